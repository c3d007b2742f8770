"""Runs a function in N fresh processes of one gloo world; none outlives the call."""

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from support.paths import ROOT, TESTS

GRACE_S = 5.0  # after the first failure: how long the other ranks may take to fail on their own
COVERED_TEST = "COVERED_TEST"  # environment variable: the test that runs, where coverage is measured
_SERVER_STARTS = threading.Lock()  # tests may run several worlds at once


class RankFailed(AssertionError):
    """A rank raised, died or did not finish; the message holds every failed rank's traceback."""


def run_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run `function(world, *args)` on `size` ranks; return the results, or show stacks at the time-out."""
    context = _server()
    test = os.environ.get(COVERED_TEST, "")
    work = pickle.dumps((function, args))  # plain pickle: torch's would send a descriptor for each tensor
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        processes, pipes = [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_one, args=(rank, size, store.port, Path(scratch), there, test, work)
            )
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        try:
            outcomes = _collect(pipes, time.monotonic() + timeout)
            late = [process for rank, process in enumerate(processes) if rank not in outcomes]
            for process in late:
                if process.is_alive():  # it writes its stacks, as `_run_one` arranged
                    os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5 if late else 0)
            failures = []
            for rank in range(size):
                stack = Path(scratch, f"{rank}.stack")
                if rank not in outcomes:
                    shown = stack.read_text() if stack.exists() else ""
                    failures.append(f"rank {rank} had not finished (time-out {timeout} s)\n{shown}")
                elif not outcomes[rank][0]:
                    failures.append(f"rank {rank}: {outcomes[rank][1]}")
            if failures:
                raise RankFailed("\n".join(failures))
            return [outcomes[rank][1] for rank in range(size)]
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                if pipe.closed:  # it has reported and is about to end
                    process.join(GRACE_S)
                process.kill()
                process.join(GRACE_S)
                process.close()


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    # a module that asks for a GPU while it is imported leaves CUDA unusable to processes forked afterwards
    on_gpu = os.environ.get("IBPO_PARITY_DEVICE") == "cuda"
    context.set_forkserver_preload([] if on_gpu else ["support.rank_imports"])
    # The server looks for the preloaded module on PYTHONPATH only (CPython gh-126631).
    with _SERVER_STARTS:
        paths = [str(TESTS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        changes = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, changes):
            forkserver.ensure_running()
    return context


def _collect(pipes: list[Any], deadline: float) -> dict[int, tuple[bool, Any]]:
    """(succeeded, result or traceback) of each rank that reported before the deadline."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting and (left := deadline - time.monotonic()) > 0:
        pipe: Any
        for pipe in wait(list(waiting), timeout=left):
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcomes[rank] = (False, "died without a word (killed, or crashed in native code)\n")
            pipe.close()
            if not outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return outcomes


def _run_one(rank, size, port, scratch, pipe, test, work) -> None:
    die_with_parent = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is the test's, as it is torchrun's
    if test:
        sys.modules["coverage"].Coverage.current().switch_context(test)
    stack_file = (scratch / f"{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
    try:
        import torch

        from megatron_ibpo.basics.distributed import start_world

        torch.set_num_threads(1)
        world = start_world(timeout_minutes=2.0)
        function, args = pickle.loads(work)
        outcome = (True, function(world, *args))
        world.barrier()
        dist.destroy_process_group()
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))  # plain pickle: torch's would share memory that ends here
    pipe.close()
