"""Samples of an evaluation with the fields that a test is about, and defaults in the others."""

from typing import Any

from megatron_ibpo.evaluate import EvalSample


def judged(index: int, number: int, text: str, reward: float | None, **fields: Any) -> EvalSample:
    """Return sample `number` of problem `index`; without a reward the verifier failed on it."""
    defaults: dict[str, Any] = {
        "set": "sums", "id": str(index), "prompt_index": index, "kind": "sampled", "number": number,
        "prompt": f"question {index}", "label": "7", "text": text, "answer": text[-1:] or None,
        "reward": reward, "correct": reward == 1, "error": "failed" if reward is None else None,
        "finish_reason": "stop", "num_tokens": 1, "details": {}, "mean_logprob": -0.5,
    }  # fmt: skip
    return EvalSample(**(defaults | fields))
