"""An engine that samples with transformers on CPUs: slow, and able to compute every family and head size that
transformers runs. It is also the example for engines of users, and needs only its line in
`engines.registry.ENGINES` beside this file.

The model lives in a thread of the engine's process. Waves of requests (`engines.waves`) and control calls
take turns in this thread, so that an update waits for the wave in progress, and all tokens of a sample come
from one version of the weights."""

import hashlib
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from megatron_ibpo.basics.records import Sample, SampleRequest
from megatron_ibpo.config import COUNT, Config, RolloutConfig, built
from megatron_ibpo.config.config_error import broken
from megatron_ibpo.data.tokenizer import read_eos_token_ids
from megatron_ibpo.engines.protocol import (
    EngineDiedError,
    EngineError,
    EngineSettings,
    EngineStartError,
    Precision,
    too_old,
)
from megatron_ibpo.engines.waves import WaveSampler, left_padded
from megatron_ibpo.models import ModelShape
from megatron_ibpo.weights.layout.regions import Need, TensorMeta, full_box
from megatron_ibpo.weights.transfer.gloo import GlooReceiver, join_group
from megatron_ibpo.weights.transfer.link import Receipt, take_weights
from megatron_ibpo.weights.transfer.wire import Answer

LINGER_S = 0.01
"""Seconds without a new request after which a wave begins."""
CLOSE_TIMEOUT_S = 15.0
NO_VERSION = -1
"""Version of weights that are being replaced."""
CONTROL_CALLS = (
    "rehearse_weight_update", "init_weight_transfer", "start_weight_update", "update_weights",
    "missing_weights", "finish_weight_update", "take_weights", "digests",
)  # fmt: skip


def model_problems(rollout: RolloutConfig, shape: ModelShape, *, on_gpu: bool) -> list[str]:
    """Return what this engine does not support, one line each."""
    rules = {
        ": samples on CPUs only; take vllm": on_gpu,
        " with --rollout-num-gpus-per-engine: one process samples": rollout.rollout_num_gpus_per_engine > 1,
        " with --use-rollout-routing-replay: it records no routing; take vllm": (
            rollout.use_rollout_routing_replay
        ),
    }
    return [f"--rollout-backend {rollout.rollout_backend}{problem}" for problem in broken(rules)]


@dataclass(frozen=True)
class Parameters:
    """Settings of the transformers engine."""

    transformers_max_num_seqs: Annotated[int, COUNT] = 256
    """Sequences of one wave. Fewer take less memory for their caches."""


class TransformersEngine:
    """An `engines.protocol.Engine` that passes its control calls (`CONTROL_CALLS`) to a `Policy`."""

    parameters = Parameters
    model_problems = staticmethod(model_problems)

    @staticmethod
    def make_settings(
        rollout: RolloutConfig, hf_dir: Path, *_: Any, num_threads: int, **options: Any
    ) -> EngineSettings:
        """Return the settings of one engine, on CPUs and in float32."""
        return EngineSettings(
            model=str(hf_dir),
            eos_token_ids=read_eos_token_ids(hf_dir),
            num_threads=num_threads,
            dtype="float32",
            max_model_len=rollout.rollout_max_context_len,
            max_num_seqs=built(Parameters, rollout.parameters).transformers_max_num_seqs,
            stall_timeout=rollout.engine_stall_timeout,
        )

    @staticmethod
    def precision(rollout: RolloutConfig) -> Precision:
        """Return float32."""
        return Precision("float32")

    @staticmethod
    def sampling_mask_obstacle(config: Config, on_gpu: bool) -> None:
        """Return None: every sample has the ids that top-k and top-p left."""

    def __init__(self, settings: EngineSettings, log: Path, is_restart: bool = False) -> None:
        """Start to load the model and return at once; see `engines.vllm.engine.Engine`."""
        self.settings, self.log = settings, log
        log.parent.mkdir(parents=not is_restart, exist_ok=True)
        log.open("a").close()
        self._news = threading.Condition()
        self._waiting: dict[int, SampleRequest] = {}
        self._running: set[int] = set()
        """Requests of the wave in progress, without those that were aborted."""
        self._samples: list[tuple[int, Sample]] = []
        self._refusal: str | None = None
        self._death: str | None = None
        """Reason why the engine has ended; None while it lives."""
        self._thread = ThreadPoolExecutor(1, "engine")
        self._answer: Future[Any] = self._thread.submit(self._start)

    def wait_ready(self, timeout: float) -> None:
        """Wait until the model is loaded; raises as `Engine.wait_ready`."""
        try:
            self.result(timeout)
        except EngineError as error:
            self.kill(str(error))
            raise EngineStartError(f"transformers did not start: {error}; see {self.log}") from None

    def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        """Add numbered requests. During an update they wait for its end."""
        with self._news:
            self._check_alive()
            if NO_VERSION < self._policy.version < version:
                self._refusal = too_old(self._policy.version, version)
                self._news.notify_all()
                return
            self._waiting.update(requests)
            self._thread.submit(self._sample)

    def take(self, timeout: float) -> list[tuple[int, Sample]]:
        """Return finished samples as `AsyncEngine` says."""
        with self._news:
            self._news.wait_for(lambda: self._samples or self._refusal or self._death, timeout)
            if self._samples:
                samples, self._samples = self._samples, []
                return samples
            if self._refusal:
                refusal, self._refusal = self._refusal, None
                raise EngineError(refusal)
            self._check_alive()
            return []

    def abort(self, numbers: Collection[int]) -> None:
        with self._news:
            for number in numbers:
                self._waiting.pop(number, None)
                self._running.discard(number)
            self._samples = [pair for pair in self._samples if pair[0] not in numbers]

    def generate(self, requests: Sequence[SampleRequest], *, version: int, timeout: float) -> list[Sample]:
        """Return one sample for each request, in order; raises as `submit` and `take`."""
        self._begin(lambda: self._policy.samples(requests, version, lambda _: self._death is not None))
        return self.result(timeout)

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        self.begin(method, *arguments)
        return self.result(timeout)

    def begin(self, method: str, *arguments: Any) -> None:
        """Start a call of one of `CONTROL_CALLS`."""
        self._begin(lambda: self._obey(method, arguments))

    def result(self, timeout: float) -> Any:
        """Return the answer to the last call. Raises EngineDiedError if the engine ended, as it does after
        `timeout` seconds, and EngineError if the call failed; after one of an update it has no weights."""
        try:
            return self._answer.result(timeout)
        except TimeoutError:
            self.kill(f"no answer within {timeout:g} seconds")
        except CancelledError:
            pass
        with self._news:
            self._check_alive()
        raise EngineDiedError("it has ended")

    def kill(self, reason: str | None = None) -> None:
        """End the engine. Its thread ends after the present token."""
        with self._news:
            self._death = self._death or reason or "it has ended"
            self._waiting.clear()
            self._running.clear()
            self._news.notify_all()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Stop the engine and wait for its thread."""
        self.kill("it was closed")
        self._thread.shutdown(wait=True)

    def _begin(self, action: Callable[[], Any]) -> None:
        with self._news:
            self._check_alive()
            self._answer = self._thread.submit(self._logged, action)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDiedError(f"{self._death}; see {self.log}")

    def _start(self) -> None:
        torch.set_num_threads(self.settings.num_threads)
        began = time.monotonic()
        self._policy = self._logged(lambda: Policy(self.settings))
        with self.log.open("a") as file:
            print(f"{self.settings.model} loaded in {time.monotonic() - began:.1f} s", file=file)

    def _logged(self, action: Callable[[], Any]) -> Any:
        """Return the result of `action`. An error is logged, and becomes one that passes between
        processes."""
        try:
            return action()
        except EngineError:
            raise
        except Exception as error:  # a checkpoint, a connection or a kernel may raise anything
            with self.log.open("a") as file:
                traceback.print_exc(file=file)
            raise EngineError(f"{type(error).__name__}: {error}") from None

    def _obey(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method not in CONTROL_CALLS:
            raise EngineError(f"the transformers engine has no {method}")
        value = getattr(self._policy, method)(*arguments)
        if method in ("finish_weight_update", "take_weights"):
            self._thread.submit(self._sample)  # requests that came during the update
        return value

    def _sample(self) -> None:
        """Sample a wave of waiting requests."""
        if not self._waiting or self._policy.version == NO_VERSION:
            return
        num_waiting = -1
        while len(self._waiting) > num_waiting:  # requests that arrive one by one share a wave
            num_waiting = len(self._waiting)
            time.sleep(LINGER_S)
        with self._news:
            numbers = list(self._waiting)[: self.settings.max_num_seqs]
            wave = [self._waiting.pop(number) for number in numbers]
            self._running = set(numbers)
        if not wave:
            return
        try:
            samples = self._logged(
                lambda: self._policy.samples(wave, 0, lambda row: numbers[row] not in self._running)
            )
        except EngineError as error:
            self.kill(f"sampling failed: {error}")
            return
        with self._news:
            pairs = zip(numbers, samples, strict=True)
            self._samples += [(number, sample) for number, sample in pairs if number in self._running]
            self._running = set()
            self._news.notify_all()
            if self._waiting and self._death is None:
                self._thread.submit(self._sample)  # after calls that were made meanwhile


class Policy:
    """A model of transformers as a sampler and as a `weights.transfer.link.WeightReceiver`."""

    def __init__(self, settings: EngineSettings) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        dtype = getattr(torch, settings.dtype)
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype, local_files_only=True)
        context = settings.max_model_len or model.config.get_text_config().max_position_embeddings
        self._waves = WaveSampler(settings.eos_token_ids, context, settings.max_num_seqs)
        self._use(model)
        self.version = 0
        self._receiver: GlooReceiver | None = None

    def _use(self, model: Any) -> None:
        self._model = model.eval()
        self._decoder = TransformersDecoder(model)
        self._tensors, self._are_copies = checkpoint_tensors(model)

    def samples(
        self, requests: Sequence[SampleRequest], version: int, is_aborted: Callable[[int], bool]
    ) -> list[Sample]:
        """Return one sample for each request (`WaveSampler.samples`). Raises EngineError if the weights are
        older than `version`."""
        if self.version < version:
            raise EngineError(too_old("none" if self.version == NO_VERSION else self.version, version))
        return self._waves.samples(self._decoder, requests, self.version, is_aborted)

    def rehearse_weight_update(self, tensors: bytes) -> list[bytes]:
        """Return what the model takes of these tensors: whole ones, by name."""
        metas: list[TensorMeta] = pickle.loads(tensors)
        self._needs = [
            Need(meta.dtype, (full_box(meta.shape),)) if meta.name in self._tensors else None
            for meta in metas
        ]
        wrong = [
            f"{meta.name} is {list(meta.shape)}, the engine's {list(self._tensors[meta.name].shape)}"
            for meta, need in zip(metas, self._needs, strict=True)
            if need is not None and meta.shape != self._tensors[meta.name].shape
        ]
        forgotten = sorted(self._tensors.keys() - {meta.name for meta in metas})
        return [pickle.dumps(Answer(self._needs, forgotten, wrong[0] if wrong else None))]

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        address, port, rank = (init_info[name] for name in ("address", "port", "first_worker"))
        group = join_group(address, port, rank, init_info["size"])
        plan = pickle.loads(init_info["plan"])
        self._receiver = GlooReceiver(group, plan, self._needs, init_info["timeout"])

    def start_weight_update(self, check: bool) -> None:
        self.version = NO_VERSION
        self._absent = set(self._tensors)
        self._receipt: dict[str, int] | None = {} if check else None

    @torch.no_grad()
    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self._receiver is not None, "the trainers have not been met"
        for name, tensor in self._receiver.tensors(self._receipt):
            self._tensors[name].copy_(tensor)
            self._absent.discard(name)

    def missing_weights(self) -> list[list[str]]:
        return [sorted(self._absent)]

    def finish_weight_update(self, version: int) -> list[dict[str, int]]:
        if self._are_copies:
            model = self._model
            names = {"config": model.config, "state_dict": self._tensors, "dtype": model.dtype}
            self._use(type(model).from_pretrained(None, **names))
        self.version = version
        return [self._receipt or {}]

    def take_weights(self, check: bool, version: int) -> list[Receipt]:
        return take_weights(self, check, version)

    def digests(self) -> list[dict[str, str]]:
        raw = {name: tensor.detach().contiguous().view(torch.uint8) for name, tensor in self._tensors.items()}
        return [{name: hashlib.sha256(part.numpy().tobytes()).hexdigest() for name, part in raw.items()}]


@dataclass
class TransformersDecoder:
    """A `waves.Decoder` over a causal language model of transformers."""

    model: Any

    def read(self, prompts: Sequence[np.ndarray], room: int) -> tuple[Tensor, "PaddedCache"]:
        """Compute prompts, padded on the left. One that occurs several times is computed once."""
        from transformers import DynamicCache

        ids, pads, rows = left_padded(prompts)
        mask = (torch.arange(ids.shape[1]) >= pads[:, None]).long()
        cache = PaddedCache(DynamicCache(config=self.model.config), mask)
        logits = self._forward(ids, cache)
        cache.keep(rows)
        return logits[rows], cache

    def write(self, tokens: Tensor, cache: "PaddedCache") -> Tensor:
        """Compute one more token of each row."""
        cache.mask = torch.cat([cache.mask, torch.ones_like(tokens)[:, None]], 1)
        return self._forward(tokens[:, None], cache)

    def _forward(self, ids: Tensor, cache: "PaddedCache") -> Tensor:
        positions = (cache.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.model(
            input_ids=ids,
            attention_mask=cache.mask,
            position_ids=positions,
            past_key_values=cache.states,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()


@dataclass
class PaddedCache:
    """The states of rows whose prompts were padded on the left."""

    states: Any
    mask: Tensor
    """[rows, tokens] long: 0 for padding."""

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self.states.reorder_cache(rows)  # `batch_select_indices` lacks delta nets
        self.mask = self.mask[rows]


def checkpoint_tensors(model: Any) -> tuple[dict[str, Tensor], bool]:
    """Return a model's tensors by their names in checkpoints, once each even if layers share them, and
    whether some are copies: transformers keeps the experts of a layer in one tensor. The others share the
    model's memory."""
    from transformers.core_model_loading import revert_weight_conversion

    named = {tensor.data_ptr(): name for name, tensor in reversed(model.state_dict().items())}
    state = {name: tensor for name, tensor in model.state_dict().items() if named[tensor.data_ptr()] == name}
    tensors: dict[str, Tensor] = revert_weight_conversion(model, state)
    memory = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    return tensors, any(tensor.untyped_storage().data_ptr() not in memory for tensor in tensors.values())
