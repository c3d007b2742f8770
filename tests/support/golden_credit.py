"""Credit of the recorded groups as plain rows: the one place that knows how credit is asked for."""

import json
import lzma
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from megatron_ibpo.config import PRESETS, RolloutConfig
from megatron_ibpo.credit import CreditContext, Vocabulary, assign_credit, find_method
from megatron_ibpo.report import load_step
from support import credit_cases
from support.golden_runs import GOLDEN, recordings
from support.paths import ROOT

COLUMNS = ["group", "kind", "index", "advantage", "weight", "token_weights", "token_advantages", "returns"]
RESPONSE_TOKENS = 48  # --rollout-max-response-len of the recording
NEWER = {"dr-grpo", "wrong-weight"}  # presets that the code which computed the golden credit did not have
CASES = {
    **{name: (name, {}) for name in PRESETS if name not in NEWER},
    "ibpo-adaptive": ("ibpo", {"ibpo_rewrite_threshold": "adaptive"}),
    "ibpo-mask-insertions": ("ibpo-mask", {"ibpo_mask_insertions": True}),
    "ibpo-on-ppo": ("ibpo", {"advantages": "critic"}),
    "agreement": ("ibpo-shaping-only", {"ibpo_operator": credit_cases.AGREEMENT, "ibpo_variant": "mask"}),
}  # name → preset and what is set on top of it


def credited(case):
    """Return what is trained on of every response and correction: its step, and its COLUMNS."""
    with tempfile.TemporaryDirectory() as directory:
        paths = sorted(recordings("credit", Path(directory) / "rollouts").iterdir())
        return [row for path in paths for row in _credited(case, load_step(path))]


def _credited(case, recorded):
    step, groups = recorded.step, recorded.groups
    preset, settings = CASES[case]
    algorithm = credit_cases.algorithm(preset, **settings)
    method = find_method(algorithm)
    answers = iter(list(_answers(groups, method.operator.ibpo_corrections)))
    for group in groups:
        group.corrections, group.skipped_pairs = [], 0
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/tiny_qwen3")
    vocabulary = Vocabulary(
        lambda prompt, target, references: np.concatenate([prompt.token_ids, target, *references]),
        lambda ids: [tokenizer.decode([token]) for token in ids.tolist()],
        placeholder_id=tokenizer.pad_token_id,
    )
    context = CreditContext(
        algorithm, RolloutConfig(rollout_max_response_len=RESPONSE_TOKENS), vocabulary, max_context=1024,
        seed=0, step=step - 1, logprobs=_logprobs, values=_values,  # recordings count from 1
    )  # fmt: skip
    credit_cases.correct_groups(
        groups, context, method.operator, lambda asked: [next(answers) for _ in asked], lambda pairs: None
    )
    credit = assign_credit(groups, context, method)
    assert next(answers, None) is None, "every correction was asked for"
    for sequence in credit.sequences:
        found = [getattr(sequence, name) for name in COLUMNS]
        yield [step, *(own.tolist() if isinstance(own, np.ndarray) else own for own in found)]


def _answers(groups, wanted):
    """The first `wanted` recorded corrections of each wrong response, in the order they are asked for."""
    for group in groups:
        taken = Counter()
        for correction in group.corrections:
            taken[correction.target] += 1
            if taken[correction.target] <= wanted:
                assert correction.response.reward is not None, "recorded corrections are scored"
                yield correction.response


def _logprobs(queries):
    """Whole numbers of which every processor's `exp` is the same: none lies halfway between two floats."""
    chances, found = (0.0, -1.0, -2.0, -3.0, -5.0, -6.0, -7.0, -8.0), []
    for query in queries:
        found.append(np.zeros(len(query.continuation), np.float32))
        found[-1][0] = chances[sum((n + 1) * t for n, t in enumerate(query.context.tolist())) % 8]
    return found


def _values(sequences):
    responses = [sequence.response_token_ids.tolist() for sequence in sequences]
    values = [[(31 * token + 7 * t) % 64 / 64 for t, token in enumerate(ids)] for ids in responses]
    return [np.array(own, np.float32) for own in values]


if __name__ == "__main__":
    numbers = json.dumps({case: credited(case) for case in CASES}).encode()
    packed = lzma.compress(numbers, preset=9 | lzma.PRESET_EXTREME)  # cases repeat each other, far apart
    (GOLDEN / "credit.json.xz").write_bytes(packed)
