"""Algorithms by name, each as what it sets, and the check of an algorithm's settings."""

from __future__ import annotations

import difflib
import math
from typing import Any

from megatron_ibpo.config import AlgorithmConfig

__all__ = ["PRESETS", "check_algorithm"]

PRESETS: dict[str, dict[str, Any]] = {
    # the paper's base variant: compare-and-correct credit, corrections trained jointly
    "ibpo": {
        "ibpo_variant": "base",
        "ibpo_lambda": 0.6,
        "ibpo_beta": 0.5,
        "ibpo_k": 2,
        "ibpo_corrections": 1,
        "ibpo_rewrite_threshold": 0.6,
        "ibpo_joint": True,
        "loss_variant": "gspo",
    },
    # group-normalised terminal rewards and the sequence-level ratio alone
    "gspo": {"ibpo_lambda": 0.0, "ibpo_corrections": 0, "ibpo_joint": False, "loss_variant": "gspo"},
}
"""What --advantage-estimator NAME sets: configuration field → value. Recipes and flags win over it."""


def check_algorithm(algorithm: AlgorithmConfig, reward_threshold: float = 1.0) -> None:
    """Refuse settings under which credit would not mean what it says.

    Args:
        reward_threshold: the smallest reward of a correct response (--reward-threshold); a wrong one, with
            reward 0 and the whole bonus, must stay below it (ibpo steps 2 and 8).

    Raises:
        ValueError: with every problem, each naming its flag.
    """
    bonus = algorithm.ibpo_lambda * algorithm.ibpo_beta
    alpha = algorithm.ibpo_rewrite_threshold
    estimator = algorithm.advantage_estimator
    nearest = difflib.get_close_matches(estimator, PRESETS, n=1)
    hint = f" (nearest: {nearest[0]})" if nearest else ""
    rules = [
        (
            estimator in PRESETS,
            f"--advantage-estimator {estimator}: unknown{hint}; there are {', '.join(PRESETS)}",
        ),
        (
            0 <= algorithm.ibpo_lambda < math.inf,
            f"--ibpo-lambda {algorithm.ibpo_lambda}: must be finite and at least 0",
        ),
        (0 <= algorithm.ibpo_beta <= 1, f"--ibpo-beta {algorithm.ibpo_beta}: must lie in [0, 1]"),
        (
            not bonus >= 1,
            f"--ibpo-lambda {algorithm.ibpo_lambda} times --ibpo-beta {algorithm.ibpo_beta} is {bonus:g}: "
            "λΔ must stay below 1, or a corrected wrong response is worth a correct one",
        ),
        (
            bonus >= 1 or not bonus >= reward_threshold,
            f"--ibpo-lambda times --ibpo-beta is {bonus:g}: a wrong response with that bonus reaches the "
            f"smallest correct reward, --reward-threshold {reward_threshold:g}; lower λ or β",
        ),
        (algorithm.ibpo_k >= 1, f"--ibpo-k {algorithm.ibpo_k}: at least 1 (the wrong response itself)"),
        (algorithm.ibpo_corrections >= 0, f"--ibpo-corrections {algorithm.ibpo_corrections}: at least 0"),
        (
            alpha == "adaptive" or (isinstance(alpha, int | float) and alpha >= 0),
            f'--ibpo-rewrite-threshold {alpha}: a distance of at least 0, or "adaptive"',
        ),
        (
            0 <= algorithm.ibpo_correction_weight < math.inf,
            f"--ibpo-correction-weight {algorithm.ibpo_correction_weight}: must be finite and at least 0",
        ),
    ]
    problems = [problem for holds, problem in rules if not holds]
    if problems:
        raise ValueError("\n".join(problems))
