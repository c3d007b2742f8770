"""Sizes of what a run writes: bytes of a checkpoint and of an export, and how many it keeps at one time."""

from megatron_ibpo.config import Config


def checkpoint_bytes(num_parameters: int, *, bf16: bool) -> int:
    """Return the bytes of one Megatron checkpoint: the weights, fp32 master weights if the weights are bf16,
    and Adam's two fp32 moments."""
    weight = 2 if bf16 else 4
    master = 4 if bf16 else 0
    return num_parameters * (weight + master + 8)


def export_bytes(num_parameters: int, *, bf16: bool) -> int:
    """Return the bytes of one Hugging Face export."""
    return num_parameters * (2 if bf16 else 4)


def kept_at_once(config: Config) -> tuple[int, int]:
    """Return the most (Megatron checkpoints, Hugging Face exports) that a run holds at one time: those it
    keeps, and one more that is written before an older one goes."""
    run = config.run
    # the number of steps per time interval is not known
    interval = 1 if run.save_interval_minutes is not None else run.save_interval or run.num_rollout
    saves = -(-run.num_rollout // interval)
    forever = run.num_rollout // run.keep_checkpoint_every if run.keep_checkpoint_every else 0
    exports = run.num_rollout // run.export_interval if run.export_interval else 0
    return min(saves, run.keep_checkpoints + 1 + forever), exports + 1
