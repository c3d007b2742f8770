"""One vLLM engine as its owner sees it: a process to start, ask, and stop."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import megatron_ibpo
from megatron_ibpo.records import Response, SampleRequest
from megatron_ibpo.rollout.process_group import end_group, shared_memory
from megatron_ibpo.rollout.settings import EngineSettings

__all__ = ["Engine", "EngineDiedError", "EngineError", "EngineStartError"]

LOG_LINES = 30
CLOSE_TIMEOUT_S = 15.0
LOOK_EVERY_S = 1.0
"""A dead process is noticed through its socket; this is for the case that something else holds it open."""

LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR"}
LAUNCHER_VARIABLES |= {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_PORT"}
"""The trainers' world, which is not the engine's."""


class EngineError(RuntimeError):
    """An engine cannot do what it was asked."""


class EngineStartError(EngineError):
    """The engine did not start; the message ends with the last lines of vLLM's own log."""


class EngineDiedError(EngineError):
    """The engine ended or stopped answering; the message ends with the last lines of its log."""


class Engine:
    """A vLLM engine in a process of its own, in a session of its own: Ctrl-C reaches the trainer only.

    One request at a time: `begin` sends it, `result` waits for the answer, `call` does both.
    """

    def __init__(self, settings: EngineSettings, log: Path) -> None:
        """Start the process and return at once; `wait_ready` waits for vLLM in it."""
        self.settings = settings
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log.stat().st_size if log.exists() else 0
        self._scratch = Path(tempfile.mkdtemp(prefix="ibpo-engine-"))
        here, there = socket.socketpair()
        with there, log.open("ab") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _program(there.fileno())],
                env=_environment(os.environ, settings, self._scratch),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        self._channel = Connection(here.detach())
        self._busy = True
        """It owes an answer; the first is that it is ready."""
        self._shared_memory: set[int] = set()
        with suppress(ConnectionError):  # it has died already: `wait_ready` says so
            self._channel.send((os.getpid(), self._scratch, settings))

    def wait_ready(self, timeout: float) -> None:
        """Wait until the engine can be asked.

        Raises:
            EngineStartError: it died, or took longer than `timeout` seconds. It is gone then.
        """
        try:
            self._receive(timeout)
        except EngineDiedError as error:
            raise EngineStartError(f"vLLM did not start: {error}") from None
        self._shared_memory = shared_memory(self._process.pid)

    def generate(self, requests: Sequence[SampleRequest], *, version: int, timeout: float) -> list[Response]:
        """Sample one response for each request with the weights of policy `version`.

        Raises:
            EngineDiedError: the engine ended or took longer than `timeout` seconds.
            EngineError: it has weights of another version.
        """
        plain = [
            (r.prompt_token_ids, r.seed, r.max_tokens, r.temperature, r.top_p, r.top_k) for r in requests
        ]
        sampled = self.call("generate", version, plain, timeout=timeout)
        return [
            Response(ids, logprobs, finish_reason, request.temperature, version)
            for request, (ids, logprobs, finish_reason) in zip(requests, sampled, strict=True)
        ]

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Run a public method of `engine_process.SamplingEngine` and return its result."""
        self.begin(method, *arguments)
        return self.result(timeout)

    def begin(self, method: str, *arguments: Any) -> None:
        """Ask without waiting."""
        try:
            self._channel.send((method, arguments))
        except OSError:
            raise self._died("it has ended") from None
        self._busy = True

    def result(self, timeout: float) -> Any:
        """The answer to what `begin` asked.

        Raises:
            EngineDiedError: the engine ended, or `timeout` seconds passed; it is gone then.
            EngineError: the engine refused, and is as it was.
        """
        return self._receive(timeout)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Stop the engine: by asking if it is idle, by force otherwise. Nothing of it remains."""
        if not self._busy and self.is_alive():
            with suppress(EngineError, subprocess.TimeoutExpired):
                self.call("close", timeout=CLOSE_TIMEOUT_S)
                self._process.wait(CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the engine and everything it started at once."""
        if self._channel.closed:
            return
        end_group(self._process.pid, self._shared_memory)
        self._process.wait()
        self._channel.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _receive(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        try:
            while not self._channel.poll(min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))):
                if not self.is_alive() and not self._channel.poll(0):
                    raise EOFError
                if time.monotonic() >= deadline:
                    raise self._died(f"no answer within {timeout:g} seconds")
            kind, value = self._channel.recv()
        except (EOFError, OSError):
            raise self._died("it has ended") from None
        self._busy = False
        if kind == "refused":
            raise EngineError(value)
        return value

    def _died(self, why: str) -> EngineDiedError:
        """The error to raise, once nothing of the engine is left."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LOOK_EVERY_S)  # a process that ends by itself says how
        self.kill()
        code = self._process.returncode
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return EngineDiedError(f"{why} ({how}); the end of {self.log}:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode("utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LOG_LINES:]) or "  (empty)"


def _program(descriptor: int) -> str:
    # The package's place goes last on the path, so that nothing beside it hides an installed package.
    root = Path(megatron_ibpo.__file__).resolve().parent.parent
    return (
        f"import sys; sys.path.append({str(root)!r}); "
        f"from megatron_ibpo.rollout.engine_process import run; run({descriptor})"
    )


def _environment(base: Mapping[str, str], settings: EngineSettings, scratch: Path) -> dict[str, str]:
    """The engine's environment: the owner's without its launcher's variables, and what vLLM needs."""
    environment = {
        name: value
        for name, value in base.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(scratch),  # one place to clear, also after a kill
    }
    environment.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    if settings.device == "cpu":
        alone = settings.tensor_parallel_size == 1
        environment |= {
            # In one process nothing spins while it waits, and a small model's steps need no messages.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if alone else "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainers and other engines use the same cores
            "OMP_NUM_THREADS": str(settings.num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "0",
            # vLLM compiles a few small functions even when told not to: seconds, and a C++ compiler needed.
            "TORCH_COMPILE_DISABLE": "1",
            # A weight update allocates as much as it loads, and small pages cost more than receiving does.
            "THP_MEM_ALLOC_ENABLE": "1",
        }
    else:
        visible = base.get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpus = [visible[gpu] if visible != [""] else str(gpu) for gpu in settings.gpus]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # expandable segments cannot sleep
        if settings.transport == "ipc":
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # memory handles between own processes
    return environment
