"""Sampling."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megatron_ibpo.config.config_error import broken
from megatron_ibpo.config.hooks import is_import_path
from megatron_ibpo.config.ranges import (
    BYTES,
    COUNT,
    NAMED_VALUES,
    POSITIVE,
    RANKS,
    SECONDS,
    SHARE,
    above,
    at_least,
    each,
    or_word,
    within,
)
from megatron_ibpo.config.tyro_marks import UseAppendAction

if TYPE_CHECKING:
    from megatron_ibpo.config.algorithm import AlgorithmConfig
    from megatron_ibpo.config.config import Config
    from megatron_ibpo.config.run import RunConfig


MOST_SEQUENCES = 4_000_000
"""Responses of a step, or corrections: each is a record in the driver's memory."""


@dataclass
class RolloutConfig:
    """Sampling, by vLLM where nothing else is said."""

    rollout_backend: str = "vllm"
    """Engine that samples: "vllm"; "lean", the trainer's own process in plain torch and float32, without Ray,
    for studies of dense Qwen3 of up to 4 M parameters on a processor, where starting vLLM takes longer than
    training (docs/studies.md); or an import path package.module:Engine (docs/extending.md)."""
    rollout_batch_size: Annotated[int, COUNT] = 32
    """P: prompts per rollout."""
    n_samples_per_prompt: Annotated[int, COUNT] = 8
    """G: responses per prompt."""
    rollout_max_response_len: Annotated[int, COUNT] = 8192
    """Tokens a response may have."""
    rollout_max_context_len: Annotated[int | None, COUNT] = None
    """Tokens that prompt and response may have together; the model's own limit when None."""
    rollout_temperature: Annotated[float, above(0, "greedy samples of a prompt are all the same")] = 1.0
    """Divides the logits before sampling. 1: the policy that the trainer sees."""
    rollout_top_p: Annotated[float, SHARE] = 1.0
    """Sample from the likeliest tokens that together have this probability. 1: off, for the reason below."""
    rollout_top_k: Annotated[int, or_word(-1, at_least(1), "off")] = -1
    """Sample from this many of the likeliest tokens. -1: off, since cutting the distribution makes it differ
    from the trainer's; the difference is logged."""
    rollout_temperature_cycle: Annotated[tuple[float, ...], each(POSITIVE)] = ()
    """Temperatures of a group's responses in turn, for more diverse trajectories; corrections and evaluation
    stay at --rollout-temperature, and so do the responses when it is empty."""
    rollout_top_p_cycle: Annotated[tuple[float, ...], each(SHARE)] = ()
    """The same for --rollout-top-p."""
    rollout_top_k_cycle: Annotated[tuple[int, ...], each(or_word(-1, at_least(1), "off"))] = ()
    """The same for --rollout-top-k."""
    rollout_prompt_suffixes: tuple[str, ...] = ()
    """Texts appended to the question in turn over a group's responses (prompt perturbation); an empty one
    leaves it as it is. Each response is trained on with the prompt that it answered."""
    rollout_num_gpus_per_engine: Annotated[int, RANKS] = 1
    """Tensor-parallel size of one engine."""
    colocate: bool = True
    """Engines share the trainers' devices and sleep while those train."""
    offload_train: bool = True
    """While engines sample on the trainers' GPUs, weights, gradients and optimizer state of the trainers wait
    in pinned host memory (gradients are dropped): 18 bytes less a parameter of the rank's part on the GPU, 14
    more in host memory. On: they move in about a second. Has no effect with --no-colocate and on CPUs."""
    rollout_num_gpus: Annotated[int | None, RANKS] = None
    """GPUs of the engines in all, where they have some of their own (--no-colocate)."""
    vllm_arg: Annotated[tuple[str, ...], UseAppendAction, NAMED_VALUES] = ()
    """Any other argument of vLLM's engine, name=value with the names of its EngineArgs; in a recipe also a
    mapping."""
    vllm_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of sampling. auto: the trainer's on GPUs and float32 on CPUs, but bfloat16 where vLLM takes
    no float32: beside quantization, and on CPUs for models with delta nets."""
    vllm_gpu_memory_utilization: Annotated[float, SHARE] = 0.6
    """Share of a GPU's memory for weights and KV cache of a colocated engine."""
    vllm_kv_cache_bytes: Annotated[int | None, BYTES] = None
    """KV-cache bytes per engine rank. On CPUs 512 MiB when None (vLLM's default takes a share of all
    RAM); on GPUs None leaves it to the utilization."""
    vllm_max_num_seqs: Annotated[int, COUNT] = 256
    """Sequences decoded at once by one engine."""
    vllm_enforce_eager: bool = False
    """Do not compile or capture graphs. Always so on CPUs, where compiling was 20x slower."""
    vllm_start_timeout: Annotated[float | None, SECONDS] = None
    """Seconds an engine may take to start. None: 600, for compiling and capturing graphs, and what reading
    the model's files takes at 0.25 GB/s; 1,240 for 160 GB."""
    engine_stall_timeout: Annotated[float, SECONDS] = 300.0
    """Seconds in which an engine that has requests must write a token; one that does not is ended and
    replaced. 300: the longest step, many long prompts at once, takes a minute."""
    max_staleness: Annotated[int, within(0, 1000)] = 0
    """How many steps older than the policy that is trained the weights behind a batch's oldest token may be.
    0: sampling waits for every update (on-policy). With S ≥ 1 it runs ahead of training by up to S batches,
    and running responses go on with new weights as these come."""
    over_sampling_batch_size: Annotated[int | None, COUNT] = None
    """Groups to have under way for a batch of --rollout-batch-size, of which the first that are complete are
    taken. The others go on, up to --max-staleness; past that they are given up, counted, and their prompts
    are asked again. Favours short responses (metric length_bias). None: no more than are taken."""
    keep_order: bool = False
    """With --max-staleness, take groups in the order in which their prompts were asked instead of the first
    that are complete: no bias, and a batch waits for its longest response."""
    recompute_kv_after_update: bool = True
    """When new weights come while responses run, compute their caches anew, so that every later token is the
    new policy's alone. Off: what was asked before the update goes on from the old policy's cache, which saves
    that time; what is asked after it shares nothing with that."""
    use_rollout_routing_replay: bool = False
    """For mixtures of experts: engines record which experts their routers chose for each token, and the
    trainer's routers choose them again, for old log-probs and in the optimizer steps (R3, arXiv 2510.11370).
    Off: it takes layers x experts per token bytes (two each above 255 experts) of record a token, on the way,
    in the journal and in the driver's memory: 960 for Qwen3-Next-80B."""
    update_weight_buffer_size: Annotated[int, BYTES] = 512 * 1024**2
    """Bytes of one bucket of the weight update. It costs a trainer at most two of them on top of its weights.
    512 MiB: large enough to keep the transport busy."""
    update_weight_timeout: Annotated[float, SECONDS] = 600.0
    """Seconds that one stage of a weight update may take. 600: 150 GB at 0.25 GB/s."""
    check_weight_update_equal: bool = False
    """After each update compare checksums at receipt, and once per run the engine's output with that of
    a freshly loaded engine."""

    @property
    def runs_ahead(self) -> bool:
        """Whether groups are sampled before the steps before them are over."""
        return self.max_staleness > 0 or (self.over_sampling_batch_size or 0) > self.rollout_batch_size

    def problems(self, config: "Config") -> list[str]:
        """Return what cannot work, one line each."""
        return [*self._size_problems(config.algorithm), *self._staleness_problems(config.run)]

    def _size_problems(self, algorithm: "AlgorithmConfig") -> list[str]:
        context, longest = self.rollout_max_context_len, self.rollout_max_response_len
        groups = max(self.rollout_batch_size, self.over_sampling_batch_size or 0)
        corrections = algorithm.parameters.get("ibpo_corrections", 0)
        compares = algorithm.advantages != "critic" and not is_import_path(algorithm.advantages)
        sequences = groups * self.n_samples_per_prompt * max(1, corrections)
        return broken(
            {
                "--n-samples-per-prompt: 1 leaves nothing to compare; at least 2, or --advantages critic": (
                    self.n_samples_per_prompt == 1 and compares
                ),
                f"--rollout-max-context-len: {context} leaves no room for a prompt next to "
                f"--rollout-max-response-len {longest}": context is not None and context <= longest,
                "--rollout-num-gpus: only engines with GPUs of their own count them; add --no-colocate": (
                    self.rollout_num_gpus is not None and self.colocate
                ),
                f"--n-samples-per-prompt: {groups} prompts of {self.n_samples_per_prompt} responses, each "
                f"with up to {corrections} corrections, are more than the {MOST_SEQUENCES} sequences that a "
                "step may have": sequences > MOST_SEQUENCES,
            }
        )

    def _staleness_problems(self, run: "RunConfig") -> list[str]:
        over, size = self.over_sampling_batch_size, self.rollout_batch_size
        return broken(
            {
                f"--over-sampling-batch-size: {over} groups do not fill --rollout-batch-size {size}": (
                    over is not None and over < size
                ),
                "--keep-order: has no meaning unless --max-staleness lets sampling run ahead": (
                    self.keep_order and not self.runs_ahead
                ),
                "--check-weight-update-equal: asks engines that rest, and with --max-staleness or "
                "--over-sampling-batch-size they go on through an update; check once without these": (
                    self.check_weight_update_equal and self.runs_ahead
                ),
                "--load-debug-rollout-data: recorded rollouts cannot run ahead; drop --max-staleness": (
                    run.load_debug_rollout_data is not None and self.runs_ahead
                ),
            }
        )
