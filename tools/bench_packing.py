"""Balance of a step's sequences over data-parallel ranks, by the operations that each rank computes.

    python tools/bench_packing.py --save tools/results/bench_packing.json

Planned, not timed: operations of a forward pass by the model's shape, lengths drawn from a long-tailed
(log-normal) distribution and truncated at the context. An optimizer step ends when the fullest rank has
finished: `rank` is the most that a rank computes over the mean of all. Ranks that share experts wait for each
other in every micro-batch. For them `turn` counts: the sum over micro-batches of the most that a rank
computes in each, over that mean. 1 is best for both.

"before" dealt by length back and forth, and opened a micro-batch when the last had no room.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import bench
import numpy as np

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.models import forward_flops, read_hf_config
from megatron_ibpo.policy.planning import Cost, plan_micro_batches

MODELS = Path(__file__).resolve().parents[1] / "examples/models"
Plan = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Case:
    model: str
    ranks: int
    sequences: int
    context: int
    """Context length, and tokens of a micro-batch."""
    median: int = 3000
    spread: float = 1.0
    """Standard deviation of a length's logarithm."""


CASES = (
    Case("qwen3_32b", 4, 512, 32768),
    Case("qwen3_32b", 8, 512, 32768),
    Case("qwen3_32b", 8, 512, 16384),
    Case("qwen3_next_80b_a3b", 8, 512, 32768),
    Case("qwen3_next_80b_a3b", 16, 512, 32768),
    Case("qwen3_next_80b_a3b", 16, 2048, 32768),
)


@dataclass
class Arguments(bench.Saving):
    draws: int = 50
    """Steps drawn per case."""


@dataclass(frozen=True)
class Balance:
    """Means over the draws."""

    rank: float
    rank_worst: float
    """Largest value of all draws."""
    turn: float
    micro_batches: float
    plan_ms: float


def before(lengths: Sequence[int], num_ranks: int, max_tokens: int, _: Cost) -> Plan:
    """Plan as before sequences had a cost."""
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    rooms = [0] * num_ranks
    for first in range(0, len(by_length), num_ranks):
        row = by_length[first : first + num_ranks]
        seats = range(num_ranks) if (first // num_ranks) % 2 == 0 else reversed(range(num_ranks))
        for rank, index in zip(seats, row, strict=False):
            if not plan[rank] or lengths[index] > rooms[rank]:
                plan[rank].append([])
                rooms[rank] = max_tokens
            plan[rank][-1].append(index)
            rooms[rank] -= lengths[index]
    most = max(len(batches) for batches in plan)
    return [[*batches, *([] for _ in range(most - len(batches)))] for batches in plan]


def balance(case: Case, method: object, draws: int) -> Balance:
    """Return the balance of `before` or `plan_micro_batches`, over the same draws."""
    assert callable(method)
    cost = partial(forward_flops, read_hf_config(MODELS / case.model))
    ranks, turns, counts, seconds = [], [], [], []
    for seed in range(draws):
        drawn = np.random.default_rng(seed).lognormal(np.log(case.median), case.spread, case.sequences)
        lengths = drawn.clip(100, case.context).astype(int).tolist()
        started = time.perf_counter()
        plan = method(lengths, case.ranks, case.context, cost)
        seconds.append(time.perf_counter() - started)
        flops = np.array([[sum(cost(lengths[i]) for i in batch) for batch in batches] for batches in plan])
        mean = flops.sum() / case.ranks
        ranks.append(flops.sum(1).max() / mean)
        turns.append(flops.max(0).sum() / mean)
        counts.append(flops.shape[1])
    means = [statistics.fmean(values) for values in (ranks, turns, counts, seconds)]
    return Balance(
        rank=round(means[0], 4),
        rank_worst=round(max(ranks), 4),
        turn=round(means[1], 4),
        micro_batches=round(means[2], 2),
        plan_ms=round(1000 * means[3], 2),
    )


def main(arguments: Arguments) -> None:
    rows = []
    for case in CASES:
        found = {
            "before": balance(case, before, arguments.draws),
            "now": balance(case, plan_micro_batches, arguments.draws),
        }
        rows.append({"case": asdict(case), **{name: asdict(own) for name, own in found.items()}})
        print(f"{case.model}, {case.sequences} sequences of up to {case.context} on {case.ranks} ranks")
        for name, own in found.items():
            print(
                f"  {name:7} rank {own.rank:.3f} (worst {own.rank_worst:.3f})  turn {own.turn:.3f}  "
                f"{own.micro_batches:.1f} micro-batches  planned in {own.plan_ms:.1f} ms"
            )
    bench.save(arguments.save, {"draws": arguments.draws, "rows": rows})


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
