"""Written solutions of chain_sum by a student that may drop carries, for the warm start."""

import random
import re
from collections import deque
from collections.abc import Callable
from functools import partial


def worked_solution(
    expression: str, rng: random.Random | None = None, *, carry_dropped: float = 0.0, slip: float = 0.0
) -> str:
    """Return `6 + 1 - 8` as `6+1=7-8=-1#-1`: every intermediate result, then the answer after `#`.

    Args:
        expression: terms and operators separated by spaces, as chain_sum's metadata has it.
        rng: the student's random generator; needed unless both probabilities are 0.
        carry_dropped: probability that a step that carries (or borrows) forgets to, and so is off by 10.
        slip: probability that another step is off by one or two.
    """
    return _written(expression, partial(_step, rng=rng, carry_dropped=carry_dropped, slip=slip))


def mended_solution(
    expression: str,
    candidate: str,
    rng: random.Random,
    *,
    skill: float,
    carry_dropped: float = 0.0,
    slip: float = 0.0,
) -> str:
    """Return the solution of a student that compares, after seeing `candidate`.

    The student copies the results of the candidate. At a wrong one it writes the right value with probability
    `skill`; otherwise it overlooks the error and copies on. After a changed value the rest cannot be copied,
    and the student continues as `worked_solution` does.

    A reference changes no target: where it differs from a right step of the candidate, the right value is the
    candidate's. It tells the policy where to look.

    Args:
        candidate: a solution of this expression, as `worked_solution` writes it.
        skill: 0 copies every candidate, 1 overlooks nothing.
        carry_dropped: as in `worked_solution`, and so is `slip`; both for the part after the first change.

    Raises:
        ValueError: the candidate has another number of steps.
    """
    candidate_results = deque(int(result) for result in re.findall(r"=(-?\d+)", candidate))
    if 2 * len(candidate_results) + 1 != len(expression.split()):
        raise ValueError(
            f"{candidate!r} has {len(candidate_results)} steps, which is not a solution of {expression!r}"
        )

    def step(value: int, operator: str, term: int) -> int:
        if not candidate_results:
            return _step(value, operator, term, rng=rng, carry_dropped=carry_dropped, slip=slip)
        copied, right = candidate_results.popleft(), _exact(value, operator, term)
        if copied == right or rng.random() >= skill:
            return copied
        candidate_results.clear()
        return right

    return _written(expression, step)


def _written(expression: str, step: Callable[[int, str, int], int]) -> str:
    """Return the solution with the results that `step` gives for (value so far, operator, term)."""
    first, *tail = expression.split()
    value, text = int(first), first
    for operator, term in zip(tail[::2], tail[1::2], strict=True):
        value = step(value, operator, int(term))
        text += f"{operator}{term}={value}"
    return f"{text}#{value}"


def _exact(value: int, operator: str, term: int) -> int:
    return value + term if operator == "+" else value - term


def _step(
    value: int, operator: str, term: int, *, rng: random.Random | None, carry_dropped: float, slip: float
) -> int:
    result = _exact(value, operator, term)
    if rng is None:
        return result
    if carries(value, operator, term) and rng.random() < carry_dropped:
        return result - 10 if operator == "+" else result + 10
    if rng.random() < slip:
        return result + rng.choice((-2, -1, 1, 2))
    return result


def carries(value: int, operator: str, term: int) -> bool:
    """Return whether the units digit runs over (plus) or under (minus): a child would carry on paper."""
    if operator == "+":
        return value >= 0 and value % 10 + term % 10 >= 10
    return value >= 10 and value % 10 < term % 10
