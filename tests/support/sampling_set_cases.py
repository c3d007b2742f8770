"""Random sampling sets of rows, and log-probs over them by brute force."""

import numpy as np
import torch

from megatron_ibpo.basics.sampling_mask import SamplingMask, sampling_mask
from megatron_ibpo.loss import SamplingSets


def draw_mask(targets, vocab, *, seed=0, largest=6, unrestricted=0.25) -> SamplingMask:
    """Sets of up to `largest` ids, with the target among them; some rows have none, one has the target alone
    and one all ids."""
    rng, sets = np.random.default_rng(seed), []
    for number, target in enumerate(np.asarray(targets).tolist()):
        others = rng.choice(vocab, size=min(vocab, int(rng.integers(1, largest + 1))) - 1, replace=False)
        own = np.unique([*others, target])
        own = {1: np.array([target]), 2: np.arange(vocab)}.get(number, own)
        sets.append([] if number != 2 and rng.random() < unrestricted else own)
    return sampling_mask(sets)


def as_sets(mask: SamplingMask, device="cpu") -> SamplingSets:
    offsets = torch.from_numpy(mask.offsets)
    return SamplingSets(
        torch.from_numpy(mask.token_ids).to(device), offsets[:-1].to(device), offsets[1:].to(device)
    )


def draw_sets(targets, vocab, **how) -> SamplingSets:
    return as_sets(draw_mask(targets.cpu(), vocab, **how), targets.device)


def cut_off(logits_NV, mask: SamplingMask):
    """Return the logits with -inf at the ids that were cut off."""
    is_kept_NV = torch.zeros(logits_NV.shape, dtype=torch.bool)
    for row in range(len(mask)):
        is_kept_NV[row, mask[row] if len(mask[row]) else slice(None)] = True
    return logits_NV.masked_fill(~is_kept_NV.to(logits_NV.device), -torch.inf)


def brute_force(logits_NV, targets_N, mask, temperature_N):
    """Return (log-probs, entropies) of the truncated distributions, differentiable."""
    logprobs_NV = (cut_off(logits_NV, mask) / temperature_N[:, None]).log_softmax(1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV.clamp(min=-1e9)).sum(1)
    return logprobs_NV.gather(1, targets_N[:, None]).squeeze(1), entropy_N
