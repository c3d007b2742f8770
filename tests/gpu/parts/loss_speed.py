"""The loss beside its peers: `tools/bench_loss.py` at P1 (logits given) and P2 (LM head fused), H = 2048."""

import math
import os

from job import check

NAMED = ("ours", "ours, sampling sets", "Liger sequence level", "torch.compile fp32", "ours, head fused")
"""Contestants that the summary names."""


def run(job):
    if not job.on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    import bench_loss

    arguments = bench_loss.Arguments(
        device=job.device, only=() if job.on_gpu else ("ours, torch", "ours, sampling sets", "ours, sapo"),
        tokens=(32768, 8192) if job.is_large else (4096,), vocabularies=(151936,),
        masked=(0.0,) if job.quick else (0.0, 0.5), repeats=5 if job.quick else 10,
    )  # fmt: skip
    errors = bench_loss.errors(arguments)
    job.note(errors=errors)
    if job.on_gpu:
        ceilings = bench_loss.ceilings()
        job.note(ceilings=ceilings, predicted=bench_loss.predictions(arguments)["rows"])
        rows = []
        for row in bench_loss.times(arguments, ceilings):
            rows.append(row)
            job.note(times=rows)
        most = max(row["tokens"] for row in rows)
        largest = [row for row in rows if row["tokens"] == most and not row["masked"]]
        times = {row["contestant"]: row.get("total_ms", math.nan) for row in largest}
        named = (name for name in NAMED if name in times)
        job.note(summary=f"{most} rows: " + ", ".join(f"{name} {times[name]:.2f} ms" for name in named))
    bound = 2**-6 if job.on_gpu else 1e-5
    for row in errors:
        if row["contestant"].startswith("ours"):  # the peers' are only noted
            worst = [*row.get("gradient_errors", [math.inf]), row.get("loss_error", math.inf)]
            check(max(worst) <= bound, f"{row}")
