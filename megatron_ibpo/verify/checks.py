"""All checks: those of one process, and those over one start of the run's trainers and engines, which is
opened again to see whether it resumes."""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_ibpo.basics.records import Group, Sample, TrainSequence
from megatron_ibpo.config import Config
from megatron_ibpo.engines.registry import samples_in_trainer
from megatron_ibpo.plan.feasibility import memory_on_cpus
from megatron_ibpo.plan.memory import GIB
from megatron_ibpo.plan.parameter_count import take_census
from megatron_ibpo.run import saving
from megatron_ibpo.run import steps as loop
from megatron_ibpo.run.inputs import JOURNAL
from megatron_ibpo.run.open import open_run
from megatron_ibpo.run.rollouts import LiveRollouts
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify.batch import Subject, Update, tensor_gaps, update_on_one_rank, weights_in
from megatron_ibpo.verify.engine import check_arrival, engine_rows
from megatron_ibpo.verify.inputs import check_data, check_rewards
from megatron_ibpo.verify.rows import (
    CHECKS,
    NotCheckedError,
    Row,
    attempted,
    check_of,
    counted_faults,
    largest,
    measured,
    not_checked,
)
from megatron_ibpo.verify.small_run import small_run
from megatron_ibpo.verify.tokens import Turns, check_cut, check_samples, check_tokens
from megatron_ibpo.verify.trainer import bound_of, check_reference, check_split, compared

WITHOUT_ENGINE: dict[str, Callable[[Subject], Iterable[Row]]] = {
    "rewards": check_rewards, "data": check_data, "tokens": check_tokens, "split": check_split,
    "reference": check_reference,
}  # fmt: skip
"""Checks that need no engine, quick ones first."""
LIVE = ("engine", "arrival", "resume", "memory", "tokens")
"""Checks that need the run's processes, in part or as a whole. So does `split` of several trainers."""
ON_GPU = 1e-3
"""Relative difference of weights on GPUs, whose kernels add in varying orders; not measured on one yet."""
MEMORY_BOUND = 2.0
"""Activations, libraries and their threads come on top of what is counted (`plan.feasibility`)."""


def run_checks(
    config: Config, *, full: bool = False, only: Collection[str] = CHECKS
) -> tuple[list[Row], dict[str, Any]]:
    """Make the checks named in `only`, and print each row as soon as it is there. Return (rows in the order
    of CHECKS, what verify.json says about the settings)."""
    rows: list[Row] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ibpo-verify-") as scratch:
        small = small_run(config, Path(scratch), full=full)
        subject = Subject(config, small, full)
        work = [(name, partial(check, subject)) for name, check in WITHOUT_ENGINE.items() if name in only]
        live = (*LIVE, "split") if (small.cluster.num_trainers or 1) > 1 else LIVE
        work += [(name, partial(check_live, subject, only)) for name in live if name in only][:1]
        for name, check in work:
            print(f"checking {name} …", file=sys.stderr, flush=True)
            for row in attempted(name, check):
                print(f"  {row.verdict}: {row.check}", file=sys.stderr, flush=True)
                rows.append(row)
    missing = set(only) - {check_of(row.check) for row in rows}
    rows += [not_checked(name, "the run ended before it") for name in missing]
    return sorted(rows, key=lambda row: CHECKS.index(check_of(row.check))), {
        "model": str(config.model.hf_dir),
        "cut_down": small.model.hf_dir != config.model.hf_dir,
        "layout": {name: size for name, size in vars(small.parallel).items() if name.endswith("_size")},
        "trainers": small.cluster.num_trainers,
        "precision": "float32",
        "seed": small.run.seed,
        "full": full,
        "seconds": round(time.monotonic() - began, 1),
    }


def check_live(subject: Subject, only: Collection[str]) -> Iterable[Row]:
    """Open the run, take two steps, and make the checks named in `only`."""
    turns: Turns = set()

    def rows(check: str, work: Callable[..., Iterable[Row]], *arguments: Any) -> Iterable[Row]:
        return attempted(check, partial(work, *arguments)) if check_of(check) in only else ()

    with redirect_stdout(sys.stderr), open_run(subject.small) as run:
        assert isinstance(run.rollouts, LiveRollouts)  # the small run replays nothing
        run.rollouts.sampler.on_sample = lambda s: turns.add((s.token_ids.tobytes(), s.logprobs.tobytes()))
        export = partial(_export, run)
        initial = export("initial")
        groups = loop.sample(run)
        sequences = loop.credit(run, groups).sequences
        yield from rows("engine: before", engine_rows, "before an update", run, groups, initial)
        yield from rows("tokens: samples", check_samples, subject, groups, sequences, turns)
        yield from rows("tokens: cut responses", check_cut, subject, run)
        metrics = loop.update(run, sequences)
        loop.sync(run)
        updated = export("updated")
        if "split" in only and not samples_in_trainer(subject.small.rollout.rollout_backend):
            update = Update(weights_in(initial), weights_in(updated), metrics)
            yield from rows("split: the run's layout", _check_layout, subject, run.config, sequences, update)
        saving.save_if_due(run)
        run.policy.saved(wait=True)
        second = loop.sample(run)
        second_sequences = loop.credit(run, second).sequences
        yield from rows("engine: after", engine_rows, "after an update", run, second, updated)
        loop.update(run, second_sequences)
        loop.sync(run)
        yield from rows("memory", check_memory, run)
        undisturbed = export("undisturbed")
        yield from rows("arrival", check_arrival, subject, run, export)
    with redirect_stdout(sys.stderr):
        yield from rows("resume", check_resume, subject.small, [groups, second], undisturbed)


def _export(run: Run, name: str) -> Path:
    """Write the present weights; return their directory."""
    directory = run.config.run.run_dir.parent / name
    run.policy.save_hf(directory)
    return directory


def _check_layout(
    subject: Subject, config: Config, sequences: Sequence[TrainSequence], update: Update
) -> Iterator[Row]:
    """Compare the first step of the run's ranks with the same step of one rank in this process."""
    check = f"split: the run's layout, {config.cluster.num_trainers} ranks"
    yield compared(check, update, update_on_one_rank(config, sequences), bound_of(subject))


def check_memory(run: Run) -> Iterator[Row]:
    """Compare what trainers and engines hold of main memory with what the plan counts."""
    if torch.cuda.is_available():
        raise NotCheckedError("on GPUs: metrics.jsonl has the peak of each rank, `ibpo plan` the prediction")
    used = _bytes_held()
    if not used:
        raise NotCheckedError("trainer and engine are this process, which does much else")
    config, shape = run.config, run.foundation.shape
    census = take_census(shape, config, config.cluster.num_trainers or 1)
    planned = sum(memory_on_cpus(config, shape, census).values())
    reason = f"{used / GIB:.2f} GiB held by trainers and engines, {planned / GIB:.2f} planned"
    yield measured("memory: main", used / planned, MEMORY_BOUND, "activations and libraries on top", reason)


def _bytes_held() -> int:
    """Return the bytes that trainers, engines, and the processes that these started hold alone."""
    processes: set[psutil.Process] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if "".join(process.cmdline()[:1]).startswith("ray::_Process"):
                processes |= {process, *process.children(recursive=True)}
    return sum(process.memory_full_info().uss for process in processes if process.is_running())


def check_resume(config: Config, steps: Sequence[Sequence[Group]], undisturbed: Path) -> Iterator[Row]:
    """Open the run again, which ended after two steps, and train its second step from the first checkpoint
    and the journal; then sample that step anew.

    Args:
        steps: groups of the two steps.
        undisturbed: the weights after them.
    """
    resumed = replace(config, run=replace(config.run, load=config.run.run_dir))
    with open_run(resumed) as run:
        faults = [] if run.progress.step == 1 else [f"it goes on after step {run.progress.step}, not 1"]
        second = loop.sample(run)
        faults += _different(steps[1], second)
        loop.update(run, loop.credit(run, second).sequences)
        weights = weights_in(_export(run, "resumed"))
    yield counted_faults("resume: journal", faults, "the second step is that of the journal")
    gap, furthest = largest(tensor_gaps(weights, weights_in(undisturbed), 0.0))
    bound, source = (ON_GPU, "stated for GPUs") if torch.cuda.is_available() else (0.0, "bit for bit")
    reason = f"largest relative difference after step 2; furthest: {furthest}"
    yield measured("resume: weights", gap, bound, source, reason)
    shutil.rmtree(config.run.run_dir / JOURNAL)
    with open_run(resumed) as run:
        second = loop.sample(run)
    faults = _different(steps[1], second, exactly=False)
    if config.algorithm.group_filter is None:  # a filter takes further prompts
        faults += [
            f"step {number + 1} took prompt {group.prompt.index} in place {place}"
            for number, groups in enumerate([steps[0], second])
            for place, group in enumerate(groups, start=number * config.rollout.rollout_batch_size)
            if group.prompt.index != place
        ]
    reason = "without the journal, the same prompts and tokens come again"
    yield counted_faults("resume: samples", faults, reason)


def _different(groups: Sequence[Group], repeated: Sequence[Group], *, exactly: bool = True) -> list[str]:
    """Return the samples that differ from those of the run that ended.

    Args:
        exactly: in log-probs too, whose last bits depend on what an engine computed together.
    """

    def content(s: Sample) -> tuple[object, ...]:
        arrays = (s.prompt_token_ids, s.token_ids, s.loss_mask, *([s.logprobs] if exactly else []))
        return (*(array.tobytes() for array in arrays), s.reward, s.temperature, s.finish_reason)

    first, second = ([content(s) for group in step for s in group.samples] for step in (groups, repeated))
    if len(first) != len(second):
        return [f"{len(second)} samples in place of {len(first)}"]
    return [f"sample {i} differs" for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
