"""Settings of the run itself and of its machines."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.config_error import broken, nearest
from megatron_ibpo.config.paths import Kind, missing_directory, read_hub_id
from megatron_ibpo.config.values import (
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

BudgetUnit = Literal[
    "accelerator-seconds",
    "tokens",
    "flops",
    "tokens-shared-prefixes",
    "flops-shared-prefixes",
    "flops-charged",
]

_PROMPT_ROOM = 2048
"""Tokens reserved for the prompt in the paper's context lengths; the paper does not give its share."""

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
"""Settings of --eval-preset NAME, used where no flag is given: field of `RunConfig` → value."""


@dataclass
class RunConfig:
    """Settings of the run itself: its length, what it saves and what it reports."""

    run_dir: Annotated[Path, Kind.WRITTEN] = Path("runs/latest")
    """Directory for all output of the run: metrics.jsonl, summary.json, curves.png, config.yaml, versions,
    checkpoints, hf."""
    num_rollout: Annotated[int, at_least(1)] = 60
    """Steps, each one rollout and its updates."""
    num_epoch: Annotated[int | None, at_least(1)] = None
    """Passes over the prompts. Replaces --num-rollout, which then follows from the number of prompts. None:
    --num-rollout decides."""
    budget: Annotated[float | None, POSITIVE] = None
    """Stop after the step that uses up this budget, in units of --budget-unit, or after --num-rollout steps.
    Observation (evaluation, saving, reports, the gradient meter) is free. None: no such limit."""
    budget_unit: BudgetUnit = "accelerator-seconds"
    """Unit of --budget: seconds of the loop times accelerators, tokens through the model, or estimated
    floating-point operations. The "-shared-prefixes" forms of the last two count a prefix that several
    sequences of a pass share once. "flops-charged" also counts updates on sequences without an advantage,
    which are left out, and takes writing a token as ten times as dear as reading it."""
    seed: Annotated[int, SEED] = 0
    """Seed of sampling, pairing and initialisation."""
    save: bool = True
    """Write a Megatron checkpoint and a Hugging Face export at the end."""
    save_interval: Annotated[int | None, at_least(1)] = None
    """Steps between Megatron checkpoints; None leaves it to --save-interval-minutes."""
    save_interval_minutes: Annotated[float | None, POSITIVE] = 10.0
    """Minutes between Megatron checkpoints, each at the end of the step in progress; None leaves it to
    --save-interval. 10: what a closed terminal or a lost machine may cost."""
    keep_checkpoints: Annotated[int, at_least(1)] = 2
    """Number of newest Megatron checkpoints to keep. An older one is removed once a newer one is complete. 2:
    one to resume from, and one in case that it is damaged."""
    keep_checkpoint_every: Annotated[int | None, at_least(1)] = None
    """Never remove checkpoints of steps that are multiples of this. None: no such steps."""
    export_interval: Annotated[int | None, at_least(1)] = None
    """Steps between Hugging Face exports of the weights into run_dir/hf_step_N; None: only at the end, into
    run_dir/hf. All exports are kept."""
    push_to_hub: str | None = None
    """Model on the Hugging Face Hub, OWNER/NAME, that run_dir/hf is uploaded to when the run has finished;
    created as a private one if there is none. None: nothing is uploaded."""
    disk_wait: Annotated[float, NOT_NEGATIVE] = 600.0
    """Seconds to wait for space when the disk is full before the run stops. 600: time to free some."""
    journal_keep: Annotated[float, POSITIVE] = 1.0
    """GiB of the journal (run_dir/journal: every scored response) to keep although the newest checkpoint
    makes them unnecessary; after as many new ones a checkpoint is forced. 1: thousands of steps of the tiny
    models, and little next to a large model's checkpoints."""
    load: Path | None = None
    """Run directory, or its checkpoints directory, to resume from."""
    eval_interval: Annotated[int | None, at_least(1)] = None
    """Steps between evaluations; None: only at start and end."""
    eval_num_prompts: Annotated[int, within(0, 10_000_000)] = 2048
    """Number of held-out prompts; 0 turns evaluation off."""
    eval_preset: str | None = None
    """Sampling settings of held-out prompts where no flag below is given: qwen3-32b or qwen3-next-80b-a3b,
    the paper's settings of these models (avg@64). None: a benchmark's own number of samples, and training's
    settings."""
    n_samples_per_eval_prompt: Annotated[int | None, within(1, 65_536)] = None
    """Responses per held-out prompt at --eval-temperature, in addition to greedy decoding. With several, also
    report pass@k, maj@k and best-of-k. None: as --eval-preset or the benchmark, otherwise 1."""
    eval_temperature: Annotated[float | None, POSITIVE] = None
    """Divisor of the logits before held-out prompts are sampled. None: as --eval-preset, otherwise
    --rollout-temperature."""
    eval_other_temperatures: Annotated[tuple[float, ...], each(POSITIVE)] = ()
    """Further temperatures for every set of held-out prompts, each reported as a set SET@T. A method that
    only makes the policy more confident gains at temperature 1 but not at a low one."""
    eval_half: Literal["all", "tuning", "test"] = "all"
    """Half of the held-out prompts to use: "tuning" for choosing settings, "test" for judging the choice.
    Prompts are divided by their text; no text is in both. Studies that tune set it. all: both halves."""
    eval_top_p: Annotated[float | None, SHARE] = None
    """The same as --eval-temperature, for --rollout-top-p."""
    eval_top_k: Annotated[int | None, or_word(-1, at_least(1), "off")] = None
    """The same as --eval-temperature, for --rollout-top-k."""
    eval_max_response_len: Annotated[int | None, COUNT] = None
    """Limit of tokens per response to a held-out prompt. None: as --eval-preset, otherwise
    --rollout-max-response-len."""
    eval_compare_and_correct: bool = False
    """Also let the policy correct every sample during evaluation, alongside --ibpo-k - 1 others of its
    prompt, which are drawn without knowing which are right (the paper's GSPO+Prompt). Doubles the number of
    responses."""
    keep_samples: Annotated[int, within(0, 10_000)] = 8
    """Number of steps whose samples are kept for `ibpo.sh serve`: the first, the last, and others evenly
    between. Of a step the first groups are written, about 50,000 tokens, as readable JSON into
    run_dir/samples. 0: none. 8: some 30 MB, enough to see how responses change."""
    save_debug_rollout_data: bool = False
    """Save every step's records as readable JSON in run_dir/rollouts, with token weights and the trainer's
    log-probs before and after the update, which takes two more forward passes per step. `ibpo.sh serve` shows
    them."""
    load_debug_rollout_data: Path | None = None
    """Directory of saved records to train on instead of sampling; no engine is started."""
    debug_rollout_only: bool = False
    """Sample and score without training."""
    gradient_meter_interval: Annotated[int | None, at_least(1)] = None
    """Steps between measurements of the policy gradient's noise over prompts, for the objective in use and
    for GSPO on the same responses; None: never."""
    gradient_meter_blocks: Annotated[int, within(2, 10_000_000, "a spread needs two of them")] = 4
    """Parts into which a measurement splits its prompts, with one backward pass each. --rollout-batch-size or
    more: each prompt is a part, which is exact. 2: two halves, the cheapest. All are unbiased; more have less
    variance. 4 keeps the cost at interval 10 near a tenth of a run of the tiny models."""
    operator_skill_prompts: Annotated[int, within(0, 100_000)] = 16
    """Prompts for measuring, before the first step of a run with corrections, whether corrections succeed
    more often than another try. Each prompt is answered as in training, and two of its wrong responses are
    corrected and answered anew: G + 4 samples. 0: not measured. 16: costs about the sampling of one step of
    the tiny runs, and gives the difference within about .3; `ibpo.sh skill` measures more precisely."""
    use_wandb: bool = False
    """Also log to Weights & Biases."""
    use_trackio: bool = False
    """Also log to trackio, which keeps runs on this machine ($TRACKIO_DIR); `trackio show` shows them."""
    max_reward_error_rate: Annotated[float, UNIT] = 0.5
    """Stop the run when verifiers fail on more than this share of a step's responses. 0.5: single failures
    are counted and left out, but a verifier that fails on most responses is broken."""
    max_nonfinite_steps: Annotated[int, at_least(1)] = 3
    """Stop after this many consecutive steps with a loss or gradient that is not finite; such steps are
    skipped."""
    dry_run: bool = False
    """Print the plan (layout, memory, batch sizes, placement of processes) and exit."""
    dry_run_world_size: Annotated[int | None, RANKS] = None
    """Ranks to plan for in a dry run; None: the launcher's world size."""
    dry_run_gpu_memory_gib: Annotated[float, within(1, 1_000_000)] = 80.0
    """Memory per GPU that the plan must fit, in GiB."""
    dry_run_gpus_per_node: Annotated[int, RANKS] = 8
    """GPUs per node in a dry run."""
    dry_run_hardware: str | None = None
    """GPU type, such as h100, for predicting the seconds of a step in a dry run; docs/planner.md lists the
    types and the errors of the predictions. A run compares the same prediction with the time it took. None: a
    dry run predicts no time, and a run uses the detected GPU, if known."""
    dry_run_response_len: Annotated[int | None, COUNT] = None
    """Mean tokens per response in that prediction. None: half of --rollout-max-response-len, since the mean
    is unknown before the first step."""
    gpu_hour_price: Annotated[float | None, NOT_NEGATIVE] = None
    """Price of one GPU hour, in any currency, for the cost of a predicted run."""

    @property
    def trackers(self) -> list[str]:
        """Packages with wandb's interface that metrics are logged to as well."""
        return [name for name, used in (("wandb", self.use_wandb), ("trackio", self.use_trackio)) if used]

    def problems(self) -> list[str]:
        """Return the problems, one line each."""
        preset, pushed = self.eval_preset, self.push_to_hub
        hub = None if pushed is None else read_hub_id(pushed)
        unknown = f"--eval-preset: no preset {shown(preset)}; there are {', '.join(EVAL_PRESETS)}"
        return [
            *missing_directory("--load", self.load),
            *missing_directory("--load-debug-rollout-data", self.load_debug_rollout_data),
            *(
                f"--use-{name}: the package {name} is not installed; pip install {name}"
                for name in self.trackers
                if importlib.util.find_spec(name) is None
            ),
            *broken(
                {
                    f"{unknown}{nearest(preset or '', EVAL_PRESETS)}": (
                        preset is not None and preset not in EVAL_PRESETS
                    ),
                    f"--push-to-hub: must be OWNER/NAME, is {shown(pushed)}": (
                        pushed is not None and (hub is None or hub.repo != pushed)
                    ),
                    "--push-to-hub: --no-save exports nothing to upload": (
                        pushed is not None and not self.save
                    ),
                    "--debug-rollout-only: cannot be combined with --load-debug-rollout-data": (
                        self.debug_rollout_only and self.load_debug_rollout_data is not None
                    ),
                }
            ),
        ]


@dataclass
class ClusterConfig:
    """Settings of the machines and processes of a run."""

    ray_address: str | None = None
    """Address of a Ray cluster to join, HOST:PORT or "auto". None: $RAY_ADDRESS if set, otherwise the run
    starts its own Ray."""
    num_trainers: Annotated[int | None, RANKS] = None
    """Total trainer processes, one per GPU. None: one for every GPU of the cluster that is not reserved for
    engines; 1 without GPUs."""
    node_wait: Annotated[float, NOT_NEGATIVE] = 600.0
    """Seconds that a run waits for room in the cluster after losing a node with trainers, or all its engines.
    600: time for a scheduler to bring another node."""
    object_store_bytes: Annotated[int | None, BYTES] = None
    """Bytes of shared memory for each node's object store, through which records travel. None: derived from
    the size of a step's records."""
