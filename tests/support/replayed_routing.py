from support import planned
from support.layouts import layout
from support.trainers import EPSILON, LR, close_trainer, config_for, open_trainer, weights_of


def replaying(parallel=None, *, rollout=True, own=False, recompute="none", overrides=(), **settings):
    config = config_for(parallel or layout(), use_routing_replay=own, **settings)
    config.rollout.use_rollout_routing_replay = rollout
    config.model.recompute_granularity = recompute
    config.model.model_override = tuple(overrides)
    return config


def updated(world, hf_dir, config, rows):
    trainer, export, _ = open_trainer(world, hf_dir, config)
    before = weights_of(export)
    metrics = planned.update(trainer, rows)
    after = weights_of(export)
    logprobs = planned.logprobs(trainer, rows)
    close_trainer()
    return metrics, {name: (before[name] - after[name]) * (EPSILON / LR) for name in before}, logprobs


def all_updated(world, hf_dir, configs, rows):
    return [updated(world, hf_dir, config, rows) for config in configs]
