"""Fields of Megatron's own configurations, set by name: checked, applied, shown and counted."""

from dataclasses import fields

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from megatron_ibpo.config import Config, ConfigError, ModelConfig, OptimizerConfig
from megatron_ibpo.config.config import ENTRIES, flag
from megatron_ibpo.plan.feasibility import UNCOUNTED
from megatron_ibpo.policy import overrides
from megatron_ibpo.policy.forward_backward import _optimizer_config
from megatron_ibpo.policy.model import _own_fields, transformer_config
from megatron_ibpo.policy.overrides import check_overrides, model_overrides, optimizer_overrides
from megatron_ibpo.report.display import run_sizes
from megatron_ibpo.run.settings import check_settings, parse_config


def overriding(*model, optimizer=(), bf16=None, precise=False, offload=False):
    of_optimizer = OptimizerConfig(optimizer_override=tuple(optimizer), optimizer_cpu_offload=offload)
    of_optimizer.use_precision_aware_optimizer = precise
    return Config(model=ModelConfig(model_override=model, bf16=bf16), optimizer=of_optimizer)


def test_a_setting_has_the_type_that_megatron_declares():
    for setting, value in {
        "fp8=hybrid": "hybrid",
        "fp8-margin=2": 2,
        "moe_enable_deepep=true": True,
        "recompute_modules=[core_attn, moe]": ["core_attn", "moe"],
        "activation_offload_fraction=1": 1.0,
        "moe_deepep_num_sms=none": None,
    }.items():
        ((name, found),) = model_overrides(overriding(setting)).items()
        assert (name, found) == (setting.partition("=")[0].replace("-", "_"), value)
        assert type(found) is type(value)


def test_an_invalid_override_is_refused_with_advice():
    for setting, says in {
        "num_layer=3": "no such field; did you mean 'num_layers'",
        "num_layers=3": "config.json of --hf-checkpoint",
        "fp8=e5m2": "Megatron wants Optional",
        "recompute_modules=[1]": "Megatron wants",
        "init_method=torch.nn.init.zeros_": "takes a Python object",
        "fp8": "name=value",
        "virtual_pipeline_model_parallel_size=1": "must be at least 2",
    }.items():
        with pytest.raises(ValueError, match=says):
            check_overrides(overriding(setting))
    for setting, says in {
        "exp_avg_dtype=bf16": "needs --use-precision-aware-optimizer",
        "exp_avg_dtype=int4": "there are fp32, float32, bf16",
    }.items():
        with pytest.raises(ValueError, match=says):
            check_overrides(overriding(optimizer=[setting]))
    with pytest.raises(ConfigError) as refused:
        check_settings(overriding("bf16=true", optimizer=["lr=1"]))
    for said in ("--model-override bf16", "--optimizer-override lr: this project sets it; use --lr"):
        assert said in str(refused.value), "all problems of both flags are told at once"


def test_settings_of_this_project_are_refused_but_implementation_choices_free(shapes):
    of_model = {field.name for field in fields(TransformerConfig)}
    of_optimizer = {field.name for field in fields(MegatronOptimizerConfig)}
    ours = [(name, overriding(f"{name}=1")) for name in ENTRIES.keys() & of_model]
    ours += [(name, overriding(optimizer=[f"{name}=1"])) for name in ENTRIES.keys() & of_optimizer]
    assert len(ours) > 20
    for name, config in ours:
        with pytest.raises(ValueError, match=f" {name}: this project sets it; use {flag(name)}$"):
            check_overrides(config)
    choices = {
        "apply_rope_fusion", "batch_p2p_comm", "bias_activation_fusion", "masked_softmax_fusion",
        "moe_permute_fusion", "moe_router_dtype", "moe_token_dispatcher_type", "overlap_p2p_comm",
    }  # fmt: skip
    set_by_us = {name for shape in shapes.values() for name in _own_fields(shape, Config(), use_te=True)}
    assert set_by_us - overrides.MODEL_OURS.keys() - ENTRIES.keys() == choices
    assert overrides.MODEL_OURS.keys() | UNCOUNTED.keys() <= of_model
    assert overrides.OPTIMIZER_OURS.keys() <= of_optimizer


def test_settings_reach_megatron(shapes):
    of_optimizer = ["decoupled_weight_decay=false", "exp_avg_dtype=bf16"]
    of_model = ("attention_backend=flash", "bias_dropout_fusion=true")
    config = overriding(*of_model, optimizer=of_optimizer, precise=True)
    core = transformer_config(shapes["dense"], config)
    assert (core.attention_backend, core.bias_dropout_fusion) == (AttnBackend.flash, True)
    assert transformer_config(shapes["dense"], Config()).attention_backend is AttnBackend.auto
    given = overrides.as_megatron(optimizer_overrides(config), MegatronOptimizerConfig)
    assert given == {"decoupled_weight_decay": False, "exp_avg_dtype": torch.bfloat16}
    plain = _optimizer_config(overriding(optimizer=of_optimizer[:1]), 1e-3)
    assert (plain.decoupled_weight_decay, plain.lr) == (False, 1e-3)
    with pytest.raises(ValueError, match="--model-override fp8=hybrid, fp4=e2m1: Megatron refuses it"):
        transformer_config(shapes["dense"], overriding("fp8=hybrid", "fp4=e2m1"))
    with pytest.raises(ValueError, match="attention_backend=quick: there are flash, fused"):
        transformer_config(shapes["dense"], overriding("attention_backend=quick"))


def test_overrides_are_flags_recipe_keys_and_table_rows(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model-override: {fp8: hybrid, recompute_modules: '[moe]'}\n")
    config = parse_config(["--config", str(recipe), "--optimizer-override", "decoupled_weight_decay=false"])
    assert model_overrides(config) == {"fp8": "hybrid", "recompute_modules": ["moe"]}
    assert optimizer_overrides(config) == {"decoupled_weight_decay": False}
    rows = {(size.name, size.value, size.meaning) for size in run_sizes(config, 1, corrections=0)}
    assert ("fp8", "hybrid", "--model-override") in rows


def test_bytes_of_optimizer_state_follow_the_settings():
    for device, host, precise, offload, bf16, given in (
        (12, 0, False, False, True, ""),
        (8, 0, False, False, False, ""),
        (7, 0, True, False, True, "exp_avg_dtype=fp8 exp_avg_sq_dtype=fp16"),
        (0, 16, True, True, True, ""),
        (9, 4, True, True, True, "optimizer_offload_fraction=0.25"),
    ):
        config = overriding(optimizer=given.split(), bf16=bf16, precise=precise, offload=offload)
        counted = overrides.read_overrides(config).optimizer_bytes
        assert (counted.device, counted.host) == (device, host), config.optimizer
