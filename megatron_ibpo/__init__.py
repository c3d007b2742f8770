"""Reinforcement learning of reasoning models with IBPO on Megatron-core and vLLM.

The names of `__all__` are imported from their rooms when they are first used, so that importing the package
takes no time and needs no library.
"""

import importlib
from typing import Any

__version__ = "0.3.0"

_ROOMS = {
    "basics.records": ("Correction", "Group", "Prompt", "Sample", "SampleRequest", "TrainSequence"),
    "config": ("Config", "ConfigError", "DataConfig", "RolloutConfig"),
    "credit": (
        "CreditContext", "FollowUp", "Judgement", "Operator", "TokenFactors", "Vocabulary", "assign_credit",
        "credit_of",
    ),
    "edit_distance": ("batch_distance", "distance", "opcodes", "rewrite_test", "unmodified_mask"),
    "engines": ("Engine",),
    "loss": ("LossRows", "Parameter", "Variant", "make_objective", "policy_loss"),
    "rewards": ("LabelError", "ResponseError", "Score", "open_verifier"),
    "run.settings": ("load_recipe", "parse_config"),
    "run.steps": ("OpenRun", "Step", "open_run"),
}  # fmt: skip
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
__all__ = sorted(_ROOM_OF)


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOM_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
