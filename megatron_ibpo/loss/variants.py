"""Loss variants: each a few lines of torch, registered by name, that say what one token or one sequence
loses. Gradients come from autograd, and what is detached here has none; on GPUs `kernels/traced_terms.py`
makes Triton code of the same."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megatron_ibpo.config import known_or_path, load_hook
from megatron_ibpo.loss.term_inputs import FURTHER_INPUTS, SequenceInputs, Term, TokenInputs, input_names

# exp(80) is the last power of ten below float32's largest: ratios beyond it are clipped anyway, and an
# infinite one would turn a zero coefficient into NaN.
MAX_LOG_RATIO = 80.0


@dataclass(frozen=True)
class Parameter:
    """A number that a variant takes: its default, and the values that make sense."""

    default: float
    above: float = -math.inf
    """Values must exceed it."""
    at_most: float = math.inf

    def allows(self, value: float) -> bool:
        """Return whether a value is finite and in the range."""
        return math.isfinite(value) and self.above < value <= self.at_most

    def check(self, value: float) -> None:
        """Raise ValueError, with the value and the range, for one that is not allowed."""
        if self.allows(value):
            return
        bounds = [
            *([f"above {self.above:g}"] if self.above > -math.inf else []),
            *([f"at most {self.at_most:g}"] if self.at_most < math.inf else []),
        ]
        raise ValueError(f"must be {' and '.join(bounds) or 'finite'}, is {value}")


@dataclass(frozen=True)
class Variant:
    """One or both terms, the parameters they take, and what the publication combines them with.

    token_term(*inputs, **params) -> (value_N, clipped_N), the inputs by their names in `TokenInputs`.
    sequence_term(*inputs, **params) -> (loss_S, clipped_S), the inputs by their names in `SequenceInputs`.

    Without a sequence term the sequence's loss is the mean of its token values. Both are elementwise, finite
    for log-ratios of any size, and 0 for an advantage of 0.
    """

    token_term: Term | None = None
    sequence_term: Term | None = None
    params: Mapping[str, Parameter] = field(default_factory=dict)
    """Parameters by name: keyword arguments of both terms."""
    aggregation: Literal["sequence-mean", "token-mean", "constant"] = "sequence-mean"
    """Default aggregation of token values into one loss; see `Objective`."""
    sequence_ratio: bool = False
    """Hand the token term the sequence's mean log-ratio instead of the token's own. Its value counts, the
    gradient goes through the token's own log-prob (arXiv 2507.18071, eq. 13)."""

    def __post_init__(self) -> None:
        if self.token_term is None and self.sequence_term is None:
            raise ValueError("a variant needs a token_term, a sequence_term or both")
        if self.sequence_ratio and (self.token_term is None or self.sequence_term is not None):
            raise ValueError("sequence_ratio is for variants with a token_term alone")
        if self.sequence_term is not None:
            input_names(self.sequence_term, SequenceInputs)
        _ = self.token_inputs  # refuses an unknown name

    @property
    def token_inputs(self) -> tuple[str, ...]:
        """Names of what the token term reads; see `TokenInputs`."""
        return () if self.token_term is None else input_names(self.token_term, TokenInputs)

    @property
    def further_inputs(self) -> tuple[str, ...]:
        """Return the `token_inputs` that are made only for terms that read them, in the kernels' order."""
        return tuple(name for name in FURTHER_INPUTS if name in self.token_inputs)

    @property
    def takes_token_advantages(self) -> bool:
        """True where advantages may differ inside a sequence."""
        return self.sequence_term is None


def name_of_variant(variant: str | Variant) -> str:
    """Return the name of a variant for messages."""
    if isinstance(variant, str):
        return variant
    return next((name for name, registered in VARIANTS.items() if registered is variant), "of your own")


def resolve_variant(
    name: str | Variant, params: Mapping[str, float] | None = None
) -> tuple[Variant, dict[str, float]]:
    """Return the variant of that name and all its parameters, in its order: the given ones, and defaults for
    the rest.

    Args:
        name: in VARIANTS, or where to import one: package.module:VARIANT; or the variant itself.

    Raises:
        ValueError: an unknown variant or parameter, or a value outside the parameter's range.
    """
    variant = _named_variant(name) if isinstance(name, str) else name
    name = name_of_variant(name)
    overrides = dict(params or {})
    unknown = sorted(overrides.keys() - variant.params.keys())
    if unknown:
        available = f"it has {', '.join(variant.params)}" if variant.params else "it has none"
        raise ValueError(f"loss variant {name!r} has no parameter {', '.join(unknown)}; {available}")
    for parameter, value in overrides.items():
        try:
            variant.params[parameter].check(value)
        except ValueError as error:
            raise ValueError(f"{parameter} of loss variant {name!r} {error}") from error
    return variant, {
        key: float(overrides.get(key, declared.default)) for key, declared in variant.params.items()
    }


def _named_variant(name: str) -> Variant:
    variant = known_or_path("--loss-variant", name, VARIANTS, "loss variant")
    variant = variant or load_hook("--loss-variant", name)
    if not isinstance(variant, Variant):
        raise ValueError(f"loss variant {name!r} is a {type(variant).__name__}, wanted a Variant")
    return variant


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """-min(s·A, clip(s, 1-ε_low, 1+ε_high)·A) with s = exp(log_ratio): of a sequence GSPO (arXiv 2507.18071,
    eq. 5), of a token PPO's clip (arXiv 1707.06347, eq. 7) as in GRPO, DAPO and Dr. GRPO."""
    ratio = _ratio(log_ratio)
    plain = ratio * advantages
    bounded = ratio.detach().clamp(1.0 - eps_low, 1.0 + eps_high) * advantages  # constant where it counts
    clipped = bounded < plain
    return -torch.where(clipped, bounded, plain), clipped


def dual_clip(
    log_ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float, bound: float
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate, and for A < 0 at most bound·|A| (arXiv 1912.09729)."""
    loss, clipped = clipped_surrogate(log_ratio, advantages, eps_low=eps_low, eps_high=eps_high)
    ceiling = -bound * advantages
    beyond = (advantages < 0) & (loss > ceiling)
    return torch.where(beyond, ceiling, loss), clipped | beyond


def cispo(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """-clip(r, 1-ε_low, 1+ε_high)·A·log π with a detached clip: no token loses its gradient
    (arXiv 2506.13585). The default has no lower bound and lets ratios up to 5 through."""
    ratio = _ratio(log_ratio.detach())
    bounded = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    slope = -bounded * advantages
    # a token of probability 0 has ratio 0 and log π = -inf; the product's limit is 0
    return torch.where(bounded == 0, 0.0, slope * logprobs), bounded != ratio


def sapo(log_ratio: Tensor, advantages: Tensor, *, tau_pos: float, tau_neg: float) -> tuple[Tensor, Tensor]:
    """-(4/τ)·sigmoid(τ(r - 1))·A, a soft gate in place of the clip, with a τ for each sign of A
    (arXiv 2511.20347)."""
    tau = torch.where(advantages > 0, tau_pos, tau_neg * torch.ones_like(advantages))
    gate = torch.sigmoid(tau * (_ratio(log_ratio) - 1.0)) * 4.0 / tau
    return -gate * advantages, torch.zeros_like(gate, dtype=torch.bool)


def gmpo_token(
    log_ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """The token's log-ratio, cut at ε_high for A > 0 and at -ε_low for A < 0 (arXiv 2507.20673)."""
    fixed = log_ratio.detach()  # constant where it is cut
    cut = torch.where(advantages > 0, fixed.clamp(max=eps_high), fixed.clamp(min=-eps_low))
    clipped = cut != log_ratio
    return torch.where(clipped, cut, log_ratio), clipped


def gmpo_sequence(
    log_ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """-A times the geometric mean of the tokens' cut ratios."""
    loss = -_ratio(log_ratio) * advantages
    return loss, torch.zeros_like(loss, dtype=torch.bool)


def nll(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """-A·log π: at advantage 1 the negative log-likelihood, the loss of supervised fine-tuning."""
    return -advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool)


_GSPO = {"eps_low": Parameter(3e-4, 0.0, 1.0), "eps_high": Parameter(4e-4, 0.0)}
"""The variant that the field uses with a length-normalised ratio (arXiv 2507.18071, section 5.1)."""
_PPO = {"eps_low": Parameter(0.2, 0.0, 1.0), "eps_high": Parameter(0.2, 0.0)}
_DUAL = {"bound": Parameter(3.0, above=1.0)}
"""At a bound of 1 or less a wrong response would have no gradient even on-policy."""

VARIANTS: dict[str, Variant] = {
    "gspo": Variant(sequence_term=clipped_surrogate, params=_GSPO),
    "gspo-token": Variant(token_term=clipped_surrogate, params=_GSPO, sequence_ratio=True),
    "gspo-dual-clip": Variant(sequence_term=dual_clip, params=_GSPO | _DUAL),
    "grpo": Variant(token_term=clipped_surrogate, params=_PPO),
    "ppo-clip": Variant(token_term=clipped_surrogate, params=_PPO, aggregation="token-mean"),
    "dual-clip": Variant(token_term=dual_clip, params=_PPO | _DUAL, aggregation="token-mean"),
    "dapo": Variant(
        token_term=clipped_surrogate,
        params=_PPO | {"eps_high": Parameter(0.28, 0.0)},
        aggregation="token-mean",
    ),
    "dr-grpo": Variant(token_term=clipped_surrogate, params=_PPO, aggregation="constant"),
    "cispo": Variant(
        token_term=cispo,
        params={"eps_low": Parameter(1.0, 0.0, 1.0), "eps_high": Parameter(4.0, 0.0)},
        aggregation="token-mean",
    ),
    "sapo": Variant(
        token_term=sapo, params={"tau_pos": Parameter(1.0, 0.0), "tau_neg": Parameter(1.05, 0.0)}
    ),
    "gmpo": Variant(
        token_term=gmpo_token,
        sequence_term=gmpo_sequence,
        params={"eps_low": Parameter(0.4, 0.0), "eps_high": Parameter(0.4, 0.0)},
    ),
    "nll": Variant(token_term=nll, aggregation="token-mean"),
}
