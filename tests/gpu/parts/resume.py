"""A checkpoint is resumed in another process: is the next step the one that would have come?

On a GPU sums have no fixed order, so the same step from the same state differs a little every time. The
control is that difference without a resume: the step is taken, the state put back, and the step taken again.
"""

import time
from contextlib import contextmanager
from pathlib import Path

import torch
from job import apart, check
from training import set_up, start_policy

SAMPLED = 1000  # elements of each tensor that are compared
MOVE_BOUND = 0.1  # sums may be taken in another order; without the optimizer's state a step differs by 1


def run(job):
    _, config, sequences = set_up(job, "qwen3")
    first, before, after = apart(save_and_go_on, config, sequences, job.scratch / "checkpoints")
    job.note(**first)
    second, loaded, again = apart(resume, config, sequences, first["checkpoint"])
    difference = step_difference(before, after, again)
    is_equal = torch.equal(before, loaded)
    job.note(
        load_seconds=second["load_seconds"], weights_equal=is_equal, step_difference=difference,
        grad_norms=[first["grad_norm"], second["grad_norm"]],
        summary=f"saved in {first['save_seconds']:.1f} s, the next step differs by {difference:.1e} "
        f"(without a resume by {first['control_difference']:.1e})",
    )  # fmt: skip
    bound = MOVE_BOUND if job.on_gpu else 0.0
    check(is_equal, "the weights loaded are not those saved")
    check(difference <= bound, f"the step after differs by {difference}")
    check(first["control_difference"] <= bound, f"the same step differs by {first['control_difference']}")


def step_difference(before, after, again):
    """The distance between two results of a step, relative to the step's length."""
    return float((after - again).norm() / (after - before).norm())


def save_and_go_on(config, sequences, directory):
    from megatron_ibpo.weights.formats.run_state import Keep, step_name

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
    with put_back(rank.trainer):
        control_norm = policy.update(sequences)["grad_norm"]
        control = sample(rank.export)
    grad_norm, after = policy.update(sequences)["grad_norm"], sample(rank.export)
    numbers = {
        "grad_norm": grad_norm, "checkpoint": str(checkpoint),
        "control_grad_norm": control_norm, "control_difference": step_difference(before, after, control),
        "checkpoint_bytes": sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()),
        "blocked_seconds": blocked, "save_seconds": seconds,
    }  # fmt: skip
    return numbers, before, after


@contextmanager
def put_back(trainer):
    """The trainer's weights, optimizer state and place in the schedule are what they were before."""
    steps = trainer.scheduler.num_steps
    parts = trainer.optimizer.chained_optimizers
    tensors = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
    tensors += [parameter for part in parts for parameter in part.get_parameters()]
    tensors += [
        value
        for part in parts
        for state in part.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    copies = [tensor.detach().clone() for tensor in tensors]
    yield
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
    trainer.scheduler.num_steps = steps


def resume(config, sequences, checkpoint):
    started = time.perf_counter()
    policy, rank = start_policy(config, Path(checkpoint))
    seconds = time.perf_counter() - started
    before = sample(rank.export)
    numbers = {"grad_norm": policy.update(sequences)["grad_norm"], "load_seconds": seconds}
    return numbers, before, sample(rank.export)


def sample(export):
    return torch.cat([tensor.flatten()[:SAMPLED].float().cpu() for _, tensor in export])
