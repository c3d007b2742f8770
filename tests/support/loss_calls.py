"""The entry points of the loss called with one flat dictionary: rows, objective and layout by their names."""

from dataclasses import fields
from typing import Any

from torch import Tensor

from megatron_ibpo.loss import (
    LossRows,
    LossStats,
    head_policy_loss,
    linear_policy_loss,
    make_objective,
    policy_loss,
)

ROWS = {field.name for field in fields(LossRows)}
OBJECTIVE = {"variant", "params", "aggregation", "kl", "kl_coef", "backend"}


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    """`rows` and `objective` made of what is theirs, the variant gspo unless named; the rest as it is."""
    rows = LossRows(**{name: value for name, value in given.items() if name in ROWS})
    chosen = {"variant": "gspo"} | {name: value for name, value in given.items() if name in OBJECTIVE}
    rest = {name: value for name, value in given.items() if name not in ROWS | OBJECTIVE}
    return {"rows": rows, "objective": make_objective(**chosen), **rest}


def loss_of_logits(**given: Any) -> tuple[Tensor, LossStats]:
    return policy_loss(**arguments(given))


def loss_of_head(**given: Any) -> tuple[Tensor, LossStats]:
    return head_policy_loss(**arguments(given))


def loss_of_hidden(**given: Any) -> tuple[Tensor, LossStats]:
    return linear_policy_loss(**arguments(given))
