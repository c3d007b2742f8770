"""Prompts and reward of the part `loop`: the sums that the tiny models were warm-started on."""

import random

ASKED = "State the final answer to the following arithmetic problem: "


def rows(split):
    draw = random.Random(split)
    for _ in range(256 if split == "eval" else 4096):
        terms = [str(draw.randint(1, 9)) for _ in range(draw.randint(5, 7))]
        sum_ = terms[0] + "".join(draw.choice("+-") + term for term in terms[1:])
        yield {"prompt": f"{ASKED}{sum_}=\n", "label": str(eval(sum_))}


def score(question, response, label, metadata):
    return float(response.rpartition("#")[2].strip() == label)
