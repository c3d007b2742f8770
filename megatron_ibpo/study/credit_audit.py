"""Statistics of the audit, on plain numbers: does credit fall where the value falls?

The value of a prefix is the probability that the policy, continuing from there, ends correct. In a wrong
response it falls from the prompt's to 0. The step with the largest drop is where the response went wrong, as
far as rollouts can tell. A token mask is compared with that step within each response, φ between responses.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Group
from scipy import stats

from megatron_ibpo.report.display import plain_table

Array = npt.NDArray[np.float64]
Credit = Callable[["AuditedResponse"], Sequence[Sequence[float] | Array]]
"""Response → its token weights; several arrays if they are drawn."""

RESAMPLES = 1000
MASK = "mask"
RANDOM = "random masks of the same size"
SIBLING = "difference to a correct sibling, same responses"
RANDOM_MASKS = 20


@dataclass(frozen=True)
class AuditedResponse:
    """A wrong response with n steps, and its measurements."""

    prompt: int
    """Prompt of the response. Responses of one prompt are not independent, so intervals resample prompts."""
    boundaries: list[int]
    """[n + 1] tokens before each boundary, from 0 to all."""
    values: list[float]
    """[n + 1] share of rollouts from each boundary that ended correct; 0 at the last."""
    first_half: list[float]
    """[n + 1] the same share over every other rollout."""
    second_half: list[float]
    """[n + 1] the same share over the remaining rollouts."""
    modified: list[int] | None
    """[tokens] 1 where corrections that earn credit change the response; None if there are none."""
    phi: float
    sibling: list[int] | None = None
    """[tokens] 1 where the nearest correct response of the group differs; None if none is correct."""

    @cached_property
    def drops(self) -> Array:
        """[n] fall of the value over each step."""
        return _drops(self.values)

    @property
    def error(self) -> int:
        """The step over which the value falls most."""
        return int(self.drops.argmax())

    @property
    def nearness(self) -> float:
        """Mean value of the inner boundaries: how long the response could still have ended well."""
        return float(np.mean(self.values[1:-1])) if len(self.values) > 2 else 0.0


def _drops(values: Sequence[float]) -> Array:
    falls: Array = -np.diff(np.asarray(values, dtype=np.float64))
    return falls.round(9)  # rounded so that equal ones stay equal


def step_shares(weights: Sequence[float] | Array, boundaries: Sequence[int]) -> Array:
    """Return the mean weight of the tokens of each step."""
    return np.array([np.mean(weights[a:b]) for a, b in pairwise(boundaries)])


def step_auc(scores: Array, step: int) -> float:
    """Return the probability that `step` has a higher score than another step; ties count half."""
    return float((stats.rankdata(scores)[step] - 1) / (len(scores) - 1))


def audit(responses: Sequence[AuditedResponse], *, min_drop: float = 0.25) -> dict[str, Any]:
    """Return all figures of the report, each with its 95 % interval (percentile bootstrap over prompts).

    Args:
        min_drop: a response whose largest drop is smaller has no step that can be called the error. It is
            left out of the figures that need one, and counted.

    Raises:
        ValueError: no responses.
    """
    if not responses:
        raise ValueError("no wrong responses to audit")
    located = [r for r in responses if len(r.values) > 2 and r.drops.max() >= min_drop]
    masked = [r for r in located if r.modified is not None]
    with_sibling = [r for r in masked if r.sibling is not None]
    rng = np.random.default_rng(0)
    drawn = {id(r): [rng.permutation(r.modified or ()) for _ in range(RANDOM_MASKS)] for r in masked}
    credits: dict[str, Credit] = {
        MASK: lambda r: [r.modified or ()],
        SIBLING: lambda r: [r.sibling or ()],
        RANDOM: lambda r: drawn[id(r)],
    }
    mask_auc, random_auc = (partial(_agreement, credits[name], step_auc) for name in (MASK, RANDOM))
    return {
        "responses": len(responses),
        "prompts": len({r.prompt for r in responses}),
        "min_drop": min_drop,
        "with_a_located_error": len(located),
        "located_and_masked": len(masked),
        "empty_masks": sum(not any(r.modified or ()) for r in masked),
        "largest_drop": _mean(located, lambda r: float(r.drops.max())),
        "position_of_the_drop": _mean(located, _position),
        "mask": {
            name: {
                measure: _mean(
                    with_sibling if name == SIBLING else masked, partial(_agreement, credit, of_step)
                )
                for measure, of_step in (("auc", step_auc), ("first_credited_step_is_the_error", _is_first))
            }
            for name, credit in credits.items()
        }
        | {"ceiling: drops of the other rollouts": {"auc": _mean(masked, _ceiling_auc)}},
        "mask_above_random_auc": _mean(masked, lambda r: mask_auc(r) - random_auc(r)),
        "mask_equals_sibling": _mean(with_sibling, lambda r: float(r.modified == r.sibling)),
        "phi": {
            "positive": float(np.mean([r.phi > 0 for r in responses])),
            "rank_correlation": _of_prompts(responses, _phi_rank),
        },
    }


def _agreement(credit: Credit, measure: Callable[[Array, int], float], response: AuditedResponse) -> float:
    """Return the mean of a measure over the masks that a credit gives a response."""
    shares = [step_shares(mask, response.boundaries) for mask in credit(response)]
    return float(np.mean([measure(share, response.error) for share in shares]))


def _is_first(scores: Array, step: int) -> float:
    """Return 1 if `step` is the first credited one. An empty mask gives 0."""
    credited = np.flatnonzero(scores)
    return float(bool(credited.size) and credited[0] == step)


def _ceiling_auc(response: AuditedResponse) -> float:
    """Return the AUC of the drops from half of the rollouts for the error found by the other half. No credit
    can be expected to agree better with values estimated from so few rollouts."""
    return step_auc(_drops(response.first_half), int(_drops(response.second_half).argmax()))


def _position(response: AuditedResponse) -> float:
    """Return where the largest drop ends, as a share of the response's tokens."""
    return response.boundaries[response.error + 1] / response.boundaries[-1]


def _phi_rank(responses: Sequence[AuditedResponse]) -> float:
    """Return Spearman's rank correlation of φ and nearness; 0 if one of them is constant."""
    phi, nearness = ([getattr(r, name) for r in responses] for name in ("phi", "nearness"))
    if np.ptp(phi) == 0 or np.ptp(nearness) == 0:
        return 0.0
    return float(stats.spearmanr(phi, nearness).statistic)


def _mean(
    responses: Sequence[AuditedResponse], measure: Callable[[AuditedResponse], float]
) -> dict[str, float] | None:
    """Return the mean over responses, and its interval; None without responses."""
    if not responses:
        return None
    values = {id(r): measure(r) for r in responses}
    return _of_prompts(responses, lambda drawn: float(np.mean([values[id(r)] for r in drawn])))


def _of_prompts(
    responses: Sequence[AuditedResponse], statistic: Callable[[Sequence[AuditedResponse]], float]
) -> dict[str, float]:
    """Return a statistic of the responses and its interval from resampling whole prompts."""
    prompts: dict[int, list[AuditedResponse]] = {}
    for response in responses:
        prompts.setdefault(response.prompt, []).append(response)
    groups, estimate = list(prompts.values()), statistic(responses)
    if len(groups) < 2:
        return {"estimate": estimate, "low": float("nan"), "high": float("nan")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # a statistic may be constant
        bounds = stats.bootstrap(
            (np.arange(len(groups)),),
            lambda drawn: statistic([response for i in drawn for response in groups[i]]),
            n_resamples=RESAMPLES,
            method="percentile",
            vectorized=False,
            rng=np.random.default_rng(0),
        ).confidence_interval
    return {"estimate": estimate, "low": float(bounds.low), "high": float(bounds.high)}


# ------------------------------------------------------------------------------------------------ for display

_MEASURES = {"auc": "AUC", "first_credited_step_is_the_error": "first credited step is the error"}


def audit_page(counts: Mapping[str, int], findings: Mapping[str, Any]) -> Group:
    """Return the findings of `credit_audit.audit` for a console, with 95 % intervals in brackets.

    Args:
        counts: numbers of what was sampled for them.
    """
    table = plain_table(("does credit lie on the error?",), [*_MEASURES.values()])
    for name, scores in findings["mask"].items():
        title = "tokens that corrections change (the mask)" if name == MASK else name
        table.add_row(title, *(_number(scores.get(measure)) for measure in _MEASURES))
    return Group(*_sampled(counts, findings), "", table, "", *_verdicts(findings))


def _sampled(counts: Mapping[str, int], findings: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{counts['responses_sampled']:,} responses were sampled; {counts['wrong']:,} are wrong. "
        f"{counts['corrections_correct']:,} of {counts['corrections']:,} corrections succeed."
    )
    yield (
        f"{findings['responses']:,} wrong responses to {findings['prompts']:,} prompts were audited with "
        f"{counts['rollouts']:,} continuations."
    )
    yield (
        f"In {findings['with_a_located_error']:,} of them one step costs at least {findings['min_drop']:.0%} "
        f"of the chance to end correct: the error. {findings['located_and_masked']:,} of these have a "
        "correction that earns credit."
    )
    if findings["largest_drop"] is not None:
        yield (
            f"The error costs {_number(findings['largest_drop'])} of the chance, and ends at "
            f"{_number(findings['position_of_the_drop'])} of the response."
        )


def _verdicts(findings: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "AUC is the chance that the error has a larger share of credited tokens than another step of its "
        "response; .5 is no better than chance."
    )
    if (above := findings["mask_above_random_auc"]) is not None:
        comparison = "more often than" if (above["low"] or 0.0) > 0 else "not surely more often than"
        yield f"The mask lies on the error {comparison} random tokens: AUC higher by {_number(above)}."
    if (equal := findings["mask_equals_sibling"]) is not None:
        yield (
            f"A share of {_number(equal)} of the masks equals the difference to a correct response of the "
            "same group, which costs no correction."
        )
    phi = findings["phi"]
    yield (
        f"A share of {phi['positive']:.2f} of the wrong responses earns a bonus (φ > 0). The rank "
        f"correlation of φ with how near a response was to correct is {_number(phi['rank_correlation'])}."
    )


def _number(value: Mapping[str, float | None] | None) -> str:
    """Return an estimate with its interval; a dash for what could not be measured."""
    if value is None or value["estimate"] is None:
        return "–"
    low, high = value["low"], value["high"]
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{value['estimate']:.2f}{interval}"


def plot_audit(
    responses: Sequence[AuditedResponse], findings: dict[str, Any], path: Path, *, title: str
) -> None:
    """Plot the value along wrong responses, the places of its largest drops, and the agreement of credit with
    them."""
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(13, 3.8), dpi=120, layout="constrained")
        figure.suptitle(title)
        values, drops, agreement = figure.subplots(1, 3, width_ratios=[1, 1, 1.3])
        _draw_values(values, responses)
        _draw_drops(drops, responses, findings["min_drop"])
        _draw_agreement(agreement, findings)
        figure.savefig(path)


def _draw_values(axes: Axes, responses: Sequence[AuditedResponse]) -> None:
    grid = np.linspace(0, 1, 50)
    curves = []
    for response in responses:
        at = np.asarray(response.boundaries) / response.boundaries[-1]
        curves.append(np.interp(grid, at, response.values))
        axes.plot(at, response.values, color="grey", alpha=0.15, linewidth=0.8)
    axes.plot(grid, np.mean(curves, axis=0), label="mean")
    axes.set_title("Value of prefixes of wrong responses")
    axes.set_xlabel("share of the response")
    axes.set_ylabel("rollouts that end correct")
    axes.legend(frameon=False)


def _draw_drops(axes: Axes, responses: Sequence[AuditedResponse], min_drop: float) -> None:
    ends = [_position(response) for response in responses if response.drops.max() >= min_drop]
    axes.hist(ends, bins=np.linspace(0, 1, 11).tolist())
    axes.set_title(f"Where the largest drop (≥ {min_drop:g}) ends")
    axes.set_xlabel("share of the response")


def _draw_agreement(axes: Axes, findings: dict[str, Any]) -> None:
    bars = {name: measured["auc"] for name, measured in findings["mask"].items()}
    defined_bars = {name: bar for name, bar in bars.items() if bar is not None}
    for place, bar in enumerate(reversed(defined_bars.values())):
        low, high = bar["estimate"] - bar["low"], bar["high"] - bar["estimate"]
        axes.errorbar(bar["estimate"], place, xerr=[[max(low, 0)], [max(high, 0)]], fmt="o", capsize=3)
    axes.set_yticks(range(len(defined_bars)), list(reversed(defined_bars)))
    axes.axvline(0.5, color="grey", linewidth=0.8)
    axes.set_xlim(0, 1)
    axes.set_title("Agreement with the drop, AUC and 95 % interval")
