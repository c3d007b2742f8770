"""The operators by name (--ibpo-operator), and those of the user's own by import path."""

from megatron_ibpo.config import AlgorithmConfig, known_or_path, load_hook
from megatron_ibpo.credit.agreement import Agreement
from megatron_ibpo.credit.corrections import CompareAndCorrect
from megatron_ibpo.credit.importance import SpanMasking
from megatron_ibpo.credit.operator import NoOperator, Operator
from megatron_ibpo.credit.resets import ResetGroups

OPERATORS: dict[str, Operator] = {
    "compare-and-correct": CompareAndCorrect(),
    "agreement": Agreement(),
    "span-masking": SpanMasking(),
    "reset-groups": ResetGroups(),
}
"""--ibpo-operator → what judges wrong responses."""

_METHODS = ("follow_ups", "attach", "judge")


def find_operator(algorithm: AlgorithmConfig) -> Operator:
    """The operator that the algorithm names, in OPERATORS or by an import path package.module:NAME of an
    operator or of its class.

    Raises:
        ValueError: there is none, or it lacks a method.
    """
    name = algorithm.ibpo_operator
    if name == "compare-and-correct" and algorithm.ibpo_corrections == 0:
        return NoOperator()
    if known := known_or_path("--ibpo-operator", name, OPERATORS, "operator"):
        return known
    found = load_hook("--ibpo-operator", name)
    abstract = getattr(found, "__abstractmethods__", ())  # of a class that leaves `judge` out
    lacking = [name for name in _METHODS if name in abstract or not callable(getattr(found, name, None))]
    if lacking:
        raise ValueError(
            f"--ibpo-operator {name}: it lacks {', '.join(lacking)}; an operator has {', '.join(_METHODS)}, "
            "of which a subclass of megatron_ibpo.credit.Operator must define judge alone: docs/extending.md"
        )
    return found() if isinstance(found, type) else found
