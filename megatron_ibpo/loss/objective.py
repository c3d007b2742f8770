"""The objective of a loss, one object from the entry points down to the kernels; and the checks of its terms,
in torch and as the code that is made of them, before a run starts."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_ibpo.kernels.term_agreement import Agreement, Disagreement, check_call, compare_with_torch
from megatron_ibpo.kernels.term_calls import TermError
from megatron_ibpo.kernels.traced_terms import PASSED, SEQUENCE_PASSED
from megatron_ibpo.loss.logprobs import LossBackend
from megatron_ibpo.loss.term_inputs import FURTHER_INPUTS
from megatron_ibpo.loss.variants import Variant, name_of_variant, resolve_variant

KLEstimator = Literal["k1", "k2", "k3"]

MAX_K3_LOG_RATIO = 5.0
"""log π_ref - log π of a token up to which k3 is exact."""
_STEEPEST = math.exp(MAX_K3_LOG_RATIO)


def _k3(gap: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d, continued by its tangent below d = -MAX_K3_LOG_RATIO.

    The slope of exp(-d) doubles with every .7 nats: the clipped gradient of a step would be one far token's
    alone. On the tangent a token weighs at most e^5 - 1 = 147, and is still drawn back to the reference.
    (verl cuts d at ±20 and k3 at 10, beyond which such a token has no gradient.)
    """
    exact = (-gap).clamp(max=MAX_K3_LOG_RATIO).exp() - 1.0 + gap
    tangent = _STEEPEST * (1.0 - MAX_K3_LOG_RATIO) - 1.0 + (1.0 - _STEEPEST) * gap
    return torch.where(gap < -MAX_K3_LOG_RATIO, tangent, exact)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda gap: gap,
    "k2": lambda gap: 0.5 * gap * gap,
    "k3": _k3,
}
"""Name → function of d [N], a per-token estimate of KL(π ‖ π_ref) from log-probs of sampled tokens.

k1, k2 and k3 of John Schulman, "Approximating KL Divergence" (2020): d = log π - log π_ref of the sampled
token. In expectation over π k1 and k3 are the divergence (k3 but for its tangent); the gradient of k1 as a
penalty is 0 in expectation, that of k2 is the divergence's.
"""


@dataclass(frozen=True)
class Objective:
    """A variant with its parameters, the aggregation of tokens into one loss, KL penalty and back end."""

    name: str
    """The variant's name, for messages."""
    variant: Variant
    params: Mapping[str, float]
    """All parameters of the variant, in its order."""
    aggregation: str | float
    """Divisor of the sum over a sequence's tokens.

    "sequence-mean" divides by its response tokens. "token-mean" divides by the weighted mean of response
    tokens over the sequences of the call, so that every token counts the same. A number is the divisor
    itself (for a token mean over several micro-batches, or for "constant"). A sequence term's loss counts
    once for each token, and so once for the sequence under "sequence-mean".
    """
    kl: KLEstimator = "k3"
    kl_coef: float = 0.0
    """Factor of the estimate of KL(π ‖ π_ref), added for each response token. 0: it is only measured, if
    there are reference log-probs."""
    backend: LossBackend = "auto"

    @property
    def kl_term(self) -> Callable[[Tensor], Tensor]:
        """The KL estimator, a function of the gap [N]."""
        return KL_ESTIMATORS[self.kl]

    def __post_init__(self) -> None:
        if self.kl not in KL_ESTIMATORS:
            raise ValueError(f"unknown KL estimator {self.kl!r}; there are {', '.join(KL_ESTIMATORS)}")
        if self.aggregation == "constant":
            raise ValueError(
                "this loss variant divides by a constant: give the number of tokens, such as the longest "
                "response allowed (aggregation=8192)"
            )
        if isinstance(self.aggregation, str) and self.aggregation not in ("sequence-mean", "token-mean"):
            raise ValueError(
                f"unknown aggregation {self.aggregation!r}; there are 'sequence-mean', 'token-mean' and a "
                "number of tokens"
            )
        if not isinstance(self.aggregation, str) and not self.aggregation > 0:
            raise ValueError(
                f"aggregation {self.aggregation}: a number of tokens to divide by must be above 0"
            )


def make_objective(
    variant: str | Variant,
    params: Mapping[str, float] | None = None,
    *,
    aggregation: str | float | None = None,
    kl: KLEstimator = "k3",
    kl_coef: float = 0.0,
    backend: LossBackend = "auto",
) -> Objective:
    """Return the objective of a variant (see `resolve_variant`) as published, except for the values given.
    Raises ValueError for an unknown variant, parameter, aggregation or KL estimator, a number that is not
    above 0, or a variant that divides by a constant and got none."""
    chosen, resolved = resolve_variant(variant, params)
    aggregation = chosen.aggregation if aggregation is None else aggregation
    return Objective(name_of_variant(variant), chosen, resolved, aggregation, kl, kl_coef, backend)


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
    """Raise TermError for a variant that torch cannot train with, whatever would compute its loss."""
    for term in variant_terms(variant):
        check_call(
            term.function, (*PASSED, *FURTHER_INPUTS) if term.kind == "token" else SEQUENCE_PASSED, params
        )


def kernel_agreement(term: VariantTerm, variant: Variant, params: Mapping[str, float]) -> Agreement:
    """Compare the code made of a term with the term in torch, at these parameters and at others near them.
    Raises TermError if no code can be made of it, or it computes something else."""
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
    """Raise TermError, with the line of the term, for an objective whose terms the kernels do not compute as
    torch does. Takes about two seconds."""
    check_calls(objective.variant, objective.params)
    for term in variant_terms(objective.variant):
        kernel_agreement(term, objective.variant, objective.params)
    compare_with_torch(KL_ESTIMATORS[objective.kl], ("gap",), (), {})
