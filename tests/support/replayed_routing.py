"""Trains with routing that is replayed, and returns what came of it."""

from __future__ import annotations

from support import planned
from support.layouts import layout
from support.trainers import EPSILON, LR, close_trainer, config_for, open_trainer


def replaying(parallel=None, *, rollout=True, own=False, recompute="none", overrides=(), **settings):
    config = config_for(parallel or layout(), use_routing_replay=own, **settings)
    config.rollout.use_rollout_routing_replay = rollout
    config.model.recompute_granularity = recompute
    config.model.model_override = tuple(overrides)
    return config


def weights(export):
    """Return them by name, on the first rank, which alone is given them."""
    return {name: tensor.clone() for name, tensor in export if tensor is not None}


def moved(export, before):
    """Return gradients by name, on the first rank."""
    after = weights(export)
    return {name: (before[name] - after[name]) * (EPSILON / LR) for name in before}


def updated(world, hf_dir, config, rows):
    """Return metrics, gradients and log-probs after an update."""
    trainer, export, _ = open_trainer(world, hf_dir, config)
    before = weights(export)
    metrics = planned.update(trainer, rows)
    found = metrics, moved(export, before), planned.logprobs(trainer, rows)
    close_trainer()
    return found


def all_updated(world, hf_dir, configs, rows):
    return [updated(world, hf_dir, config, rows) for config in configs]
