import math
import random
from dataclasses import replace

import numpy as np

from megatron_ibpo.basics.records import TrainSequence, token_ids
from megatron_ibpo.policy.packing import pack
from megatron_ibpo.policy.planning import MicroBatch


def sequences(count=9, seed=0):
    """Draw uneven lengths, kinds and advantages; a weight for each; old and rollout log-probs not far off."""
    rng, made = random.Random(seed), []
    for number in range(count):
        prompt, response = ([rng.randrange(2, 64) for _ in range(rng.randrange(1, most))] for most in (9, 40))
        made.append(sequence(
            prompt, response, advantage=rng.choice([-1.5, -0.5, 0.0, 1.0]), weight=1.0 / 6, group=number % 4,
            kind="response" if number % 3 else "correction",
            rollout_logprobs=[-4.0 - rng.random() for _ in response],
            token_weights=[rng.random() for _ in response] if number % 2 else None,
        ))  # fmt: skip
    return made


DTYPES = {"loss_mask": bool, "rollout_logprobs": np.float32, "values": np.float32}


def sequence(prompt, response, *, advantage, weight, group, **fields):
    """Make one of plain lists, all response tokens in the loss unless a `loss_mask` says otherwise."""
    fields = {"loss_mask": [True] * len(response)} | fields
    per_token = {name: value for name, value in fields.items() if isinstance(value, list)}
    arrays = {name: np.array(value, DTYPES.get(name, np.float64)) for name, value in per_token.items()}
    return TrainSequence(
        token_ids(prompt), token_ids(response), advantage=advantage, weight=weight, prompt_index=group,
        group=group, index=0, **(fields | arrays),
    )  # fmt: skip


def with_holes(rows):
    """Some of the response tokens are not the policy's own: a tool's output in the midst or at the start."""
    rng = np.random.default_rng(1)
    masks = [rng.random(len(row.response_token_ids)) < 0.6 for row in rows]
    return [replace(row, loss_mask=mask) for row, mask in zip(rows, masks, strict=True)]


def packed(*ratios, masks=None, token_weights=None, weights=None):
    """Return a micro-batch of sequences whose tokens have these ratios of trainer to engine."""
    rows = []
    for number, own in enumerate(ratios):
        more = {"rollout_logprobs": [-2.0 - math.log(ratio) for ratio in own]}
        more |= {} if masks is None else {"loss_mask": masks[number]}
        more |= {} if token_weights is None else {"token_weights": token_weights[number]}
        weight = 0.5 if weights is None else weights[number]
        rows.append(sequence([7], [3] * len(own), advantage=1.0, weight=weight, group=0, **more))
    arrays = pack(MicroBatch(tuple(range(len(rows))), tuple(rows)))
    # what the trainer finds: no log-prob outside the loss
    return replace(arrays, old_logprobs_R=np.where(arrays.loss_mask_R, -2.0, 0.0).astype(np.float32))
