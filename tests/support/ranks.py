"""Runs a function in N fresh processes of one gloo world; none outlives the call."""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from support.paths import ROOT, TESTS

GRACE_S = 5.0  # after the first failure: how long the other ranks may take to fail on their own
COVERED_TEST = "COVERED_TEST"  # environment variable: the test that runs, where coverage is measured
IMPORTED = [  # once, by the server from which processes are forked: what every rank needs
    "support.uncollected", "pytest", "hypothesis.strategies", "safetensors.torch", "support.ranks",
    "megatron.core.distributed", "megatron.core.fusions.fused_bias_dropout", "megatron.core.models.gpt",
    "megatron.core.optimizer", "megatron_ibpo.models.delta_net.layer", "megatron_ibpo.policy.rank",
]  # fmt: skip
_SERVER_STARTS = threading.Lock()  # tests may run several worlds at once


class RankFailed(AssertionError):
    """A rank raised, died or did not finish; the message holds every failed rank's traceback."""


def run_ranks(function, size, *args, timeout=120.0, has_world=True):
    """Run `function(world, *args)` on `size` ranks; return the results, or show stacks at the time-out. A
    process that has no world runs `function(*args)`."""
    context, test = server(), os.environ.get(COVERED_TEST, "")
    work = pickle.dumps((function, args))  # plain pickle: torch's would send a descriptor for each tensor
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        stacks = [Path(scratch, f"{rank}.stack") for rank in range(size)]
        try:
            for rank, stack in enumerate(stacks):
                here, there = context.Pipe(duplex=False)
                own = rank, size, store.port, stack, there, test, work, has_world
                process = context.Process(target=_run_one, args=own)
                process.start()
                there.close()
                processes.append(process)
                pipes.append(here)
            outcomes = _collect(pipes, time.monotonic() + timeout)
            late = [process for rank, process in enumerate(processes) if rank not in outcomes]
            for process in late:
                if process.is_alive():  # it writes its stacks, as `_run_one` arranged
                    os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5 if late else 0)
            failures = [f"rank {rank}: {said}" for rank, (passed, said) in outcomes.items() if not passed]
            for rank in set(range(size)) - outcomes.keys():
                shown = stacks[rank].read_text() if stacks[rank].exists() else ""
                failures.append(f"rank {rank} had not finished (time-out {timeout} s)\n{shown}")
            if failures:
                raise RankFailed("\n".join(sorted(failures)))
            return [outcomes[rank][1] for rank in range(size)]
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                if pipe.closed:  # it has reported and is about to end
                    process.join(GRACE_S)
                process.kill()
                process.join(GRACE_S)
                process.close()


def server():
    context = multiprocessing.get_context("forkserver")
    # a module that asks for a GPU while it is imported leaves CUDA unusable to processes forked afterwards
    on_gpu = os.environ.get("IBPO_PARITY_DEVICE") == "cuda"
    context.set_forkserver_preload([] if on_gpu else IMPORTED)
    # The server looks for the preloaded modules on PYTHONPATH only (CPython gh-126631).
    with _SERVER_STARTS:
        paths = [str(TESTS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        changes = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, changes):
            forkserver.ensure_running()
    return context


def _collect(pipes, deadline):
    """(succeeded, result or traceback) of each rank that reported before the deadline."""
    outcomes, waiting = {}, {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting and (left := deadline - time.monotonic()) > 0:
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


def _run_one(rank, size, port, stack, pipe, test, work, has_world):
    # Megatron collects garbage at every save of a sharded optimizer, and need not look through all modules
    gc.freeze()
    gc.enable()
    die_with_parent = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is the test's, as it is torchrun's
    if test:
        sys.modules["coverage"].Coverage.current().switch_context(test)
    faulthandler.register(signal.SIGUSR1, stack.open("w"), all_threads=True)
    try:
        import torch

        from megatron_ibpo.basics.distributed import start_world

        torch.set_num_threads(1)
        worlds = [start_world(timeout_minutes=2.0)] if has_world else []
        function, args = pickle.loads(work)
        outcome = (True, function(*worlds, *args))
        for world in worlds:
            world.barrier()
            dist.destroy_process_group()
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))  # plain pickle: torch's would share memory that ends here
    pipe.close()
