"""Algorithms by name, each as what it sets, and what wins where several recipes set something."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.all_fields import ENTRIES
from megatron_ibpo.config.config_error import ConfigError, nearest

# the paper's base variant: compare-and-correct credit, corrections trained jointly
_IBPO: dict[str, Any] = {
    "ibpo_operator": "compare-and-correct",
    "ibpo_variant": "base",
    "ibpo_lambda": 0.6,
    "ibpo_beta": 0.5,
    "ibpo_k": 2,
    "ibpo_corrections": 1,
    "ibpo_gate": False,
    "ibpo_rewrite_threshold": 0.6,
    "ibpo_rewrite_penalty": 0.0,
    "ibpo_joint": True,
    "ibpo_plain_prompt": "none",
    "ibpo_correction_group": "prompt",
    "ciw_inverted": False,
    "token_credit": "uniform",
    "advantages": "group",
    "dynamic_sampling": False,
    "dynamic_sampling_by": "credit",
    "overlong_buffer_share": 0.0,
    "loss_variant": "gspo",
}
# group-normalised terminal rewards alone
_PLAIN: dict[str, Any] = {
    **_IBPO,
    "ibpo_lambda": 0.0,
    "ibpo_corrections": 0,
    "ibpo_joint": False,
    "dynamic_sampling_by": "rewards",
}
_DAPO: dict[str, Any] = {
    **_PLAIN,
    "loss_variant": "dapo",
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
    "grpo": {**_PLAIN, "loss_variant": "grpo"},
    # without the std of the group and the length of the response, which favour some prompts and responses
    "dr-grpo": {**_PLAIN, "advantages": "group-mean", "loss_variant": "dr-grpo"},
    # clip higher, a token mean, dynamic sampling, soft overlong punishment
    "dapo": _DAPO,
    # tokens weighted by what the answer loses without their step, on DAPO; and its control
    "ciw": {**_DAPO, "ibpo_operator": "span-masking"},
    "ciw-inverted": {**_DAPO, "ibpo_operator": "span-masking", "ciw_inverted": True},
    # wrong responses push less where a correct one stands beside them: ahead of GSPO over the suite's tasks
    "wrong-weight": {**_PLAIN, "token_credit": "wrong-weight"},
    # a learned critic and generalised advantage estimation
    "ppo": {**_PLAIN, "advantages": "critic", "loss_variant": "ppo-clip"},
}
"""What --advantage-estimator NAME sets: configuration field → value. It wins over recipes read before the
place where it is named; what is given there or later wins over it."""

_OF_THE_VARIANT = ("eps_clip", "eps_clip_high", "loss_param")
"""Fields that mean something for one loss variant only."""


def resolve(layers: Sequence[Mapping[str, Any]], default_preset: str) -> dict[str, Any]:
    """Fields and values of several layers (recipes, flags) on top of the preset in force.

    A later layer wins over an earlier one. Naming a preset takes its settings in place of earlier ones, and
    leaves what it says nothing of. Naming another loss variant, alone or by a preset, forgets the parameters
    given for the previous one.

    Raises:
        ConfigError: an unknown preset.
    """
    preset, given = _preset(default_preset), dict[str, Any]()
    for layer in layers:
        if "advantage_estimator" in layer:
            chosen = _preset(layer["advantage_estimator"])
            given = _without(_forget_parameters(preset | given, chosen, given), chosen)
            preset = chosen
        in_force = preset | given
        preset, given = (_forget_parameters(in_force, layer, settings) for settings in (preset, given))
        given = _over(given, layer)
    return preset | given


def unknown_preset(name: str) -> str:
    """What to say of a name that is none of `PRESETS`."""
    known = ", ".join(PRESETS)
    return f"--advantage-estimator: no preset {shown(name)}; there are {known}{nearest(name, PRESETS)}"


def _preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        raise ConfigError(unknown_preset(name))
    return PRESETS[name]


def _forget_parameters(
    in_force: Mapping[str, Any], layer: Mapping[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """`settings`, without the loss variant's parameters if `layer` names another one than is in force."""
    stays = layer.get("loss_variant", in_force["loss_variant"]) == in_force["loss_variant"]
    return settings if stays else _without(settings, _OF_THE_VARIANT)


def _without(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _over(given: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """`layer` over `given`; "name=value" settings are added, where `named_values` lets the later one win."""
    merged = {**given, **layer}
    for name in layer:
        if ENTRIES[name].has_names:
            merged[name] = (*given.get(name, ()), *layer[name])
    return merged
