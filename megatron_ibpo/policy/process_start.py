"""The first code that a trainer's process runs."""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from megatron_ibpo.config import Config
from megatron_ibpo.policy.process_environment import set_environment


def trainer_rank(config: Config, checkpoint: Path | None) -> Any:
    """Return a `rank.TrainerRank`, after setting the environment, which libraries read when they are
    imported.

    Without CUDA the stand-ins come before Megatron, which would import torch.compile's machinery for nothing:
    two seconds.
    """
    notes = set_environment(os.environ, colocate=config.rollout.colocate)
    hide_tilelang()
    hush_megatron()
    from megatron_ibpo.policy import cpu

    cpu.activate()
    from megatron_ibpo.policy.rank import TrainerRank

    rank = TrainerRank(config, checkpoint)
    rank.notes = (*notes, *rank.notes)
    return rank


def hide_tilelang() -> None:
    """Hide TileLang from flash-linear-attention unless it is to be used: if it finds TileLang it imports all
    of TVM, even if FLA_TILELANG is 0 (0.6.0, `ops/utils/sinkhorn`)."""
    if os.environ["FLA_TILELANG"] == "0":
        sys.modules.setdefault("tilelang", None)  # type: ignore[arg-type]


def hush_megatron() -> None:
    """Drop warnings of megatron-core and of torch's collectives, which are true, many, and nothing that a
    user can act on. Call it before importing them."""
    for module in (r"megatron\.", r"torch\.distributed\.", r"torch\.jit\."):
        warnings.filterwarnings("ignore", module=module)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
