"""A recorded step as the page shows it: a table of its groups, and each group with all its tokens.

Numbers per token are rounded; tokens are numbers in a vocabulary that goes with the group.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_ibpo.basics.records import Correction, Group, Sample, TokenIds
from megatron_ibpo.credit.explanation import SampleExplanation
from megatron_ibpo.data import Tokenizer
from megatron_ibpo.edit_distance import opcodes
from megatron_ibpo.report.rollout_data import RecordedStep, Trained

_OF_CORRECTION = ("target", "references", "distance", "reference_distance", "rewritten", "unmodified_share")
"""Fields of a correction that the page shows as they are."""
_PROMPT_END = 160
"""Characters of a prompt's end in the table of groups."""
_LONGEST_CHARACTER = 4
"""Most bytes of a character in UTF-8, and so its most tokens."""


def index_of_step(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the data for the table of groups and the filters: everything but tokens."""
    return [
        {
            "prompt": group.prompt.text[-_PROMPT_END:],
            "label": group.prompt.label,
            "skipped_pairs": group.skipped_pairs,
            "responses": [_outcome(response) for response in group.responses],
            "corrections": [
                {
                    "target": correction.target,
                    "kind": _kind(group, correction),
                    "leaks": correction.reference_leakage,
                }
                for correction in group.corrections
            ],
        }
        for group in groups
    ]


def group_of_step(number: int, step: RecordedStep, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a group with its tokens, and the lines that explain its advantages."""
    vocabulary, group = _Vocabulary(tokenizer), step.groups[number]
    trained, prompt_ids = step.trained, group.prompt.token_ids
    content = {
        "prompt": vocabulary.turns(prompt_ids) or [("prompt", group.prompt.text)],
        "question": group.prompt.text,
        "label": group.prompt.label,
        "task": group.prompt.task,
        "index": group.prompt.index,
        "metadata": json.dumps(group.prompt.metadata, default=str) if group.prompt.metadata else "",
        "responses": [
            _response(response, vocabulary, trained.get((number, "response", index)))
            | {
                "asked": None
                if np.array_equal(response.prompt_token_ids, prompt_ids)
                else vocabulary.prompt(response)
            }
            | {"lines": _lines(step, number, "responses", index)}
            for index, response in enumerate(group.responses)
        ],
        "corrections": [
            _correction(group, correction, vocabulary, trained.get((number, "correction", index)))
            | {"lines": _lines(step, number, "corrections", index)}
            for index, correction in enumerate(group.corrections)
        ],
    }
    return content | {"vocabulary": vocabulary.texts}


def _lines(step: RecordedStep, number: int, kind: str, index: int) -> list[list[Any]]:
    """Return the lines that explain a sample's advantage, as [name, value, sum, note]; none if they were not
    recorded."""
    if number >= len(step.explanations):
        return []
    samples: list[SampleExplanation] = getattr(step.explanations[number], kind)
    return [[line.name, line.value, line.sum, line.note] for line in samples[index].lines]


def matches(groups: Sequence[Group], text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Return (group, response) of each response that contains the text, ignoring case, in itself, in its
    prompt or in its correction."""
    folded = text.casefold()

    def holds(ids: TokenIds) -> bool:
        return folded in tokenizer.decode(ids).casefold()

    places = []
    for number, group in enumerate(groups):
        if folded in group.prompt.text.casefold():
            places += [(number, index) for index in range(len(group.responses))]
            continue
        targets = {c.target for c in group.corrections if holds(c.response.token_ids)}
        places += [
            (number, index)
            for index, response in enumerate(group.responses)
            if index in targets or holds(response.token_ids)
        ]
    return places


def _outcome(response: Sample) -> dict[str, Any]:
    return {
        "reward": response.reward,
        "correct": response.correct,
        "error": response.reward_error is not None,
        "truncated": response.finish_reason == "length",
        "length": len(response.token_ids),
    }


def _kind(group: Group, correction: Correction) -> str:
    if not correction.response.correct:
        target_ids = group.responses[correction.target].content_ids
        return "no-op" if np.array_equal(target_ids, correction.response.content_ids) else "failed"
    return "rewritten" if correction.rewritten else "corrected"


def _correction(
    group: Group, correction: Correction, vocabulary: "_Vocabulary", trained: Trained | None
) -> dict[str, Any]:
    target_ids = group.responses[correction.target].content_ids
    return {name: getattr(correction, name) for name in _OF_CORRECTION} | {
        "kind": _kind(group, correction),
        "leaks": correction.reference_leakage,
        "prompt": vocabulary.prompt(correction.response),
        "ops": opcodes(target_ids, correction.response.content_ids),
        "response": _response(correction.response, vocabulary, trained),
    }


def _response(response: Sample, vocabulary: "_Vocabulary", trained: Trained | None) -> dict[str, Any]:
    fields = {
        "tokens": vocabulary.numbers(response.token_ids),
        **_outcome(response),
        "error": response.reward_error,
        "details": response.reward_details,
        "versions": response.versions,
        "temperature": response.temperature,
        "mask": None if response.loss_mask.all() else response.loss_mask.astype(int).tolist(),
        "sampled": _rounded(response.logprobs),
    }
    if trained is None:
        return fields
    return fields | {
        "advantage": trained.advantage,
        "weight": trained.weight,
        "weights": _rounded(trained.token_weights),
        "advantages": _rounded(trained.token_advantages),
        "values": _rounded(trained.values),
        "old": _rounded(trained.old_logprobs),
        "new": _rounded(trained.new_logprobs),
    }


def _rounded(values: np.ndarray | None) -> list[float] | None:
    return None if values is None else [round(value, 5) for value in values.tolist()]


class _Vocabulary:
    """A numbering of a group's different tokens in order of appearance, with their texts."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._numbers: dict[tuple[str, bool], int] = {}
        self._alone: dict[int, str] = {}
        self.texts: list[tuple[str, bool]] = []
        """(text, special)"""
        # ids of ChatML's marks, if the tokenizer has each as one token
        marks = [tokenizer.encode(mark) for mark in ("<|im_start|>", "<|im_end|>")]
        self._marks = tuple(mark[0] if len(mark) == 1 else None for mark in marks)

    def text(self, ids: TokenIds) -> str:
        return self._tokenizer.decode(ids)

    def numbers(self, ids: TokenIds) -> list[int]:
        """Return the number of each token's text. If several tokens form one character, it is at the first of
        them."""
        tokens = ids.tolist()
        texts = [self._text_alone(token) for token in tokens]
        for start in range(len(texts)):
            for end in range(start + 2, min(len(texts), start + _LONGEST_CHARACTER) + 1):
                if "\ufffd" not in texts[start]:
                    break
                if "\ufffd" not in (text := self._tokenizer.decode(tokens[start:end])):
                    texts[start:end] = [text] + [""] * (end - start - 1)
        return [self._number(text, token) for text, token in zip(texts, tokens, strict=True)]

    def prompt(self, sample: Sample) -> list[tuple[str, str]]:
        """Return the prompt that a sample was drawn from, as turns or as one text."""
        prompt_ids = sample.prompt_token_ids
        return self.turns(prompt_ids) or [("prompt", self.text(prompt_ids))]

    def turns(self, ids: TokenIds) -> list[tuple[str, str]]:
        """Return (role, text) of a chat in ChatML; empty for any other prompt."""
        opening, _ = self._marks
        tokens = ids.tolist()
        if opening is None or opening not in tokens:
            return []
        starts = [place for place, token in enumerate(tokens) if token == opening]
        turns = [("prompt", self.text(ids[: starts[0]]))] if starts[0] else []
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            role, _, text = self.text(ids[start + 1 : end]).partition("\n")
            turns.append((role, text.rstrip("\n")))
        return turns

    def _text_alone(self, token: int) -> str:
        if token not in self._alone:
            self._alone[token] = self._tokenizer.decode([token])
        return self._alone[token]

    def _number(self, text: str, token: int) -> int:
        special = not text and not self._text_alone(token)
        if special:
            text = "⟨end⟩" if token == self._tokenizer.eos_id else f"⟨{token}⟩"
        key = (text, special)
        if key not in self._numbers:
            self._numbers[key] = len(self.texts)
            self.texts.append(key)
        return self._numbers[key]
