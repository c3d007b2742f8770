"""Written solutions of chain_sum, by a student who may drop carries: what the warm start is taught."""

import random


def worked_solution(
    expression: str, rng: random.Random | None = None, *, carry_dropped: float = 0.0, slip: float = 0.0
) -> str:
    """`6 + 1 - 8` as `6+1=7-8=-1#-1`: every intermediate result, then the answer after `#`.

    Args:
        expression: terms and operators separated by spaces, as chain_sum's metadata has it.
        rng: the student's luck; needed unless both probabilities are 0.
        carry_dropped: probability that a step that carries (or borrows) forgets to, and so is off by 10.
        slip: probability that another step is off by one or two.
    """
    first, *rest = expression.split()
    value, text = int(first), first
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        value = _step(value, operator, int(term), rng, carry_dropped, slip)
        text += f"{operator}{term}={value}"
    return f"{text}#{value}"


def _step(
    value: int, operator: str, term: int, rng: random.Random | None, carry_dropped: float, slip: float
) -> int:
    sign = 1 if operator == "+" else -1
    result = value + sign * term
    if rng is None:
        return result
    if _carries(value, operator, term) and rng.random() < carry_dropped:
        return result - 10 * sign
    if rng.random() < slip:
        return result + rng.choice((-2, -1, 1, 2))
    return result


def _carries(value: int, operator: str, term: int) -> bool:
    """The units digit runs over (plus) or under (minus), for a value a child would carry on paper."""
    if operator == "+":
        return value >= 0 and value % 10 + term % 10 >= 10
    return value >= 10 and value % 10 < term % 10
