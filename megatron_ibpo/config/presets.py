"""Algorithm presets, and the precedence of several recipes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.algorithm import AlgorithmConfig
from megatron_ibpo.config.config import ENTRIES, Config
from megatron_ibpo.config.config_error import ConfigError, nearest_value
from megatron_ibpo.config.parameters import (
    Registry,
    chosen_entries,
    entries_of,
    nested_names,
    unknown_setting,
)
from megatron_ibpo.config.recipes import Layer, typed_value

# group-normalised terminal rewards only
_PLAIN: dict[str, Any] = {
    "ibpo_operator": "none",
    "token_credit": "uniform",
    "advantages": "group",
    "dynamic_sampling": False,
    "dynamic_sampling_by": "rewards",
    "overlong_buffer_share": 0.0,
    "loss_variant": "gspo",
}
# the paper's base variant: compare-and-correct credit, corrections trained jointly
_IBPO: dict[str, Any] = {
    **_PLAIN,
    "ibpo_operator": "compare-and-correct",
    "ibpo_variant": "base",
    "ibpo_lambda": 0.6,
    "ibpo_beta": 0.5,
    "ibpo_k": 2,
    "ibpo_corrections": 1,
    "ibpo_rewrite_threshold": 0.6,
    "ibpo_rewrite_penalty": 0.0,
    "ibpo_joint": True,
    "ibpo_plain_prompt": "none",
    "ibpo_correction_group": "prompt",
    "dynamic_sampling_by": "credit",
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
    # cipo: the policy's own wrong answer is corrected, and the correction trained on; no reference, no
    # shaping
    "cipo": {**_IBPO, "ibpo_lambda": 0.0, "ibpo_k": 1},
    "gspo": _PLAIN,
    "grpo": {**_PLAIN, "loss_variant": "grpo"},
    # no std of the group and no length of the response, which favour some prompts and responses
    "dr-grpo": {**_PLAIN, "advantages": "group-mean", "loss_variant": "dr-grpo"},
    # clip higher, a token mean, dynamic sampling, soft overlong punishment
    "dapo": _DAPO,
    # tokens weighted by what the answer loses without their step, on DAPO; and its control
    "ciw": {**_DAPO, "ibpo_operator": "span-masking"},
    "ciw-inverted": {**_DAPO, "ibpo_operator": "span-masking", "ciw_inverted": True},
    # wrong responses push less if their group has a correct one; gained on one of the suite's two tasks
    "wrong-weight": {**_PLAIN, "token_credit": "wrong-weight"},
    # a learned critic and generalised advantage estimation
    "ppo": {**_PLAIN, "advantages": "critic", "loss_variant": "ppo-clip"},
}
"""Settings of --advantage-estimator NAME: configuration field or parameter of the method → value. A preset
overrides recipes read before the one that names it; values given with it or later override the preset."""

_OF_THE_VARIANT = ("eps_clip", "eps_clip_high", "loss_param")
"""Fields that apply to one loss variant only."""


def resolve(layers: Sequence[Layer], registries: Sequence[Registry]) -> Config:
    """Return the configuration that several layers (recipes, flags) make on top of the preset in force.

    A later layer overrides an earlier one. Naming a preset replaces earlier values of its settings and keeps
    all other settings. Naming another loss variant, method, token credit, estimator or engine, directly or
    by a preset, discards the parameters given for the previous one.

    Raises:
        ConfigError: an unknown preset or choice, an unknown key, a parameter that the choice does not have,
            or a value of the wrong type.
    """
    named = AlgorithmConfig.advantage_estimator
    preset, settings = _preset(named), dict[str, Any]()
    for layer in layers:
        if "advantage_estimator" in layer.fields:
            named = layer.fields["advantage_estimator"]
            chosen = _preset(named)
            settings = _without(settings, [*_forgotten(preset | settings, chosen, registries), *chosen])
            preset = chosen
        forgotten = _forgotten(preset | settings, layer.fields, registries)
        preset, settings = _without(preset, forgotten), _without(settings, forgotten)
        settings = _over(settings, layer.fields)
        settings |= _parameters(layer, {**preset, **settings, "advantage_estimator": named}, registries)
    return _config(preset | settings, registries)


def algorithm_of(preset: str, registries: Sequence[Registry], **settings: Any) -> AlgorithmConfig:
    """Return the algorithm settings of a preset with `settings` on top. Raises ConfigError as `resolve`."""
    fields = {name: value for name, value in settings.items() if name in ENTRIES}
    parameters = _without(settings, ENTRIES)
    return resolve([Layer(fields | {"advantage_estimator": preset}, parameters)], registries).algorithm


def _preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        flag, names = "--advantage-estimator", ", ".join(PRESETS)
        nearest = nearest_value(flag, name, PRESETS)
        raise ConfigError(f"{flag}: no preset {shown(name)}; there are {names}{nearest}")
    return PRESETS[name]


def _config(values: Mapping[str, Any], registries: Sequence[Registry]) -> Config:
    config = Config()
    for name, value in values.items():
        if name in ENTRIES:
            ENTRIES[name].put(config, value)
    for name, entry in entries_of(config, registries).items():
        entry.put(config, values.get(name, entry.default))
    return config


def _forgotten(
    in_force: Mapping[str, Any], layer: Mapping[str, Any], registries: Sequence[Registry]
) -> list[str]:
    """Return the parameters of every choice in force that `layer` replaces by another."""
    names: list[str] = []
    if layer.get("loss_variant", in_force["loss_variant"]) != in_force["loss_variant"]:
        names += _OF_THE_VARIANT
    for registry in registries:
        previous = registry.name_of(in_force.get(registry.setting))
        chosen = registry.name_of(layer.get(registry.setting, previous))
        if chosen != previous and registry.find(chosen) is not registry.find(previous):
            names += registry.entries(previous)
    return names


def _parameters(layer: Layer, in_force: Mapping[str, Any], registries: Sequence[Registry]) -> dict[str, Any]:
    """Return the other keys of a layer as typed parameters; "name=value" settings join those in force."""
    if not layer.parameters:
        return {}
    entries = chosen_entries(in_force, registries)
    parameters: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in layer.parameters.items():
        entry = entries.get(key.replace("-", "_"))
        if entry is None:
            place, names = layer.source.of(key), [*ENTRIES, *entries]
            problems += [
                place + unknown_setting(name, names, in_force, registries)
                for name in nested_names(key, value)
            ]
        else:
            typed = typed_value(value, entry, layer.source.of(key) + key)
            parameters[entry.name] = (*in_force.get(entry.name, ()), *typed) if entry.has_names else typed
    if problems:
        raise ConfigError("\n".join(problems))
    return parameters


def _without(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    removed = set(names)
    return {name: value for name, value in settings.items() if name not in removed}


def _over(settings: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return `layer` over `settings`. "name=value" settings are added: `named_values` lets the later win."""
    merged = {**settings, **layer}
    for name in layer:
        if ENTRIES[name].has_names:
            merged[name] = (*settings.get(name, ()), *layer[name])
    return merged
