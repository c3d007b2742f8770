"""Cost of credit per step: pairs and their prompts, rewrite test, masks, shaping, advantages, sequences.

    python tools/bench_credit.py --save tools/results/bench_credit.json

512 responses of 4,096 tokens in groups of 8, half of them wrong. Sampling and scoring are left out:
corrections are prepared in advance, half of them right. There are two cases: every wrong response is
corrected, or every other one (the rest does not fit the context). A correction differs from its response in 2
% or 20 % of the tokens, and references are other solutions that share half of them. Results are wall
milliseconds; the edit distance uses all cores.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import bench
import numpy as np

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.records import Group, Prompt, Sample, TokenIds, token_ids
from megatron_ibpo.config import RolloutConfig
from megatron_ibpo.credit import CreditContext, Vocabulary, assign_credit, credit_of, find_operator
from megatron_ibpo.data import CorrectionTemplate, load_tokenizer

TOKENIZER = Path(__file__).resolve().parents[1] / "examples" / "tiny_qwen3"
VOCABULARY = 150_000
WANTED_MS = 50.0
PROMPT = token_ids([1, 5, 27])


@dataclass
class Arguments(bench.Saving):
    responses: int = 512
    group: int = 8
    tokens: int = 4096
    repeats: int = 9
    presets: tuple[str, ...] = ("ibpo-mask", "ibpo")


@dataclass
class Row:
    preset: str
    edits: float
    corrections: int
    median_ms: float
    best_ms: float
    wanted_ms: float = WANTED_MS


class Texts:
    """Token ids as in responses with a large vocabulary, Zipf-distributed."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def draw(self, count: int) -> list[int]:
        return [min(VOCABULARY - 1, int(self.rng.paretovariate(0.7))) for _ in range(count)]

    def edited(self, ids: Sequence[int], share: float) -> list[int]:
        fresh = self.draw(len(ids))
        return [new if self.rng.random() < share else old for old, new in zip(ids, fresh, strict=True)]


def make_step(arguments: Arguments, edits: float) -> tuple[list[Group], dict[tuple[int, int], list[int]]]:
    """Return (groups of responses, correction of each wrong one by prompt and index)."""
    texts = Texts(seed=0)
    groups, corrections = [], {}
    for index in range(arguments.responses // arguments.group):
        base = texts.draw(arguments.tokens - 1)
        responses = []
        for place in range(arguments.group):
            ids, right = texts.edited(base, 0.5), place % 2 == 0
            responses.append(made(ids, reward=float(right)))
            if not right:
                corrections[index, place] = texts.edited(ids, edits)
        groups.append(Group(Prompt(index, PROMPT, 2, "", "bench", ""), responses))
    return groups, corrections


def made(ids: list[int], reward: float | None) -> Sample:
    tokens = token_ids([*ids, 2])
    return Sample(
        prompt_token_ids=PROMPT,
        token_ids=tokens,
        logprobs=(-0.5 - np.arange(len(tokens)) / 8192).astype(np.float32),
        finish_reason="stop",
        temperature=1.0,
        versions=((0, 0),),
        loss_mask=np.ones(len(tokens), bool),
        reward=reward,
        correct=reward == 1,
    )


def fresh(groups: Sequence[Group]) -> list[Group]:
    return [Group(group.prompt, list(group.responses)) for group in groups]


def measure(preset: str, edits: float, every: int, arguments: Arguments) -> Row:
    """Measure the credit of one step, with `every`-th wrong response corrected."""
    groups, corrections = make_step(arguments, edits)
    ready = [made(ids, None) for ids in corrections.values()][::every]
    for number, sample in enumerate(ready):
        sample.reward, sample.correct = float(number % 2), number % 2 == 1
    del corrections  # these lists would burden the garbage collector again and again
    template = CorrectionTemplate(load_tokenizer(TOKENIZER), 2)
    too_long = token_ids([0] * (4 * arguments.tokens))
    calls = 0

    def correction_prompt(prompt: Prompt, target: TokenIds, references: Sequence[TokenIds]) -> TokenIds:
        nonlocal calls
        calls += 1
        prompt_ids = template(prompt, target, references)
        return prompt_ids if (calls - 1) % every == 0 else too_long

    context = CreditContext(
        algorithm=credit_of(preset),
        rollout=RolloutConfig(rollout_max_response_len=arguments.tokens),
        vocabulary=Vocabulary(correction_prompt),
        max_context=4 * arguments.tokens,
        seed=0,
        step=0,
    )
    operator = find_operator(context.algorithm)
    times = []
    for _ in range(arguments.repeats + 1):
        step = fresh(groups)
        gc.collect()
        started = time.perf_counter()
        asked = [operator.follow_ups(group, context) for group in step]
        left = iter(ready)
        for group, of_group in zip(step, asked, strict=True):
            operator.attach(group, of_group, [next(left) for _ in of_group])
        credit = assign_credit(step, context, operator)
        times.append(1e3 * (time.perf_counter() - started))
    assert credit.metrics["corrections"] == len(ready)
    return Row(preset, edits, len(ready), statistics.median(times[1:]), min(times[1:]))


def main(arguments: Arguments) -> None:
    rows = [
        measure(preset, edits, every, arguments)
        for preset in arguments.presets
        for edits in (0.02, 0.2)
        for every in (1, 2)
    ]
    for row in rows:
        print(
            f"{row.preset}, {row.corrections} corrections, {row.edits:.0%} edits: "
            f"median {row.median_ms:.1f} ms, best {row.best_ms:.1f} ms (wanted {row.wanted_ms:g})"
        )
    workload = asdict(arguments) | {"save": None}
    bench.save(arguments.save, {"workload": workload, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
