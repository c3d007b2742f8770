"""A term's Triton code, made from its torch function, has the value, derivative and clip that torch has."""

import math

import pytest
import torch
import triton
import triton.language as tl

from megatron_ibpo.kernels.term_calls import TermError
from megatron_ibpo.kernels.traced_terms import traced_source, traced_term
from megatron_ibpo.loss import VARIANTS, Parameter, Variant, resolve_variant
from megatron_ibpo.loss.objective import KL_ESTIMATORS
from support import kernel_cases as cases
from support.loss_calls import loss_of_logits

pytestmark = pytest.mark.kernel

TOKEN, SEQUENCE = ("log_ratio", "logprobs", "advantages"), ("log_ratio", "lengths", "advantages")
GAP = ("gap", "logprobs", "advantages")
TERMS = {
    term: (names, resolve_variant(name)[1])
    for name, variant in VARIANTS.items()
    for names, term in ((TOKEN, variant.token_term), (SEQUENCE, variant.sequence_term))
    if term
} | {estimator: (GAP, {}) for estimator in KL_ESTIMATORS.values()}


@triton.jit
def apply_kernel(a, b, c, parameters, value, slope, clipped, TERM: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    found = TERM(tl.load(a + i), tl.load(b + i), tl.load(c + i), (), i, i < N, parameters)
    tl.store(value + i, found[0])
    tl.store(slope + i, found[1])
    if clipped is not None:
        tl.store(clipped + i, found[2])


def in_triton(term, names, inputs, params):
    function = traced_term(term, names, (), params)
    value, slope = torch.empty(2, len(inputs[0]))
    clipped = None if names == GAP else torch.empty(len(value), dtype=torch.bool)
    apply_kernel[(1,)](*inputs, tuple(params.values()), value, slope, clipped, TERM=function, N=len(value))
    return value, slope, clipped


def in_torch(term, names, inputs, params, dtype=torch.float64):
    read = term.__code__.co_varnames[: term.__code__.co_argcount]
    doubled = dict(zip(names, (x.clone().to(dtype) for x in inputs), strict=True))
    moving = [doubled[n].requires_grad_() for n in read if n in ("log_ratio", "logprobs", "gap")]
    found = term(*(doubled[n] for n in read), **params)
    value, clipped = found if isinstance(found, tuple) else (found, None)
    slopes = torch.autograd.grad(value.sum(), moving, allow_unused=True)
    return value.detach(), sum(s for s in slopes if s is not None), clipped


def compare(term, names, inputs, params, bound, rounding=torch.max):
    """Hold the Triton code to an error of `bound`, and to four times that of torch in float32 where rounding
    grows on the way: its largest, or as `rounding` has it."""
    found, exact = in_triton(term, names, inputs, params), in_torch(term, names, inputs, params)
    single = in_torch(term, names, inputs, params, torch.float32)
    for own, plain, theirs in zip(found[:2], single[:2], exact[:2], strict=True):
        assert not own.isnan().any()
        allowed = bound * (theirs.abs() + 1.0) + 4 * rounding((plain - theirs).abs())
        assert ((own.double() - theirs).abs() <= allowed).all(), (own.double() - theirs).abs().max()
    if exact[2] is not None:
        assert torch.equal(found[2], exact[2])


@pytest.mark.parametrize("term", TERMS)
def test_traced_terms_match_autograd_in_value_slope_and_clip(term):
    """At log-ratios of every size, at the clip bounds and at both ends of float32's range."""
    names, params = TERMS[term]
    edges = [0.0, 1e-7, -1e-7, 0.5, -0.5, 3.0, -3.0, 20.0, -20.0, 79.9, -79.9, 80.1, 1e4, -1e4, 85.0, -85.0]
    edges += [math.inf, -math.inf]
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(238, generator=generator) * torch.logspace(-6, 1, 238)
    first = torch.cat([torch.tensor(edges), spread])
    second = torch.rand(256, generator=generator) * (999 if names == SEQUENCE else -5)
    third = torch.randn(256, generator=generator)
    third[::5] = third[::5].sign()
    inputs = (first, second, third)
    huge = in_torch(term, names, inputs, params)[0].abs() > 1e30  # exp(80): past float32's products
    kept = [x.masked_fill(huge, 1.0) for x in inputs]
    compare(term, names, kept, params, bound=4e-6, rounding=lambda error: error)  # point by point


def every_operator(log_ratio, logprobs, advantages, *, scale):
    x = scale * log_ratio
    y = torch.where(x > logprobs, x, logprobs * 0.5) - torch.minimum(x, advantages) / (logprobs.abs() + 0.5)
    powers = x**2 + x**3 / 10 + (x.abs() + 0.5) ** -1
    grown = x.clamp(-5, 5).exp() + torch.expm1(y.clamp(-5, 5)) + (y.abs() + 0.5).log() + torch.log1p(x.abs())
    gates = torch.tanh(y) * torch.sigmoid(x) + torch.nn.functional.softplus(y) - torch.relu(-x)
    others = (x.abs() + 0.1).sqrt() + torch.sin(y) + x.detach() * y.clamp(-0.7, 1.3) + torch.maximum(x, y)
    return powers + grown * gates + others - torch.where(x > 0, y, 0.1 * x), x > 1.0


def test_every_known_operator_is_differentiated_as_autograd_does():
    first, second, third = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    compare(every_operator, TOKEN, (first, -second.abs(), third), {"scale": -0.75}, bound=4e-6)


def test_a_parameter_that_python_needs_is_written_in():
    def by_python_value(log_ratio, advantages, *, eps):
        factor = math.log(eps) if eps > 1 else 1.0
        return -factor * log_ratio * advantages, log_ratio > eps

    inputs = (torch.tensor([0.5, -2.0]), torch.zeros(2), torch.tensor([1.0, -1.0]))
    for eps in (0.5, 3.0):
        compare(by_python_value, TOKEN, inputs, {"eps": eps}, bound=1e-6)


@pytest.mark.parametrize(
    ("term", "says"),
    [
        (lambda log_ratio: log_ratio.cumsum(0), r"_terms.py, line \d+: .*cumsum\(0\).*aten.cumsum.*abs, add"),
        (lambda log_ratio: torch.div(log_ratio, 0.5, rounding_mode="floor"), r"torch.div.*aten.div"),
        (lambda log_ratio: log_ratio if log_ratio.sum() > 0 else -log_ratio, "cannot be .*data-dependent"),
        (lambda advantages: advantages, "reads none of log_ratio, logprobs, gap"),
    ],
)
def test_terms_that_no_kernel_computes_are_refused_with_their_line(term, says):
    with pytest.raises(TermError, match=says):
        traced_source(term, TOKEN, (), {})


def test_a_term_may_read_lengths_places_entropies_and_other_policies(monkeypatch):
    def weighed(log_ratio, advantages, lengths, positions, entropy, ref_logprobs, rollout_logprobs, *, tau):
        late = (positions + 1.0) / lengths
        drift = (ref_logprobs - rollout_logprobs).clamp(-1, 1)
        return -log_ratio.clamp(max=80.0).exp() * advantages * late * (tau + entropy + drift), entropy > tau

    variant = Variant(token_term=weighed, params={"tau": Parameter(0.3)})
    monkeypatch.setitem(VARIANTS, "weighed", variant)
    batch = cases.make_batch("cpu")
    for name, shift in (("ref_logprobs_N", 0.2), ("rollout_logprobs_N", -0.4)):
        batch[name] = batch["old_logprobs_N"] + shift
    cases.compare(batch, size=10.0, variant="weighed", token_weights_N=torch.rand(cases.ROWS))
    del batch["rollout_logprobs_N"]
    with pytest.raises(ValueError, match="reads rollout_logprobs, and these rows have no rollout_logprobs_N"):
        loss_of_logits(**batch, variant="weighed")
