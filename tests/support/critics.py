import random
from dataclasses import replace

import numpy as np
import torch

from support.train_sequences import sequences
from support.trainers import built, config_for

EPSILON = 100.0  # Adam's is far above every gradient, so that a step goes along the gradient


def rows_with_returns(count=9, seed=1):
    rng, rows = random.Random(seed), []
    for sequence in sequences(count):
        returns, values = ([rng.uniform(-1, 1) for _ in sequence.response_token_ids] for _ in range(2))
        rows.append(replace(sequence, returns=np.array(returns), values=np.array(values, np.float32)))
    return rows


def critic_config(parallel, *, lr, eps_adam=EPSILON, **loss):
    config = config_for(parallel, eps_adam=eps_adam, **loss)
    config.optimizer.critic_lr = lr
    return config


def open_critic(world, hf_dir, config, head=0.3):
    """Return a critic whose head is not 0, so that the whole model has a gradient from the first step on."""
    from megatron_ibpo.policy.critic import Critic

    chunks, _ = built(world, hf_dir, config, value=True)
    for chunk in chunks:
        if chunk.post_process and head:
            chunk.output_layer.weight.data.normal_(0, head, generator=torch.Generator().manual_seed(7))
    return Critic(chunks, config, world, total_updates=10)
