"""One vLLM engine as its owner sees it: a process to start, call and stop."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import megatron_ibpo
from megatron_ibpo.basics.records import Sample, SampleRequest
from megatron_ibpo.basics.rendezvous import private_directory, remove_private
from megatron_ibpo.basics.supervised import end_group, shared_memory
from megatron_ibpo.engines.protocol import EngineDiedError, EngineError, EngineSettings, EngineStartError
from megatron_ibpo.engines.vllm.messages import (
    Answer,
    Call,
    Finished,
    Message,
    NumberedRequest,
    Refused,
    Samples,
    Unsampled,
)
from megatron_ibpo.engines.vllm.settings import (
    VllmParameters,
    changed_probabilities,
    engine_settings,
    model_problems,
    on_device,
    precision,
    sampling_mask_obstacle,
    start_timeout,
    vllm_needs,
)

SOCKET_BYTES = 37
"""Length of a slash and the 36 characters of the names of vLLM's sockets."""
LOG_LINES = 30
CLOSE_TIMEOUT_S = 15.0
LOOK_EVERY_S = 1.0
"""Seconds between checks of the process. A dead one is noticed through its socket; this covers a socket that
another process holds open."""

STAND_INS = Path(__file__).parent / "stand_ins"
"""Directory of stand-ins for packages that vLLM imports and that have no build for CPUs."""

LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR"}
LAUNCHER_VARIABLES |= {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_PORT"}
"""Variables of the trainers' world, which the engine does not belong to."""


class Engine:
    """A vLLM engine in a process and session of its own, so that Ctrl-C reaches only the owner
    (`engines.protocol.Engine`)."""

    parameters = VllmParameters
    make_settings = staticmethod(engine_settings)
    start_timeout = staticmethod(start_timeout)
    on_device = staticmethod(on_device)
    precision = staticmethod(precision)
    changed_probabilities = staticmethod(changed_probabilities)
    needs = staticmethod(vllm_needs)
    model_problems = staticmethod(model_problems)
    sampling_mask_obstacle = staticmethod(sampling_mask_obstacle)

    def __init__(self, settings: EngineSettings, log: Path, is_restart: bool = False) -> None:
        """Start the process and return at once; `wait_ready` waits for vLLM in it. With `is_restart` the
        engine replaces one that had the same log: a run's directory that was deleted is not created again.
        Raises OSError if the log cannot be written."""
        self.settings = settings
        self.log = log
        log.parent.mkdir(parents=not is_restart, exist_ok=True)
        self._log_start = log.stat().st_size if log.exists() else 0
        engine_end, child_end = socket.socketpair()
        with child_end, log.open("ab") as log_file:
            self._scratch = private_directory("ibpo-engine-", SOCKET_BYTES)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _program(child_end.fileno(), self._scratch)],
                env=_environment(os.environ, settings, self._scratch),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                pass_fds=[child_end.fileno()],
                start_new_session=True,
            )
        self._channel = Connection(engine_end.detach())
        self._shared_memory: set[int] = set()
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._kill_reason: str | None = None
        self._killed_by_others = False
        self._inbox = _Inbox()
        self._reader = threading.Thread(target=self._read, name="engine reader", daemon=True)
        self._reader.start()
        with suppress(ConnectionError):  # it has died already: `wait_ready` says so
            self._channel.send(settings)

    def wait_ready(self, timeout: float) -> None:
        """Wait until the engine can take requests. Raises EngineStartError if it died, or took longer than
        `timeout` seconds; it is gone then."""
        try:
            self.result(timeout)
        except EngineDiedError as error:
            raise EngineStartError(f"vLLM did not start: {error}") from None
        self._shared_memory = shared_memory(self._process.pid)

    def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        """Add requests as `AsyncEngine` says; `take` raises EngineError if the engine has older weights."""
        self._inbox.expect(requests)
        self._send("submit", version, [NumberedRequest(number, request) for number, request in requests])

    def take(self, timeout: float) -> list[tuple[int, Sample]]:
        """Return finished samples as `AsyncEngine` says. An engine that wrote nothing for `stall_timeout`
        seconds is gone then."""
        samples = self._inbox.take(timeout)
        if samples is None:
            raise self._died("it has ended")
        if not samples and self._inbox.silence() > (longest := self.settings.stall_timeout):
            raise self._died(f"it wrote no token for {longest:g} seconds (--engine-stall-timeout)")
        return samples

    def abort(self, numbers: Collection[int]) -> None:
        """Drop these requests; their samples never come."""
        self._inbox.forget(numbers)
        self._send("abort", list(numbers))

    def generate(self, requests: Sequence[SampleRequest], *, version: int, timeout: float) -> list[Sample]:
        """Return one sample for each request, in order; call it only while no other request runs. Raises as
        `take`, and EngineDiedError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        self.submit(list(enumerate(requests)), version)
        samples: dict[int, Sample] = {}
        while len(samples) < len(requests):
            samples.update(self.take(max(0.0, deadline - time.monotonic())))
            if len(samples) < len(requests) and time.monotonic() >= deadline:
                raise self._died(f"no answer within {timeout:g} seconds")
        return [samples[number] for number in range(len(requests))]

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Run a public method of `engine_process.SamplingEngine` and return its result."""
        self.begin(method, *arguments)
        return self.result(timeout)

    def begin(self, method: str, *arguments: Any) -> None:
        """Send a call without waiting. An earlier call that is still unanswered gets no answer any more.
        Raises EngineDiedError if the engine has ended."""
        self._inbox.ask()
        self._send(method, *arguments)

    def result(self, timeout: float) -> Any:
        """Return the answer to the call that `begin` sent.

        Raises:
            EngineDiedError: the engine ended, or `timeout` seconds passed; it is gone then.
            EngineError: the engine refused, and is unchanged.
        """
        answer = self._inbox.answer(timeout)
        if answer is None:
            late = f"no answer within {timeout:g} seconds"
            raise self._died("it has ended" if self._inbox.closed else late)
        if isinstance(answer, Refused):
            raise EngineError(answer.reason)
        return answer.value

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Stop the engine: by request if it is idle, by force otherwise. No process of it remains."""
        if self._inbox.idle and self.is_alive():
            with suppress(EngineError, subprocess.TimeoutExpired):
                self.call("close", timeout=CLOSE_TIMEOUT_S)
                self._process.wait(CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self, reason: str | None = None) -> None:
        """End the engine and everything it started at once; errors of later calls give the reason."""
        with self._ending:
            if self._channel.closed:
                return
            self._kill_reason = reason
            self._killed_by_others = self._process.poll() == -signal.SIGKILL
            # comes first, since this process may be killed here too; the other processes then clear up
            remove_private(self._scratch)
            end_group(self._process.pid, self._shared_memory)
            self._process.wait()
            # it sees the socket close; only then may the descriptor be used again
            self._reader.join(CLOSE_TIMEOUT_S)
            self._channel.close()
            remove_private(self._scratch)

    def _send(self, method: str, *arguments: Any) -> None:
        try:
            with self._sending:
                self._channel.send(Call(method, arguments))
        except OSError:
            raise self._died("it has ended") from None

    def _read(self) -> None:
        """Run the reader's thread: receive messages until the engine has ended."""
        try:
            while True:
                while not self._channel.poll(LOOK_EVERY_S):
                    if not self.is_alive() and not self._channel.poll(0):
                        raise EOFError
                self._inbox.receive(self._channel.recv())
        except (EOFError, OSError):
            self._inbox.close()

    def _died(self, symptom: str) -> EngineDiedError:
        """Return the error to raise, once all processes of the engine have ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LOOK_EVERY_S)  # a process that ends by itself reports how
        self.kill(symptom)
        code = self._process.returncode
        ending = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        if self._killed_by_others:
            ending += ", most often the kernel's out-of-memory killer"
        if code == -signal.SIGILL:
            ending += ": illegal instruction on this processor; try --vllm-dtype float32"
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode("utf-8", errors="replace").splitlines()
        tail = "\n".join(f"  {line}" for line in lines[-LOG_LINES:]) or "  (empty)"
        reason = self._kill_reason or symptom
        return EngineDiedError(f"{reason} ({ending}); the end of {self.log}:\n{tail}")


class _Inbox:
    """Messages that the reader's thread has received, until they are taken."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._open: dict[int, SampleRequest] = {}
        self._samples: list[tuple[int, Sample]] = []
        self._refusal: str | None = None
        """Reason why requests were not sampled."""
        self._answer: Answer | Refused | None = None
        """Answer to the last call, until it is taken."""
        self._num_calls, self._num_answers = 1, 0
        """Number of answers expected, and received so far; the first says that the engine is ready."""
        self.closed = False
        self._heard = time.monotonic()

    @property
    def owed(self) -> bool:
        """True if the engine owes an answer."""
        return self._num_answers < self._num_calls

    @property
    def idle(self) -> bool:
        """True if nothing is being sampled or answered."""
        return not self._open and not self.owed

    def silence(self) -> float:
        """Return the seconds since the engine's last sign of work on its requests; 0 if it has none, or does
        something else."""
        with self._news:
            return 0.0 if not self._open or self.owed else time.monotonic() - self._heard

    def expect(self, requests: Sequence[tuple[int, SampleRequest]]) -> None:
        with self._news:
            if not self._open:
                self._heard = time.monotonic()
            self._open.update(requests)

    def forget(self, numbers: Collection[int]) -> None:
        with self._news:
            for number in numbers:
                self._open.pop(number, None)
            self._samples = [pair for pair in self._samples if pair[0] not in numbers]

    def receive(self, message: Message) -> None:
        """Process a message from the engine."""
        with self._news:
            self._heard = time.monotonic()
            if isinstance(message, Samples):
                self._sampled(message.finished)
            elif isinstance(message, Unsampled):
                self._refusal = message.reason
                for number in message.numbers:
                    self._open.pop(number, None)
            else:
                self._num_answers += 1
                if not self.owed:  # otherwise another call has been made since
                    self._answer = message
            self._news.notify_all()

    def _sampled(self, finished: Sequence[Finished]) -> None:
        for done in finished:
            request = self._open.pop(done.number, None)
            if request is None:  # aborted after it had been sent
                continue
            sample = Sample(
                prompt_token_ids=request.prompt_token_ids,
                token_ids=done.token_ids,
                logprobs=done.logprobs,
                finish_reason=done.finish_reason,
                temperature=request.temperature,
                versions=done.versions,
                loss_mask=np.ones(len(done.token_ids), dtype=np.bool_),
                routed_experts=done.routed_experts,
                sampling_mask=done.sampling_mask,
                drafts=done.drafts,
            )
            self._samples.append((done.number, sample))

    def close(self) -> None:
        """Mark the end: no more messages will come."""
        with self._news:
            self.closed = True
            self._open.clear()
            self._news.notify_all()

    def take(self, timeout: float) -> list[tuple[int, Sample]] | None:
        """Return finished samples, perhaps none; None when all have been taken and no more will come."""
        with self._news:
            self._news.wait_for(lambda: self._samples or self._refusal or self.closed, timeout)
            if self._samples:
                samples, self._samples = self._samples, []
                return samples
            if self._refusal:
                refusal, self._refusal = self._refusal, None
                raise EngineError(refusal)
            return None if self.closed else []

    def ask(self) -> None:
        """Record that a call is about to be sent."""
        with self._news:
            self._num_calls, self._answer = self._num_calls + 1, None
            self._news.notify_all()

    def answer(self, timeout: float) -> Answer | Refused | None:
        """Return the answer to the last call; None if none came in time or will come."""
        with self._news:
            num_calls = self._num_calls
            self._news.wait_for(
                lambda: self._answer is not None or self._num_calls > num_calls or self.closed, timeout
            )
            if self._num_calls > num_calls:
                return Refused("another request was sent before the answer came")
            answer, self._answer = self._answer, None
            return answer


def _program(descriptor: int, scratch: Path) -> str:
    # The package's place goes last on the path, so that nothing beside it hides an installed package.
    root = Path(megatron_ibpo.__file__).resolve().parent.parent
    return (
        f"import sys; sys.path.append({str(root)!r}); "
        f"from megatron_ibpo.engines.vllm.engine_process import run; "
        f"run({descriptor}, {os.getpid()}, {str(scratch)!r})"
    )


def _environment(base: Mapping[str, str], settings: EngineSettings, scratch: Path) -> dict[str, str]:
    """Return the engine's environment: the owner's without its launcher's variables, and vLLM's needs."""
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
        "TMPDIR": str(scratch),  # one place to clean, also after a kill
    }
    environment.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    if settings.device == "cpu":
        is_one_process = settings.tensor_parallel_size == 1
        environment |= {
            # In one process nothing spins while it waits, and a small model's steps need no messages.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if is_one_process else "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainers and other engines use the same cores
            "OMP_NUM_THREADS": str(settings.num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "0",
            # vLLM compiles a few small functions even when told not to: seconds, and a C++ compiler needed.
            "TORCH_COMPILE_DISABLE": "1",
            # oneDNN keeps generated code for each of its last 1,024 batch shapes: half a megabyte per step.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
            # A weight update allocates as much as it loads, and small pages cost more than receiving does.
            "THP_MEM_ALLOC_ENABLE": "1",
        }
        if importlib.util.find_spec("torchvision") is None:
            paths = filter(None, [str(STAND_INS), base.get("PYTHONPATH")])
            environment["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # updates speak to a core in its own process
        visible = base.get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpus = [visible[gpu] if visible != [""] else str(gpu) for gpu in settings.gpus]
        if gpus:  # an engine that spans nodes leaves its GPUs to vLLM's own Ray back end
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            environment.pop(name, None)  # expandable segments cannot sleep
        # PATH stays as it is: with ninja of .venv/bin on it FlashInfer would compile kernels with an nvcc
        # that has not been tested here. Without it, Triton serves on Blackwell (docs/gpus.md)
        if settings.transport == "ipc":
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # memory handles between own processes
    return environment
