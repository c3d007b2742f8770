"""Settings of sampling, and of environments: episodes of many turns."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from megatron_ibpo.config.algorithm import AlgorithmConfig
from megatron_ibpo.config.config_error import broken
from megatron_ibpo.config.hooks import is_import_path
from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.config.values import (
    BYTES,
    COUNT,
    IMPORT_PATHS,
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

MOST_SEQUENCES = 4_000_000
"""Most responses or corrections per step; each is a record in the driver's memory."""


@dataclass
class RolloutConfig:
    """Settings of sampling with any engine; those of one engine are its parameters."""

    rollout_backend: str | None = None
    """Engine for sampling. "vllm". "lean": plain torch in float32 in the trainer's own process, without Ray,
    for studies of dense Qwen3 of up to 4 M parameters, where starting vLLM takes longer than training
    (docs/studies.md); it samples on the CPU, also where the trainer has a GPU. "transformers": any model
    that transformers runs, in float32 on CPUs, in waves of requests; slower than vLLM. Or an import path
    package.module:Engine (docs/extending.md). None: vllm, but transformers on CPUs for models that vLLM does
    not compute there; the start says so."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Settings that the engine declares (`engines.protocol.Engine`), by name. One left out has its
    default."""
    rollout_batch_size: Annotated[int, COUNT] = 32
    """P: prompts per rollout."""
    n_samples_per_prompt: Annotated[int, COUNT] = 8
    """G: responses per prompt."""
    rollout_max_response_len: Annotated[int, COUNT] = 8192
    """Limit of tokens per response."""
    rollout_max_context_len: Annotated[int | None, COUNT] = None
    """Limit of tokens in prompt and response together; None: the model's own limit."""
    rollout_temperature: Annotated[float, above(0, "greedy samples of a prompt are all the same")] = 1.0
    """Divisor of the logits before sampling. 1: the policy that the trainer sees."""
    rollout_top_p: Annotated[float, SHARE] = 1.0
    """Sample from the likeliest tokens that together have this probability. 1: off. Engines record the ids
    that it leaves, and the trainer's log-probs are normalised over the same ids (docs/loss_variants.md). An
    engine that cannot record them is refused where the loss reads its log-probs. Where the loss reads none,
    the trainer then takes log-probs over the whole vocabulary, of a policy that also writes what was cut
    off."""
    rollout_top_k: Annotated[int, or_word(-1, at_least(1), "off")] = -1
    """Sample from this many of the likeliest tokens, with the same record as for --rollout-top-p. vLLM makes
    that record on GPUs, and only where this is on. -1: off."""
    rollout_temperature_cycle: Annotated[tuple[float, ...], each(POSITIVE)] = ()
    """Temperatures to cycle through over a group's responses, for more diverse trajectories. Corrections and
    evaluation keep --rollout-temperature, as do all responses when this is empty."""
    rollout_top_p_cycle: Annotated[tuple[float, ...], each(SHARE)] = ()
    """The same as --rollout-temperature-cycle, for --rollout-top-p."""
    rollout_top_k_cycle: Annotated[tuple[int, ...], each(or_word(-1, at_least(1), "off"))] = ()
    """The same as --rollout-temperature-cycle, for --rollout-top-k."""
    rollout_prompt_suffixes: tuple[str, ...] = ()
    """Texts to append to the question, cycling over a group's responses (prompt perturbation); an empty text
    leaves the question unchanged. Each response is trained on with the prompt that it answered."""
    rollout_num_gpus_per_engine: Annotated[int, RANKS] = 1
    """Tensor-parallel size of one engine."""
    colocate: bool = True
    """Run engines on the trainers' devices; they sleep while the trainers work."""
    offload_train: bool = True
    """Move the trainers' weights, gradients and optimizer state out of the way while engines sample on the
    same GPUs: into pinned host memory, except gradients, which are dropped. Per parameter of the rank's part
    this frees 18 bytes on the GPU and takes 14 in host memory. On: the move takes about a second. Has no
    effect with --no-colocate and on CPUs."""
    rollout_num_gpus: Annotated[int | None, RANKS] = None
    """Total GPUs for engines that have GPUs of their own (--no-colocate)."""
    engine_stall_timeout: Annotated[float, SECONDS] = 300.0
    """Seconds without a new token after which a busy engine is ended and replaced. 300: the longest step,
    many long prompts at once, takes a minute."""
    max_staleness: Annotated[int, within(0, 1000)] = 0
    """Most steps by which the weights behind a batch's oldest token may lag the policy in training. 0:
    sampling waits for every update (on-policy). With S ≥ 1, sampling runs ahead of training by up to S
    batches, and running responses continue with new weights as these arrive."""
    over_sampling_batch_size: Annotated[int | None, COUNT] = None
    """Groups in flight for a batch of --rollout-batch-size; the first to complete are taken. The others
    continue, up to --max-staleness; beyond it they are dropped and counted, and their prompts are sampled
    again. Favours short responses (metric length_bias). None: no more groups than are taken."""
    keep_order: bool = False
    """Take groups in the order of their prompts rather than of completion, with --max-staleness. Avoids the
    bias, but a batch waits for its longest response."""
    recompute_kv_after_update: bool = True
    """Recompute the caches of running responses when new weights arrive, so that every later token depends on
    the new policy only. Off: requests made before the update continue from the old policy's cache, which
    saves that time; requests made after it do not share that cache."""
    use_rollout_routing_replay: bool = False
    """Mixture-of-experts models: engines record the experts that their routers chose for each token, and the
    trainer's routers reuse them, for old log-probs and in the optimizer steps (R3, arXiv 2510.11370). Off
    because the record takes layers x experts per token bytes per token (two each above 255 experts) in
    transfers, in the journal and in the driver's memory: 960 for Qwen3-Next-80B."""
    update_weight_buffer_size: Annotated[int, BYTES] = 512 * 1024**2
    """Bytes per bucket of the weight update. A trainer needs memory for at most two buckets on top of its
    weights. 512 MiB: large enough to keep the transport busy."""
    update_weight_timeout: Annotated[float, SECONDS] = 600.0
    """Seconds that one stage of a weight update may take. 600: 150 GB at 0.25 GB/s."""
    check_weight_update_equal: bool = False
    """Compare checksums on receipt of every update, and once per run the engine's output with that of a
    freshly loaded engine."""

    @property
    def truncation(self) -> list[str]:
        """Flags by which top-p and top-k cut the distribution of some samples."""
        return broken(
            {
                "--rollout-top-p": self.rollout_top_p < 1,
                "--rollout-top-k": self.rollout_top_k > 0,
                "--rollout-top-p-cycle": min(self.rollout_top_p_cycle, default=1) < 1,
                "--rollout-top-k-cycle": max(self.rollout_top_k_cycle, default=-1) > 0,
            }
        )

    def top_p_and_k(self, index: int) -> tuple[float, int]:
        """Return top-p and top-k of a group's response number `index`, in the turn of their cycles."""
        top_p, top_k = self.rollout_top_p_cycle, self.rollout_top_k_cycle
        return (
            top_p[index % len(top_p)] if top_p else self.rollout_top_p,
            top_k[index % len(top_k)] if top_k else self.rollout_top_k,
        )

    def context_of(self, limit: int) -> int:
        """Return the limit of tokens in prompt and response together: --rollout-max-context-len, or the
        model's own."""
        return self.rollout_max_context_len or limit

    @property
    def runs_ahead(self) -> bool:
        """True if groups are sampled before earlier steps are finished."""
        return self.max_staleness > 0 or (self.over_sampling_batch_size or 0) > self.rollout_batch_size

    def problems(self, algorithm: AlgorithmConfig, run: RunConfig) -> list[str]:
        """Return the problems, one line each."""
        context, longest = self.rollout_max_context_len, self.rollout_max_response_len
        over, size = self.over_sampling_batch_size, self.rollout_batch_size
        groups = max(size, over or 0)
        corrections = algorithm.parameters.get("ibpo_corrections", 0)
        compares = not is_import_path(algorithm.advantages) and not algorithm.trains_critic
        sequences = groups * self.n_samples_per_prompt * max(1, corrections)
        return broken(
            {
                "--n-samples-per-prompt 1: a group of one leaves nothing to compare; take at least 2, or "
                "--advantages critic": (self.n_samples_per_prompt == 1 and compares),
                f"--rollout-max-context-len: {context} leaves no room for a prompt next to "
                f"--rollout-max-response-len {longest}": context is not None and context <= longest,
                "--rollout-num-gpus: only for engines with GPUs of their own; add --no-colocate": (
                    self.rollout_num_gpus is not None and self.colocate
                ),
                f"--n-samples-per-prompt: {groups} prompts of {self.n_samples_per_prompt} responses, each "
                f"with up to {corrections} corrections, are more than the {MOST_SEQUENCES} sequences that a "
                "step may have": sequences > MOST_SEQUENCES,
                f"--over-sampling-batch-size: {over} groups do not fill --rollout-batch-size {size}": (
                    over is not None and over < size
                ),
                "--keep-order: has no effect unless --max-staleness lets sampling run ahead": (
                    self.keep_order and not self.runs_ahead
                ),
                "--check-weight-update-equal: needs idle engines, and with --max-staleness or "
                "--over-sampling-batch-size they sample during an update; check once without these": (
                    self.check_weight_update_equal and self.runs_ahead
                ),
                "--load-debug-rollout-data: recorded rollouts cannot run ahead; drop --max-staleness": (
                    run.load_debug_rollout_data is not None and self.runs_ahead
                ),
            }
        )


@dataclass
class EnvironmentConfig:
    """Settings of episodes. Without --environment a response is one turn."""

    environment: str | None = None
    """Environment of the prompts: the import path package.module:Class of a class of your own or of another
    framework (docs/environments.md), or openenv://HOST:PORT, a server. A prompt may name its own under
    `environment` in its metadata, if --allowed-environments has it. It gives the reward, in place of
    --rm-type. None: responses of one turn."""
    environment_reward: Annotated[tuple[str, ...], IMPORT_PATHS] = ()
    """Reward functions as TRL takes them for `reward_funcs`, for an environment of TRL's kind: the import
    path of one, package.module:name or path/to/file.py:name, or of several, whose values are added up. None:
    the environment scores itself."""
    allowed_environments: Annotated[tuple[str, ...], IMPORT_PATHS] = ()
    """Environments that rows may name besides --environment, in the same forms. They are loaded at the start.
    None: a row may name no other, since a data set would run code, or ask servers, of its author's choice."""
    max_turns: Annotated[int, COUNT] = 8
    """Turns of the policy after which an episode is over and scored. 8: enough for the bundled tasks; raise
    it for agents that search or write programs."""
    max_turn_len: Annotated[int | None, COUNT] = None
    """Limit of tokens of one turn of the policy. A turn that reaches it ends the episode. None: what is left
    of --rollout-max-response-len, which limits the whole episode, answers of the environment included."""
    step_timeout: Annotated[float, SECONDS] = 60.0
    """Seconds that one call of an environment may take. 60: a tool that runs a program has a shorter limit of
    its own."""
    episode_timeout: Annotated[float, SECONDS] = 1800.0
    """Seconds that all calls of an environment in one episode may take together. Waiting for the policy does
    not count, so that a busy engine fails no episode."""
    environment_processes: Annotated[int, COUNT] = 256
    """Most environments that run at once on one node; further episodes wait. Each is a process, a fork of
    one that has imported the class: 2 MB of its own for a small environment. 256: as many as an engine
    decodes at once (--vllm-max-num-seqs)."""
    environment_sandbox: bool = False
    """Run environments in bubblewrap: without network, with a read-only file system and a temporary directory
    of their own. Off: most environments need files or a network."""

    def of_samples(self) -> dict[str, Any]:
        """Return the settings that samples depend on, where they are not the defaults: records made before
        there were environments then still have equal settings."""
        without_effect = ("step_timeout", "episode_timeout", "environment_processes", "allowed_environments")
        defaults = {field.name: field.default for field in fields(self) if field.name not in without_effect}
        values = {name: getattr(self, name) for name in defaults}
        return {name: value for name, value in values.items() if value != defaults[name]}

    def problems(self, rollout: RolloutConfig) -> list[str]:
        """Return the problems, one line each."""
        named = self.environment is not None
        return broken(
            {
                "--rollout-prompt-suffixes: with --environment the environment writes the prompt": (
                    named and bool(rollout.rollout_prompt_suffixes)
                ),
                "--environment-reward: scores the episodes of --environment; name one, or drop the flag": (
                    bool(self.environment_reward) and not named and not self.allowed_environments
                ),
            }
        )
