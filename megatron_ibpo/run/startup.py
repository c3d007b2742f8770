"""From a configuration to a run in progress: what the user gave is checked, then the processes start.

Ray comes up while tokenizer and data are read, engines while the trainers build their model.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.environment_variables import environment_number
from megatron_ibpo.basics.policy_digest import policy_digest
from megatron_ibpo.cluster.engines import Engines
from megatron_ibpo.cluster.placement import Engines as WantedEngines
from megatron_ibpo.cluster.placement import Placement, plan_placement
from megatron_ibpo.cluster.ray_session import abandon_start, open_ray, take_back_signals
from megatron_ibpo.cluster.reservation import NodeLostError, cluster_nodes, placed_within, reserved
from megatron_ibpo.cluster.trainers import Trainers
from megatron_ibpo.cluster.verifiers import Verifiers
from megatron_ibpo.config import Config, on_device
from megatron_ibpo.engines import EngineLostError
from megatron_ibpo.engines.vllm.settings import engine_settings, start_timeout
from megatron_ibpo.evaluate import KeptSamples, set_settings
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.report import Stages, prepare_run_dir
from megatron_ibpo.report.run_lock import locked
from megatron_ibpo.rewards import Verifier, check_labels, named_rm_types, open_pool
from megatron_ibpo.run.loop import Progress, Run
from megatron_ibpo.run.opening import (
    Beginning,
    Given,
    Standing,
    check_model_layout,
    failure_in_summary,
    join,
    open_given,
    read_beginning,
    with_context,
)
from megatron_ibpo.run.rollouts import Rollouts, open_rollouts
from megatron_ibpo.run.task import Task, open_task
from megatron_ibpo.weights.transfer.update_order import Order, choose_transport

NODE_ERRORS = (NodeLostError, EngineLostError)
"""What a run raises that can go on once the cluster has room for it again."""


@contextmanager
def open_run(config: Config, node_wait: float = 0.0) -> Iterator[Run]:
    """Everything a run needs, started; closed again on the way out, whatever happens.

    Args:
        node_wait: seconds to wait for a cluster that has too little.

    Raises:
        ValueError, OSError, EngineError, ProcessDiedError: with what is wrong, where, and what to do.
    """
    stages = Stages()
    with ExitStack() as stack:
        with stages("start"):
            begun = read_beginning(config)
            if config.cluster.num_trainers is not None:
                check_model_layout(begun.shape, begun.config, config.cluster.num_trainers)
            # what takes no time is checked before Ray starts, and the rest while it does
            wait_for_ray = stack.enter_context(_starting(_ray_of(begun.config)))
            given = open_given(begun, stack)
            wait_for_ray()
            run = join(begun, given, _started(begun, given, node_wait, stack), stages, stack)
        if run.engines is not None and run.progress.step > 0:
            with stages("sync"):
                run.engines.update_weights(run.progress.step)
        run.progress.start_seconds = stages.take()
        with failure_in_summary(run.reporter):
            yield run


def _started(begun: Beginning, given: Given, node_wait: float, stack: ExitStack) -> Standing:
    """Trainers with their model, and engines and verifiers on their way up, where there is room for them."""
    placement = placed_within(node_wait, lambda: _placed(given.config))
    world_size = len(placement.trainers)
    config = replace(given.config, cluster=replace(given.config.cluster, num_trainers=world_size))
    on_gpu = any(node.gpus for node in placement.nodes)
    config = on_device(config, on_gpu=on_gpu, has_delta_nets=begun.shape.is_recurrent)
    check_model_layout(begun.shape, config, world_size)
    verifiers = stack.enter_context(Verifiers(given.pool, placement.nodes, config.data, given.rm_types))
    group = stack.enter_context(reserved(placement))
    trainers = Trainers(group, placement)
    stack.callback(trainers.close)
    engines = _launch_engines(config, begun.hf_dir, trainers, placement, group, stack)
    trainers.locate()
    from megatron_ibpo.plan.node_memory import check_main_memory  # takes torch

    there = trainers.main_memory() | (engines.main_memory() if engines is not None else {})
    check_main_memory(config, begun.shape, given.elements, placement, there)
    _build(config, begun.checkpoint, trainers, engines)
    progress = begun.progress()
    return Standing(
        config=config,
        trainers=trainers,
        world_size=world_size,
        engines=engines,
        verifiers=verifiers,
        accelerators=_accelerators(config, placement),
        progress=progress,
        deaths=partial(_deaths, engines, verifiers, progress),
        where=_where(placement, verifiers),
        wait_ready=partial(_wait_ready, engines, verifiers),
    )


def _build(config: Config, checkpoint: Path | None, trainers: Trainers, engines: Engines | None) -> None:
    """The trainers' model, while engines load theirs."""
    if engines is not None:
        engines.start()
        if engines.settings.sleep_mode:
            # what trainers took meanwhile would look like the engines' own use of a shared GPU
            engines.wait_ready()
            engines.sleep()
    trainers.wait(trainers.build(config, checkpoint))
    if engines is not None:
        engines.meet_trainers()


def _wait_ready(engines: Engines | None, verifiers: Verifiers) -> None:
    verifiers.wait_ready()
    if engines is not None and not engines.settings.sleep_mode:
        engines.wait_ready()


def _deaths(engines: Engines | None, verifiers: Verifiers, progress: Progress) -> dict[str, int]:
    """Who has died so far, and what was started again, by metric."""
    counts = {"verifier_deaths": verifiers.deaths, "trainer_restarts": progress.trainer_restarts}
    if engines is not None:
        counts |= {"engine_deaths": engines.died, "engine_restarts": engines.restarts}
    return counts


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
        ValueError, OSError, EngineError, ProcessDiedError: with what is wrong, where, and what to do.
    """
    hf_dir = config.model.hf_checkpoint
    assert hf_dir is not None  # check_evaluation saw to it
    with ExitStack() as stack:
        shape = read_hf_config(hf_dir)
        config = with_context(config, shape)
        wait_for_ray = stack.enter_context(_starting(_ray_of(config)))
        task = open_task(config, trains=False)
        from megatron_ibpo.weights.formats.convert import check_checkpoint  # takes torch

        check_checkpoint(hf_dir, shape)
        stack.enter_context(locked(config.run.run_dir))
        prepare_run_dir(config)
        rm_types = named_rm_types(task.first_prompts, config.data)
        own_pool = stack.enter_context(open_pool(config.data, rm_types))
        check_labels(own_pool, task.first_prompts, config.data)
        wait_for_ray()
        placement = _engines_placed(config)
        on_gpu = any(node.gpus for node in placement.nodes)
        config = on_device(config, on_gpu=on_gpu, has_delta_nets=shape.is_recurrent)
        kept = None if policy is None else stack.enter_context(_kept_samples(config, hf_dir, task, policy))
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
            if not entered.done():
                abandon_start()
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


def going_on(run: Run, asked: Config) -> Config:
    """Return the configuration for going on after a node was lost, from the run's own checkpoint and journal.

    Args:
        asked: what the run was started with. The journal knows its settings of sampling as they were asked.
    """
    own = replace(run.config.run, load=run.config.run.run_dir)
    return replace(run.config, rollout=asked.rollout, run=own)


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
