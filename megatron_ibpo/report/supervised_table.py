"""The table at the end of a supervised run."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from megatron_ibpo.report.summary import HELD_OUT_LOSS

_BEFORE_AND_AFTER = {
    "loss": ("training loss per token", "step"),
    HELD_OUT_LOSS: ("held-out loss per token", "evaluation"),
    "grad_norm": ("gradient norm", "step"),
    "entropy": ("entropy per token", "step"),
}
"""Metric → its display name, and the kind of the rows that have it."""
_TOTALS = {"loss_tokens": "tokens in the loss", "tokens": "tokens, prompts included"}


def supervised_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of first and last values, and of totals over all steps.

    Args:
        rows: metrics.jsonl. Measures without values are left out.
    """
    table = Table("", show_edge=False, pad_edge=False)
    for column in ("first", "last"):
        table.add_column(column, justify="right")
    for metric, (name, kind) in _BEFORE_AND_AFTER.items():
        values = [row[metric] for row in rows if row["kind"] == kind and metric in row]
        if values:
            table.add_row(name, f"{values[0]:.4f}", f"{values[-1]:.4f}")
    steps = [row for row in rows if row["kind"] == "step"]
    if steps:
        table.add_section()
    if steps and "epoch" in steps[-1]:
        table.add_row("passes over the rows", "", f"{steps[-1]['epoch']:.2f}")
    for metric, name in _TOTALS.items():
        if steps:
            table.add_row(name, "", f"{sum(row[metric] for row in steps):,}")
    return table
