r"""Verifier of mathematical answers: as text where that decides, or the library math-verify cannot read all
of it, otherwise by that library. The answer is the content of the last `\boxed{}`, or of several if only
commas and "and" stand between them; else what follows "the answer is" or "####"; else the last formula or
number. Units are not compared, as in math-verify."""

import cmath
import functools
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from zlib import crc32

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Expr

from megatron_ibpo.basics.reward_value import WRONG, LabelError, ResponseError
from megatron_ibpo.rewards.exact import (
    compare,
    decimal_comma,
    latex,
    normal,
    text_form,
    unwrapped,
    without_fonts,
)
from megatron_ibpo.rewards.labels import accepted_answers
from megatron_ibpo.rewards.limits import cpu_limit
from megatron_ibpo.rewards.response import final_boxes, final_part, stated_answer

# math-verify asks for a time-out of the caller's own when its alarm signal is off; `cpu_limit` is that
logging.getLogger("math_verify").setLevel(logging.ERROR)

CHECK_S = 2.0
"""Seconds of processor time for one response. Usual ones take milliseconds; a tower of powers never ends."""
_DEEPEST = 100
"""Limit on nested braces up to which LaTeX is parsed; parsing a deeper answer only costs time."""
_ENDLESS = re.compile(r"\d{101}")
"""A number so long that one step of arithmetic on it may take longer than any signal can end."""
_END = 5_000
"""Characters at the end of a response that are searched for an unboxed answer, and the longest formula given
to math-verify."""
_LONGEST_FORMULA = 200
"""Longest label in characters that is read as one formula; of a longer one with `$`, the last is read."""
_LONGEST = 200_000
"""Longest label in characters; a longer answer does not count as one."""
_IN_BOX = [LatexExtractionConfig(boxed_match_priority=0)]
_IN_TEXT = [*_IN_BOX, ExprExtractionConfig()]
_ONE_FORMULA = re.compile(
    r"\s*+(?:\$([^$]++)\$|\\\(((?:[^\\]|\\(?!\)))*+)\\\)|\\\[((?:[^\\]|\\(?!\]))*+)\\\])\s*+\.?\s*+"
)
_LETTER = re.compile(
    r"(?i:(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?:? ?)?"
    r"(?:\(([A-Z])\)|([A-Z])(?![A-Za-z]))(?:[).:]?|[).: ]{1,3}[\w$\\(].*)",
    re.DOTALL,
)
"""An answer of a multiple-choice question, with its text after the letter or without."""
_VERDICT = re.compile(r"(yes|no|true|false)\b(?=\s*(?:[.,;:!]|$))", re.IGNORECASE)
_BREAK = re.compile(r"[,;]|\band\b|\\text\s*+\{\s*+(?:,\s*+)?and\s*+\}|\\q?quad(?![A-Za-z])")
_ASSIGNMENT = re.compile(r"([A-Za-z](?:_\w|_\{\w+\})?|\\[A-Za-z]+)=([^=<>]+)")
_FAR = 1e-3
"""Relative difference between two formulas that rounding cannot explain."""
_NOISE = 1e-12
"""Value that a formula may have which is 0."""
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\w.])")
_ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*({'|'.join(_ZEROS)})s?\s*\}}|({'|'.join(_ZEROS)})s?\b)")
_OR = re.compile(
    r"(?:(?<!\s)\s++or(?=\s)|(?:(?<!\s)\s++)?+(?:\\text\s*+\{\s*+(?:,\s*+)?or\s*+\}|,\s++or(?=\s)))\s*+"
)
_ASSIGNED = re.compile(r"[A-Za-z](?:_\w|_\{\w+\})?\s*=\s*(?=[^=])")
_BEFORE_VALUE = re.compile(r"\A\s*+(?:=|\\(?:approx|bf|rm|it)(?![A-Za-z])|≈)\s*+")
"""A sign or a font command before a value in a box that does not change the value."""
_MISREAD = re.compile(r"\d\s++\d|\d\s*+_")
"""Notation that math-verify misreads: separate groups of digits as a product, and 12_7 without its base."""
_AND = re.compile(r",?\s++and\b")
_DIGIT = re.compile(r"\d")


def score(
    prompts: Sequence[str],
    responses: Sequence[str],
    labels: Sequence[str],
    metadata: Sequence[dict[str, Any]],
) -> list[Any]:
    """Return 1 for each response whose answer equals its label, else 0, also if it has no answer."""

    def reward(prompt: str, response: str, label: str) -> Any:
        try:
            return float(is_right(response, label, prompt))
        except ResponseError:
            return WRONG

    return list(map(reward, prompts, responses, labels))


score.batched = True  # type: ignore[attr-defined]


def is_right(response: str, label: str, prompt: str = "") -> bool:
    """Return whether the response's answer equals the label: a formula, number or text, with or without `$`
    or `\\boxed{}` around it. A quotation of the prompt does not count as an answer. Raises LabelError if the
    label cannot be graded, and ResponseError if the answer asks for more than can be computed, or math-verify
    fails on it."""
    accepted = _accepted(label)
    answer = _answer(final_part(response, prompt))
    if answer is None or len(answer.text) > _LONGEST:
        return False
    if normal(answer.text) == normal(label):  # a structure, written as it is
        return True
    choices = [part for part in _OR.split(answer.text) if part]
    if len(choices) > 1:  # right only if all of them are, or if the label has the same ones
        is_prose = not answer.is_box and answer.text == answer.context
        as_answer = _in_prose if is_prose else _boxed
        return _equals_one(as_answer(",".join(map(_unassigned, choices))), accepted) or all(
            _equals_one(as_answer(choice), accepted) for choice in choices
        )
    return _equals_one(answer, accepted)


def extract_answer(response: str) -> str | None:
    r"""Return a response's answer, as for a majority vote; None without any. Spaces and a final full stop are
    dropped."""
    text = final_part(response)
    answer = ",".join(final_boxes(text)) or stated_answer(text)
    if answer is None:
        answer = next(iter(re.findall(r"[-+]?\d+(?:[.,/]\d+)*", text[-_END:])[-1:]), "")
    return "".join(answer.split()).rstrip(".").strip("$") or None


def label_problem(label: str, metadata: dict[str, Any] | None = None) -> str | None:
    """Return why a label cannot be graded; None if it can. Text that is not mathematics is compared as
    text."""
    try:
        for answer in _accepted(label):
            _gold(answer)
    except LabelError as error:
        return str(error)
    return None


def _accepted(label: str) -> tuple[str, ...]:
    """Return the answers that a label accepts."""
    if len(label) > _LONGEST:
        raise LabelError(f"it has more than {_LONGEST:,} characters")
    accepted = accepted_answers(label)
    if not all(map(normal, accepted)):
        raise LabelError("it holds layout only, and no mathematical answer")
    return accepted


@dataclass(frozen=True)
class _Answer:
    """The answer of a response."""

    text: str
    context: str
    """Text in which math-verify looks for it: the same, or the end of the response."""
    is_box: bool = False
    """True if math-verify reads the text alone, as the content of a box."""


def _answer(text: str) -> _Answer | None:
    boxes = final_boxes(text)
    if boxes:
        return _boxed(boxes[0] if len(boxes) == 1 else ",".join(map(_unassigned, boxes)))
    end = text[-_END:].strip()
    if not end:
        return None
    stated = stated_answer(end)
    if stated is not None and (formula := _ONE_FORMULA.fullmatch(stated)) is not None:
        return _boxed(next(group for group in formula.groups() if group is not None))
    last_line = end.splitlines()[-1] if stated is None else stated
    if (listed := _alternatives(last_line)) is not None:
        return _boxed(listed.rstrip("."))
    return _Answer(end if stated is None else stated, end)


def _alternatives(line: str) -> str | None:
    """Return the first list of numbers that ends in "or", as in `1, 2 or 3`; None without one. Read word by
    word, because a pattern for such lists backtracks without bound."""
    words = line.split()
    numeric = [_DIGIT.search(word) is not None for word in words]

    def is_or(i: int) -> bool:
        return words[i] == "or" and 0 < i < len(words) - 1 and numeric[i - 1] and numeric[i + 1]

    last = next((i for i in range(len(words)) if is_or(i)), None)
    if last is None:
        return None
    first = last - 1
    while first > 0 and (words[first - 1].endswith(",") or words[first].startswith(",")):
        comma_alone = words[first - 1] == "," and first > 1
        if not numeric[first - (2 if comma_alone else 1)]:
            break
        first -= 2 if comma_alone else 1
    while last + 2 < len(words) and is_or(last + 2):
        last += 2
    return " ".join(words[first : last + 2])


def _boxed(text: str) -> _Answer:
    return _Answer(text, text, is_box=True)


def _in_prose(text: str) -> _Answer:
    return _Answer(text, f"\\boxed{{{text}}}")


def _unassigned(text: str) -> str:
    """Return `x=5` as 5."""
    return _ASSIGNED.sub("", text)


def _equal(answer: _Answer, label: str) -> bool:
    ours, theirs = latex(answer.text), latex(label)
    as_pair = f"({ours})" if "," in ours and theirs.lstrip("$ ").startswith("(") else None
    readings = [
        (ours, theirs),
        (as_pair, theirs),  # before a decimal comma is thought of
        (ours, decimal_comma(theirs)),
        (decimal_comma(ours), theirs),
    ]
    for ours_reading, theirs_reading in readings:
        if ours_reading is not None and theirs_reading is not None:
            decided = compare(ours_reading, theirs_reading)
            if decided is not None:
                return decided
    if text_form(ours) == text_form(theirs) or _same_word(ours, theirs):
        return True
    assigned = _assignments(ours), _assignments(theirs)
    if assigned[0] is not None and assigned[1] is not None and assigned[0].keys() == assigned[1].keys():
        return all(_equal(_boxed(value), assigned[1][name]) for name, value in assigned[0].items())
    return bool(_gold(theirs)) and _same_mathematics(theirs, latex(answer.context), answer.is_box)


def _same_word(answer: str, label: str) -> bool:
    """Return whether an answer begins with a label that is a letter, yes or no: "(B) 5", "Yes, it is"."""
    label, answer = unwrapped(label), without_fonts(answer).replace("\\ ", " ").strip()
    pattern = _LETTER if re.fullmatch(r"\(?[A-Z]\)?", label) else _VERDICT
    if pattern is _LETTER:
        match = pattern.fullmatch(answer)
    else:
        match = pattern.match(answer) if pattern.fullmatch(label) else None
    return match is not None and next(filter(None, match.groups())).casefold() == label.strip("()").casefold()


def _assignments(text: str) -> dict[str, str] | None:
    """Return the values by name of a text such as `x=1, y=2`; None for anything else, also one assignment."""
    parts = ["".join(part.split()).strip("$") for part in _BREAK.split(unwrapped(text))]
    matches = [_ASSIGNMENT.fullmatch(part) for part in parts if part]
    values = {match[1]: match[2] for match in matches if match is not None}
    return values if 1 < len(values) == len(matches) else None


def _equals_one(answer: _Answer, accepted: Sequence[str]) -> bool:
    """Return whether the answer equals one of several, in the time of one comparison and that of the last."""
    if len(accepted) == 1:
        return _equal(answer, accepted[0])
    deadline, failure = time.process_time() + CHECK_S, None
    for label in accepted:
        try:
            if _equal(answer, label):
                return True
        except ResponseError as error:
            failure = error
        if time.process_time() > deadline:
            failure = ResponseError(f"not compared with {len(accepted)} answers within {CHECK_S:g} s")
            break
    if failure is not None:
        raise failure
    return False


@functools.lru_cache(maxsize=4096)  # responses of a group make the same mistakes
def _same_mathematics(label: str, context: str, is_box: bool) -> bool:
    gold = _gold(label)
    if len(context) > _END:
        raise ResponseError(f"a formula of more than {_END:,} characters")
    depths = accumulate((brace == "{") - (brace == "}") for brace in context)
    if max(depths, default=0) > _DEEPEST:
        raise ResponseError(f"braces are nested more than {_DEEPEST} deep")
    if _ENDLESS.search(context):
        raise ResponseError("a formula with a number of more than 100 digits")
    with cpu_limit(CHECK_S):
        try:
            parsed_answers = _read(context, is_box)
            if not parsed_answers or _plainly_differ(gold, parsed_answers):
                return False
            return bool(verify(gold, parsed_answers, timeout_seconds=0, raise_on_error=True))
        except Exception as error:
            raise ResponseError(f"{type(error).__name__}: {error}") from error


def _read(context: str, is_box: bool) -> list[Any]:
    """Return what math-verify reads: a box as a whole or not at all, or a formula or number at the end of
    another text. What it cannot read it returns as text; that is left out, since it may be a part."""
    context = _plain(context)
    if is_box and (formula := _ONE_FORMULA.fullmatch(context)) is not None:
        context = next(group for group in formula.groups() if group is not None)
    if is_box:
        context = _BEFORE_VALUE.sub("", context)
        context = context if context.endswith("..") else context.removesuffix(".")
    if is_box and "$" in context:  # several formulas
        context = _AND.sub(",", context.replace("$", " "))
    if is_box and _MISREAD.search(context):
        return []
    parsed = parse(
        f"\\boxed{{{context}}}" if is_box else context,
        extraction_config=_IN_BOX if is_box else _IN_TEXT,
        extraction_mode="first_match" if is_box else "any_match",
        parsing_timeout=0,
        raise_on_error=True,
    )
    return [formula for formula in parsed if not isinstance(formula, str)]


def _plainly_differ(gold: list[Any], parsed_answers: list[Any]) -> bool:
    """Return whether two formulas have values too far apart to be equal. That takes a tenth of the time in
    which math-verify tries to make them equal. A factor of 100 may be a percentage."""
    ours, theirs = _value(parsed_answers), _value(gold)
    if ours is None or theirs is None:
        return False
    return all(
        abs(a - b) > (_FAR * (abs(a) + abs(b)) if a and b else _NOISE)
        for a, b in ((ours, theirs), (100 * ours, theirs), (ours, 100 * theirs))
    )


def _value(parsed: list[Any]) -> complex | None:
    """Return the value of the one parsed formula, with each variable at a point of its own; None if it has no
    value, such as a set or an equation."""
    formulas = [item for item in parsed if not isinstance(item, str)]
    if len(formulas) != 1 or not isinstance(formulas[0], Expr):
        return None
    places = {symbol: 1 + crc32(symbol.name.encode()) / 2**32 for symbol in formulas[0].free_symbols}
    try:
        value = complex(formulas[0].evalf(15, subs=places))
    except Exception:  # of any kind; math-verify decides then
        return None
    return value if cmath.isfinite(value) else None


@functools.lru_cache(maxsize=4096)
def _gold(label: str) -> list[Any]:
    """Return the label as math-verify reads it; empty if it is not mathematics, or does not equal itself."""
    choices = _OR.split(label)
    marked = ",".join(map(_unassigned, choices)) if len(choices) > 1 else label
    boxes = final_boxes(marked)
    if len(boxes) == 1 and marked.strip(" $.") == f"\\boxed{{{boxes[0]}}}":
        marked = boxes[0]
    try:
        with cpu_limit(CHECK_S):
            return _equal_to_itself(marked)
    except ResponseError as error:
        raise LabelError(f"reading it takes too long: {error}") from None


def _equal_to_itself(label: str) -> list[Any]:
    try:
        is_solution = "\\boxed" in label or ("$" in label and len(label) > _LONGEST_FORMULA)
        gold = _read(label, is_box=not is_solution)
        return gold if gold and verify(gold, gold, timeout_seconds=0, raise_on_error=True) else []
    except Exception:  # not mathematics then
        return []


def _plain(text: str) -> str:
    """Return the text in the spelling that math-verify reads."""
    text = text.replace("\\$", "").replace("\\fbox", "\\boxed").replace("\\varnothing", "\\emptyset")
    text = _SCALE.sub(lambda match: f" \\times 10^{{{_ZEROS[match[1] or match[2]]}}}", text)
    return _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
