"""The choice between vLLM's two model runners, and what this project assumes of each.

vLLM 0.32 takes the second where Triton has a back end: on GPUs, not on CPUs
(`VllmConfig.use_v2_model_runner`). VLLM_USE_V2_MODEL_RUNNER=0 or 1 overrides that. The tests run the first
one, and the second one on Triton's interpreter (tests/engines/test_second_runner.py).

| assumption | first | second |
|---|---|---|
| a request's seed fixes its tokens | a generator a request | noise hashed from seed and position |
| reading a prompt in parts changes no token | with a fix (`fixes`), on CPUs | yes: noise has no state |
| log-probs are of what was sampled from | `processed_logprobs` | `processed_logprobs` |
| `FlatLogprobs`, spans of weight versions | yes: the engine's core makes them | as in the first |
| the ids that top-k and top-p left | no | `return_sampling_mask`, with top-k only |
| routers' choices | `worker.RecordingWorker`, on CPUs | `enable_return_routed_experts` |
| steps overlap (`async_scheduling`) | not on CPUs | on GPUs |
"""

import os
from typing import Literal

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


def uses_second_runner(device: Literal["cpu", "cuda"]) -> bool:
    """Return whether an engine on this device samples with vLLM's second model runner."""
    chosen = os.environ.get(VARIABLE)
    return device == "cuda" if chosen is None else chosen == "1"


def check_runner(second: bool, needs_second: bool) -> None:
    """Refuse an engine for which vLLM took the first runner where the second is needed.

    Args:
        second: whether vLLM took the second.

    Raises:
        RuntimeError: it did not; its log says why.
    """
    if needs_second and not second:
        raise RuntimeError(
            "vLLM took its first model runner, which records neither routing nor what top-k and top-p left; "
            "its log says above what the second one does not support. Drop that, or "
            "--use-rollout-routing-replay and --rollout-top-k"
        )
