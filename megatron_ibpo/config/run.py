"""The run itself and the machines that it has."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.config_error import broken, nearest
from megatron_ibpo.config.paths import Kind, missing_directory
from megatron_ibpo.config.ranges import (
    BYTES,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    RANKS,
    SEED,
    SHARE,
    UNIT,
    at_least,
    each,
    or_word,
    within,
)

if TYPE_CHECKING:
    from megatron_ibpo.config.config import Config


_PROMPT_ROOM = 2048
"""Tokens of the paper's contexts left to the prompt; the paper gives the contexts alone."""

EVAL_PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2605.16302, section 5 and "Tasks and Datasets": MinP is 0, which is off, and every test set is
    # evaluated 64 times
    "qwen3-32b": {
        "n_samples_per_eval_prompt": 64,
        "eval_temperature": 0.6,
        "eval_top_p": 0.95,
        "eval_top_k": 20,
        "eval_max_response_len": 32 * 1024 - _PROMPT_ROOM,
    },
    "qwen3-next-80b-a3b": {
        "n_samples_per_eval_prompt": 64,
        "eval_temperature": 0.7,
        "eval_top_p": 0.8,
        "eval_top_k": 20,
        "eval_max_response_len": 256 * 1024 - _PROMPT_ROOM,
    },
}
"""What --eval-preset NAME sets where no flag does: field of `RunConfig` → value."""


@dataclass
class RunConfig:
    """The run itself: how long, what is kept, what is shown."""

    run_dir: Annotated[Path, Kind.WRITTEN] = Path("runs/latest")
    """Everything of the run lands here: metrics.jsonl, summary.json, curves.png, config.yaml, versions,
    checkpoints, hf."""
    num_rollout: Annotated[int, at_least(1)] = 60
    """Steps: one rollout and its updates each."""
    num_epoch: Annotated[int | None, at_least(1)] = None
    """Times that the prompts are gone through. --num-rollout then follows from their number, and what was
    given for it is not used. None: --num-rollout decides."""
    budget: Annotated[float | None, POSITIVE] = None
    """Stop after the step with which so much is spent, in --budget-unit; --num-rollout steps at most. What
    only observes (evaluation, saving, reports, the gradient meter) is free. None: no such limit."""
    budget_unit: Literal[
        "accelerator-seconds", "tokens", "flops", "tokens-shared-prefixes", "flops-shared-prefixes"
    ] = "accelerator-seconds"
    """What --budget counts: seconds of the loop times accelerators, tokens through the model, or estimated
    floating-point operations; and of the last two what is left where a beginning that several sequences of a
    pass share is computed once."""
    seed: Annotated[int, SEED] = 0
    """Seeds sampling, pairing and initialisation."""
    save: bool = True
    """Write a Megatron checkpoint and a Hugging Face export at the end."""
    save_interval: Annotated[int | None, at_least(1)] = None
    """Steps between Megatron checkpoints; None leaves it to --save-interval-minutes."""
    save_interval_minutes: Annotated[float | None, POSITIVE] = 10.0
    """Minutes after which a Megatron checkpoint is due, at the end of the step that is under way; None leaves
    it to --save-interval. 10: what a closed terminal or a lost machine may cost."""
    keep_checkpoints: Annotated[int, at_least(1)] = 2
    """Megatron checkpoints that stay: the newest. An older one is removed once a newer one is whole. 2: one
    to go on from, and one in case that it is damaged."""
    keep_checkpoint_every: Annotated[int | None, at_least(1)] = None
    """Checkpoints of steps that are multiples of this are never removed; None: no such steps."""
    export_interval: Annotated[int | None, at_least(1)] = None
    """Steps between Hugging Face exports, weights alone, into run_dir/hf_step_N; only at the end, into
    run_dir/hf, when None. All of them stay."""
    disk_wait: Annotated[float, NOT_NEGATIVE] = 600.0
    """Seconds that a run waits for room when its disk is full before it stops. 600: time to free some."""
    journal_keep: Annotated[float, POSITIVE] = 1.0
    """GiB of the journal (run_dir/journal: every scored response) that stay although the newest checkpoint
    makes them dispensable; after as many new ones a checkpoint is forced. 1: thousands of steps of the tiny
    models, and little beside a large model's checkpoints."""
    load: Path | None = None
    """Run directory or its checkpoints directory to resume from."""
    eval_interval: Annotated[int | None, at_least(1)] = None
    """Steps between evaluations; only at start and end when None."""
    eval_num_prompts: Annotated[int, within(0, 10_000_000)] = 2048
    """Held-out prompts used; 0 turns evaluation off."""
    eval_preset: str | None = None
    """How held-out prompts are sampled where no flag below says so: qwen3-32b or qwen3-next-80b-a3b, the
    paper's settings of these models (avg@64). None: a benchmark's own number of samples, and training's
    settings."""
    n_samples_per_eval_prompt: Annotated[int | None, within(1, 65_536)] = None
    """Responses per held-out prompt at --eval-temperature; greedy is evaluated as well. With several,
    pass@k, maj@k and best-of-k of them too. None: what --eval-preset or the benchmark says, else 1."""
    eval_temperature: Annotated[float | None, POSITIVE] = None
    """Divides the logits before held-out prompts are sampled. None: as --eval-preset says, else
    --rollout-temperature."""
    eval_other_temperatures: Annotated[tuple[float, ...], each(POSITIVE)] = ()
    """Temperatures at which every set of held-out prompts is sampled too, as a set of its own called SET@T. A
    method that only makes the policy surer of itself gains at temperature 1 and not at a low one."""
    eval_half: Literal["all", "tuning", "test"] = "all"
    """Which held-out prompts are used: those whose text falls into the half for choosing settings, or into
    the half for judging what was chosen; no text is in both. Studies that tune set it. all: both halves."""
    eval_top_p: Annotated[float | None, SHARE] = None
    """The same for --rollout-top-p."""
    eval_top_k: Annotated[int | None, or_word(-1, at_least(1), "off")] = None
    """The same for --rollout-top-k."""
    eval_max_response_len: Annotated[int | None, COUNT] = None
    """Tokens that a response to a held-out prompt may have. None: as --eval-preset says, else
    --rollout-max-response-len."""
    eval_compare_and_correct: bool = False
    """At evaluation, also let the policy correct every sample alongside --ibpo-k - 1 others of its prompt.
    They are drawn without knowing which are right (the paper's GSPO+Prompt). As many more responses as there
    are samples."""
    save_debug_rollout_data: bool = False
    """Keep every step's records as readable JSON in run_dir/rollouts, with token weights and the trainer's
    log-probs before and after the update: two more forward passes per step. `ibpo.sh serve` shows them."""
    load_debug_rollout_data: Path | None = None
    """Train on the records kept in this directory instead of sampling; no engine is started."""
    debug_rollout_only: bool = False
    """Sample and score, do not train."""
    gradient_meter_interval: Annotated[int | None, at_least(1)] = None
    """Steps between measurements of the policy gradient's noise over prompts, for the objective in use and
    for GSPO on the same responses; never when None."""
    gradient_meter_blocks: Annotated[int, within(2, 10_000_000, "a spread needs two of them")] = 4
    """Parts that the prompts of a measurement are cut into, a backward pass each. From --rollout-batch-size
    on each prompt is one, which is exact; 2 are two halves, the cheapest. All are unbiased; more are less
    scattered. 4 keeps the cost at interval 10 near a tenth of a run of the tiny models."""
    operator_skill_prompts: Annotated[int, within(0, 100_000)] = 16
    """Prompts on which a run that has responses corrected measures, before its first step, whether
    corrections succeed more often than another try. Each is answered as in training, and two of its wrong
    responses are corrected and answered anew: G + 4 samples. 0: not measured. 16: about the sampling of one
    step of the tiny runs, and a difference known to about .3; `ibpo.sh skill` measures more closely."""
    use_wandb: bool = False
    """Also log to Weights & Biases."""
    max_reward_error_rate: Annotated[float, UNIT] = 0.5
    """Share of a step's responses whose verifier failed above which the run stops. 0.5: single failures are
    counted and left out, but a verifier that fails on most responses is broken."""
    max_nonfinite_steps: Annotated[int, at_least(1)] = 3
    """Stop after this many steps in a row were skipped for a loss or gradient that is not finite."""
    dry_run: bool = False
    """Print the plan (layout, memory, batch sizes, who runs where) and exit."""
    dry_run_world_size: Annotated[int | None, RANKS] = None
    """Ranks to plan for in a dry run; the launcher's world size when None."""
    dry_run_gpu_memory_gib: Annotated[float, within(1, 1_000_000)] = 80.0
    """Memory of one GPU that the plan must fit."""
    dry_run_gpus_per_node: Annotated[int, RANKS] = 8
    """GPUs of one node in a dry run."""
    dry_run_hardware: Annotated[str | None, Kind.NAME_OR_YAML] = None
    """Kind of GPU, such as h100, for which a dry run predicts the seconds of a step; docs/planner.md lists
    them, with the errors of its predictions. Or a file of `ibpo calibrate` that describes this machine. A run
    compares the same prediction with what it took. None: a dry run predicts no time, and a run that of the
    GPUs that it has, where they are known."""
    dry_run_response_len: Annotated[int | None, COUNT] = None
    """Mean tokens of a response in that prediction. None: half of --rollout-max-response-len, since nothing
    tells before the first step."""
    gpu_hour_price: Annotated[float | None, NOT_NEGATIVE] = None
    """Price of a GPU for an hour, in any currency: a predicted run's cost is shown in it."""

    def problems(self, config: "Config") -> list[str]:
        """Return what cannot work, one line each."""
        preset = self.eval_preset
        lacks_wandb = self.use_wandb and importlib.util.find_spec("wandb") is None
        unknown = f"--eval-preset: no preset {shown(preset)}; there are {', '.join(EVAL_PRESETS)}"
        return [
            *missing_directory("--load", self.load),
            *missing_directory("--load-debug-rollout-data", self.load_debug_rollout_data),
            *broken(
                {
                    "--use-wandb: the package wandb is not installed; pip install wandb": lacks_wandb,
                    f"{unknown}{nearest(preset or '', EVAL_PRESETS)}": (
                        preset is not None and preset not in EVAL_PRESETS
                    ),
                    "--debug-rollout-only: cannot be combined with --load-debug-rollout-data": (
                        self.debug_rollout_only and self.load_debug_rollout_data is not None
                    ),
                }
            ),
        ]


@dataclass
class ClusterConfig:
    """The machines and processes of a run."""

    ray_address: str | None = None
    """Address of a Ray cluster to join, HOST:PORT or "auto". None: $RAY_ADDRESS where that is set, else a Ray
    of the run's own."""
    num_trainers: Annotated[int | None, RANKS] = None
    """Trainer processes in all, one per GPU. None: one for every GPU of the cluster that engines of their own
    leave; 1 without GPUs."""
    node_wait: Annotated[float, NOT_NEGATIVE] = 600.0
    """Seconds for which a run that has lost a node with trainers, or all its engines, waits until the cluster
    has room for it again. 600: time for a scheduler to bring another node."""
    object_store_bytes: Annotated[int | None, BYTES] = None
    """Shared memory of each node's object store, through which records travel. Follows the size of a step's
    records when None."""
