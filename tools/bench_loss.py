"""GSPO's loss, forward and backward: this project's compared with every installed peer.

    python tools/bench_loss.py --save tools/results/bench_loss_h200.json           # on a GPU
    python tools/bench_loss.py --device cpu --save tools/results/bench_loss_cpu.json
    python tools/bench_loss.py --predict --save tools/results/bench_loss_predicted.json

On a GPU: errors against fp64 on a small batch, then milliseconds, peak memory and the share of the copy
bandwidth measured in the same run, for the operator alone. On a CPU, under Triton's interpreter, errors only.
--predict measures nothing: it writes floors from counted bytes and operations, marked as predictions.
requirements/bench_loss.txt names the peers; one that is missing or fails is listed with its reason.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import bench

from megatron_ibpo.basics.entry_point import run_tool

BYTES, HIDDEN, SEQUENCE_ROWS, CHUNK_ROWS = 2, 2048, 1024, 4096
COPY_BANDWIDTH, MATMUL_FLOPS = 4.3e12, 790e12
"""Rates of an earlier H200, used only for predictions."""
SHARE = 0.85
"""Share of the copy bandwidth that the predictions assume. The product's rate is a measured one already."""


@dataclass
class Arguments(bench.Saving):
    device: Literal["cuda", "cpu"] = "cuda"
    predict: bool = False
    """Write predictions for an H200 and measure nothing."""
    only: tuple[str, ...] = ()
    """Names of contestants; empty: all."""
    tokens: tuple[int, ...] = (4096, 8192, 32768)
    vocabularies: tuple[int, ...] = (18992, 75968, 151936)
    masked: tuple[float, ...] = (0.0, 0.5)
    repeats: int = 10


@dataclass(frozen=True)
class Workload:
    """A workload in bf16 on a GPU: sequences of 1024 rows, with a share of prompt rows."""

    tokens: int
    vocabulary: int
    masked: float

    @property
    def response_rows(self) -> int:
        sequences = max(1, self.tokens // SEQUENCE_ROWS)
        length = self.tokens // sequences
        return sequences * (length - int(length * self.masked))


def workloads(arguments: Arguments) -> Iterator[Workload]:
    for shape in product(arguments.tokens, arguments.vocabularies, arguments.masked):
        yield Workload(*shape)


def logits_seconds(work: Workload, bandwidth: float, _: float) -> float:
    """Return the floor with the logits given: response rows are read twice and written once, others
    written."""
    rows = work.response_rows
    return BYTES * work.vocabulary * (3 * rows + (work.tokens - rows)) / bandwidth


def sets_seconds(work: Workload, bandwidth: float, _: float) -> float:
    """Return the floor with the logits given and response rows restricted to a few ids: all are written."""
    return BYTES * work.vocabulary * work.tokens / bandwidth


def head_seconds(work: Workload, bandwidth: float, flops: float) -> float:
    """Return the floor with the head fused: three products, three passes over the logits of response rows,
    and one read and write of the fp32 weight gradient per chunk."""
    rows = work.response_rows
    weight = 8 * work.vocabulary * HIDDEN * -(-rows // CHUNK_ROWS)
    passes = 3 * BYTES * rows * work.vocabulary
    return 6 * rows * HIDDEN * work.vocabulary / flops + (passes + weight) / bandwidth


def predictions(arguments: Arguments) -> dict[str, Any]:
    rows = []
    for work in workloads(arguments):
        for name, seconds in {"ours": logits_seconds, "ours, head fused": head_seconds}.items():
            floor = seconds(work, COPY_BANDWIDTH, MATMUL_FLOPS)
            predicted = seconds(work, SHARE * COPY_BANDWIDTH, MATMUL_FLOPS)
            milliseconds = {"floor_ms": round(floor * 1e3, 3), "predicted_ms": round(predicted * 1e3, 3)}
            rows.append({"contestant": name, **dataclasses.asdict(work), **milliseconds})
    return {
        "kind": "prediction: nothing here was measured",
        "basis": {"copy_bytes_per_s": COPY_BANDWIDTH, "matmul_flops_per_s": MATMUL_FLOPS, "share": SHARE},
        "hidden": HIDDEN,
        "rows": rows,
    }


# ------------------------------------------------------------------------------------------ correctness


def errors(arguments: Arguments) -> list[dict[str, Any]]:
    """Return the errors of loss and gradients of every contestant against eager fp64 on the same (rounded)
    numbers."""
    import torch
    from loss_contestants import CONTESTANTS, make_batch

    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    for fused_head in (False, True):
        batch = make_batch(4, 64, 4099, 128, 0.25, dtype, device, fused_head)
        exact: dict[tuple[str, bool], tuple[float, list[Any]]] = {}
        for name, contestant in CONTESTANTS.items():
            if contestant.fused_head != fused_head or (arguments.only and name not in arguments.only):
                continue
            if device.type == "cpu" and not contestant.on_cpu:
                continue
            if (case := (contestant.variant, contestant.has_sets)) not in exact:
                exact[case] = _exact(batch, contestant)
            row = {"contestant": name, "dtype": str(dtype).removeprefix("torch.")}
            rows.append(row | _attempt(partial(_error, contestant, batch, exact[case])))
            _say(rows[-1])
    return rows


def _exact(batch: Any, contestant: Any) -> tuple[float, list[Any]]:
    """Return the loss that a contestant computes, and its gradients, in fp64: GSPO's by eager torch, another
    variant's by its definition."""
    import torch
    from loss_contestants import eager_gspo, ours_variant, set_ids

    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    doubled = dataclasses.replace(
        batch, **{k: v.double() for k, v in fields.items() if v is not None and v.is_floating_point()}
    )
    if contestant.variant != "gspo":
        prepared = ours_variant(doubled, contestant.variant, "torch")
        loss = prepared.forward()
        loss.backward()
        return loss.item(), list(prepared.gradients())
    if doubled.logits_SLV is not None:
        leaves = [doubled.logits_SLV.flatten(0, 1).requires_grad_()]
        logits = leaves[0]
    else:
        leaves = [doubled.hidden_SLH.requires_grad_(), doubled.weight_VH.requires_grad_()]
        logits = leaves[0].flatten(0, 1) @ leaves[1].t()
    targets = batch.targets_SL.flatten()[:, None]
    if contestant.has_sets:
        ids = set_ids(batch, logits.shape[-1])
        logits, targets = logits.gather(1, ids), torch.zeros_like(targets)
    logprobs = logits.log_softmax(-1).gather(1, targets).view(batch.targets_SL.shape)
    loss = eager_gspo(logprobs, doubled)
    return loss.item(), list(torch.autograd.grad(loss, leaves))


def _error(contestant: Any, batch: Any, exact: tuple[float, list[Any]]) -> dict[str, Any]:
    prepared = contestant.prepare(batch)
    loss = prepared.forward()
    loss.backward()
    relative = [
        ((ours.double().view(theirs.shape) - theirs).norm() / theirs.norm()).item()
        for ours, theirs in zip(prepared.gradients(), exact[1], strict=True)
    ]
    return {"loss_error": abs(loss.item() - exact[0]), "gradient_errors": relative}


# ----------------------------------------------------------------------------------- times, on GPUs only


def ceilings() -> dict[str, float]:
    """Measure this GPU's copy bandwidth (read and write counted) and bf16 product."""
    import torch

    pair_2N = torch.empty(2, 2**31, dtype=torch.bfloat16, device="cuda")
    copied = pair_2N.numel() * BYTES / _seconds(lambda: pair_2N[0].copy_(pair_2N[1]), 10)
    matrix_a, matrix_b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    flops = 2 * 8192**3 / _seconds(lambda: matrix_a @ matrix_b, 20)
    return {"copy_bytes_per_s": copied, "matmul_flops_per_s": flops}


def times(arguments: Arguments, ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    import torch
    from loss_contestants import CONTESTANTS, make_batch

    for work in workloads(arguments):
        for fused_head in (False, True):
            sequences = max(1, work.tokens // SEQUENCE_ROWS)
            shape = (sequences, work.tokens // sequences, work.vocabulary, HIDDEN, work.masked)
            batch = make_batch(*shape, torch.bfloat16, torch.device("cuda"), fused_head)
            for name, contestant in CONTESTANTS.items():
                if contestant.fused_head != fused_head or (arguments.only and name not in arguments.only):
                    continue
                row = {"contestant": name, **dataclasses.asdict(work)}
                started = time.perf_counter()
                row |= _attempt(partial(_time, contestant, batch, arguments.repeats))
                row["seconds"] = round(time.perf_counter() - started, 1)
                if "total_ms" in row:
                    row["share_of_floor"] = _share(work, contestant, row["total_ms"] / 1e3, ceiling)
                _say(row)
                yield row
                gc.collect()
                torch.cuda.empty_cache()
            del batch


def _time(contestant: Any, batch: Any, repeats: int) -> dict[str, float]:
    """Return medians; peak memory is what forward and backward take in addition."""
    import torch

    torch.compiler.reset()  # each shape is compiled for itself, and none for shapes in general
    prepared = contestant.prepare(batch)
    forward, backward, peaks = [], [], []
    for repeat in range(repeats + 3):
        prepared.restore()
        torch.cuda.synchronize()
        memory_before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        loss = prepared.forward()
        marks[1].record()
        loss.backward()
        marks[2].record()
        torch.cuda.synchronize()
        if repeat >= 3:
            forward.append(marks[0].elapsed_time(marks[1]))
            backward.append(marks[1].elapsed_time(marks[2]))
            peaks.append(torch.cuda.max_memory_allocated() - memory_before)
    totals = [f + b for f, b in zip(forward, backward, strict=True)]
    return {
        "forward_ms": statistics.median(forward),
        "backward_ms": statistics.median(backward),
        "total_ms": statistics.median(totals),
        "total_ms_worst": max(totals),
        "peak_extra_mib": max(peaks) / 2**20,
    }


def _share(work: Workload, contestant: Any, seconds: float, ceiling: dict[str, float]) -> float:
    """Return the share of the rates just measured on this GPU; without the head, of its copy bandwidth."""
    floor = head_seconds if contestant.fused_head else sets_seconds if contestant.has_sets else logits_seconds
    return floor(work, ceiling["copy_bytes_per_s"], ceiling["matmul_flops_per_s"]) / seconds


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    import torch

    durations = []
    for _ in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        durations.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(durations[3:])


# -------------------------------------------------------------------------------------------- the report


def _attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result, or why there is none: a peer that fails must not end the comparison."""
    try:
        return run()
    except ImportError as error:
        return {"missing": f"{error}"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def _say(row: dict[str, Any]) -> None:
    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)


def main(arguments: Arguments) -> None:
    if not arguments.predict:
        bench.save(arguments.save, measure(arguments))
        return
    report = predictions(arguments)
    for row in report["rows"]:
        _say(row)
    bench.write(arguments.save, report)


def measure(arguments: Arguments) -> dict[str, Any]:
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    import torch

    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("no CUDA device: --device cpu compares results, --predict writes predictions")
    report: dict[str, Any] = {
        "what": "the operator alone; whole steps are in tools/results/bench_loop.json",
        "errors": errors(arguments),
    }
    if on_gpu:
        report["ceilings"] = ceilings()
        report["times"] = list(times(arguments, report["ceilings"]))
    return report


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
