"""The process of one vLLM engine: it samples a stream of requests, obeys its owner's calls over a socket, and
ends with its owner, `megatron_ibpo.engines.vllm.engine.Engine`. It never imports Megatron."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ibpo.basics.large_imports import import_transformers, uncollected
from megatron_ibpo.basics.records import ExpertIds, SampleRequest, expert_ids
from megatron_ibpo.basics.rendezvous import remove_private
from megatron_ibpo.basics.sampling_mask import SamplingMask, sampling_mask
from megatron_ibpo.basics.supervised import end_group
from megatron_ibpo.engines.protocol import EngineSettings, too_old
from megatron_ibpo.engines.vllm.messages import (
    MARK,
    Answer,
    Call,
    Finished,
    Message,
    NumberedRequest,
    Refused,
    Samples,
    Unsampled,
)
from megatron_ibpo.engines.vllm.settings import check_runner, uses_second_runner
from megatron_ibpo.engines.vllm.slim_imports import slim_imports
from megatron_ibpo.weights.transfer.link import Receipt, take_weights

HOLD_STEPS = 16
"""Tokens of each request between a busy engine's messages with finished samples. Each message costs several
processes a millisecond or two, and each prompt that joins makes its step longer: corrections that are
requested together share this cost. An engine that becomes idle sends at once. On the tiny model 16 was better
than 1, and than 32, where groups wait too long for their corrections."""
OWNER_CHECK_S = 0.5
"""Seconds between checks that the owner is still alive."""
CPU_BATCHED_TOKENS = 8192
"""Prompt tokens that one step may take on CPUs: all prompts of a step at once."""
FLASHINFER_KERNELS = "flashinfer_jit_cache"
"""Package with FlashInfer's compiled kernels. Without it vLLM lets nvcc and ninja compile those for the delta
net at the first prompt, for minutes, on GPUs where it prefers FlashInfer (Hopper)."""
PLUGIN = "megatron_ibpo.engines.vllm.worker.WorkerExtension"
RECORDING_PLUGIN = "megatron_ibpo.engines.vllm.worker.RecordingWorker"
"""The same plugin with a record of the routers' choices, for CPUs, where vLLM's own record does not work."""
NCCL_BACKEND = "ibpo_nccl"
"""Name under which vLLM knows this project's worker for nccl; its own has the shorter name."""
NO_VERSION = "none"
"""Version of weights that are being replaced."""
PROGRESS_S = 1.0
"""Seconds between signs of life of an engine that writes long responses and finishes none."""
WHILE_BUSY = {
    "init_weight_transfer", "rehearse_weight_update", "start_weight_update", "update_weights",
    "missing_weights", "finish_weight_update", "take_weights", "drafts",
}  # fmt: skip
"""Calls allowed while requests run: those of a weight update, for which requests wait, and a query that is
answered at once."""


class Refusal(Exception):
    """The request cannot be served; the engine is unchanged."""


def run(descriptor: int, owner: int, scratch: str) -> None:
    """Serve the owner at the other end of the socket `descriptor` until it closes or asks to stop. Log a
    failure, and leave no process of vLLM behind."""
    directory = Path(scratch)
    try:
        threading.Thread(target=_end_with_owner, args=(owner, directory), daemon=True).start()
        os.set_inheritable(descriptor, False)
        channel = Connection(descriptor)
        try:
            settings = channel.recv()
            started = time.monotonic()
            engine = SamplingEngine(settings, is_interrupted=partial(channel.poll, 0))
            channel.send(Answer(time.monotonic() - started))
            _serve(channel, engine)
        except (EOFError, ConnectionError):  # the owner is gone
            _end(directory)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        _clear_up(directory)  # its cause may have ended the owner too, which would otherwise clean up
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # closed in order already; the interpreter's own teardown takes seconds


def _serve(channel: Connection, engine: SamplingEngine) -> None:
    """Sample requests, and receive more between steps. Any failure inside vLLM ends the process, for a
    restart."""
    finished: list[Finished] = []
    num_unsent_steps = 0
    last_sent = time.monotonic()
    while True:
        ready = finished and (not engine.busy or num_unsent_steps >= HOLD_STEPS)
        if ready or (engine.busy and num_unsent_steps and time.monotonic() - last_sent >= PROGRESS_S):
            channel.send(Samples(finished))
            finished, num_unsent_steps, last_sent = [], 0, time.monotonic()
        if engine.busy and not engine.paused and not channel.poll(0):
            finished += engine.step()
            num_unsent_steps += engine.num_tokens
            continue
        if engine.busy and engine.paused and not channel.poll(PROGRESS_S):
            num_unsent_steps += 1  # a sign of life: it waits for its weights, perhaps for long
            continue
        call: Call = channel.recv()
        if call.method == "close":
            engine.close()
            channel.send(Answer(None))
            return
        answer = _obey(engine, *call)
        if answer is not None:
            channel.send(answer)


def _obey(engine: SamplingEngine, method: str, arguments: tuple[Any, ...]) -> Message | None:
    """Run the method and return the message to answer with; None for submit, whose answer is samples, and for
    abort."""
    try:
        if method == "submit":
            engine.submit(*arguments)
            return None
        if method == "abort":
            engine.abort(*arguments)
            return None
        if engine.busy and method not in WHILE_BUSY:
            raise Refusal(f"{method} must wait until the engine has no requests; take or abort them first")
        return Answer(getattr(engine, method)(*arguments))
    except Refusal as refusal:
        if method == "submit":
            _, requests = arguments
            return Unsampled([numbered.number for numbered in requests], str(refusal))
        return Refused(str(refusal))


def _end_with_owner(owner: int, scratch: Path) -> None:
    """End this process and everything that vLLM started once the owner has died, however busy vLLM is."""
    while os.getppid() == owner:
        time.sleep(OWNER_CHECK_S)
    _end(scratch)


def _end(scratch: Path) -> None:
    _clear_up(scratch)
    os.kill(os.getpid(), signal.SIGKILL)


def _clear_up(scratch: Path) -> None:
    end_group(os.getpgrp())
    remove_private(scratch)  # vLLM's thread goes on meanwhile


class SamplingEngine:
    """vLLM's engine with this project's control calls (`weights.transfer.link.WeightReceiver`). The owner
    calls the public methods by name. While it is busy, only `submit`, `abort` and `WHILE_BUSY` are allowed.

    New weights may arrive while requests run. These pause with the tokens that they have and continue with
    the new weights; each sample records which version wrote which of its tokens.
    """

    def __init__(self, settings: EngineSettings, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """On CPUs a step may sample several tokens of each request, until `is_interrupted` says that there is
        something else to do."""
        with uncollected():
            slim_imports(settings)
            import_transformers()
            from vllm import LLMEngine
            from vllm.usage.usage_lib import UsageContext
        gc.freeze()  # vLLM looks for garbage several times as it loads a model

        self._settings, self._records_itself = settings, _records_itself(settings)
        # vLLM derives the prompt tokens per step from the GPU and from this: 16,384 on an H100, and 2,048 by
        # default
        self._llm = LLMEngine.from_engine_args(_engine_args(settings), UsageContext.LLM_CLASS)
        native_records = settings.records_sampling_mask or (
            settings.recorded_experts > 0 and not self._records_itself
        )
        check_runner(self._llm.vllm_config.use_v2_model_runner, native_records)
        self._runs = self._decode_runs(is_interrupted)
        self._set_version("0")
        self.paused = False
        """True while weights are being replaced: nothing is sampled until they are whole."""
        self._updating = False
        """True if an update has begun and is not finished."""
        self._updates = 0
        """Number of updates begun so far."""
        self._drafted, self._accepted = 0, 0
        if self._records_itself:
            self._llm.collective_rpc("record_routing", args=(settings.recorded_experts,))
        top_k = 1 if settings.records_sampling_mask else -1
        self.submit(
            0, [NumberedRequest(0, SampleRequest(np.zeros(1, np.int32), seed=0, max_tokens=2, top_k=top_k))]
        )
        while self.busy:  # this builds everything that is built at first use
            self.step()
        gc.collect()
        gc.freeze()

    def _decode_runs(self, is_interrupted: Callable[[], bool]) -> Any:
        """Return `decode_runs.DecodeRuns` of this engine; None where each step is one token's. A worker that
        records routing looks at the batch of its step, and the second model runner has another loop."""
        is_second = self._llm.vllm_config.use_v2_model_runner
        if not self._in_process or self._records_itself or is_second:
            return None
        from megatron_ibpo.engines.vllm.decode_runs import DecodeRuns

        client: Any = self._llm.engine_core
        return DecodeRuns(client.engine_core, self._settings.eos_token_ids, HOLD_STEPS, is_interrupted)

    @property
    def num_tokens(self) -> int:
        """Tokens of each running request that the last step has sampled."""
        return 1 if self._runs is None else self._runs.num_tokens

    @property
    def busy(self) -> bool:
        """True if some requests have not finished."""
        return self._llm.has_unfinished_requests()

    def submit(self, version: int, requests: list[NumberedRequest]) -> None:
        """Add requests, to be sampled with the weights of `version` or later. During an update they wait for
        its end."""
        if not self.paused and (self._version == NO_VERSION or int(self._version) < version):
            raise Refusal(too_old(self._version, version))
        # a request without top-k samples from the whole vocabulary, or from what top-p alone leaves of it
        keeps_all = any(request.temperature > 0 and request.top_k <= 0 for _, request in requests)
        if self._settings.records_sampling_mask and keeps_all:
            raise Refusal("vLLM records sampling masks only of requests with top-k; set --rollout-top-k")
        gc.disable()  # millions of short-lived objects and no cycles: collecting costs a third of the time
        for number, request in requests:
            prompt: Any = {"prompt_token_ids": request.prompt_token_ids.tolist()}
            if not self._settings.recompute_kv_after_update:
                # vLLM forgets no cached prefix while a request that keeps its cache runs; only requests with
                # the same salt share one
                prompt["cache_salt"] = str(self._updates)
            self._llm.add_request(str(number), prompt, self._params(request))

    def _params(self, request: SampleRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        temperature, top_p, top_k = request.temperature, request.top_p, request.top_k
        if self._settings.records_sampling_mask and temperature == 0:
            # vLLM then takes no greedy requests. Likewise the likeliest token, with a log-prob of 0
            temperature, top_p, top_k = 1.0, 1.0, 1
        return SamplingParams(
            seed=request.seed,
            max_tokens=request.max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_token_ids=list(self._settings.eos_token_ids),
            ignore_eos=not self._settings.eos_token_ids,
            logprobs=0,
            flat_logprobs=True,
            extra_args={MARK: request.repeats_prompt} if self._settings.drafts_corrections else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def abort(self, numbers: list[int]) -> None:
        """Drop these requests if they have not finished yet."""
        self._llm.abort_request([str(number) for number in numbers])
        if self._records_itself:
            self._llm.collective_rpc("forget_routing", args=([str(number) for number in numbers],))
        self._rest_if_idle()

    def step(self) -> list[Finished]:
        """Sample a token, or several, of every running request; return the requests that end with them."""
        outputs: list[Any] = [output for output in self._llm.step() if output.finished]
        for drafted, accepted in filter(any, map(_drafts, outputs)):
            self._drafted += drafted
            self._accepted += accepted
        choices = self._routed_experts(outputs)
        self._rest_if_idle()
        masks = self._settings.records_sampling_mask
        return [
            _finished(output, expert_choices, _native_mask(output) if masks else None)
            for output, expert_choices in zip(outputs, choices, strict=True)
        ]

    def drafts(self) -> tuple[int, int]:
        """Return (tokens drafted, tokens of these accepted) for the requests that have ended since the last
        call. Both are 0 without speculation."""
        counts, self._drafted, self._accepted = (self._drafted, self._accepted), 0, 0
        return counts

    def _routed_experts(self, outputs: list[Any]) -> list[ExpertIds | None]:
        """Return the chosen experts of each finished request, as `Sample.routed_experts`."""
        count, dense = self._settings.recorded_experts, self._settings.dense_layers
        if not count or not outputs:
            return [None] * len(outputs)
        reads = [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in outputs]
        if not self._records_itself:  # vLLM's own record
            return [_native_choices(o, n, count, dense) for o, n in zip(outputs, reads, strict=True)]
        requests = [(output.request_id, n) for output, n in zip(outputs, reads, strict=True)]
        records, *_ = self._llm.collective_rpc("take_routing", args=(requests,))  # all workers route alike
        return [None if r is None else np.frombuffer(r[2], np.dtype(r[0])).reshape(r[1]) for r in records]

    def _rest_if_idle(self) -> None:
        if not self.busy:
            gc.enable()

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        self._llm.collective_rpc("init_weight_transfer_engine", args=(init_info,))

    def rehearse_weight_update(self, tensors: bytes) -> list[bytes]:
        """Return each worker's needs of these tensors (`weights.transfer.wire`). The engine has no weights
        afterwards until it receives some."""
        self.start_weight_update(False)
        self.update_weights({"rehearse": tensors})
        needs = self._llm.collective_rpc("take_rehearsal")
        self._end_update()
        return needs

    def start_weight_update(self, check: bool) -> None:
        self._pause()
        self._updates += 1
        self._set_version(NO_VERSION)
        if self._updating:  # the tensors of the last one are not whole, and others start anew
            self._end_update()
        self._llm.collective_rpc("start_weight_update")
        self._llm.collective_rpc("watch_loading", args=(check,))
        self._updating = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        errors = self._llm.collective_rpc("load_update", args=(update_info,))
        if failed := [f"worker {rank}: {error}" for rank, error in enumerate(errors) if error is not None]:
            raise Refusal(f"the weight update failed on {'; '.join(failed)}")

    def missing_weights(self) -> list[list[str]]:
        missing = self._llm.collective_rpc("missing_weights")
        if None in missing:
            raise Refusal("the weight update was cut off: another member of its group was lost")
        return missing

    def finish_weight_update(self, version: int) -> list[dict[str, int]]:
        """Make the received weights those of policy `version`, let requests continue, and return the
        checksums of each worker. What was computed with the old weights is forgotten unless the settings keep
        it for running requests."""
        sums = self._end_update()
        self._set_version(str(version))
        recompute = self._settings.recompute_kv_after_update
        is_reset = self._llm.reset_prefix_cache(reset_running_requests=recompute)
        if not is_reset and (recompute or not self.busy):
            raise RuntimeError("vLLM could not clear its prefix cache after a weight update")
        self._tell_core("resume_scheduler")
        self.paused = False
        return sums

    def take_weights(self, check: bool, version: int) -> list[Receipt]:
        return take_weights(self, check, version)

    def _end_update(self) -> list[dict[str, int]]:
        """Let vLLM process the tensors of an update, whole or not; return the checksums of each worker."""
        sums = self._llm.collective_rpc("end_loading")
        self._llm.collective_rpc("close_update")
        self._updating = False
        return sums

    def _set_version(self, version: str) -> None:
        self._llm.set_weight_version(version)
        self._version = version  # kept here, too: a core in another process answers between two steps only

    def _pause(self) -> None:
        """Pause, so that no step sees half-replaced weights. Requests keep what they have. An idle core is
        paused too: otherwise it would take a step at once for a request that arrives meanwhile."""
        if not self.paused:
            self._tell_core("pause_scheduler", "keep", False)
        self.paused = True

    def _tell_core(self, method: str, *arguments: Any) -> None:
        """Call a method of vLLM's core in its own process, where it steps by itself unless told not to."""
        if not self._in_process:
            core: Any = self._llm.engine_core
            core.call_utility(method, *arguments)

    @property
    def _in_process(self) -> bool:
        """True if all of vLLM runs in this process and steps only when told to."""
        return self._settings.device == "cpu" and self._settings.tensor_parallel_size == 1

    def digests(self) -> list[dict[str, str]]:
        """Return for each worker digests of the weights that vLLM keeps as tensors (on CPUs most are
        packed)."""
        return self._llm.collective_rpc("compute_weight_checksums")

    def sleep(self) -> None:
        """Free the GPU's memory. The weights are dropped: waking needs an update, which is known to be whole.
        (vLLM's level 1 would keep them in host memory.)"""
        if self._updating:  # the trainer has died: vLLM cannot save buffers that wait for their tensors
            self._end_update()
        self._llm.sleep(level=2)
        self._set_version(NO_VERSION)

    def wake(self, part: str) -> None:
        """Allocate the memory of "weights" or "kv_cache" again, with undefined contents. vLLM ignores the
        call where that is awake, as in the second pass of an update that failed."""
        self._llm.wake_up([part])

    def close(self) -> None:
        if not self._in_process:  # where it ends with this process; its own shutdown takes a second
            self._llm.engine_core.shutdown()


def _records_itself(settings: EngineSettings) -> bool:
    """Return whether the worker records routing, since vLLM's own record needs the second model runner."""
    return settings.recorded_experts > 0 and not uses_second_runner(settings.device)


def _native_choices(output: Any, reads: int, num_experts: int, dense_layers: int) -> ExpertIds:
    """Return vLLM's own record of a finished request (enable_return_routed_experts), which has room for
    layers without a router too. Run with the second model runner on a CPU only."""
    ids = output.outputs[0].routed_experts
    if ids is None or len(ids) != reads:
        num_recorded = "none" if ids is None else f"{len(ids)}"
        raise RuntimeError(f"vLLM recorded the routing of {num_recorded} of {reads} tokens of a response")
    return expert_ids(ids[:, dense_layers:], num_experts)


def _native_mask(output: Any) -> SamplingMask:
    """Return vLLM's own record of what top-k and top-p left (return_sampling_mask). Run with the second model
    runner on a CPU only."""
    (completion,) = output.outputs
    sets = [] if completion.sampling_mask is None else completion.sampling_mask.token_ids
    tokens = completion.token_ids
    if len(sets) != len(tokens) or any(token not in ids for token, ids in zip(tokens, sets, strict=True)):
        raise RuntimeError(
            f"vLLM's sampling mask of {len(sets)} sets is not that of a response of {len(tokens)} tokens"
        )
    return sampling_mask(sets)


def _finished(output: Any, routed_experts: ExpertIds | None, mask: SamplingMask | None) -> Finished:
    from vllm.logprobs import FlatLogprobs

    (completion,) = output.outputs
    assert isinstance(completion.logprobs, FlatLogprobs)
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with {completion.finish_reason!r}")
    return Finished(
        int(output.request_id),
        np.array(completion.token_ids, dtype=np.int32),
        np.array(completion.logprobs.logprobs, dtype=np.float32),
        completion.finish_reason,
        tuple((span.start, int(span.version)) for span in completion.weight_versions),
        routed_experts,
        mask,
        _drafts(output),
    )


def _drafts(output: Any) -> tuple[int, int]:
    """Return (tokens drafted for a finished request, those accepted)."""
    metrics = output.outputs[0].spec_decode_metrics
    if metrics is None:
        return 0, 0
    accepted = sum(length * times for length, times in enumerate(metrics.histogram))
    return metrics.num_draft_tokens, accepted


def _device_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's arguments that differ between CPUs and GPUs."""
    records: dict[str, Any] = {}
    if settings.recorded_experts and not _records_itself(settings):
        records["enable_return_routed_experts"] = True
    if settings.records_sampling_mask:
        records["return_sampling_mask"] = True
    if settings.device == "cpu":
        # Whole prompts in one step. Models with delta nets are told otherwise by `engine_settings`.
        batched_tokens = max(CPU_BATCHED_TOKENS, settings.max_model_len or 0)
        return {"enable_chunked_prefill": False, "max_num_batched_tokens": batched_tokens} | records
    arguments = {"gpu_memory_utilization": settings.gpu_memory_utilization} | records
    if importlib.util.find_spec(FLASHINFER_KERNELS) is None:
        arguments["gdn_prefill_backend"] = "triton"
    return arguments


def _engine_args(settings: EngineSettings) -> Any:
    from vllm import EngineArgs
    from vllm.config import WeightTransferConfig

    arguments = _device_arguments(settings)
    backend = NCCL_BACKEND if settings.transport == "nccl" else settings.transport
    if settings.max_model_len is not None:
        arguments["max_model_len"] = settings.max_model_len
    if settings.spans_nodes:  # never run so far: it needs nodes with GPUs
        arguments["distributed_executor_backend"] = "ray"
    if settings.drafts:
        arguments["per_request_spec_decode_metrics"] = "summary"
        if settings.sleep_mode:
            # sleep drops all weights, and an update need not bring the drafter's. Not run on GPUs
            arguments["sleep_preserve_parameter_names"] = ["draft.*"]
    return EngineArgs(
        model=settings.model,
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        tensor_parallel_size=settings.tensor_parallel_size,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        enforce_eager=settings.enforce_eager,
        enable_sleep_mode=settings.sleep_mode,
        enable_prefix_caching=settings.prefix_caching,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        seed=0,
        weight_transfer_config=WeightTransferConfig(backend=backend),
        worker_extension_cls=RECORDING_PLUGIN if _records_itself(settings) else PLUGIN,
        language_model_only=True,  # a vision tower would wait for weights that no update brings
        **{**arguments, **settings.extra_arguments},
    )
