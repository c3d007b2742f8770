"""Limits of the lean engine: settings that it does not support. Importing this loads no torch."""

from megatron_ibpo.config import Config
from megatron_ibpo.config.config_error import broken


def lean_problems(config: Config, *, trains: bool) -> list[str]:
    """Return what a run in one process does not support, one line each.

    Args:
        trains: False for an evaluation, which does not train.
    """
    rollout, cluster = config.rollout, config.cluster
    rules = {
        ": only for runs that train; evaluate with vllm": not trains,
        " with --max-staleness: one process cannot sample while it trains": (rollout.max_staleness > 0),
        " with --num-trainers: one process trains": (cluster.num_trainers or 1) > 1,
        " with --ray-address: it uses no Ray": cluster.ray_address is not None,
        " with --vllm-arg: it uses no vLLM": bool(rollout.vllm_arg),
        " with --use-rollout-routing-replay: it samples dense models only": (
            rollout.use_rollout_routing_replay
        ),
        " with --load-debug-rollout-data: a replay samples nothing": (
            config.run.load_debug_rollout_data is not None
        ),
    }
    return [f"--rollout-backend lean{problem}" for problem in broken(rules)]
