"""Trainers, engines and verifiers on a Ray cluster: connected, placed, started.

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

from megatron_ibpo.basics.user_files import policy_digest
from megatron_ibpo.cluster.engine_processes import EngineProcesses
from megatron_ibpo.cluster.engines import Engines
from megatron_ibpo.cluster.node_pools import Environments, Verifiers
from megatron_ibpo.cluster.placement import Placement
from megatron_ibpo.cluster.ray_session import abandon_start, open_ray, take_back_signals
from megatron_ibpo.cluster.reservation import NodeLostError, place_engines, place_run, reserved
from megatron_ibpo.cluster.trainers import Trainers
from megatron_ibpo.config import Config
from megatron_ibpo.engines import EngineLostError
from megatron_ibpo.engines.registry import start_timeout
from megatron_ibpo.evaluate import KeptSamples, set_settings
from megatron_ibpo.models import ModelShape, least_world
from megatron_ibpo.rewards import Verifier
from megatron_ibpo.run.inputs import Inputs, Judges, RunData, open_inputs, open_judges
from megatron_ibpo.run.preflight import check_inputs, check_judges
from megatron_ibpo.run.resolve import ResolvedConfig, check_model_layout, read_foundation, resolve
from megatron_ibpo.run.rollouts import Rollouts, open_episodes, open_rollouts
from megatron_ibpo.run.state import Launched, Processes, Run
from megatron_ibpo.weights.transfer.link import UpdateOrder

NODE_ERRORS = (NodeLostError, EngineLostError)
"""Errors after which a run can continue once the cluster has room for it again."""


@dataclass(frozen=True)
class OnCluster:
    """The back end of engines in their own processes."""

    node_wait: float = 0.0
    """Seconds to wait for nodes while the cluster has too few."""

    def check(self, config: Config, shape: ModelShape) -> None:
        """Refuse a model or a layout, as far as that shows before devices are counted: if the number of
        trainers is not known yet, the fewest that the layout takes are assumed. Raises ValueError."""
        check_model_layout(shape, config, config.cluster.num_trainers or least_world(config.parallel))

    def connect(self, config: Config) -> AbstractContextManager[Callable[[], None]]:
        """Connect to the Ray of --ray-address or RAY_ADDRESS, or start one, in a thread. The context gives a
        function that waits for it."""
        return _starting(_ray_of(config))

    def place(self, config: Config, *, samples: bool = True) -> Placement:
        """Place trainers and, if the run `samples`, engines on the nodes of the cluster, once it has room for
        them. Raises ValueError if it is too small, or settings do not suit its devices."""
        return place_run(config, samples=samples, wait=self.node_wait)

    def launch(
        self, resolved: ResolvedConfig, inputs: Inputs, judges: Judges, stack: ExitStack
    ) -> Launched[Processes]:
        """Start the processes of trainers, engines and verifiers. `stack` ends them. This, and `build`, raise
        ValueError, OSError, EngineError or ProcessDiedError if one does not start."""
        config, placement = resolved.config, resolved.placement
        group = stack.enter_context(reserved(placement))
        trainers = Trainers(group, placement)
        stack.callback(trainers.close)
        engines = None
        if resolved.engine_settings is not None:
            engines = _launch_engines(resolved, trainers, group, stack)
        trainers.locate()
        verifiers, environments = _spread(inputs, judges, placement, stack)

        def build(checkpoint: Path | None) -> Processes:
            """Build the trainers' model while engines load theirs."""
            if engines is not None:
                engines.start()
            if engines is not None and engines.sleeps:
                # memory that trainers take meanwhile would look like the engines' own use of a shared GPU
                engines.wait_ready()
                engines.sleep()
            trainers.build(config, checkpoint)
            if engines is not None:
                engines.meet_trainers()
            return Processes(
                trainers=trainers,
                engines=engines,
                verifiers=verifiers,
                environments=environments,
                deaths=partial(_deaths, engines, verifiers, environments),
                placement_note=verifiers.describe_placement(placement),
                wait_ready=partial(_wait_ready, engines, verifiers, environments),
            )

        memory = trainers.main_memory()
        if engines is not None:
            memory |= engines.processes.main_memory()
        return Launched(memory, build)

    def launch_trainers(self, resolved: ResolvedConfig, stack: ExitStack) -> Launched[tuple[Trainers, str]]:
        """Start trainers, for training without sampling, and say on which nodes. Raises as `launch`."""
        placement = resolved.placement
        trainers = Trainers(stack.enter_context(reserved(placement)), placement)
        stack.callback(trainers.close)
        trainers.locate()

        def build(checkpoint: Path | None) -> tuple[Trainers, str]:
            trainers.build(resolved.config, checkpoint)
            nodes = zip(placement.nodes, placement.rows(), strict=True)
            placement_note = "\n".join(f"{node.address}: trainers {ranks}" for node, (_, ranks, _) in nodes)
            return trainers, placement_note

        return Launched(trainers.main_memory(), build)


def _spread(
    inputs: Inputs, judges: Judges, placement: Placement, stack: ExitStack
) -> tuple[Verifiers, Environments | None]:
    """Start verifiers, and places for episodes if a prompt names an environment, on the other nodes too."""
    config, nodes = inputs.config, placement.nodes
    verifiers = stack.enter_context(Verifiers(judges.pool, nodes, config.data, inputs.rm_types))
    if judges.environments is None:
        return verifiers, None
    places = Environments(judges.environments, nodes, config.environment, inputs.targets)
    return verifiers, stack.enter_context(places)


def _wait_ready(engines: Engines | None, verifiers: Verifiers, environments: Environments | None) -> None:
    verifiers.wait_ready()
    if environments is not None:
        environments.wait_ready()
    if engines is not None and not engines.sleeps:
        engines.wait_ready()


def _deaths(
    engines: Engines | None, verifiers: Verifiers, environments: Environments | None
) -> dict[str, int]:
    """Return the numbers of dead and of restarted processes, by metric."""
    counts = {"verifier_deaths": verifiers.deaths}
    if environments is not None:
        counts["environment_deaths"] = environments.deaths
    if engines is not None:
        counts |= {"engine_deaths": engines.deaths, "engine_restarts": engines.restarts}
    return counts


@dataclass(frozen=True)
class OpenEvaluation:
    """An evaluation whose engines and verifiers have been started."""

    data: RunData
    stored_samples: KeptSamples | None
    rollouts: Rollouts
    engines: Engines
    verifiers: Verifiers
    placement_note: str
    """Nodes of the processes, for the user."""


@contextmanager
def open_evaluation(config: Config, policy: str | None = None) -> Iterator[OpenEvaluation]:
    """Start engines with the weights of --hf-checkpoint, and verifiers, without trainers. End them on the way
    out.

    Args:
        policy: the user's name for these weights, under which samples are stored; None stores none.

    Raises:
        ValueError, OSError, EngineError, ProcessDiedError: says what is wrong, where, and what to do.
    """
    with ExitStack() as stack:
        foundation = read_foundation(config)
        wait_connected = stack.enter_context(_starting(_ray_of(config)))
        inputs = open_inputs(config, foundation, trains=False)
        check_inputs(inputs, stack)
        judges = open_judges(inputs, stack)
        wait_connected()
        placement = place_engines(config)
        resolved = resolve(inputs.config, foundation, placement, trains=False)
        config = resolved.config
        stored_samples = None
        if policy is not None:
            stored_samples = stack.enter_context(_kept_samples(resolved, inputs.data, policy))
        verifiers, environments = _spread(inputs, judges, placement, stack)
        group = stack.enter_context(reserved(placement))
        no_trainers = Trainers(group, placement)
        engines = _launch_engines(resolved, no_trainers, group, stack)
        check_judges(inputs, judges)
        engines.start()
        verifiers.wait_ready()
        if environments is not None:
            environments.wait_ready()
        engines.wait_ready()
        verifier = Verifier(verifiers, config.data, config.run.run_dir / "logs")
        stack.callback(verifier.close_servers)
        episodes = open_episodes(config, judges, environments)
        opened = open_rollouts(resolved, inputs.data, engines, verifier, episodes=episodes)
        rollouts = stack.enter_context(opened)
        placement_note = "\n".join(
            filter(None, [verifiers.describe_placement(placement), resolved.engine_note])
        )
        yield OpenEvaluation(inputs.data, stored_samples, rollouts, engines, verifiers, placement_note)


def _kept_samples(resolved: ResolvedConfig, data: RunData, policy: str) -> KeptSamples:
    """Open the samples that an earlier start of the same evaluation stored, to resume from."""
    config, operator = resolved.config, resolved.foundation.method.operator
    digest = policy_digest(resolved.foundation.hf_dir)
    settings = {
        eval_set.name: set_settings(eval_set, config, operator, digest) for eval_set in data.eval_sets
    }
    return KeptSamples(config.run.run_dir, policy, settings)


@contextmanager
def _starting(context: AbstractContextManager[Any]) -> Iterator[Callable[[], Any]]:
    """Enter `context`, a Ray, in a thread; give a function that waits for it. Leave it on the way out."""
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
    """Return the Ray to connect to: that of --ray-address or RAY_ADDRESS, or the run's own."""
    cluster, rollout = config.cluster, config.rollout
    # the run's own Ray counts processes, which share the processors
    processes = 2 * (cluster.num_trainers or 1) + (rollout.rollout_num_gpus or 0)
    return open_ray(
        cluster.ray_address or os.environ.get("RAY_ADDRESS"),
        num_cpus=max(processes, os.cpu_count() or 1),
        object_store_bytes=cluster.object_store_bytes,
    )


def _launch_engines(resolved: ResolvedConfig, trainers: Trainers, group: Any, stack: ExitStack) -> Engines:
    """Launch the engines' processes without waiting for them."""
    assert resolved.engine_settings is not None  # engines were placed
    rollout, logs = resolved.config.rollout, resolved.config.run.run_dir / "logs"
    order = UpdateOrder(
        version=0,
        sleeping=False,
        check=rollout.check_weight_update_equal,
        timeout=rollout.update_weight_timeout,
    )
    processes = EngineProcesses(
        trainers,
        resolved.placement,
        group,
        rollout.rollout_backend,
        resolved.engine_settings,
        logs,
        start_timeout(rollout, resolved.foundation.hf_dir),
    )
    engines = Engines(processes, order)
    stack.callback(engines.close)
    processes.launch()
    return engines


def resume_after_loss(run: Run, requested_config: Config) -> Config:
    """Return the configuration for restarting after a node was lost, from the run's checkpoint and journal.

    Args:
        requested_config: the configuration that the run was started with. The journal compares sampling
            settings as given, before devices decided some of them.
    """
    resumed = replace(run.config.run, load=run.config.run.run_dir)
    return replace(run.config, rollout=requested_config.rollout, run=resumed)
