"""What transformers says of sampled tokens, and how far an engine's log-probs are from it."""

import gc

import numpy as np
import torch

from megatron_ibpo.engines.registry import sampling_precision

ROUNDINGS = 3.0  # the engine's mean error over that of transformers in the same precision
NEARER = 3.0  # log-probs are this many times nearer to the right weights' than to the wrong ones'
DEVIATIONS = 5.0  # by which the likelihood of all tokens together may be off


def judge_samples(job, config, samples, trained):
    """Compare the engine's log-probs, and the trainer's (`trained`), with transformers' in the next wider
    precision; return the errors, beside those of transformers in the engine's own."""
    path, dtype = config.model.hf_checkpoint, engine_dtype(config)
    right, entropy, variance = logprobs_of(path, job, wider_dtype(config), samples)
    sampled = [sample.logprobs for sample in samples]
    engine, rounded = error(sampled, [right]), error(logprobs_of(path, job, dtype, samples)[:1], [right])
    deviation = float((right + entropy).sum() / np.sqrt(variance.sum()))
    problem = ""
    if not engine["mean"] <= ROUNDINGS * rounded["mean"]:
        problem = (
            f"log-probs are off by {engine['mean']:.1e}, transformers' in {dtype} by {rounded['mean']:.1e}"
        )
    elif not abs(deviation) <= DEVIATIONS:
        problem = f"tokens are not as likely as samples are, by {deviation:.1f} standard deviations"
    return {
        "tokens": len(right), "engine": engine, "trainer": error(trained, [right]),
        "transformers_in_the_engines_precision": rounded, "engine_to_trainer": error(sampled, trained),
        "likelihood_deviation": deviation, "problem": problem,
    }  # fmt: skip


def engine_dtype(config):
    return getattr(torch, sampling_precision(config.rollout).dtype)


def wider_dtype(config):
    return torch.float32 if engine_dtype(config) == torch.bfloat16 else torch.float64


def reference(path, device, dtype):
    """Return transformers' model of a directory."""
    from transformers import AutoModelForCausalLM

    how: dict = {"dtype": dtype, "experts_implementation": "eager"}  # the others take no float64
    return AutoModelForCausalLM.from_pretrained(path, **how).to(device).eval()


def logprobs_of(path, job, dtype, samples):
    """Return the log-probs of all tokens of `samples`, the entropies of what they were sampled from, and the
    variances of a log-prob there."""
    model = reference(path, job.device, dtype)
    columns = zip(*(score(model, sample) for sample in samples), strict=True)
    scores = [np.concatenate(column) for column in columns]
    del model
    free_memory()
    return scores


@torch.no_grad()
def score(model, sample, *, earlier=None, switch=0):
    """Return (log-prob of each token, entropy of what it was sampled from, variance of a log-prob there).

    Args:
        earlier: model that wrote the tokens before number `switch` of the response; it scores those, and
            `model` reads its cache of them. None: `model` wrote all.
    """
    start, written = len(sample.prompt_token_ids), (sample.prompt_token_ids, sample.token_ids)
    ids = torch.tensor(np.concatenate(written), dtype=torch.long, device=model.device)[None]
    if earlier is None:
        logits = model(ids).logits[0, start - 1 : -1]
    else:
        cut = start + switch - 1  # the first new token is computed from the last old one
        before = earlier(ids[:, :cut], use_cache=True)
        after = model(ids[:, cut:], past_key_values=before.past_key_values)
        logits = torch.cat([before.logits[0, start - 1 :], after.logits[0, :-1]])
    accumulated = torch.promote_types(logits.dtype, torch.float32)
    logprobs = (logits.to(accumulated) / (sample.temperature or 1.0)).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    variance = (logprobs.exp() * (logprobs + entropy[:, None]) ** 2).sum(-1)
    chosen = logprobs.gather(1, ids[0, start:, None])[:, 0]
    return tuple(part.double().cpu().numpy() for part in (chosen, entropy, variance))


def error(ours, theirs):
    """Return the mean and the largest difference of two lists of arrays."""
    apart = differences(ours, theirs)
    return {"mean": float(apart.mean()), "max": float(apart.max())}


def differences(ours, theirs):
    return np.abs(joined(ours) - joined(theirs))


def nearer(ours, right, wrong):
    """Return the median errors from both, and whether the log-probs are those of the right weights. (A token
    whose experts change in another precision is far off, and there are few.)"""
    to_right, to_wrong = (float(np.median(differences(ours, theirs))) for theirs in (right, wrong))
    return {"to_right": to_right, "to_wrong": to_wrong, "holds": NEARER * to_right < to_wrong}


def joined(arrays):
    return np.concatenate([np.asarray(array, np.float64) for array in arrays])


def free_memory():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
