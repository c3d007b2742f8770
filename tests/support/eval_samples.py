from megatron_ibpo.evaluate import EvalSample


def judged(index, number, text, reward, **fields):
    defaults = {
        "set": "sums", "id": str(index), "prompt_index": index, "kind": "sampled", "number": number,
        "prompt": f"question {index}", "label": "7", "text": text, "answer": text[-1:] or None,
        "reward": reward, "correct": reward == 1, "error": "failed" if reward is None else None,
        "finish_reason": "stop", "num_tokens": 1, "details": {}, "mean_logprob": -0.5,
    }  # fmt: skip
    return EvalSample(**(defaults | fields))
