"""Credit: the choices of a method, a token credit and an estimator, and which groups are used."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megatron_ibpo.config.ranges import COUNT, UNIT
from megatron_ibpo.config.tyro_marks import NO_FLAG


@dataclass
class AlgorithmConfig:
    """Credit: from scored responses to advantages. `advantage_estimator` names a preset; the other
    fields default to what that preset says. What --ibpo-operator, --token-credit and --advantages name has
    parameters of its own (credit/), which are flags and recipe keys where it is chosen."""

    advantage_estimator: str = "ibpo"
    """Preset in `megatron_ibpo.config.PRESETS`: ibpo, ibpo-ratio, ibpo-mask, ibpo-k1, ibpo-shaping-only,
    ibpo-joint-only, ibpo-rewrite-penalty, gspo, wrong-weight, grpo, dr-grpo, dapo, ppo, ciw,
    ciw-inverted, cipo."""
    ibpo_operator: str = "compare-and-correct"
    """What compares responses. "compare-and-correct": corrections of wrong ones by the policy (the paper's);
    "none": nothing, rewards alone decide; "span-masking": for token weights alone, what the probability of a
    response's answer loses when a step of it is masked (CIW); or the import path of another method,
    package.module:name or path/to/file.py:name, such as those in examples/credit/."""
    token_credit: str = "uniform"
    """Which tokens of a wrong response learn how much, in groups that have a correct one, beside what the
    operator says. "uniform": all alike; "wrong-weight": all --token-credit-weight; "wrong-weight-by-length":
    all so much that together they count as --token-credit-tokens; "divergence-window": so many tokens where
    it leaves the longest prefix that it shares with a correct one; "divergence-cut": all from there on;
    "self-teacher": the more, the less likely the policy finds them once it is shown a correct response (after
    SDPO); or an import path, package.module:name or path/to/file.py:name."""
    advantages: str = "group"
    """What a reward is relative to: the mean of its group's rewards, over their population std ("group", the
    paper's), over Bessel's ("group-bessel", as verl, TRL, slime and oat), over that mean ("maxrl") or over
    nothing ("group-mean", Dr. GRPO); the mean of the others ("leave-one-out"); token by token what a critic
    expected ("critic", PPO); or an import path, package.module:name or path/to/file.py:name."""
    parameters: Annotated[dict[str, Any], *NO_FLAG] = field(default_factory=dict)
    """Parameters of what the three fields above name, by name; one that is left out has its default."""
    group_filter: str | None = None
    """Import path (package.module:name or path/to/file.py:name) of a function that says of a scored group
    whether to train on it; all groups are when None."""
    dynamic_sampling: bool = False
    """DAPO: sample other prompts in the place of those that all or no responses answer correctly, or
    correct: --dynamic-sampling-by."""
    dynamic_sampling_by: Literal["rewards", "credit"] = "credit"
    """When dynamic sampling passes a group over. "rewards": where all or no responses are correct, before
    anything is corrected, as in DAPO. "credit": where besides no response or correction has an advantage; so
    groups without a correct response are corrected first, and stay if some corrections succeed. The default
    where there are corrections, which those groups need most; it costs the corrections of groups that are
    passed over in the end."""
    dynamic_sampling_rounds: Annotated[int, COUNT] = 10
    """Batches of --rollout-batch-size prompts that a step may sample for that. Prompts of rounds that a step
    does not need are passed over, so that the order of prompts depends on no result. 10 as in DAPO."""
    overlong_buffer_share: Annotated[float, UNIT] = 0.0
    """DAPO: the last part of --rollout-max-response-len in which a response loses reward, up to 1 at the full
    length. 0: off; DAPO has 0.2 (4,096 of 20,480 tokens)."""
