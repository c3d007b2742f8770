"""Checks before anything large is loaded, and the dry run.

A start passes these checks in the order of this file, each as soon as its inputs exist. A check stands alone:
it raises or returns nothing, and nothing after it depends on it. In the opening of a run, only this file uses
`plan/`. Every function of the user is called once on one row, so that a fault in it costs a second and not
the start of a cluster.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import Config
from megatron_ibpo.config.hooks import is_import_path
from megatron_ibpo.credit import CreditContext
from megatron_ibpo.data.generated import SCHEME
from megatron_ibpo.data.row_prompts import OWN_SCHEME
from megatron_ibpo.data.sources import read_spec
from megatron_ibpo.data.tokenizer import TOKENIZER_FILES, has_tokenizer, load_tokenizer
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.models import ModelShape, read_hf_config
from megatron_ibpo.report.run_dir import locked, prepare_run_dir
from megatron_ibpo.report.stages import Forecast
from megatron_ibpo.rewards import (
    Pool,
    WorkerPool,
    check_labels,
    check_pool,
    check_servers,
    named_rm_types,
    reward_functions,
)
from megatron_ibpo.run.inputs import (
    Inputs,
    Judges,
    RunData,
    environments_of,
    open_run_data,
    scored_by_verifiers,
)
from megatron_ibpo.run.resolve import ResolvedConfig, read_foundation
from megatron_ibpo.run.settings import check_run
from megatron_ibpo.run.state import Backend
from megatron_ibpo.run.trial import credit_functions, try_credit, try_environment, try_rewards
from megatron_ibpo.weights.formats.checkpoint_files import has_weights
from megatron_ibpo.weights.formats.run_state import kept_bytes

_MADE_UP = Prompt(0, token_ids([0]), 1, "1", "made up", "1")
"""Prompt of a run that has none, such as a replay."""


def check_model(config: Config, shape: ModelShape, backend: Backend) -> None:
    """Refuse what cannot work whatever the data are, in milliseconds: a layout, a device's name. Raises
    ValueError that says what is wrong, and what to change."""
    backend.check(config, shape)
    if config.run.dry_run_hardware is not None:
        from megatron_ibpo.plan.hardware import read_hardware

        read_hardware(config.run.dry_run_hardware)


def check_inputs(inputs: Inputs, stack: ExitStack) -> None:
    """Refuse inputs that cannot be used; lock the run's directory, and fill it once its disk has room.

    Args:
        stack: unlocks the directory.

    Raises:
        ValueError, OSError: says which, where, and what to do.
    """
    from megatron_ibpo.weights.formats.hugging_face import check_checkpoint  # imports torch

    config, shape = inputs.config, inputs.foundation.shape
    check_checkpoint(inputs.foundation.hf_dir, shape, trains=inputs.trains)
    stack.enter_context(locked(config.run.run_dir))
    prepare_run_dir(config, checkpoint_bytes=disk_bytes(config, shape) if inputs.trains else 0)
    check_servers(config.data, inputs.rm_types)


def check_judges(inputs: Inputs, judges: Judges) -> None:
    """Refuse verifiers that do not start, and labels, environments and functions of the user that do not
    work, by trying them once. Raises ValueError or OSError that says which, where, and what to do."""
    config, pool, environments = inputs.config, judges.pool, judges.environments
    check_pool(pool, config.data, inputs.rm_types)
    check_labels(pool, scored_by_verifiers(inputs.data.first_prompts), config.data)
    if environments is not None:
        for target in inputs.targets:
            environments.check(target)
    context, logs = inputs.foundation.max_context, config.run.run_dir / "logs"
    try_user_code(config, context, inputs.data, pool, environments, trains=inputs.trains, logs=logs)


def preflight(resolved: ResolvedConfig, memory: Mapping[int, int]) -> Callable[[str], Forecast]:
    """Refuse a run for which a node's main memory is too small.

    Args:
        memory: node, by its index in the placement → its bytes of main memory; empty: not checked.

    Returns:
        a function that predicts the seconds of a step on a device with this name.

    Raises:
        ValueError: what is missing, where, and what to change.
    """
    from megatron_ibpo.plan.feasibility import check_main_memory  # these import torch
    from megatron_ibpo.plan.prediction import forecast

    config, shape = resolved.config, resolved.shape
    if memory:
        check_main_memory(config, shape, resolved.placement, memory)
    return partial(forecast, config, shape, resolved.world_size)


def check_present_files(hf_dir: Path) -> None:
    """Refuse weights or a tokenizer that a run could not start with, as its start does. A plan needs neither:
    only files that are there are checked."""
    from megatron_ibpo.weights.formats.hugging_face import check_checkpoint  # imports torch

    shape = read_hf_config(hf_dir)
    if has_weights(hf_dir):
        check_checkpoint(hf_dir, shape)
    if has_tokenizer(hf_dir):
        load_tokenizer(hf_dir, embedding_rows=shape.vocab_size)


def dry_run(config: Config) -> int:
    """Check a run as its start would, and print its plan. Return the exit status."""
    from megatron_ibpo.plan.run_plan import plan_run  # imports torch

    check_run(config)
    check_present_files(config.model.hf_dir)
    note = check_user_code(config)
    status = plan_run(config)
    if note is not None:
        print(note)
    return status


def disk_bytes(config: Config, shape: ModelShape) -> int:
    """Return the most bytes that a run keeps on disk at one time."""
    from megatron_ibpo.plan.parameter_count import count_parameters

    parameters, trained = count_parameters(shape, config)
    return kept_bytes(config, parameters=parameters, trained=trained)


def try_user_code(
    config: Config,
    max_context: int,
    data: RunData,
    pool: Pool,
    environments: EnvironmentPool | None,
    *,
    trains: bool,
    logs: Path | None,
) -> None:
    """Call the user's reward functions, environments and, for training, credit functions once. Nothing of it
    is counted or recorded.

    Args:
        environments: processes for episodes; None: no prompt names an environment, or none is to be tried.
        logs: folder for tracebacks; None: they are not kept.

    Raises:
        ConfigError: one of them fails; names its line and the prompt.
    """
    prompts = data.first_prompts
    details = try_rewards(pool, scored_by_verifiers(prompts), config.data, logs)
    if environments is not None:
        for target, prompt in environments_of(prompts, config.environment).items():
            details |= try_environment(environments, target, prompt)
    if trains:
        # what a running policy lends is left out
        context = CreditContext(
            config.algorithm,
            config.rollout,
            data.vocabulary,
            max_context,
            config.run.seed,
            step=0,
            reward_threshold=config.data.reward_threshold,
        )
        try_credit(prompts[0] if prompts else _MADE_UP, context, details)


def check_user_code(config: Config) -> str | None:
    """Check the labels of a plan's prompts, and call the user's functions, as the start of the run would do.
    If the prompts or the tokenizer are not on this machine, nothing is checked.

    Returns:
        a line to print if something could not be checked for that reason.

    Raises:
        ValueError, OSError: what the start of the run would raise for them.
    """
    sources = [read_spec(spec).location for spec in config.data.prompt_data]
    files = [source for source in sources if not source.startswith((SCHEME, OWN_SCHEME))]
    hf_dir = config.model.hf_dir
    rewards = [config.data.rm_type, *config.data.reward_weights]
    names_code = any(map(is_import_path, rewards)) or bool(credit_functions(config.algorithm))
    if not (files or names_code or config.environment.environment is not None):
        return None
    has_tokenizer = any((hf_dir / name).exists() for name in TOKENIZER_FILES)
    if not sources or not has_tokenizer or not all(Path(file).exists() for file in files):
        return "Labels and your functions are not checked: prompts or tokenizer are not on this machine."
    foundation = read_foundation(config)
    data = open_run_data(replace(config, run=replace(config.run, eval_num_prompts=0)), foundation)
    prompts = data.first_prompts
    verified = scored_by_verifiers(prompts)
    with ExitStack() as stack:
        # no `open_pool`: a plan may be made where no sandbox for programs can be had
        targets = reward_functions(config.data, named_rm_types(verified, config.data))
        pool = stack.enter_context(WorkerPool(targets, size=1, timeout=config.data.reward_timeout))
        pool.wait_ready()
        check_labels(pool, verified, config.data)
        environments = None
        if environments_of(prompts, config.environment):
            environments = stack.enter_context(EnvironmentPool(config.environment))
        try_user_code(config, foundation.max_context, data, pool, environments, trains=True, logs=None)
    return None
