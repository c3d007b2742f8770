"""A trainer saves and goes on; another process resumes from there and must do the same."""

import time
from pathlib import Path
from typing import Any

import torch
from job import Job, check
from processes import apart
from torch import Tensor
from training import set_up, start_policy

from megatron_ibpo.config import Config

SAMPLED = 1000  # elements of each tensor that are compared
MOVE_BOUND = 0.1  # sums may be taken in another order; without the optimizer's state a step differs by 1


def run(job: Job) -> None:
    _, config, sequences = set_up(job, "qwen3")
    first = apart(save_and_go_on, config, sequences, job.scratch / "checkpoints")
    job.note(**{name: value for name, value in first.items() if not isinstance(value, Tensor)})
    second = apart(resume, config, sequences, first["checkpoint"])
    moved = (first["after"] - first["before"]).norm()
    difference = float((first["after"] - second["after"]).norm() / moved)
    job.note(
        load_seconds=second["load_seconds"], weights_equal=torch.equal(first["before"], second["before"]),
        step_difference=difference, grad_norms=[first["grad_norm"], second["grad_norm"]],
        summary=f"saved in {first['save_seconds']:.1f} s, the next step differs by {difference:.1e}",
    )  # fmt: skip
    check(torch.equal(first["before"], second["before"]), "the weights loaded are not those saved")
    check(difference <= (MOVE_BOUND if job.on_gpu else 0.0), f"the step after differs by {difference}")


def save_and_go_on(config: Config, sequences: list[Any], directory: Path) -> dict[str, Any]:
    from megatron_ibpo.weights.formats.retention import Keep, step_name

    policy, ranks = start_policy(config)
    for _ in range(2):
        policy.update(sequences)
    before = sample(ranks.rank.export)
    started = time.perf_counter()
    policy.save(directory, 2, {}, Keep(3))
    blocked = time.perf_counter() - started
    policy.saved(wait=True)
    seconds = time.perf_counter() - started
    metrics = policy.update(sequences)
    checkpoint = directory / step_name(2)
    return {
        "before": before, "after": sample(ranks.rank.export), "grad_norm": metrics["grad_norm"],
        "checkpoint": str(checkpoint),
        "checkpoint_bytes": sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()),
        "blocked_seconds": blocked, "save_seconds": seconds,
    }  # fmt: skip


def resume(config: Config, sequences: list[Any], checkpoint: str) -> dict[str, Any]:
    started = time.perf_counter()
    policy, ranks = start_policy(config, Path(checkpoint))
    seconds = time.perf_counter() - started
    before = sample(ranks.rank.export)
    norm = policy.update(sequences)["grad_norm"]
    return {"before": before, "after": sample(ranks.rank.export), "grad_norm": norm, "load_seconds": seconds}


def sample(export: Any) -> Tensor:
    return torch.cat([tensor.flatten()[:SAMPLED].float().cpu() for _, tensor in export])
