"""The stages of one training step, each a method that `steps` calls. Runs on the driver."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from megatron_ibpo.basics.records import Floats, Group, TrainSequence
from megatron_ibpo.cluster.deaths import MOST_DEATHS, ProcessDiedError
from megatron_ibpo.config import Config
from megatron_ibpo.credit import (
    Credit,
    CreditContext,
    LogProbQuery,
    assign_credit,
    credit_of,
)
from megatron_ibpo.credit.break_even import composition_counts, learns_from_corrections
from megatron_ibpo.engines.probe import IdleEngine, compare_probes, probe
from megatron_ibpo.engines.truncation import check_recorded
from megatron_ibpo.journal import Journal
from megatron_ibpo.policy.group import Policy
from megatron_ibpo.report import (
    Report,
    Stages,
    check_reward_errors,
    metrics_by_task,
    rollout_path,
    rounding_bound,
    save_groups,
    save_outcomes,
    step_alarms,
)
from megatron_ibpo.report.disk import DiskWait, is_full
from megatron_ibpo.report.rollout_data import is_kept, keep_samples
from megatron_ibpo.report.run_dir import SKILL_FILE, write_whole
from megatron_ibpo.run.cost import CostMeter
from megatron_ibpo.run.operator_skill import (
    Asking,
    corrects,
    operator_skill,
    premise,
    skill_json,
    try_corrections,
)
from megatron_ibpo.run.resolve import Foundation
from megatron_ibpo.run.rollouts import Fleet, LiveRollouts, Rollouts
from megatron_ibpo.run.run_data import RunData
from megatron_ibpo.weights.formats.retention import Keep
from megatron_ibpo.weights.formats.run_state import load_run_state, newest_step

T = TypeVar("T")

GSPO = credit_of("gspo")
"""Plain advantages of the responses only, as the gradient meter's comparison."""


class NotFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclass
class Progress:
    """Counters of a run that change from step to step."""

    step: int = 0
    """Completed steps."""
    trainer_restarts: int = 0
    deaths_in_a_row: int = 0
    """Deaths of trainers since the last completed step."""
    saved: int = 0
    """Steps completed when the last save began."""
    whole: int = 0
    """Steps completed at the last complete checkpoint."""
    saved_at: float = field(default_factory=time.monotonic)
    start_seconds: dict[str, float] = field(default_factory=dict)
    skipped_in_a_row: int = 0
    """Consecutive steps whose update was skipped."""
    remembered: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Completed steps → the memory of their credit for the next step (`Credit.memory`); entries since the
    last complete checkpoint."""
    weights_checked: bool = False
    """True once --check-weight-update-equal has compared an engine with a fresh one."""
    old_logprobs: list[Floats] | None = None
    """The trainers' log-probs before this step's update, with --save-debug-rollout-data; `new_logprobs` holds
    those after it."""
    new_logprobs: list[Floats] | None = None


class Engines(Fleet, Protocol):
    """The engines of a run, as the loop controls them: those of a cluster (`cluster.Engines`), or one in this
    process."""

    @property
    def count(self) -> int:
        """Total number of engines."""
        ...

    @property
    def alive(self) -> int:
        """Number of engines that can take requests."""
        ...

    @property
    def reproducible(self) -> bool:
        """True if an idle engine computes the same requests in the same batches every time."""
        ...

    def sleep(self) -> None:
        """Release shared devices to the trainers."""
        ...

    def wake(self) -> None:
        """Get ready to sample again."""
        ...

    def admit(self) -> None:
        """Admit engines that are up again, while the trainers are idle."""
        ...

    def update_weights(self, version: int) -> dict[str, float]:
        """Load the trainers' weights as policy `version`, and return metrics of the update."""
        ...

    def meet_trainers(self) -> None:
        """Connect to trainers that have just started."""
        ...

    def idle(self, index: int) -> IdleEngine:
        """Return one engine for the caller's exclusive use."""
        ...

    def fresh(self, index: int, hf_dir: Path) -> AbstractContextManager[IdleEngine]:
        """Provide a fresh engine with the weights of `hf_dir` as version 0, in place of the engine at
        `index`."""
        ...


@dataclass
class Run:
    """A run in progress."""

    config: Config
    foundation: Foundation
    data: RunData
    rollouts: Rollouts
    """Source of samples and rewards: engines and verifiers, or a recording."""
    journal: Journal
    policy: Policy
    engines: Engines | None
    """None when recorded rollouts are replayed."""
    reporter: Report
    disk: DiskWait
    stages: Stages
    cost: CostMeter
    progress: Progress

    def done(self) -> bool:
        """Return whether all steps are done, or the budget is spent."""
        run = self.config.run
        within = run.budget is None or self.cost.spent.of(run.budget_unit) < run.budget
        return self.progress.step >= run.num_rollout or not within

    def sample(self) -> list[Group]:
        """Return this step's groups: responses, scores, and the corrections that the algorithm requests."""
        self._wake_engines()
        with self.stages("sample"):
            groups = self.rollouts.groups(self.progress.step, self._context(), self._admit_engines)
        self.cost.sampling(self.rollouts.sampled())
        return groups

    def credit(self, groups: list[Group]) -> Credit:
        """Turn the groups into training sequences with advantages and weights.

        Raises:
            ValueError: recorded samples that the loss cannot use (`check_recorded`).
        """
        self._lay_engines_to_sleep()  # credit may need the policy or the critic, and training follows
        with self.stages("credit"):
            credit = self._surviving(lambda: assign_credit(groups, self._context(), self.foundation.method))
        if not self.config.run.debug_rollout_only:
            check_recorded(self.config, credit.sequences)
        self._count_passes()
        self._remember(self.progress.step, credit)
        return credit

    def measure_corrections_if_due(self) -> None:
        """Measure before the first step whether corrections succeed more often than another try. Its seeds
        and prompts are not those of the first step."""
        config, rollouts, operator = self.config, self.rollouts, self.foundation.method.operator
        count = config.run.operator_skill_prompts
        if self.progress.step > 0 or not count or not corrects(operator):
            return
        if not isinstance(rollouts, LiveRollouts):  # a recording cannot answer
            return
        context = self._context()
        asking = Asking(
            operator.ibpo_k,
            config.rollout,
            context.vocabulary,
            context.max_context,
            config.run.seed,
            targets=2,
            as_in_training=True,
            prompt_ids=self.data.suffixes,
        )
        prompts = rollouts.prompts_of_later_steps(count)
        self._wake_engines()
        with self.stages("operator skill"):
            tried = rollouts.observed(
                lambda sampler: try_corrections(sampler, prompts, asking), self._admit_engines
            )
            skill = operator_skill(tried)
        path = config.run.run_dir / SKILL_FILE
        self._with_room(lambda: write_whole(path, skill_json(skill)))
        self.reporter.note(premise(skill))

    def measure_gradient_if_due(
        self, groups: list[Group], sequences: Sequence[TrainSequence]
    ) -> dict[str, float]:
        """Measure, every --gradient-meter-interval steps and before the update, the gradient's noise over
        prompts, and that of GSPO on the same responses."""
        run = self.config.run
        interval = run.gradient_meter_interval
        if interval is None or self.progress.step % interval or run.debug_rollout_only:
            return {}
        with self.stages("gradient meter"):
            plain = assign_credit(groups, replace(self._context(), algorithm=GSPO)).sequences
            metrics = self._surviving(lambda: self.policy.measure_gradient(sequences, plain))
        self.policy.take_passes()  # passes of an instrument are free
        return metrics

    def update(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Run the optimizer steps of one rollout.

        Raises:
            NotFiniteError: --max-nonfinite-steps consecutive steps were skipped.
        """
        if self.config.run.debug_rollout_only:
            return {}
        self.progress.old_logprobs = self._observed_logprobs(sequences)
        with self.stages("train"):
            metrics = self._surviving(lambda: self.policy.update(sequences))
        self._count_passes()
        self.progress.new_logprobs = self._observed_logprobs(sequences)
        progress, most = self.progress, self.config.run.max_nonfinite_steps
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if metrics["updates_skipped"] else 0
        if progress.skipped_in_a_row >= most:
            raise NotFiniteError(
                f"{most} steps in a row had a loss or gradient that is not finite; lower --lr, or look at "
                "the records kept by --save-debug-rollout-data"
            )
        return metrics

    def sync(self) -> dict[str, float]:
        """Count the step, and send the trainers' weights to the engines.

        Raises:
            WeightMismatchError: with --check-weight-update-equal, the engines have other weights.
        """
        self.progress.step += 1
        if self.engines is None or self.config.run.debug_rollout_only:
            return {}
        with self.stages("sync"):
            metrics = self._surviving(self._update_engines)
            self.rollouts.advance(self.progress.step)
        if self.config.rollout.check_weight_update_equal and not self.progress.weights_checked:
            with self.stages("check weights"):
                self._check_against_fresh_engine(self.engines)
        return metrics

    def report(self, groups: list[Group], credit: Credit, metrics: dict[str, float]) -> None:
        """Record the step and its cost.

        Raises:
            RewardErrorRateError: the verifier failed on more of the step's responses than
                --max-reward-error-rate
                allows.
        """
        seconds = self.stages.take()
        self.cost.time(seconds)
        step, run = self.progress.step, self.config.run
        with self.stages("report"):
            if run.save_debug_rollout_data:
                path = rollout_path(run.run_dir / "rollouts", step)
                self._with_room(
                    lambda: save_groups(
                        path,
                        step,
                        groups,
                        self.data.tokenizer.decode,
                        credit.sequences,
                        old_logprobs=self.progress.old_logprobs,
                        new_logprobs=self.progress.new_logprobs,
                    )
                )
            elif is_kept(step, run.num_rollout, run.keep_samples):
                self._keep_samples(step, groups, credit.sequences)
            if self.engines is not None:
                alive, engines = self.engines.alive, self.engines.count
                metrics = metrics | {"engines": float(engines), "engines_alive": float(alive)}
                masked = any(sequence.sampling_mask is not None for sequence in credit.sequences)
                if (bound := rounding_bound(self.config, replays_mask=masked)) is not None:
                    metrics["logprob_diff_bound"] = bound
            metrics = self.rollouts.metrics() | credit.metrics | metrics | self.cost.spent.metrics()
            metrics |= self._by_source(groups) | self._premise(groups, credit.sequences)
            responses = [response for group in groups for response in group.responses]
            errors = [response.reward_error for response in responses if response.reward_error is not None]
            first = errors[0] if errors else None
            most = run.max_reward_error_rate
            for alarm in step_alarms(
                metrics, responses=len(responses), first_reward_error=first, most_reward_errors=most
            ):
                self.reporter.note(alarm)
            self._with_room(lambda: self.reporter.step(step, metrics, seconds))
        self.progress.deaths_in_a_row = 0
        check_reward_errors(len(errors), len(responses), most, first_reward_error=first)

    def _keep_samples(self, step: int, groups: Sequence[Group], sequences: Sequence[TrainSequence]) -> None:
        """Write some samples of the step for a reader. The run does not depend on them."""
        directory, decode = self.config.run.run_dir, self.data.tokenizer.decode
        try:
            self._with_room(lambda: keep_samples(directory, step, groups, decode, sequences))
        except TypeError as error:
            self.reporter.note(f"the samples of step {step} are not kept: {error}")

    def _by_source(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the accuracy and number of prompts of each task of a mixture, and the rows of large files
        left out so far."""
        mixed = len(self.config.data.prompt_data) > 1
        prompts = self.data.prompts
        return (metrics_by_task(groups) if mixed else {}) | ({} if prompts is None else prompts.left_out())

    def _premise(self, groups: Sequence[Group], sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Return the metrics that tell whether corrections pay (`credit.break_even`). Empty if the run learns
        from no corrections; the suffixes of reset-groups are other responses."""
        operator = self.foundation.method.operator
        if not corrects(operator) or not learns_from_corrections(operator):
            return {}
        price = self.cost.correction_price(groups, sequences)
        return {} if price is None else {"correction_price": price, **composition_counts(groups)}

    def evaluate_if_due(self) -> None:
        """Evaluate at the start, at the end, and every --eval-interval steps."""
        run, step = self.config.run, self.progress.step
        at_interval = run.eval_interval is not None and step % run.eval_interval == 0
        if self.engines is None or not self.data.eval_sets:
            return
        if step > 0 and not self.done() and not at_interval:
            return
        self._wake_engines()
        with self.stages("evaluate"):
            evaluated = self.rollouts.evaluation(self.data, self._admit_engines)
        seconds = self.stages.take()
        self._with_room(lambda: save_outcomes(run.run_dir, step, evaluated))
        self._with_room(lambda: self.reporter.evaluation(step, evaluated, seconds, self.cost.spent.metrics()))

    def save_if_due(self) -> None:
        """Start a Megatron checkpoint after the last step and every --save-interval steps or
        --save-interval-minutes; continue one in progress. Export every --export-interval steps.

        Raises:
            OSError, CheckpointError: a save failed.
            DiskFullError: the disk was full for longer than --disk-wait.
        """
        run, step = self.config.run, self.progress.step
        if not run.save:
            if self._journal_is_full():
                self.journal.saved(step)  # no run resumes from before it, so free the disk
            return
        with self.stages("save"):
            self._surviving(self._bring_on_saves)

    def finish(self, status: str) -> None:
        """Save the rest, wait for it, export the policy in Hugging Face format, draw the curves, write the
        summary. Raises as `save_if_due`."""
        run = self.config.run
        if run.save:
            with self.stages("save"):
                self._surviving(self._save_the_rest)
        seconds = self.progress.start_seconds | self.stages.take()
        self.reporter.finish(status=status, seconds=seconds)

    def _bring_on_saves(self) -> None:
        run, step = self.config.run, self.progress.step
        due = self.done() or self._save_is_due()
        self._settle_save(wait=due)
        if due:
            self._with_room(self._begin_save)
        if run.export_interval is not None and step % run.export_interval == 0:
            self._export(run.run_dir / f"hf_step_{step:06d}")

    def _save_the_rest(self) -> None:
        self._settle_save(wait=True)
        if self.progress.step > self.progress.saved:
            self._with_room(self._begin_save)
            self._settle_save(wait=True)
        self._export(self.config.run.run_dir / "hf")

    def _save_is_due(self) -> bool:
        run, minutes = self.config.run, self.config.run.save_interval_minutes
        at_interval = run.save_interval is not None and self.progress.step % run.save_interval == 0
        return (
            at_interval
            or self._journal_is_full()
            or (minutes is not None and time.monotonic() - self.progress.saved_at >= 60 * minutes)
        )

    def _journal_is_full(self) -> bool:
        """Return whether the journal holds more than --journal-keep that is needed until a checkpoint is
        saved."""
        return self.journal.pending_bytes > self.config.run.journal_keep * 1024**3

    def _export(self, directory: Path) -> None:
        self._lay_engines_to_sleep()
        self._with_room(lambda: self.policy.save_hf(directory))

    def _begin_save(self) -> None:
        self._lay_engines_to_sleep()  # trainers need their whole state; the next sampling wakes the engines
        run = self.config.run
        state = {"seed": run.seed, "spent": asdict(self.cost.spent), **self.rollouts.state()}
        if remembered := self.progress.remembered.get(self.progress.step):
            state["remembered"] = remembered
        keep = Keep(run.keep_checkpoints, run.keep_checkpoint_every)
        self.policy.save(run.run_dir / "checkpoints", self.progress.step, state, keep)
        self.progress.saved, self.progress.saved_at = self.progress.step, time.monotonic()

    def _settle_save(self, *, wait: bool) -> None:
        """Continue the save in progress. If it found the disk full, save the present step once there is
        room."""
        try:
            whole = self.policy.saved(wait=wait)
        except OSError as error:
            if not is_full(error):
                raise
            whole = self._with_room(self._save_now)
        if whole and self.progress.saved > self.progress.whole:
            self.progress.whole = self.progress.saved
            self._with_room(lambda: self.journal.saved(self.progress.whole))

    def _save_now(self) -> bool:
        self._begin_save()
        return self.policy.saved(wait=True)

    def _with_room(self, write: Callable[[], T]) -> T:
        """Return the result of `write`, after waiting while the disk is full."""
        return self.disk.write(write)

    def _wake_engines(self) -> None:
        if self.engines is not None:
            self._surviving(self.engines.wake)

    def _lay_engines_to_sleep(self) -> None:
        if self.engines is not None:
            self.engines.sleep()

    def _update_engines(self) -> dict[str, float]:
        assert self.engines is not None
        return self.engines.update_weights(self.progress.step)

    def _admit_engines(self) -> None:
        """Admit restarted engines while the loop waits for samples; trainers then have the engines' weights
        and are idle."""
        if self.engines is not None:
            self._surviving(self.engines.admit)

    def _surviving(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. If a trainer dies during it, start new trainers, bring them to the
        present step, and repeat it.

        Raises:
            ProcessDiedError: trainers died MOST_DEATHS times without a completed step in between.
        """
        while True:
            try:
                return work()
            except ProcessDiedError as death:
                self._replace_trainers(death)

    def _replace_trainers(self, death: ProcessDiedError) -> None:
        """Start new trainers from the last checkpoint and train them again on the journal's samples. Nothing
        is sampled again, engines stay up (asleep if they share the trainers' GPUs), and the weights come out
        the same."""
        progress = self.progress
        while True:
            progress.deaths_in_a_row += 1
            if progress.deaths_in_a_row >= MOST_DEATHS:
                raise death
            self.reporter.note(f"{death}\nall trainers start again from the last checkpoint")
            try:
                with self.stages("recover"):
                    self._train_again()
            except ProcessDiedError as again:
                death = again
                continue
            progress.trainer_restarts += 1
            self.reporter.note(f"the trainers are back at step {progress.step}")
            return

    def _train_again(self) -> None:
        run, progress = self.config.run, self.progress
        checkpoint = newest_step(run.run_dir)
        if checkpoint is None and run.load is not None:
            checkpoint = newest_step(run.load)
        done = 0 if checkpoint is None else load_run_state(checkpoint)["step"]
        self._lay_engines_to_sleep()  # trainers build and train; the next sampling wakes the engines
        self.policy.restart(checkpoint)
        if self.engines is not None:
            self.engines.meet_trainers()
        progress.saved = progress.whole
        steps = range(done, progress.step if not run.debug_rollout_only else done)
        for step, groups in zip(steps, self.rollouts.past(steps, self._context), strict=True):
            credit = assign_credit(groups, self._context(step), self.foundation.method)
            self._remember(step, credit)
            self.policy.update(credit.sequences)
        self.policy.take_passes()  # repeated work after a death is no cost of the algorithm

    def _remember(self, step: int, credit: Credit) -> None:
        """Store the state that the credit of the next step needs from the one after `step` completed
        steps."""
        kept = {at: memory for at, memory in self.progress.remembered.items() if at >= self.progress.whole}
        self.progress.remembered = kept | ({step + 1: credit.memory} if credit.memory else {})

    def _context(self, step: int | None = None) -> CreditContext:
        """Return the context of the step after `step` completed ones; None: the present step."""
        step = self.progress.step if step is None else step
        return CreditContext(
            self.config.algorithm,
            self.config.rollout,
            self.data.vocabulary,
            self.foundation.max_context,
            self.config.run.seed,
            step,
            self.config.data.reward_threshold,
            self._logprobs,
            self.policy.values,
            self.cost.of_sample,
            self.progress.remembered.get(step, {}),
        )

    def _logprobs(self, queries: list[LogProbQuery]) -> list[Floats]:
        with self.stages("log-probs"):
            return self.policy.logprobs([_as_sequence(query) for query in queries])

    def _observed_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Floats] | None:
        """Return the log-probs for the record. They are not counted as cost and do not affect training."""
        if not self.config.run.save_debug_rollout_data:
            return None
        with self.stages("record"):
            logprobs = self.policy.logprobs(sequences)
        self.policy.take_passes()
        return logprobs

    def _count_passes(self) -> None:
        for passes in self.policy.take_passes():
            self.cost.training(
                passes.forward, passes.updates, passes.repeated_forward, passes.repeated_updates
            )

    def _check_against_fresh_engine(self, engines: Engines) -> None:
        """Compare engine 0 with a fresh one after the first update, since errors inside engines show at once.

        The fresh engine takes the place of engine 0, so that no two models need memory at once, and stays.
        """
        directory = self.config.run.run_dir / "weight_check"
        self.policy.save_hf(directory)
        updated = probe(engines.idle(0), engines.version)
        with engines.fresh(0, directory) as fresh:
            compare_probes(updated, probe(fresh, 0), same_batches=engines.reproducible)
        shutil.rmtree(directory)
        self.progress.weights_checked = True


def _as_sequence(query: LogProbQuery) -> TrainSequence:
    """Return the sequence for which the trainers compute log-probs; it is not trained on."""
    return TrainSequence(
        query.context,
        query.continuation,
        np.ones(len(query.continuation), bool),
        advantage=0.0,
        weight=0.0,
        prompt_index=0,
        group=0,
        index=0,
        temperature=query.temperature,
    )
