"""Prompts and reward of the part `loop`: the sums that the tiny models were warm-started on."""

import random

ASKED = "State the final answer to the following arithmetic problem: "
TERMS, TRAINED, EVALUATED = (5, 7), 4096, 256


def rows(split):
    draw = random.Random(split)
    for _ in range(EVALUATED if split == "eval" else TRAINED):
        terms = [str(draw.randint(1, 9)) for _ in range(draw.randint(*TERMS))]
        sum_ = terms[0] + "".join(draw.choice("+-") + term for term in terms[1:])
        yield {"prompt": f"{ASKED}{sum_}=\n", "label": str(eval(sum_))}


def score(question, response, label, metadata):
    return float(response.rpartition("#")[2].strip() == label)
