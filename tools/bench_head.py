"""The LM head's forward and backward pass with rows masked, beside all rows, on a CPU.

    python tools/bench_head.py --save tools/results/bench_head_cpu.json

Ways: the product of all rows, then the loss of the logits (as trainers did until 28 November 2026); the
product of response rows (the default); the fused head. They take turns. Recorded are seconds of one
processor and the operations of the products, counted.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import bench
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.loss import (
    LossRows,
    head_policy_loss,
    linear_policy_loss,
    make_objective,
    policy_loss,
)

SEQUENCES = 8
CASES = {
    "all rows": (0.0, 0.0),
    "half masked": (0.5, 0.0),
    "half masked, half of the rest without a gradient": (0.5, 0.5),
}
"""Share of each sequence's rows that are its prompt, and of the others that have weight 0."""
IN_PLACE = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}


@dataclass
class Arguments(bench.Saving):
    rows: int = 256
    hidden: int = 512
    vocabulary: int = 8192
    rounds: int = 3


def loss_of_all_logits(hidden_NH: Tensor, weight_VH: Tensor, rows: LossRows, objective: Any) -> Any:
    return policy_loss(hidden_NH @ weight_VH.t(), rows, objective, inplace=True)


WAYS: dict[str, Callable[..., Any]] = {
    "all logits": loss_of_all_logits,
    "response rows": head_policy_loss,
    "fused": partial(linear_policy_loss, chunk=64),
}


def rows_of(arguments: Arguments, masked: float, without_gradient: float) -> LossRows:
    length, vocabulary = arguments.rows // SEQUENCES, arguments.vocabulary
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(length)
    return LossRows(
        targets_N=torch.randint(vocabulary, (arguments.rows,), generator=generator),
        response_mask_N=(places >= masked * length).float().repeat(SEQUENCES),
        cu_seqlens=torch.arange(SEQUENCES + 1, dtype=torch.int32) * length,
        advantages=torch.tensor([1.0, -0.5]).repeat(SEQUENCES // 2),
        token_weights_N=(places % 8 >= 8 * without_gradient).float().repeat(SEQUENCES),
    )


def measure(way: str, rows: LossRows, hidden_NH: Tensor, weight_VH: Tensor) -> float:
    hidden_NH, weight_VH = (own.detach().requires_grad_() for own in (hidden_NH, weight_VH))
    gc.collect()
    started = time.process_time()
    loss, _ = WAYS[way](hidden_NH, weight_VH, rows, make_objective("gspo"))
    loss.backward()
    return time.process_time() - started


def count_operations(way: str, rows: LossRows, hidden_NH: Tensor, weight_VH: Tensor) -> int:
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        measure(way, rows, hidden_NH, weight_VH)
    return int(counter.get_total_flops())


def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    hidden_NH = torch.randn(arguments.rows, arguments.hidden, generator=generator)
    weight_VH = torch.randn(arguments.vocabulary, arguments.hidden, generator=generator) * 0.02
    kinds = [(case, way) for case in CASES for way in WAYS]
    rows = {case: rows_of(arguments, *shares) for case, shares in CASES.items()}
    operations = {kind: count_operations(kind[1], rows[kind[0]], hidden_NH, weight_VH) for kind in kinds}
    found: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    for case, way in bench.in_turns(kinds, arguments.rounds):
        found[case, way].append(measure(way, rows[case], hidden_NH, weight_VH))
    table = []
    for (case, way), seconds in found.items():
        row = {
            "case": case, "way": way, "operations": operations[case, way],
            "seconds_median": statistics.median(seconds), "seconds_least": min(seconds),
            "seconds_most": max(seconds),
        }  # fmt: skip
        table.append(row)
        print(f"{case:50} {way:14} {row['seconds_median']:6.2f} s")
    shape = {"rows": arguments.rows, "hidden": arguments.hidden, "vocabulary": arguments.vocabulary}
    bench.save(arguments.save, {"shape": shape | {"dtype": "float32"}, "rows": table}, "torch")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
