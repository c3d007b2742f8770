"""Whether a run has room: disk, main memory and time, before anything large is loaded; and the dry run.

Alone in the opening of a run it knows `plan/`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from megatron_ibpo.config import Config
from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.data.tokenizer import has_tokenizer, load_tokenizer
from megatron_ibpo.models import ModelShape, read_hf_config
from megatron_ibpo.models.lora import adapter_elements
from megatron_ibpo.report.stages import Forecast
from megatron_ibpo.run.checks import check_run
from megatron_ibpo.run.resolve import ResolvedConfig
from megatron_ibpo.run.user_code import check_user_code
from megatron_ibpo.weights.formats.retention import kept_bytes
from megatron_ibpo.weights.formats.weight_files import has_weights


def preflight(
    resolved: ResolvedConfig, elements: Mapping[str, int], memory: Mapping[int, int]
) -> Callable[[str], Forecast]:
    """Refuse a run for which a node's main memory is too small.

    Args:
        elements: trained tensor, by its name in the checkpoint → number of elements.
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
        check_main_memory(config, shape, elements, resolved.placement, memory)
    return partial(forecast, config, shape, resolved.world_size)


def check_hardware(run: RunConfig) -> None:
    """Raise ValueError if --dry-run-hardware names no hardware."""
    if run.dry_run_hardware is not None:
        from megatron_ibpo.plan.machine import find_machine  # imports torch

        find_machine(run.dry_run_hardware)


def disk_bytes(config: Config, shape: ModelShape, parameters: int) -> int:
    """Return the most bytes that a run keeps on disk at one time."""
    trained = parameters if config.model.lora_rank is None else adapter_elements(config.model, shape)
    return kept_bytes(config, parameters=parameters, trained=trained)


def check_present_files(hf_dir: Path) -> None:
    """Refuse weights or a tokenizer that a run could not start with. A plan needs neither: only files that
    are there are checked.

    Raises:
        ValueError: as at the start of a run.
    """
    from megatron_ibpo.weights.formats.convert import check_checkpoint  # imports torch

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
