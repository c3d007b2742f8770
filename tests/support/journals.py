from megatron_ibpo.journal import ClosedGroup, SampleKey
from support.samples import sample_of

KEEP = 1024**3


def make_sample(mark, tokens=3):
    return sample_of([mark, 1], range(mark, mark + tokens), -0.25, reward=float(mark))


def response(prompt, index=0, attempt=0):
    return SampleKey(prompt, attempt, "response", index)


def group(prompt, responses=1, corrections=0, attempt=0):
    return ClosedGroup(prompt, attempt, responses, corrections, 0)


def append(journal, *keys):
    samples = {key: make_sample(100 * key.prompt_index + key.index) for key in keys}
    for key, sample in samples.items():
        journal.sampled(key, sample)
    return samples
