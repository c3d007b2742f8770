"""Does what the driver does for the trainers, on one of them: plans for all ranks, takes one's own share."""

from megatron_ibpo.policy import planning


def cost(length):
    """Return the cost of a sequence: attention costs as much as all else at 100 tokens."""
    return length + length**2 / 100


def update(trainer, rows):
    share = own_share(planning.plan_update, rows, trainer.config)
    return trainer.update(share) | planning.update_metrics(rows, trainer.config)


def logprobs(trainer, rows):
    share = own_share(planning.plan_forward, rows, trainer.config)
    return merged(trainer, trainer.logprobs(share), len(rows))


def update_values(critic, rows):
    return critic.update(own_share(planning.plan_value_update, rows, critic.config))


def values(critic, rows):
    return merged(critic, critic.values(own_share(planning.plan_forward, rows, critic.config)), len(rows))


def own_share(plan, rows, config, *more):
    from megatron.core import parallel_state

    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    return plan(rows, *more, config, size, cost).shares[rank]


def merged(model, found, count):
    return [tuple(own.tolist()) for own in planning.merge_parts(model.world.all_gather(found), count)]
