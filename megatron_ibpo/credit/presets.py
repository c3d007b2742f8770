"""Algorithms by name, each as what it sets, and the check of an algorithm's settings."""

from __future__ import annotations

import difflib
import math
from typing import Any

from megatron_ibpo.config import AlgorithmConfig
from megatron_ibpo.credit.shaping import largest_bonus

__all__ = ["PRESETS", "check_algorithm"]

# the paper's base variant: compare-and-correct credit, corrections trained jointly
_IBPO: dict[str, Any] = {
    "ibpo_operator": "compare-and-correct",
    "ibpo_variant": "base",
    "ibpo_lambda": 0.6,
    "ibpo_beta": 0.5,
    "ibpo_k": 2,
    "ibpo_corrections": 1,
    "ibpo_rewrite_threshold": 0.6,
    "ibpo_rewrite_penalty": 0.0,
    "ibpo_joint": True,
    "ibpo_correction_group": "prompt",
    "ciw_inverted": False,
    "advantages": "group",
    "dynamic_sampling": False,
    "overlong_buffer_share": 0.0,
    "loss_variant": "gspo",
}
# group-normalised terminal rewards alone
_PLAIN: dict[str, Any] = {
    **_IBPO,
    "ibpo_lambda": 0.0,
    "ibpo_corrections": 0,
    "ibpo_joint": False,
}
_DAPO: dict[str, Any] = {
    **_PLAIN,
    "loss_variant": "dapo",
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "dynamic_sampling": True,
    "overlong_buffer_share": 0.2,
}

PRESETS: dict[str, dict[str, Any]] = {
    "ibpo": _IBPO,
    "ibpo-ratio": {**_IBPO, "ibpo_variant": "ratio"},
    "ibpo-mask": {**_IBPO, "ibpo_variant": "mask"},
    "ibpo-k1": {**_IBPO, "ibpo_k": 1},
    "ibpo-shaping-only": {**_IBPO, "ibpo_joint": False},
    "ibpo-joint-only": {**_IBPO, "ibpo_lambda": 0.0},
    # several corrections of a pair, contrasted with each other; rewrites lose some of their reward
    "ibpo-rewrite-penalty": {
        **_IBPO,
        "ibpo_corrections": 4,
        "ibpo_correction_group": "pair",
        "ibpo_rewrite_penalty": 0.5,
    },
    # the policy's own wrong answer is corrected, and the correction trained on; no reference, no shaping
    "cipo": {**_IBPO, "ibpo_lambda": 0.0, "ibpo_k": 1},
    "gspo": _PLAIN,
    "grpo": {**_PLAIN, "loss_variant": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.2},
    # without the std of the group and the length of the response, which favour some prompts and responses
    "dr-grpo": {
        **_PLAIN,
        "advantages": "group-mean",
        "loss_variant": "dr-grpo",
        "eps_clip": 0.2,
        "eps_clip_high": 0.2,
    },
    # clip higher, a token mean, dynamic sampling, soft overlong punishment
    "dapo": _DAPO,
    # tokens weighted by what the answer loses without their step, on DAPO; and its control
    "ciw": {**_DAPO, "ibpo_operator": "span-masking"},
    "ciw-inverted": {**_DAPO, "ibpo_operator": "span-masking", "ciw_inverted": True},
    # a learned critic and generalised advantage estimation
    "ppo": {
        **_PLAIN,
        "advantages": "critic",
        "loss_variant": "ppo-clip",
        "eps_clip": 0.2,
        "eps_clip_high": 0.2,
    },
}
"""What --advantage-estimator NAME sets: configuration field → value. It wins over recipes read before the
place where it is named; what is given there or later wins over it."""


def check_algorithm(
    algorithm: AlgorithmConfig, reward_threshold: float = 1.0, *, takes_token_advantages: bool = True
) -> None:
    """Refuse settings under which credit would not mean what it says.

    Args:
        reward_threshold: the smallest reward of a correct response (--reward-threshold); a wrong one, with
            reward 0 and the whole bonus, must stay below it (ibpo steps 2 and 8).
        takes_token_advantages: of the loss (--loss-variant).

    Raises:
        ValueError: with every problem, each naming its flag.
    """
    rules = [*_ranges(algorithm), *_bonus_rules(algorithm, reward_threshold), *_prerequisites(algorithm)]
    rules.append(
        (
            algorithm.advantages != "critic" or takes_token_advantages,
            "--advantages critic gives every token its own advantage, and the --loss-variant takes one for a "
            "whole sequence; take ppo-clip, grpo or dapo",
        )
    )
    problems = [problem for holds, problem in rules if not holds]
    if problems:
        raise ValueError("\n".join(problems))


_Rule = tuple[bool, str]


def _ranges(algorithm: AlgorithmConfig) -> list[_Rule]:
    """Each field by itself."""
    alpha = algorithm.ibpo_rewrite_threshold
    estimator = algorithm.advantage_estimator
    nearest = difflib.get_close_matches(estimator, PRESETS, n=1)
    hint = f" (nearest: {nearest[0]})" if nearest else ""
    return [
        (
            estimator in PRESETS,
            f"--advantage-estimator {estimator}: unknown{hint}; there are {', '.join(PRESETS)}",
        ),
        (
            0 <= algorithm.ibpo_lambda < math.inf,
            f"--ibpo-lambda {algorithm.ibpo_lambda}: must be finite and at least 0",
        ),
        (0 <= algorithm.ibpo_beta <= 1, f"--ibpo-beta {algorithm.ibpo_beta}: must lie in [0, 1]"),
        (algorithm.ibpo_k >= 1, f"--ibpo-k {algorithm.ibpo_k}: at least 1 (the wrong response itself)"),
        (algorithm.ibpo_corrections >= 0, f"--ibpo-corrections {algorithm.ibpo_corrections}: at least 0"),
        (
            alpha == "adaptive" or (isinstance(alpha, int | float) and alpha >= 0),
            f'--ibpo-rewrite-threshold {alpha}: a distance of at least 0, or "adaptive"',
        ),
        (
            0 <= algorithm.ibpo_rewrite_penalty < math.inf,
            f"--ibpo-rewrite-penalty {algorithm.ibpo_rewrite_penalty}: must be finite and at least 0",
        ),
        (0 <= algorithm.gae_gamma <= 1, f"--gae-gamma {algorithm.gae_gamma}: must lie in [0, 1]"),
        (0 <= algorithm.gae_lambda <= 1, f"--gae-lambda {algorithm.gae_lambda}: must lie in [0, 1]"),
        (
            0 <= algorithm.overlong_buffer_share <= 1,
            f"--overlong-buffer-share {algorithm.overlong_buffer_share}: must lie in [0, 1]",
        ),
        (
            0 <= algorithm.ibpo_correction_weight < math.inf,
            f"--ibpo-correction-weight {algorithm.ibpo_correction_weight}: must be finite and at least 0",
        ),
    ]


def _bonus_rules(algorithm: AlgorithmConfig, reward_threshold: float) -> list[_Rule]:
    """A wrong response, however near, is worth less than a correct one."""
    bonus = largest_bonus(algorithm)
    plain = f"--ibpo-lambda {algorithm.ibpo_lambda} times --ibpo-beta {algorithm.ibpo_beta}"
    share = f"--ibpo-lambda {algorithm.ibpo_lambda} times a share of up to 1"
    product = plain if bonus == algorithm.ibpo_lambda * algorithm.ibpo_beta else share
    return [
        (
            not bonus >= 1,
            f"{product} is {bonus:g}: λΔ must stay below 1, or a corrected wrong response is worth a correct "
            "one",
        ),
        (
            bonus >= 1 or not bonus >= reward_threshold,
            f"{product} is {bonus:g}: a wrong response with that bonus reaches the smallest correct reward, "
            f"--reward-threshold {reward_threshold:g}; lower λ or β",
        ),
    ]


def _prerequisites(algorithm: AlgorithmConfig) -> list[_Rule]:
    """What a setting needs beside it."""
    operator = algorithm.ibpo_operator
    corrects = operator == "compare-and-correct" and algorithm.ibpo_corrections != 0
    judges = corrects or operator == "agreement"
    needs = "needs corrections: --ibpo-operator compare-and-correct and --ibpo-corrections of at least 1"
    return [
        (
            judges or not algorithm.ibpo_lambda > 0,
            f"--ibpo-lambda {algorithm.ibpo_lambda}: without corrections there is nothing to shape rewards "
            "with; set --ibpo-corrections or --ibpo-lambda 0",
        ),
        (corrects or not algorithm.ibpo_joint, f"--ibpo-joint {needs}"),
        (corrects or algorithm.ibpo_variant != "ratio", f"--ibpo-variant ratio {needs}"),
        (
            judges or algorithm.ibpo_variant != "mask",
            f"--ibpo-variant mask {needs}, or --ibpo-operator agreement",
        ),
        (
            not algorithm.ibpo_mask_insertions or (corrects and algorithm.ibpo_variant == "mask"),
            "--ibpo-mask-insertions marks tokens in the mask: it needs --ibpo-variant mask and corrections",
        ),
        (
            not algorithm.ciw_inverted or operator == "span-masking",
            "--ciw-inverted turns the importance of steps round: it needs --ibpo-operator span-masking",
        ),
        (corrects or not algorithm.ibpo_strip_thinking, f"--ibpo-strip-thinking {needs}"),
        (
            algorithm.ibpo_correction_group != "pair" or algorithm.ibpo_corrections >= 2,
            "--ibpo-correction-group pair compares the corrections of a pair: it needs --ibpo-corrections of "
            "at least 2",
        ),
        (
            not algorithm.ibpo_rewrite_penalty > 0 or algorithm.ibpo_joint,
            "--ibpo-rewrite-penalty acts on the rewards of corrections in the joint loss: it needs "
            "--ibpo-joint",
        ),
    ]
