"""From a configuration to a run in progress: what the user gave is checked, then the processes start.

Ray comes up while tokenizer and data are read, engines while the trainers build their model.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ibpo.checks import check_loss_of_run
from megatron_ibpo.cluster.engines import Engines
from megatron_ibpo.cluster.host import ProcessDiedError
from megatron_ibpo.cluster.placement import Engines as WantedEngines
from megatron_ibpo.cluster.placement import Placement, plan_placement
from megatron_ibpo.cluster.reservation import NodeLostError, cluster_nodes, placed_within, reserved
from megatron_ibpo.cluster.session import open_ray, take_back_signals
from megatron_ibpo.cluster.trainers import Trainers
from megatron_ibpo.cluster.verifiers import Verifiers
from megatron_ibpo.config import Config, ConfigError, on_device
from megatron_ibpo.cost import CostMeter, Spent
from megatron_ibpo.environment import environment_number
from megatron_ibpo.evaluate import KeptSamples, set_settings
from megatron_ibpo.journal import Journal, Recovered, read_journal
from megatron_ibpo.loop import Progress, Run
from megatron_ibpo.models import ModelShape, check_layout, forward_flops, read_hf_config
from megatron_ibpo.plan.machine import find_machine
from megatron_ibpo.policy.group import Policy
from megatron_ibpo.policy.overrides import model_chunks
from megatron_ibpo.policy_digest import policy_digest
from megatron_ibpo.report import (
    Report,
    Stages,
    checkpoint_bytes,
    export_bytes,
    kept_at_once,
    prepare_run_dir,
    run_sizes,
)
from megatron_ibpo.report.disk import waiting_for_room
from megatron_ibpo.report.run_lock import locked
from megatron_ibpo.rewards import Verifier, check_labels, named_rm_types, open_pool
from megatron_ibpo.rollout import EngineError, EngineLostError
from megatron_ibpo.rollout.settings import engine_settings, start_timeout
from megatron_ibpo.sampling.memory import JournalMemory
from megatron_ibpo.sampling.rollouts import Rollouts, open_rollouts
from megatron_ibpo.task import Task, open_task, with_epochs
from megatron_ibpo.weights.errors import CheckpointError
from megatron_ibpo.weights.formats.run_state import RUN_STATE, find_checkpoint, load_run_state
from megatron_ibpo.weights.transfer.order import Order, choose_transport

JOURNAL = "journal"
"""Folder of a run's directory."""
START_ERRORS = (ValueError, OSError, EngineError, ProcessDiedError)
"""What `open_run` raises for input that cannot work."""
NODE_ERRORS = (NodeLostError, EngineLostError)
"""What a run raises that can go on once the cluster has room for it again."""


@contextmanager
def open_run(config: Config, node_wait: float = 0.0) -> Iterator[Run]:
    """Everything a run needs, started; closed again on the way out, whatever happens.

    Args:
        node_wait: seconds to wait for a cluster that has too little.

    Raises:
        one of START_ERRORS, with what is wrong, where, and what to do.
    """
    stages = Stages()
    hf_dir = config.model.hf_checkpoint
    assert hf_dir is not None  # check_config saw to it
    with ExitStack() as stack:
        with stages("start"):
            shape = read_hf_config(hf_dir)
            config = with_context(config, shape)
            if config.cluster.num_trainers is not None:
                check_model_layout(shape, config, config.cluster.num_trainers)
            if config.run.dry_run_hardware is not None:
                find_machine(config.run.dry_run_hardware)
            checkpoint = chosen_checkpoint(config)
            state: dict[str, Any] = {"step": 0} if checkpoint is None else load_run_state(checkpoint)
            before = spent_before(state, checkpoint)
            # what takes no time is checked before Ray starts, and the rest while it does
            wait_for_ray = stack.enter_context(_starting(_ray_of(config)))
            check_loss_of_run(config)
            # these take torch, too
            from megatron_ibpo.plan.forecast import forecast
            from megatron_ibpo.plan.main_memory import check_main_memory
            from megatron_ibpo.weights.formats.hugging_face import trained_elements

            task = open_task(config)
            config = with_epochs(config, task.prompts)
            stack.enter_context(locked(config.run.run_dir))
            elements = trained_elements(hf_dir, shape)
            prepare_run_dir(config, checkpoint_bytes=bytes_kept(config, sum(elements.values())))
            journal, recovered = open_journal(config, state["step"], stack)
            rm_types = named_rm_types(task.first_prompts, config.data)
            own_pool = stack.enter_context(open_pool(config.data, rm_types))
            check_labels(own_pool, task.first_prompts, config.data)
            wait_for_ray()
            placement = placed_within(node_wait, lambda: _placed(config))
            world_size = len(placement.trainers)
            config = replace(config, cluster=replace(config.cluster, num_trainers=world_size))
            config = on_device(config, on_gpu=any(node.gpus for node in placement.nodes))
            check_model_layout(shape, config, world_size)
            verifiers = stack.enter_context(Verifiers(own_pool, placement.nodes, config.data, rm_types))
            group = stack.enter_context(reserved(placement))
            trainers = Trainers(group, placement)
            stack.callback(trainers.close)
            engines = _launch_engines(config, hf_dir, trainers, placement, group, stack)
            trainers.locate()
            there = trainers.main_memory() | (engines.main_memory() if engines is not None else {})
            check_main_memory(config, shape, elements, placement, there)
            if engines is not None:
                engines.start()
                if engines.settings.sleep_mode:
                    # what trainers took meanwhile would look like the engines' own use of a shared GPU
                    engines.wait_ready()
                    engines.sleep()
            trainers.wait(trainers.build(config, checkpoint))
            if engines is not None:
                engines.meet_trainers()
            about = trainers.all("about")[0]
            progress = Progress(
                state["step"],
                saved=state["step"],
                whole=state["step"],
                remembered=_remembered_before(state, checkpoint),
            )
            deaths = partial(_deaths, engines, verifiers, progress)
            reporter = stack.enter_context(Report(config, completed_steps=state["step"], deaths=deaths))
            reporter.sizes(
                run_sizes(
                    config,
                    world_size,
                    parameters=about.parameters,
                    engines=len(placement.engines) or None,
                    loss_backend=about.loss_backend,
                    layers=about.layers,
                )
            )
            reporter.note(_where(placement, verifiers))
            if engines is not None:
                reporter.predicted(forecast(config, shape, world_size, about.device))
            for note in (*about.notes, *task.notes):
                reporter.note(note)
            if config.rollout.max_staleness and not config.loss.corrections:
                reporter.note(
                    "samples may be older than the policy that they train, and nothing corrects for that: "
                    "--use-tis, --icepop or --sequence-rejection do (docs/loss_variants.md)"
                )
            verifiers.wait_ready()
            if engines is not None and not engines.settings.sleep_mode:
                engines.wait_ready()
            verifier = Verifier(verifiers, config.data)
            memory = JournalMemory(
                journal, recovered, lambda write: waiting_for_room(write, config.run.disk_wait, reporter.note)
            )
            for note in recovered.notes:
                reporter.note(note)
            rollouts = stack.enter_context(open_rollouts(config, task, engines, verifier, memory, state))
        run = Run(
            config=config,
            task=task,
            rollouts=rollouts,
            journal=journal,
            policy=Policy(trainers, config, world_size, partial(forward_flops, shape)),
            engines=engines,
            reporter=reporter,
            stages=stages,
            cost=CostMeter(
                shape,
                _accelerators(config, placement),
                recomputes=config.model.recompute_granularity == "full",
                before=before,
            ),
            progress=progress,
        )
        if engines is not None and run.progress.step > 0:
            with stages("sync"):
                engines.update_weights(run.progress.step)
        run.progress.start_seconds = stages.take()
        with failure_in_summary(reporter):
            yield run


def _deaths(engines: Engines | None, verifiers: Verifiers, progress: Progress) -> dict[str, int]:
    """Who has died so far, and what was started again, by metric."""
    counts = {"verifier_deaths": verifiers.deaths, "trainer_restarts": progress.trainer_restarts}
    if engines is not None:
        counts |= {"engine_deaths": engines.died, "engine_restarts": engines.restarts}
    return counts


def spent_before(state: dict[str, Any], checkpoint: Path | None) -> Spent:
    try:
        return Spent.read(state.get("spent", {}))
    except ValueError as error:
        raise ValueError(f"--load {checkpoint}: {RUN_STATE}: {error}") from None


def _remembered_before(state: dict[str, Any], checkpoint: Path | None) -> dict[int, Mapping[str, Any]]:
    remembered = state.get("remembered", {})
    if not isinstance(remembered, dict):
        raise ValueError(f"--load {checkpoint}: {RUN_STATE}: remembered must be an object")
    return {state["step"]: remembered} if remembered else {}


@dataclass(frozen=True)
class OpenEvaluation:
    """An evaluation about to be made, with what it asks."""

    task: Task
    kept: KeptSamples | None
    rollouts: Rollouts
    engines: Engines
    verifiers: Verifiers
    where: str
    """What sits where."""


@contextmanager
def open_evaluation(config: Config, policy: str | None = None) -> Iterator[OpenEvaluation]:
    """Engines with the weights of --hf-checkpoint, and verifiers; no trainer. Closed again on the way out,
    whatever happens.

    Args:
        policy: that these weights are, as the user named it, for what is kept; None: nothing is.

    Raises:
        one of START_ERRORS, with what is wrong, where, and what to do.
    """
    hf_dir = config.model.hf_checkpoint
    assert hf_dir is not None  # check_evaluation saw to it
    with ExitStack() as stack:
        config = with_context(config, read_hf_config(hf_dir))
        wait_for_ray = stack.enter_context(_starting(_ray_of(config)))
        task = open_task(config, trains=False)
        stack.enter_context(locked(config.run.run_dir))
        prepare_run_dir(config)
        kept = None if policy is None else stack.enter_context(_kept_samples(config, hf_dir, task, policy))
        rm_types = named_rm_types(task.first_prompts, config.data)
        own_pool = stack.enter_context(open_pool(config.data, rm_types))
        check_labels(own_pool, task.first_prompts, config.data)
        wait_for_ray()
        placement = _engines_placed(config)
        verifiers = stack.enter_context(Verifiers(own_pool, placement.nodes, config.data, rm_types))
        group = stack.enter_context(reserved(placement))
        nobody = Trainers(group, placement)
        engines = _launch_engines(config, hf_dir, nobody, placement, group, stack)
        assert engines is not None  # the placement has one or more
        engines.start()
        verifiers.wait_ready()
        engines.wait_ready()
        verifier = Verifier(verifiers, config.data)
        rollouts = stack.enter_context(open_rollouts(config, task, engines, verifier))
        yield OpenEvaluation(task, kept, rollouts, engines, verifiers, _where(placement, verifiers))


def _kept_samples(config: Config, hf_dir: Path, task: Task, policy: str) -> KeptSamples:
    """What an earlier start of the same evaluation left, to go on from."""
    digest = policy_digest(hf_dir)
    settings = {own.name: set_settings(own, config, digest) for own in task.eval_sets}
    return KeptSamples(config.run.run_dir, policy, settings)


@contextmanager
def _starting(context: AbstractContextManager[Any]) -> Iterator[Callable[[], Any]]:
    """Enters `context`, a Ray, in a thread, and gives what waits for that; leaves it on the way out."""
    with ThreadPoolExecutor(1) as thread:
        entered = thread.submit(context.__enter__)

        def wait() -> None:
            entered.result()
            take_back_signals()

        try:
            yield wait
        finally:
            if entered.exception() is None:
                context.__exit__(None, None, None)


def _ray_of(config: Config) -> AbstractContextManager[None]:
    """Ray, connected: that of --ray-address or RAY_ADDRESS, or one of the run's own."""
    cluster, rollout = config.cluster, config.rollout
    # a Ray of the run's own counts processes, which share the processors
    processes = 2 * (cluster.num_trainers or 1) + (rollout.rollout_num_gpus or 0)
    return open_ray(
        cluster.ray_address or os.environ.get("RAY_ADDRESS"),
        num_cpus=max(processes, os.cpu_count() or 1),
        object_store_bytes=cluster.object_store_bytes,
    )


def _placed(config: Config) -> Placement:
    """Where everything goes, on the nodes that there are.

    Raises:
        PlacementError: the cluster has too little.
    """
    cluster, rollout = config.cluster, config.rollout
    nodes = cluster_nodes()
    num_gpus = sum(node.gpus for node in nodes)
    engines = None
    if config.run.load_debug_rollout_data is None:
        engines = WantedEngines(
            rollout.rollout_num_gpus_per_engine, rollout.colocate, rollout.rollout_num_gpus
        )
    own_gpus = 0 if rollout.colocate or engines is None else rollout.rollout_num_gpus or num_gpus // 2
    if num_gpus and rollout.colocate and rollout.max_staleness:
        raise ValueError(
            f"--max-staleness {rollout.max_staleness}: engines that share the trainers' GPUs sleep while "
            "those train, so sampling cannot run ahead; give them GPUs of their own (--no-colocate "
            "--rollout-num-gpus N)"
        )
    if not num_gpus and config.optimizer.use_precision_aware_optimizer:
        raise ValueError("--use-precision-aware-optimizer: is for GPUs, whose memory it saves")
    num_trainers = cluster.num_trainers or max(1, num_gpus - own_gpus)
    return plan_placement(nodes, num_trainers=num_trainers, engines=engines, on_gpu=num_gpus > 0)


def _engines_placed(config: Config) -> Placement:
    """Where engines go that have the cluster to themselves: all its GPUs, or as many CPU processes as there
    would be trainers.

    Raises:
        PlacementError: the cluster has too little.
    """
    nodes, rollout = cluster_nodes(), config.rollout
    size, num_gpus = rollout.rollout_num_gpus_per_engine, sum(node.gpus for node in nodes)
    within_nodes = sum(node.gpus // size for node in nodes)
    engines = within_nodes or (num_gpus or config.cluster.num_trainers or 1) // size or 1
    wanted = WantedEngines(size, colocate=False, num_gpus=rollout.rollout_num_gpus or engines * size)
    return plan_placement(nodes, num_trainers=0, engines=wanted, on_gpu=num_gpus > 0)


def _launch_engines(
    config: Config,
    hf_dir: Path,
    trainers: Trainers,
    placement: Placement,
    group: Any,
    stack: ExitStack,
) -> Engines | None:
    """Engines whose processes are on their way up, unless recorded rollouts are replayed."""
    if not placement.engines:
        return None
    rollout = config.rollout
    on_gpu = any(node.gpus for node in placement.nodes)
    transport = choose_transport(on_gpu=on_gpu, colocate=rollout.colocate)
    settings = engine_settings(
        rollout, hf_dir, transport, gpus=(), num_threads=environment_number("OMP_NUM_THREADS", 1, least=1)
    )
    engines = Engines(
        trainers,
        placement,
        group,
        settings,
        config.run.run_dir / "logs",
        Order(
            version=0,
            sleeping=False,
            check=rollout.check_weight_update_equal,
            timeout=rollout.update_weight_timeout,
        ),
        start_timeout(rollout, hf_dir),
    )
    stack.callback(engines.close)
    engines.launch()
    return engines


def going_on(run: Run) -> Config:
    """What a run goes on with that has lost a node: its own last checkpoint and journal."""
    return replace(run.config, run=replace(run.config.run, load=run.config.run.run_dir))


def chosen_checkpoint(config: Config) -> Path | None:
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


def open_journal(config: Config, step: int, stack: ExitStack) -> tuple[Journal, Recovered]:
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
    if not recovered.is_whole:
        journal.rewound(recovered.last_step)
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


def bytes_kept(config: Config, parameters: int) -> int:
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


def _accelerators(config: Config, placement: Placement) -> int:
    """Accelerators that the run holds: the trainers', and the engines' own where they do not share those."""
    own = 0 if placement.colocated else len(placement.engines) * config.rollout.rollout_num_gpus_per_engine
    return len(placement.trainers) + (own if any(node.gpus for node in placement.nodes) else 0)


def _where(placement: Placement, verifiers: Verifiers) -> str:
    """What sits where, a line for each node."""
    return "\n".join(
        f"{address}: trainers {trainers}, engines {engines}, {verifiers.workers(node)} verifiers"
        for node, (address, trainers, engines) in zip(placement.nodes, placement.rows(), strict=True)
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
