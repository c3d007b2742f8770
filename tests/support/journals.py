import numpy as np

from megatron_ibpo.basics.records import Sample
from megatron_ibpo.journal import ClosedGroup, SampleKey

KEEP = 1024**3


def make_sample(mark, tokens=3):
    return Sample(
        prompt_token_ids=np.array([mark, 1], np.int32),
        token_ids=np.arange(mark, mark + tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.25, np.float32), finish_reason="stop", temperature=1.0,
        versions=((0, 0),), loss_mask=np.ones(tokens, bool), reward=float(mark),
    )  # fmt: skip


def response(prompt, index=0, attempt=0):
    return SampleKey(prompt, attempt, "response", index)


def group(prompt, responses=1, corrections=0, attempt=0):
    return ClosedGroup(prompt, attempt, responses, corrections, 0)


def append(journal, *keys):
    samples = {key: make_sample(100 * key.prompt_index + key.index) for key in keys}
    for key, sample in samples.items():
        journal.sampled(key, sample)
    return samples
