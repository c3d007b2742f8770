"""Look at a loss variant: its terms in torch and in Triton, a check of its gradient, and a picture.

bash tools/ibpo.sh loss gspo
bash tools/ibpo.sh loss my_file:VARIANT --loss-param eps=0.1 --save variant.png
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from megatron_ibpo.basics.entry_point import command, parsed
from megatron_ibpo.config import LossConfig
from megatron_ibpo.kernels.term_calls import TermError, code_owner, first_line, place
from megatron_ibpo.kernels.traced_terms import traced_source
from megatron_ibpo.loss import choose_backend, resolve_variant
from megatron_ibpo.loss.objective import kernel_agreement, variant_terms
from megatron_ibpo.loss.term_inputs import SequenceInputs, Term, TokenInputs, apply_term
from megatron_ibpo.policy.loss_objective import check_loss, loss_params

EXAMPLE = {
    "lengths": 100.0,
    "positions": 50.0,
    "entropy": 1.0,
    "ref_logprobs": -1.2,
    "rollout_logprobs": -1.0,
    "logprobs": -1.0,
}
"""Values of the inputs beside log-ratio and advantage, in the picture and the check."""
POINTS = 2001
GRADIENT_BOUND = 1e-5


@dataclass
class Arguments:
    variant: tyro.conf.Positional[str]
    """Name of a loss variant, or package.module:VARIANT."""
    loss_param: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE …")] = ()
    """Values of its parameters, as name=value."""
    save: Path | None = None
    """Write the picture to this file (.png, .svg or .pdf)."""
    width: float = 2.0
    """Half of the picture's range of log-ratios; for GSPO's narrow clip try 0.002."""


@command
def main(argv: list[str] | None = None) -> int:
    """Show one variant. Return 1 if its gradient is wrong."""
    arguments = parsed(Arguments, __doc__, argv, program="ibpo loss")
    loss = LossConfig(loss_variant=arguments.variant, loss_param=arguments.loss_param)
    check_loss(loss)
    variant, params = resolve_variant(arguments.variant, loss_params(loss))
    print(f"{arguments.variant}: {', '.join(f'{name}={value:g}' for name, value in params.items())}")
    right, refusal = True, ""
    for term in variant_terms(variant):
        print(f"\n# the {term.kind} term in torch\n{source_text(term.function)}")
        try:
            source = traced_source(term.function, term.passed, term.loaded, params)
            print(f"# the {term.kind} term in Triton\n{source[source.rindex('@triton.jit') :]}")
            agreement = kernel_agreement(term, variant, params)
            print(
                f"Triton code of the {term.kind} term: right ({agreement.rows:,} rows of inputs against "
                f"torch, largest relative error {agreement.error:.1e})"
            )
        except TermError as error:
            refusal = refusal or str(error)
            print(f"Triton code of the {term.kind} term: none: {error}")
        right &= check_gradient(term.kind, term.function, params)
    print(f"on cuda: {_on_cuda(refusal)}")
    print(f"on cpu: {choose_backend('auto', torch.device('cpu'), torch.bfloat16)}")
    if arguments.save is not None:
        terms = {term.kind: term.function for term in variant_terms(variant)}
        draw(arguments.variant, terms, params, arguments.width, arguments.save)
        print(f"picture: {arguments.save}")
    return 0 if right else 1


def _on_cuda(refusal: str) -> str:
    """Return what a run on GPUs does: as `backend_in_use` decides."""
    chosen = choose_backend("auto", torch.device("cuda"), torch.bfloat16)
    if chosen.name == "triton" and refusal:
        return "refused for the reason above; --loss-backend torch needs no kernels, nor does --fuse-lm-head"
    return str(chosen)


def source_text(term: Term) -> str:
    """Return the text of a term's function."""
    function = code_owner(term)
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # made by exec, or typed in
        return f"{place(term)}: its text is not in a file\n"


def evaluate(
    kind: str,
    term: Term,
    log_ratio_N: Tensor,
    advantage: float,
    params: Mapping[str, float],
    step: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (value, slope by the log-prob, clipped), [N] each, one step beyond these log-ratios."""
    start_N, log_ratio_N = log_ratio_N, (log_ratio_N + step).requires_grad_()
    full = {name: torch.full_like(log_ratio_N, value).detach() for name, value in EXAMPLE.items()}
    advantages_N = torch.full_like(log_ratio_N, advantage).detach()
    inputs: TokenInputs | SequenceInputs
    if kind == "token":
        # the log-prob moves with the ratio
        own_N = full.pop("logprobs") + (log_ratio_N - start_N)
        inputs = TokenInputs(log_ratio_N, own_N, advantages_N, **full)
    else:
        inputs = SequenceInputs(log_ratio_N, full["lengths"], advantages_N)
    value_N, clipped_N = apply_term(term, inputs, params)
    (slope_N,) = torch.autograd.grad(value_N.sum(), log_ratio_N, allow_unused=True, materialize_grads=True)
    return value_N.detach(), slope_N, clipped_N


def check_gradient(kind: str, term: Term, params: Mapping[str, float]) -> bool:
    """Compare the slope with differences of the value, away from kinks; print and return the outcome.

    A term that detaches a part on purpose, as CISPO does, has another slope than its value: it is named, and
    is not wrong.
    """
    step, worst = 1e-6, 0.0  # small: a slope may have a kink
    # neither 0 nor a sum of 0, on which terms turn
    grid_N = torch.linspace(-1.9, 1.9, POINTS, dtype=torch.float64)[:-50] + 4.7e-4
    detaches = any(word in source_text(term) for word in ("detach", "no_grad"))
    for advantage in (1.0, -1.0):
        try:
            evaluations = [
                evaluate(kind, term, grid_N, advantage, params, shift) for shift in (0.0, step, -step)
            ]
        except Exception as error:  # of the term: in float32 it has been called
            print(
                f"gradient of the {kind} term: not checked, since it fails in float64 ({first_line(error)})"
            )
            return True
        (_, slope_N, here_N), (above_N, _, clip_above_N), (below_N, _, clip_below_N) = evaluations
        smooth_N = (clip_above_N == here_N) & (clip_below_N == here_N)
        error_N = ((above_N - below_N) / (2 * step) - slope_N).abs() / (slope_N.abs() + 1.0)
        worst = max(worst, error_N.masked_fill(~smooth_N, 0.0).max().item())
    right = worst <= GRADIENT_BOUND
    wrong = "not the slope of its value, since the term detaches a part" if detaches else "WRONG"
    verdict = "right" if right else wrong
    print(
        f"gradient of the {kind} term: {verdict} (error against finite differences of its value: {worst:.1e})"
    )
    return right or detaches


def draw(
    name: str, terms: Mapping[str, Term | None], params: Mapping[str, float], width: float, path: Path
) -> None:
    """Write a picture: value and slope over the log-ratio for A = ±1, dotted where the clip is in effect."""
    from matplotlib.figure import Figure

    chosen = [(kind, term) for kind, term in terms.items() if term is not None]
    figure = Figure(figsize=(9, 3.5 * len(chosen)), layout="constrained")
    axes = figure.subplots(len(chosen), 2, squeeze=False)
    grid_N = torch.linspace(-width, width, POINTS, dtype=torch.float64)
    for (kind, term), (value_axis, slope_axis) in zip(chosen, axes, strict=True):
        for advantage, colour in ((1.0, "tab:blue"), (-1.0, "tab:orange")):
            value_N, slope_N, clipped_N = evaluate(kind, term, grid_N, advantage, params)
            for axis, curve_N in ((value_axis, value_N), (slope_axis, slope_N)):
                for mask_N, style in ((~clipped_N, "-"), (clipped_N, ":")):
                    shown_N = torch.where(mask_N, curve_N, torch.nan)
                    label = f"A = {advantage:+g}{', clipped' if style == ':' else ''}"
                    axis.plot(grid_N.numpy(), shown_N.numpy(), style, color=colour, label=label)
        value_axis.set_title(f"{name}: value of the {kind} term")
        slope_axis.set_title("slope by the log-prob")
        for axis in (value_axis, slope_axis):
            axis.set_xlabel("log-ratio")
            axis.axvline(0, color="0.8", linewidth=0.8, zorder=0)
        value_axis.legend(fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
