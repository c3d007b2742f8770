import time
from pathlib import Path

import torch
from job import apart, check
from training import set_up, start_policy

SAMPLED = 1000  # elements of each tensor that are compared
MOVE_BOUND = 0.1  # sums may be taken in another order; without the optimizer's state a step differs by 1


def run(job):
    _, config, sequences = set_up(job, "qwen3")
    first, *around = apart(save_and_go_on, config, sequences, job.scratch / "checkpoints")
    job.note(**first)
    second, *again = apart(resume, config, sequences, first["checkpoint"])
    difference = float((around[1] - again[1]).norm() / (around[1] - around[0]).norm())
    is_equal = torch.equal(around[0], again[0])
    job.note(
        load_seconds=second["load_seconds"], weights_equal=is_equal, step_difference=difference,
        grad_norms=[first["grad_norm"], second["grad_norm"]],
        summary=f"saved in {first['save_seconds']:.1f} s, the next step differs by {difference:.1e}",
    )  # fmt: skip
    check(is_equal, "the weights loaded are not those saved")
    check(difference <= (MOVE_BOUND if job.on_gpu else 0.0), f"the step after differs by {difference}")


def save_and_go_on(config, sequences, directory):
    from megatron_ibpo.weights.formats.retention import Keep, step_name

    policy, rank = start_policy(config)
    for _ in range(2):
        policy.update(sequences)
    before = sample(rank.export)
    started = time.perf_counter()
    policy.save(directory, 2, {}, Keep(3))
    blocked = time.perf_counter() - started
    policy.saved(wait=True)
    seconds = time.perf_counter() - started
    checkpoint = directory / step_name(2)
    numbers = {
        "grad_norm": policy.update(sequences)["grad_norm"], "checkpoint": str(checkpoint),
        "checkpoint_bytes": sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()),
        "blocked_seconds": blocked, "save_seconds": seconds,
    }  # fmt: skip
    return numbers, before, sample(rank.export)


def resume(config, sequences, checkpoint):
    started = time.perf_counter()
    policy, rank = start_policy(config, Path(checkpoint))
    seconds = time.perf_counter() - started
    before = sample(rank.export)
    numbers = {"grad_norm": policy.update(sequences)["grad_norm"], "load_seconds": seconds}
    return numbers, before, sample(rank.export)


def sample(export):
    return torch.cat([tensor.flatten()[:SAMPLED].float().cpu() for _, tensor in export])
