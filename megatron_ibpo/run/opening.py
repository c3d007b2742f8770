"""What every run opens, on a cluster or in one process: what the user gave, read and checked before a process
starts, and the run itself once all of them stand."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ibpo.config import Config, ConfigError
from megatron_ibpo.journal import Journal, Recovered, read_journal
from megatron_ibpo.models import ModelShape, check_layout, forward_flops, read_hf_config
from megatron_ibpo.plan.machine import find_machine
from megatron_ibpo.policy.group import Policy, RankCalls
from megatron_ibpo.policy.overrides import model_chunks
from megatron_ibpo.policy.reports import About
from megatron_ibpo.report import (
    Report,
    Stages,
    checkpoint_bytes,
    export_bytes,
    kept_at_once,
    load_groups,
    prepare_run_dir,
    rollout_path,
    run_sizes,
)
from megatron_ibpo.report.disk import DiskWait
from megatron_ibpo.report.run_lock import locked
from megatron_ibpo.rewards import Pool, Verifier, check_labels, named_rm_types, open_pool
from megatron_ibpo.run.checks import check_loss_of_run
from megatron_ibpo.run.cost import CostMeter, Spent
from megatron_ibpo.run.loop import Engines, Progress, Run
from megatron_ibpo.run.rollouts import open_rollouts
from megatron_ibpo.run.task import Task, open_task, with_epochs
from megatron_ibpo.sampling.journal_memory import JournalMemory
from megatron_ibpo.weights.formats.run_state import RUN_STATE, find_checkpoint, load_run_state
from megatron_ibpo.weights.weight_errors import CheckpointError

JOURNAL = "journal"
"""Folder of a run's directory."""


@dataclass(frozen=True)
class Beginning:
    """Where a run begins: what takes no time to know."""

    config: Config
    """With the context that prompt and response may take together."""
    hf_dir: Path
    shape: ModelShape
    checkpoint: Path | None
    """That it goes on from."""
    state: dict[str, Any]
    """Of the run at that checkpoint; of a new one the step alone, which is 0."""
    before: Spent
    """What it had spent by then."""
    remembered: Mapping[int, Mapping[str, Any]]
    """What the credit of its next step wants known, as `Progress` has it."""

    @property
    def step(self) -> int:
        """Steps that are behind it."""
        return int(self.state["step"])

    def progress(self) -> Progress:
        """From here on."""
        step = self.step
        return Progress(step, saved=step, whole=step, remembered=dict(self.remembered))


@dataclass(frozen=True)
class Given:
    """What the user gave, read and checked; its directory is the run's alone."""

    config: Config
    """With the number of steps."""
    task: Task
    elements: dict[str, int]
    """Trained tensor → its elements."""
    journal: Journal
    recovered: Recovered
    rm_types: list[str]
    """Of the verifiers."""
    pool: Pool
    """This machine's verifiers."""


@dataclass(frozen=True)
class Standing:
    """The processes of a run."""

    config: Config
    """With all that depends on the devices."""
    trainers: RankCalls
    world_size: int
    engines: Engines | None
    """None when recorded rollouts are replayed."""
    verifiers: Pool
    accelerators: int
    """That the run holds."""
    progress: Progress
    deaths: Callable[[], dict[str, int]]
    """Who has died so far, by metric."""
    where: str
    """What sits where, in words."""
    wait_ready: Callable[[], None] = lambda: None
    """Returns once those stand that nobody needs before the first step."""


def read_beginning(config: Config) -> Beginning:
    """
    Raises:
        ValueError, CheckpointError: what is asked for is not there, or does not fit the model.
    """
    hf_dir = config.model.hf_checkpoint
    assert hf_dir is not None  # check_config saw to it
    shape = read_hf_config(hf_dir)
    if config.run.dry_run_hardware is not None:
        find_machine(config.run.dry_run_hardware)
    checkpoint = _chosen_checkpoint(config)
    _check_recording(config, shape)
    state: dict[str, Any] = {"step": 0} if checkpoint is None else load_run_state(checkpoint)
    try:
        before = Spent.read(state.get("spent", {}))
    except ValueError as error:
        raise ValueError(f"--load {checkpoint}: {RUN_STATE}: {error}") from None
    remembered = state.get("remembered", {})
    if not isinstance(remembered, dict):
        raise ValueError(f"--load {checkpoint}: {RUN_STATE}: remembered must be an object")
    return Beginning(
        config=with_context(config, shape),
        hf_dir=hf_dir,
        shape=shape,
        checkpoint=checkpoint,
        state=state,
        before=before,
        remembered={state["step"]: remembered} if remembered else {},
    )


def _check_recording(config: Config, shape: ModelShape) -> None:
    """Read the first recorded step before any process starts: a wrong directory shows there.

    Raises:
        ValueError: it is not there, no recording, or one of another vocabulary.
    """
    if (directory := config.run.load_debug_rollout_data) is None:
        return
    path = min(directory.glob("step_*.json"), default=rollout_path(directory, 1))
    for group in load_groups(path)[1]:
        for response in group.responses:
            if any(not 0 <= number < shape.vocab_size for number in response.token_ids.tolist()):
                raise ValueError(f"recorded rollouts {path}: ids beyond the {shape.vocab_size} of the model")


def open_given(begun: Beginning, stack: ExitStack) -> Given:
    """Read and check the rest of what the user gave, which takes seconds.

    Args:
        stack: closes what is open for it.

    Raises:
        ValueError, OSError: something of it cannot be used.
    """
    config = begun.config
    check_loss_of_run(config)
    from megatron_ibpo.weights.formats.convert import check_checkpoint  # takes torch, too
    from megatron_ibpo.weights.formats.hugging_face import trained_elements

    task = open_task(config)
    config = with_epochs(config, task.prompts)
    stack.enter_context(locked(config.run.run_dir))
    elements = trained_elements(begun.hf_dir, begun.shape)
    check_checkpoint(begun.hf_dir, begun.shape)
    prepare_run_dir(config, checkpoint_bytes=_bytes_kept(config, sum(elements.values())))
    journal, recovered = _open_journal(config, begun.step, stack)
    rm_types = named_rm_types(task.first_prompts, config.data)
    pool = stack.enter_context(open_pool(config.data, rm_types))
    check_labels(pool, task.first_prompts, config.data)
    return Given(config, task, elements, journal, recovered, rm_types, pool)


def join(begun: Beginning, given: Given, standing: Standing, stages: Stages, stack: ExitStack) -> Run:
    """The run, with its table of sizes shown.

    Args:
        stack: closes what is open for it.
    """
    config, engines = standing.config, standing.engines
    about = standing.trainers.all("about")[0]
    reporter = stack.enter_context(Report(config, completed_steps=begun.step, deaths=standing.deaths))
    _introduce(reporter, begun, given, standing, about)
    standing.wait_ready()
    disk = DiskWait(config.run.disk_wait, reporter.note)
    memory = JournalMemory(given.journal, given.recovered, disk.write)
    verifier = Verifier(standing.verifiers, config.data)
    rollouts = open_rollouts(config, given.task, engines, verifier, memory, begun.state)
    return Run(
        config=config,
        task=given.task,
        rollouts=stack.enter_context(rollouts),
        journal=given.journal,
        policy=Policy(standing.trainers, config, standing.world_size, partial(forward_flops, begun.shape)),
        engines=engines,
        reporter=reporter,
        disk=disk,
        stages=stages,
        cost=CostMeter(
            begun.shape,
            standing.accelerators,
            recomputes=config.model.recompute_granularity == "full",
            before=begun.before,
        ),
        progress=standing.progress,
    )


def _introduce(reporter: Report, begun: Beginning, given: Given, standing: Standing, about: About) -> None:
    """Sizes, what sits where, what a step is predicted to take, and what else the user is to know."""
    from megatron_ibpo.plan.forecast import forecast  # takes torch

    config, engines = standing.config, standing.engines
    reporter.sizes(
        run_sizes(
            config,
            standing.world_size,
            parameters=about.parameters,
            engines=engines.count if engines is not None else None,
            loss_backend=about.loss_backend,
            layers=about.layers,
        )
    )
    reporter.note(standing.where)
    if engines is not None:
        reporter.predicted(forecast(config, begun.shape, standing.world_size, about.device))
    for note in (*about.notes, *given.task.notes, *given.recovered.notes):
        reporter.note(note)
    if config.rollout.max_staleness and not config.loss.corrections:
        reporter.note(
            "samples may be older than the policy that they train, and nothing corrects for that: "
            "--use-tis, --icepop or --sequence-rejection do (docs/loss_variants.md)"
        )


@contextmanager
def failure_in_summary(reporter: Report) -> Iterator[None]:
    """A run that fails has a summary that says so."""
    try:
        yield
    except KeyboardInterrupt:
        reporter.finish(status="stopped at once")
        raise
    except BaseException as error:
        reporter.finish(status=f"failed: {type(error).__name__}: {error}")
        raise


def check_model_layout(shape: ModelShape, config: Config, world_size: int) -> None:
    if config.replays_routing and not shape.is_moe:
        raise ValueError(
            f"--use-rollout-routing-replay and --use-routing-replay: {shape.family} is dense and routes "
            "nothing; drop them"
        )
    mtp, chunks = config.model.mtp_num_layers, model_chunks(config)
    if problems := check_layout(shape, config.parallel, world_size, chunks, mtp):
        raise ValueError("this layout cannot hold the model:\n  " + "\n  ".join(problems))
    if config.model.lora_rank is not None:
        from megatron_ibpo.models.lora import check_lora  # imports torch

        if problems := check_lora(config.model, shape, config.parallel, chunks):
            raise ConfigError("\n  ".join(["these adapters cannot be trained:", *problems]))


def with_context(config: Config, shape: ModelShape) -> Config:
    """The configuration with the context that prompt and response may take together."""
    asked = config.rollout.rollout_max_context_len
    limit = shape.max_position_embeddings
    if asked is not None and asked > limit:
        raise ValueError(f"--rollout-max-context-len {asked}: the model's context is {limit}")
    context = asked or limit
    if config.rollout.rollout_max_response_len >= context:
        raise ValueError(
            f"--rollout-max-response-len {config.rollout.rollout_max_response_len} leaves no room for a "
            f"prompt in a context of {context}"
        )
    return replace(config, rollout=replace(config.rollout, rollout_max_context_len=context))


def _chosen_checkpoint(config: Config) -> Path | None:
    """What --load means; None where a run begins anew, or died before its first checkpoint."""
    load = config.run.load
    if load is None:
        return None
    try:
        return find_checkpoint(load)
    except CheckpointError:
        if (load / JOURNAL).is_dir():
            return None
        raise


def _open_journal(config: Config, step: int, stack: ExitStack) -> tuple[Journal, Recovered]:
    """The run's journal, and what it has of steps after `step`.

    Raises:
        JournalError: another version of the program wrote it.
    """
    directory, settings = config.run.run_dir / JOURNAL, sampling_settings(config)
    recovered = read_journal(directory, step)
    journal = stack.enter_context(
        Journal(directory, round(config.run.journal_keep * 1024**3), settings, step)
    )
    if recovered.settings is not None and recovered.settings != settings:
        note = f"{directory}: what was sampled after step {step} is not used, since the settings have changed"
        recovered = Recovered(settings, (), {}, step, is_whole=False, notes=(note,))
    journal.follow(recovered)
    return journal, recovered


def sampling_settings(config: Config) -> str:
    """Everything that a sample and its credit depend on, as text: a journal serves runs of the same alone."""
    rollout = {
        name: value
        for name, value in asdict(config.rollout).items()
        if name not in ("engine_stall_timeout", "vllm_start_timeout", "update_weight_timeout")
    }
    sections = [asdict(config.algorithm), asdict(config.data), rollout, {"seed": config.run.seed}]
    return json.dumps(sections, default=str, sort_keys=True)


def _bytes_kept(config: Config, parameters: int) -> int:
    """Bytes of what the run will keep at one time; an upper bound where the device is not known yet."""
    models = 2 if config.algorithm.advantages == "critic" else 1
    bf16 = config.model.bf16 is not False
    checkpoints, exports = kept_at_once(config)
    saved = checkpoint_bytes(_saved_parameters(config, parameters), bf16=bf16)
    return models * checkpoints * saved + exports * export_bytes(parameters, bf16=bf16)


def _saved_parameters(config: Config, parameters: int) -> int:
    """Of the model that a checkpoint holds, or of adapters, which it holds instead."""
    hf_dir = config.model.hf_checkpoint
    if config.model.lora_rank is None or hf_dir is None:
        return parameters
    from megatron_ibpo.models.lora import adapter_elements  # imports torch

    return adapter_elements(config.model, read_hf_config(hf_dir))
