"""The checks of a loss variant's terms, in torch and as the code that is made of them, before a run starts.

`ibpo loss`, the dry run, the driver and every trainer call these, so that they say the same.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron_ibpo.kernels.term_agreement import Agreement, Disagreement, compare_with_torch
from megatron_ibpo.kernels.term_calls import TermError
from megatron_ibpo.kernels.term_trials import check_call
from megatron_ibpo.kernels.traced_terms import PASSED, SEQUENCE_PASSED
from megatron_ibpo.loss.objective import KL_ESTIMATORS, Objective
from megatron_ibpo.loss.term_inputs import FURTHER_INPUTS
from megatron_ibpo.loss.variants import Variant

__all__ = ["TermError", "VariantTerm", "check_calls", "check_terms", "kernel_agreement", "variant_terms"]

STEPS = (0.7, 1.3)
"""Factors of a parameter in the comparison of kernels with torch."""


class VariantTerm(NamedTuple):
    """A term of a variant, and the inputs that the kernels give it."""

    kind: str
    """token or sequence."""
    function: Any
    passed: tuple[str, ...]
    loaded: tuple[str, ...]


def variant_terms(variant: Variant) -> Iterator[VariantTerm]:
    """Return the terms that a variant has."""
    if variant.token_term is not None:
        yield VariantTerm("token", variant.token_term, PASSED, variant.further_inputs)
    if variant.sequence_term is not None:
        yield VariantTerm("sequence", variant.sequence_term, SEQUENCE_PASSED, ())


def check_calls(variant: Variant, params: Mapping[str, float]) -> None:
    """Refuse a variant that torch cannot train with. Every run is checked, whatever computes its loss.

    Raises:
        TermError: see `check_call`.
    """
    for term in variant_terms(variant):
        check_call(
            term.function, (*PASSED, *FURTHER_INPUTS) if term.kind == "token" else SEQUENCE_PASSED, params
        )


def kernel_agreement(term: VariantTerm, variant: Variant, params: Mapping[str, float]) -> Agreement:
    """Compare the code made of a term with the term in torch, at these parameters and at others near them.

    Raises:
        TermError: no code can be made of it, or it computes something else.
    """
    agreement = compare_with_torch(term.function, term.passed, term.loaded, params)
    for step in STEPS if params else ():
        moved = {name: value * step for name, value in params.items()}
        moved = {name: v if variant.params[name].allows(v) else params[name] for name, v in moved.items()}
        try:
            moved_agreement = compare_with_torch(term.function, term.passed, term.loaded, moved)
        except Disagreement:
            raise
        except TermError:  # a term may refuse values, or need another kernel for them
            continue
        agreement = Agreement(
            agreement.rows + moved_agreement.rows, max(agreement.error, moved_agreement.error)
        )
    return agreement


def check_terms(objective: Objective) -> None:
    """Refuse an objective whose terms the kernels do not compute as torch does. Takes about two seconds.

    Raises:
        TermError: with the line of the term and what can be computed.
    """
    check_calls(objective.variant, objective.params)
    for term in variant_terms(objective.variant):
        kernel_agreement(term, objective.variant, objective.params)
    compare_with_torch(KL_ESTIMATORS[objective.kl], ("gap",), (), {})
