import json
from dataclasses import fields

from megatron_ibpo.evaluate import EvalSample
from megatron_ibpo.evaluate.stored_samples import samples_path


def read_samples(directory, name):
    """The stored samples of a set, in the order in which they were made."""
    rows = map(json.loads, samples_path(directory, name).read_text().splitlines())
    return [EvalSample(**{item.name: row[item.name] for item in fields(EvalSample)}) for row in rows]


def judged(index, number, text, reward, **fields):
    defaults = {
        "set": "sums", "id": str(index), "prompt_index": index, "kind": "sampled", "number": number,
        "prompt": f"question {index}", "label": "7", "text": text, "answer": text[-1:] or None,
        "reward": reward, "correct": reward == 1, "error": "failed" if reward is None else None,
        "finish_reason": "stop", "num_tokens": 1, "details": {}, "mean_logprob": -0.5,
    }  # fmt: skip
    return EvalSample(**(defaults | fields))
