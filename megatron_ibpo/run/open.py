"""Opening a run: read and check its inputs, place and start its processes, join them to a `Run`."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from megatron_ibpo.config import Config
from megatron_ibpo.engines.registry import samples_in_trainer
from megatron_ibpo.journal import Journal, Recovered
from megatron_ibpo.models import forward_flops
from megatron_ibpo.policy.group import About, Policy
from megatron_ibpo.report import Report, Stages, run_sizes
from megatron_ibpo.report.run_dir import DiskWait
from megatron_ibpo.report.stages import Forecast, StartLines
from megatron_ibpo.rewards import Verifier
from megatron_ibpo.run.cost import CostMeter
from megatron_ibpo.run.inputs import (
    Inputs,
    Judges,
    ResumePoint,
    open_inputs,
    open_journal,
    open_judges,
    read_resume_point,
)
from megatron_ibpo.run.preflight import check_inputs, check_judges, check_model, preflight
from megatron_ibpo.run.resolve import ResolvedConfig, read_foundation, resolve
from megatron_ibpo.run.rollouts import open_episodes, open_rollouts
from megatron_ibpo.run.settings import check_loss_of_run, doubtful_settings
from megatron_ibpo.run.state import Backend, Processes, Progress, Run
from megatron_ibpo.sampling.groups import JournalMemory


@contextmanager
def open_run(config: Config, node_wait: float = 0.0, started: float | None = None) -> Iterator[Run]:
    """Open a run; close it, with all its processes, on the way out.

    Args:
        node_wait: seconds to wait for nodes while the cluster has too few.
        started: time.time() at the run's start; None: now.

    Raises:
        ValueError, OSError, EngineError, ProcessDiedError: says what is wrong, where, and what to do.
    """
    started = time.time() if started is None else started
    backend = choose_backend(config, node_wait)
    stages, starting = Stages(), StartLines()
    with ExitStack() as stack:
        with stages("start"):
            starting("the model's configuration")
            foundation = read_foundation(config)
            point = read_resume_point(config.run, foundation.shape.vocab_size)
            check_model(config, foundation.shape, backend)
            # Ray starts while torch is imported for the loss and data are read
            wait_connected = stack.enter_context(backend.connect(config))
            doubts = doubtful_settings(config, foundation.method.operator)
            check_loss_of_run(config)
            starting("data")
            inputs = open_inputs(config, foundation)
            check_inputs(inputs, stack)
            judges = open_judges(inputs, stack)
            starting("places of the processes")
            wait_connected()
            resolved = resolve(inputs.config, foundation, backend.place(inputs.config))
            launched = backend.launch(resolved, inputs, judges, stack)
            starting("verifiers and journal")
            check_judges(inputs, judges)  # they have started meanwhile
            journal, recovered = open_journal(inputs.config, point.step, stack)
            records = Records(point, inputs, judges, journal, recovered, doubts)
            forecast = preflight(resolved, launched.memory)
            starting("trainers and engines")
            processes = launched.build(point.checkpoint)
            starting("the run's records")
            run = join(resolved, records, processes, stages, stack, forecast, started)
        if run.engines is not None and run.engines.version != run.progress.step:
            with stages("sync"):
                starting("weights to the engines")
                run.engines.update_weights(run.progress.step)
        starting.end()
        run.progress.start_seconds = stages.take()
        yield run


def choose_backend(config: Config, node_wait: float) -> Backend:
    """Return the back end that starts the processes for --rollout-backend."""
    if samples_in_trainer(config.rollout.rollout_backend):
        from megatron_ibpo.run.in_one_process import InOneProcess  # imports torch

        return InOneProcess()
    from megatron_ibpo.run.on_cluster import OnCluster

    return OnCluster(node_wait)


@dataclass(frozen=True)
class Records:
    """Inputs and files of a run that are read and opened before its processes are placed."""

    point: ResumePoint
    inputs: Inputs
    judges: Judges
    journal: Journal
    recovered: Recovered
    doubts: list[str]
    """Warnings about settings that work but may not be intended."""

    def notes(self, about: About) -> tuple[str, ...]:
        """Return the lines to show once the trainers, which `about` describes, are built."""
        chat = self.judges.chat
        of_chat = () if chat is None else chat.notes
        of_inputs = (*self.inputs.data.notes, *of_chat, *self.recovered.notes)
        return (*self.point.notes, *about.notes, *of_inputs, *self.doubts)


def join(
    resolved: ResolvedConfig,
    records: Records,
    processes: Processes,
    stages: Stages,
    stack: ExitStack,
    forecast: Callable[[str], Forecast],
    started: float,
) -> Run:
    """Return the run over its processes, after showing its table of sizes.

    Args:
        stack: closes what is opened.
        forecast: name of a device → prediction of a step's time.
        started: time.time() at the run's start.
    """
    config, foundation, engines = resolved.config, resolved.foundation, processes.engines
    point, inputs = records.point, records.inputs
    about = processes.trainers.call_all("about")[0]
    progress = Progress(point.step, saved=point.step, whole=point.step, remembered=dict(point.remembered))

    def deaths() -> dict[str, int]:
        return {"trainer_restarts": progress.trainer_restarts, **processes.deaths()}

    reporter = stack.enter_context(Report(config, completed_steps=point.step, started=started, deaths=deaths))
    _introduce(reporter, resolved, processes, about)
    if engines is not None:
        reporter.predicted(forecast(about.device))
    for note in records.notes(about):
        reporter.note(note)
    processes.wait_ready()
    cost = CostMeter(
        foundation.shape,
        resolved.accelerators,
        recomputes=config.model.recompute_granularity == "full",
        epochs=config.loss.num_epochs_per_rollout,
        initial=point.spent,
    )
    episodes = open_episodes(config, records.judges, processes.environments)
    disk = DiskWait(config.run.disk_wait, reporter.note)
    memory = JournalMemory(records.journal, records.recovered, disk.write)
    verifier = Verifier(processes.verifiers, config.data, config.run.run_dir / "logs")
    stack.callback(verifier.close_servers)
    rollouts = open_rollouts(resolved, inputs.data, engines, verifier, memory, point.state, episodes)
    flops = partial(forward_flops, resolved.shape)
    return Run(
        config=config,
        foundation=foundation,
        data=inputs.data,
        rollouts=stack.enter_context(rollouts),
        journal=records.journal,
        policy=Policy(processes.trainers, config, resolved.world_size, flops),
        engines=engines,
        reporter=reporter,
        disk=disk,
        stages=stages,
        cost=cost,
        progress=progress,
    )


def _introduce(reporter: Report, resolved: ResolvedConfig, processes: Processes, about: About) -> None:
    """Show the sizes of the run and the placement of its processes."""
    engines = processes.engines
    reporter.sizes(
        run_sizes(
            resolved.config,
            resolved.world_size,
            corrections=resolved.foundation.method.operator.ibpo_corrections,
            parameters=about.parameters,
            engines=engines.count if engines is not None else None,
            loss_backend=about.loss_backend,
            layers=about.layers,
        )
    )
    reporter.note(processes.placement_note)
    if resolved.engine_note is not None:
        reporter.note(resolved.engine_note)
