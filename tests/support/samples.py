import numpy as np

from megatron_ibpo.basics.records import Sample, token_ids


def sample_of(prompt, ids, logprobs=-0.5, **fields):
    """Return a finished sample with these tokens, the policy's own; `logprobs`: of all, or of each."""
    known = {
        "prompt_token_ids": token_ids(prompt), "token_ids": token_ids(ids), "finish_reason": "stop",
        "logprobs": np.full(len(ids), logprobs, np.float32), "temperature": 1.0, "versions": ((0, 0),),
        "loss_mask": np.ones(len(ids), bool),
    }  # fmt: skip
    return Sample(**known | fields)
