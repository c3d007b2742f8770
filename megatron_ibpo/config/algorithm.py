"""Credit settings: the method, token credit and estimator, and the groups to train on."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megatron_ibpo.config.ranges import COUNT, NO_FLAG, UNIT


@dataclass
class AlgorithmConfig:
    """Credit settings: how scored responses become advantages. `advantage_estimator` names a preset, and the
    other fields default to that preset's values. The choices of --ibpo-operator, --token-credit and
    --advantages have their own parameters (credit/), which are flags and recipe keys only when chosen."""

    advantage_estimator: str = "ibpo"
    """Preset in `megatron_ibpo.config.PRESETS`: ibpo, ibpo-ratio, ibpo-mask, ibpo-k1, ibpo-shaping-only,
    ibpo-joint-only, ibpo-rewrite-penalty, gspo, wrong-weight, grpo, dr-grpo, dapo, ppo, ciw,
    ciw-inverted, cipo."""
    ibpo_operator: str = "compare-and-correct"
    """Method that compares responses. "compare-and-correct": the policy corrects wrong responses (the
    paper's). "none": no comparison; rewards alone decide. "span-masking": affects token weights only; a
    step's weight is the drop in the probability of the response's answer when the step is masked (CIW). Or
    the import path of another method, package.module:name or path/to/file.py:name, such as those in
    examples/credit/."""
    token_credit: str = "uniform"
    """Weights of the tokens of wrong responses in groups that have a correct one, on top of the operator's.
    "uniform": all equal. "wrong-weight": --token-credit-weight for every token. "wrong-weight-by-length":
    equal weights that sum to --token-credit-tokens. "divergence-window": a window of tokens after the longest
    prefix shared with a correct response. "divergence-cut": every token after that prefix. "self-teacher":
    more weight on tokens that the policy finds less likely once it is shown a correct response (after SDPO).
    Or an import path, package.module:name or path/to/file.py:name."""
    advantages: str = "group"
    """Baseline and scale of a reward. "group": the group's mean and population std (the paper's).
    "group-bessel": the group's mean and Bessel-corrected std, as in verl, TRL, slime and oat. "maxrl": the
    group's mean, also as the divisor. "group-mean": the group's mean, no division (Dr. GRPO).
    "leave-one-out": the mean of the other responses. "critic": a critic's value for each token (PPO). Or an
    import path, package.module:name or path/to/file.py:name."""
    parameters: Annotated[dict[str, Any], *NO_FLAG] = field(default_factory=dict)
    """Parameters of the three choices above, by name. A parameter left out has its default."""
    group_filter: str | None = None
    """Import path (package.module:name or path/to/file.py:name) of a function that returns whether to train
    on a scored group; None trains on all groups."""
    dynamic_sampling: bool = False
    """DAPO: replace prompts whose responses are all right or all wrong by other prompts;
    --dynamic-sampling-by defines which groups those are."""
    dynamic_sampling_by: Literal["rewards", "credit"] = "credit"
    """Criterion for resampling a group. "rewards": all or no responses are correct, before any correction, as
    in DAPO. "credit": in addition, no response or correction has an advantage. Groups without a correct
    response are then corrected first, and kept if some corrections succeed. "credit" is the default where
    there are corrections, because those groups need them most; it also spends corrections on groups that are
    dropped in the end."""
    dynamic_sampling_rounds: Annotated[int, COUNT] = 10
    """Most batches of --rollout-batch-size prompts that a step may sample for that. Prompts of rounds that a
    step does not need are skipped, so that the order of prompts does not depend on results. 10 as in DAPO."""
    overlong_buffer_share: Annotated[float, UNIT] = 0.0
    """DAPO: share of --rollout-max-response-len, at its end, in which a response loses reward, up to 1 at the
    full length. 0: off; DAPO uses 0.2 (4,096 of 20,480 tokens)."""
