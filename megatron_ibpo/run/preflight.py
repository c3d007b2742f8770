"""Checks before anything large is loaded, and the dry run.

A start passes these checks in the order of this file, each as soon as its inputs exist. A check stands alone:
it raises or returns nothing, and nothing after it depends on it. In the opening of a run, only this file uses
`plan/`.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from megatron_ibpo.config import Config
from megatron_ibpo.data.tokenizer import has_tokenizer, load_tokenizer
from megatron_ibpo.models import ModelShape, read_hf_config
from megatron_ibpo.models.lora import TrainedWeights
from megatron_ibpo.report.run_dir import locked, prepare_run_dir
from megatron_ibpo.report.stages import Forecast
from megatron_ibpo.rewards import check_labels, check_servers
from megatron_ibpo.run.checks import check_run
from megatron_ibpo.run.inputs import Inputs, Judges
from megatron_ibpo.run.processes import Backend
from megatron_ibpo.run.resolve import ResolvedConfig
from megatron_ibpo.run.run_data import scored_by_verifiers
from megatron_ibpo.run.user_code import check_user_code, try_user_code
from megatron_ibpo.weights.formats.checkpoint_files import has_weights
from megatron_ibpo.weights.formats.run_state import kept_bytes


def check_model(config: Config, shape: ModelShape, backend: Backend) -> None:
    """Refuse what cannot work whatever the data are, in milliseconds: a layout, a device's name.

    Raises:
        ValueError: what is wrong, and what to change.
    """
    for check in (backend.check, check_hardware):
        check(config, shape)


def check_inputs(inputs: Inputs, stack: ExitStack) -> None:
    """Refuse inputs that cannot be used; lock the run's directory, and fill it once its disk has room.

    Args:
        stack: unlocks the directory.

    Raises:
        ValueError, OSError: says which, where, and what to do.
    """
    for check in (_check_weights, partial(_make_directory, stack), _check_servers):
        check(inputs)


def check_judges(inputs: Inputs, judges: Judges) -> None:
    """Refuse labels, environments and functions of the user that do not work, by trying them once.

    Raises:
        ValueError, OSError: says which, where, and what to do.
    """
    for check in (_check_labels, _check_environments, _try_user_code):
        check(inputs, judges)


def preflight(
    resolved: ResolvedConfig, weights: TrainedWeights, memory: Mapping[int, int]
) -> Callable[[str], Forecast]:
    """Refuse a run for which a node's main memory is too small.

    Args:
        memory: node, by its index in the placement → its bytes of main memory; empty: not checked.

    Returns:
        a function that predicts the seconds of a step on a device with this name.

    Raises:
        ValueError: what is missing, where, and what to change.
    """
    from megatron_ibpo.plan.node_memory import check_main_memory  # these import torch
    from megatron_ibpo.plan.prediction import forecast

    config, shape = resolved.config, resolved.shape
    if memory:
        check_main_memory(
            config,
            shape,
            resolved.overrides,
            resolved.engine_needs,
            weights,
            resolved.placement,
            memory,
        )
    return partial(forecast, config, shape, resolved.world_size)


def check_present_files(hf_dir: Path) -> None:
    """Refuse weights or a tokenizer that a run could not start with. A plan needs neither: only files that
    are there are checked.

    Raises:
        ValueError: as at the start of a run.
    """
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


# ---------------------------------------------------------------------------------- what is checked


def check_hardware(config: Config, shape: ModelShape) -> None:
    """Raise ValueError if --dry-run-hardware names no hardware."""
    if config.run.dry_run_hardware is not None:
        from megatron_ibpo.plan.hardware import read_hardware

        read_hardware(config.run.dry_run_hardware)


def _check_weights(inputs: Inputs) -> None:
    from megatron_ibpo.weights.formats.hugging_face import check_checkpoint  # imports torch

    check_checkpoint(inputs.foundation.hf_dir, inputs.foundation.shape)


def _make_directory(stack: ExitStack, inputs: Inputs) -> None:
    stack.enter_context(locked(inputs.config.run.run_dir))
    needed = disk_bytes(inputs.config, inputs.weights) if inputs.trains else 0
    prepare_run_dir(inputs.config, checkpoint_bytes=needed)


def disk_bytes(config: Config, weights: TrainedWeights) -> int:
    """Return the most bytes that a run keeps on disk at one time."""
    return kept_bytes(config, parameters=weights.parameters, trained=weights.trained)


def _check_servers(inputs: Inputs) -> None:
    check_servers(inputs.config.data, inputs.rm_types)


def _check_labels(inputs: Inputs, judges: Judges) -> None:
    check_labels(judges.pool, scored_by_verifiers(inputs.data.first_prompts), inputs.config.data)


def _check_environments(inputs: Inputs, judges: Judges) -> None:
    if judges.environments is not None:
        for target in inputs.targets:
            judges.environments.check(target)


def _try_user_code(inputs: Inputs, judges: Judges) -> None:
    config, context = inputs.config, inputs.foundation.max_context
    logs, trains = config.run.run_dir / "logs", inputs.trains
    try_user_code(config, context, inputs.data, judges.pool, judges.environments, trains=trains, logs=logs)
