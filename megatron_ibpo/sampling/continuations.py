"""Samples that continue the beginning of a response (`SampleRequest.begun`)."""

from dataclasses import replace

import numpy as np

from megatron_ibpo.basics.records import Sample


def with_beginning(sample: Sample, begun: int) -> Sample:
    """Return the whole response of a sample whose prompt ended in the response's first `begun` tokens.

    The beginning is context: it has no log-probs and is not trained on. The verifier thus reads the whole
    response, and the loss sees only what was sampled now.
    """
    if begun == 0:
        return sample
    cut = len(sample.prompt_token_ids) - begun
    (_, version), *later = sample.versions
    return replace(
        sample,
        prompt_token_ids=sample.prompt_token_ids[:cut],
        token_ids=np.concatenate([sample.prompt_token_ids[cut:], sample.token_ids]),
        logprobs=np.concatenate([np.zeros(begun, np.float32), sample.logprobs]),
        loss_mask=np.concatenate([np.zeros(begun, bool), sample.loss_mask]),
        versions=((0, version), *((first + begun, newer) for first, newer in later)),
    )
