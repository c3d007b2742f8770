"""Supervised fine-tuning: the trainers of every run, fed with demonstrations in place of samples.

There are no engines, verifiers or journal. The rows of a step depend on its number alone, so a checkpoint is
all that a run resumes from.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatron_ibpo.basics.records import Prompt, TrainSequence
from megatron_ibpo.basics.text import listed
from megatron_ibpo.config import (
    AlgorithmConfig,
    Config,
    ConfigError,
    LossConfig,
    RolloutConfig,
    as_specs,
    check_config,
)
from megatron_ibpo.config.config import flag
from megatron_ibpo.data import DataError, PromptSource, Tokenizer, load_tokenizer, open_sources
from megatron_ibpo.data.demonstrations import Demonstration, DemonstrationReader
from megatron_ibpo.models import forward_flops
from megatron_ibpo.policy.group import About, Policy
from megatron_ibpo.policy.overrides import check_overrides
from megatron_ibpo.report import Report, Size, Stages, prepare_run_dir, run_sizes
from megatron_ibpo.report.run_dir import DiskWait, locked
from megatron_ibpo.report.stages import StartLines
from megatron_ibpo.run.inputs import read_resume_point
from megatron_ibpo.run.open import choose_backend
from megatron_ibpo.run.preflight import check_model, disk_bytes, preflight
from megatron_ibpo.run.resolve import Foundation, ResolvedConfig, read_foundation, resolve, settle
from megatron_ibpo.run.saving import is_time_to_save
from megatron_ibpo.run.steps import NotFiniteError
from megatron_ibpo.weights.formats.run_state import Keep

_OF_TRAIN = (
    "budget", "debug_rollout_only", "dry_run", "gradient_meter_interval", "load_debug_rollout_data",
    "save_debug_rollout_data",
)  # fmt: skip
_OF_PROMPTS = ("deduplicate", "filter_pass_rate")
_SIZES_OF_SAMPLING = {
    "prompts per step (P)", "responses per prompt (G)", "responses per step", "corrections per step",
    "updates per step", "response tokens",
}  # fmt: skip
_METRICS_OF_SAMPLING = {
    "clip_fraction", "ratio_mean", "ratio_max", "seconds_old_logprobs", "sequences_without_advantage",
    "tokens_trained", "tokens_trained_corrections",
}  # fmt: skip


def supervised(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration with the likelihood as its loss and without sampling and credit, and the flags
    of settings that have no effect. So a recipe for RL serves with its model, layout and optimizer. Raises
    ConfigError for a setting that only `ibpo train` supports, or one that is invalid."""
    loss, rollout, run = config.loss, config.rollout, config.run
    chosen = replace(
        config,
        loss=LossConfig("nll", loss_backend=loss.loss_backend, fuse_lm_head=loss.fuse_lm_head),
        algorithm=AlgorithmConfig(),
        rollout=RolloutConfig(
            rollout_backend=rollout.rollout_backend,
            rollout_batch_size=rollout.rollout_batch_size,
            rollout_max_context_len=rollout.rollout_max_context_len,
            rollout_max_response_len=1,  # only the context limits a response that is given
            colocate=False,
        ),
        run=replace(run, eval_num_prompts=run.eval_num_prompts if config.data.eval_prompt_data else 0),
    )
    untouched = Config()
    refused = [name for name in _OF_TRAIN if getattr(run, name) != getattr(untouched.run, name)]
    refused += [n for n in _OF_PROMPTS if getattr(config.data, n) != getattr(untouched.data, n)]
    if refused:
        raise ConfigError(
            f"{', '.join(map(flag, refused))}: only `ibpo train` has it; drop it for `ibpo sft`"
        )
    check_config(chosen, [check_overrides])
    idle = [
        flag(name)
        for section in ("loss", "algorithm", "rollout")
        for name, value in vars(getattr(config, section)).items()
        if value not in (getattr(getattr(chosen, section), name), getattr(getattr(untouched, section), name))
        and name not in ("parameters", "rollout_max_response_len")  # `commands.sft` names it if it was typed
    ]
    return chosen, idle


@dataclass
class SupervisedRun:
    """A run in progress, with the verbs of its loop."""

    config: Config
    policy: Policy
    demonstrations: PromptSource
    held_out: list[TrainSequence]
    reporter: Report
    disk: DiskWait
    stages: Stages
    step: int
    """Completed steps."""
    saved: int
    """Steps completed when the last save began."""
    evaluated: int = -1
    """Steps completed at the last evaluation."""
    saved_at: float = field(default_factory=time.monotonic)
    start_seconds: dict[str, float] = field(default_factory=dict)
    skipped_in_a_row: int = 0
    """Consecutive steps whose update was skipped."""

    def done(self) -> bool:
        """Return whether all steps are done."""
        return self.step >= self.config.run.num_rollout

    def update(self) -> None:
        """Take one optimizer step on the next rows, and report it. Raises NotFiniteError if
        --max-nonfinite-steps consecutive steps were skipped."""
        size = self.config.rollout.rollout_batch_size
        with self.stages("data"):
            sequences = sequences_of(self.demonstrations.batch(self.step, size))
        with self.stages("train"):
            all_metrics = self.policy.update(sequences)
        self.policy.take_passes()
        self.step += 1
        metrics = {name: value for name, value in all_metrics.items() if name not in _METRICS_OF_SAMPLING}
        metrics |= {
            "tokens": sum(sequence.num_tokens for sequence in sequences),
            "loss_tokens": sum(sequence.num_trained_tokens for sequence in sequences),
            **self.demonstrations.left_out(),
        }
        if self.demonstrations.size:
            metrics["epoch"] = self.step * size / self.demonstrations.size
        seconds = self.stages.take()
        self.disk.write(lambda: self.reporter.step(self.step, metrics, seconds))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if all_metrics["updates_skipped"] else 0
        if self.skipped_in_a_row >= self.config.run.max_nonfinite_steps:
            raise NotFiniteError(
                f"{self.skipped_in_a_row} steps in a row had a loss or gradient that is not finite; lower "
                "--lr"
            )

    def evaluate_if_due(self) -> None:
        """Compute the held-out loss at the start, at the end, and every --eval-interval steps."""
        interval = self.config.run.eval_interval
        due = self.step == 0 or self.done() or (interval is not None and self.step % interval == 0)
        if not self.held_out or not due or self.evaluated == self.step:
            return
        with self.stages("evaluate"):
            logprobs = self.policy.logprobs(self.held_out)
        self.policy.take_passes()
        tokens = sum(sequence.num_trained_tokens for sequence in self.held_out)
        loss = -sum(float(values.sum(dtype=float)) for values in logprobs) / tokens
        seconds = self.stages.take()
        self.disk.write(lambda: self.reporter.held_out_loss(self.step, loss, seconds))
        self.evaluated = self.step

    def save_if_due(self) -> None:
        """Begin a checkpoint at the end and every --save-interval steps or --save-interval-minutes. Raises
        OSError or CheckpointError if a save failed, and DiskFullError if the disk was full for longer than
        --disk-wait."""
        run = self.config.run
        with self.stages("save"):
            if run.save and (self.done() or is_time_to_save(run, self.step, self.saved_at)):
                self.disk.write(self._save)
            else:
                self.policy.saved(wait=False)
            if run.save and run.export_interval is not None and self.step % run.export_interval == 0:
                self._export(f"hf_step_{self.step:06d}")

    def finish(self, status: str) -> None:
        """Save the rest, export the policy in Hugging Face format, and write summary and curves."""
        if self.config.run.save:
            with self.stages("save"):
                if self.step > self.saved:
                    self.disk.write(self._save)
                self.policy.saved(wait=True)
                self._export("hf")
        self.reporter.finish(status=status, seconds=self.start_seconds | self.stages.take())

    def _export(self, name: str) -> None:
        self.disk.write(lambda: self.policy.save_hf(self.config.run.run_dir / name))

    def _save(self) -> None:
        run = self.config.run
        keep = Keep(run.keep_checkpoints, run.keep_checkpoint_every)
        self.policy.save(run.run_dir / "checkpoints", self.step, {"seed": run.seed}, keep)
        self.saved, self.saved_at = self.step, time.monotonic()


def sequences_of(rows: Sequence[Prompt]) -> list[TrainSequence]:
    """Return the training sequences of these rows, with equal weights that add up to 1: every token in the
    loss counts the same. Raises DataError if a row has no response, as those of a generated task."""
    without = next((row for row in rows if not isinstance(row, Demonstration)), None)
    if without is not None:
        raise DataError(f"--prompt-data: {without.task} has prompts without responses to learn from")
    turns = [
        (row, number) for row in rows if isinstance(row, Demonstration) for number in range(len(row.turns))
    ]
    return [row.sequence(number, 1 / len(turns)) for row, number in turns]


@contextmanager
def open_supervised(requested_config: Config) -> Iterator[SupervisedRun]:
    """Open a supervised run; close it, with all its processes, on the way out. Raises ValueError, OSError,
    ProcessDiedError: says what is wrong, where, and what to do."""
    started = time.time()
    config, idle = supervised(requested_config)
    backend, stages, starting = choose_backend(config, 0.0), Stages(), StartLines()
    with ExitStack() as stack:
        with stages("start"):
            starting("the model's configuration")
            foundation = read_foundation(config)
            point = read_resume_point(config.run, foundation.shape.vocab_size)
            check_model(config, foundation.shape, backend)
            wait_connected = stack.enter_context(backend.connect(config))
            starting("data")
            config, rows, held_out, notes = _open_inputs(config, foundation, point.step)
            stack.enter_context(locked(config.run.run_dir))
            prepare_run_dir(requested_config, checkpoint_bytes=disk_bytes(config, foundation.shape))
            starting("places of the processes")
            wait_connected()
            resolved = resolve(config, foundation, backend.place(config, samples=False))
            launched = backend.launch_trainers(resolved, stack)
            preflight(resolved, launched.memory)
            starting("trainers")
            trainers, placement_note = launched.build(point.checkpoint)
            about = trainers.call_all("about")[0]
            report = Report(resolved.config, completed_steps=point.step, started=started, command="sft")
            reporter = stack.enter_context(report)
            reporter.sizes(_sizes(resolved, about))
            for note in (placement_note, *about.notes, *notes):
                reporter.note(note)
            if idle:
                reporter.note(f"settings without effect here: {listed(idle, most=20)}")
        starting.end()
        flops = partial(forward_flops, foundation.shape)
        yield SupervisedRun(
            resolved.config,
            Policy(trainers, resolved.config, resolved.world_size, flops),
            rows,
            held_out,
            reporter,
            DiskWait(config.run.disk_wait, reporter.note),
            stages,
            step=point.step,
            saved=point.step,
            evaluated=point.step or -1,
            start_seconds=stages.take(),
        )


def _open_inputs(
    config: Config, foundation: Foundation, step: int
) -> tuple[Config, PromptSource, list[TrainSequence], tuple[str, ...]]:
    """Read and check the rows and the headers of the weights. Return the settled configuration, the rows, the
    held-out sequences, and notes for the user.

    Args:
        step: completed steps; rows of the next one are tried.
    """
    from megatron_ibpo.weights.formats.hugging_face import check_checkpoint  # imports torch: a second

    hf_dir, shape, context = foundation.hf_dir, foundation.shape, foundation.max_context
    tokenizer = load_tokenizer(hf_dir, embedding_rows=shape.vocab_size)
    rows = _open_rows(config, tokenizer, config.data.prompt_data, context, "train")
    config = settle(config, foundation, rows)
    held_out, notes = _held_out(config, tokenizer, context)
    sequences_of(rows.batch(step, 1))
    check_checkpoint(hf_dir, shape)
    return config, rows, held_out, (*rows.notes, *notes)


def _sizes(resolved: ResolvedConfig, about: About) -> list[Size]:
    """Return the run's table of sizes, without those of sampling."""
    sizes = run_sizes(
        resolved.config,
        resolved.world_size,
        corrections=0,
        parameters=about.parameters,
        loss_backend=about.loss_backend,
        layers=about.layers,
    )
    rows = Size("rows per step", resolved.config.rollout.rollout_batch_size, "--rollout-batch-size")
    return [rows, *(size for size in sizes if size.name not in _SIZES_OF_SAMPLING)]


def _open_rows(
    config: Config, tokenizer: Tokenizer, specs: Sequence[str], context: int, split: Any
) -> PromptSource:
    return open_sources(
        specs, tokenizer, config.data, split=split, max_prompt_len=context, reader_type=DemonstrationReader
    )


def _held_out(
    config: Config, tokenizer: Tokenizer, context: int
) -> tuple[list[TrainSequence], tuple[str, ...]]:
    """Return the sequences of the first --eval-num-prompts rows of each held-out source, and notes."""
    sequences: list[TrainSequence] = []
    notes: tuple[str, ...] = ()
    for spec in as_specs(config.data.eval_prompt_data) if config.run.eval_num_prompts else ():
        rows = _open_rows(config, tokenizer, [spec.spec], context, "eval")
        sequences += sequences_of(rows.batch(0, min(config.run.eval_num_prompts, rows.num_prompts() or 1)))
        notes += rows.notes
    return sequences, notes
