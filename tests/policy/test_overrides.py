"""Fields of Megatron's own configurations, set by name: checked, applied, shown and counted."""

from dataclasses import fields

import pytest
import torch

from megatron_ibpo.config import Config, ConfigError, ModelConfig, OptimizerConfig
from megatron_ibpo.config.all_fields import ENTRIES, flag
from megatron_ibpo.plan.feasibility import UNCOUNTED, make_plan
from megatron_ibpo.policy.overrides import (
    MODEL_OURS,
    OPTIMIZER_OURS,
    check_overrides,
    model_overrides,
    optimizer_bytes,
    optimizer_overrides,
)
from megatron_ibpo.report.sizes import run_sizes
from megatron_ibpo.run.checks import check_settings
from megatron_ibpo.run.settings import parse_config


def overriding(*model, optimizer=(), bf16=None):
    return Config(
        model=ModelConfig(model_override=model, bf16=bf16),
        optimizer=OptimizerConfig(optimizer_override=tuple(optimizer)),
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("fp8=hybrid", "hybrid"),
        ("fp8-margin=2", 2),
        ("moe_enable_deepep=true", True),
        ("moe_token_dispatcher_type=flex", "flex"),
        ("recompute_modules=[core_attn, moe]", ["core_attn", "moe"]),
        ("activation_offload_fraction=1e-1", 0.1),
        ("activation_offload_fraction=1", 1.0),
        ("moe_deepep_num_sms=none", None),
        ("cuda_graph_impl=local", "local"),
        ("attention_backend=flash", "flash"),
    ],
)
def test_a_setting_has_the_type_that_megatron_declares(setting, value):
    name = setting.partition("=")[0].replace("-", "_")
    found = model_overrides(overriding(setting))
    assert found == {name: value}
    assert type(found[name]) is type(value)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("num_layer=3", "no such field; did you mean 'num_layers'"),
        ("num_layers=3", "config.json of --hf-checkpoint"),
        ("bf16=true", "use --bf16"),
        ("tensor_model_parallel_size=2", "use --tensor-model-parallel-size"),
        ("fp8=e5m2", "Megatron wants Optional"),
        ("fp8_margin=1.5", "Megatron wants int"),
        ("recompute_modules=[1]", "Megatron wants"),
        ("recompute_modules=core_attn", "Megatron wants"),
        ("moe_enable_deepep=1", "Megatron wants bool"),
        ("init_method=torch.nn.init.zeros_", "takes a Python object"),
        ("fp8", "name=value"),
    ],
)
def test_what_cannot_be_overridden_is_refused_and_says_what_to_do(setting, says):
    with pytest.raises(ValueError, match=says):
        check_overrides(overriding(setting))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("exp_avg_dtype=bf16", "needs --use-precision-aware-optimizer"),
        ("exp_avg_dtype=int4", "there are fp32, float32, bf16"),
        ("use_distributed_optimizer=true", "use --use-distributed-optimizer"),
        ("overlap_param_gather=true", "use --overlap-param-gather"),
        ("timers=none", "takes a Python object"),
    ],
)
def test_the_same_of_the_optimizers_fields(setting, says):
    with pytest.raises(ValueError, match=says):
        check_overrides(overriding(optimizer=[setting]))


def test_a_field_with_a_flag_of_its_own_is_set_by_that_flag():
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.transformer import TransformerConfig

    for megatrons, given in (
        (TransformerConfig, lambda setting: overriding(setting)),
        (MegatronOptimizerConfig, lambda setting: overriding(optimizer=[setting])),
    ):
        with_flags = ENTRIES.keys() & {field.name for field in fields(megatrons)}
        assert len(with_flags) > 10
        for name in with_flags:
            with pytest.raises(ValueError, match=f" {name}: this project sets it; use {flag(name)}$"):
                check_overrides(given(f"{name}=1"))


def test_all_problems_of_both_flags_are_told_at_once():
    with pytest.raises(ConfigError) as refused:
        check_settings(overriding("bf16=true", optimizer=["lr=1", "exp_avg_dtype=int4"]))
    said = str(refused.value)
    assert "--model-override bf16" in said
    assert "--optimizer-override lr: this project sets it; use --lr" in said


def test_everything_that_follows_from_the_rest_is_refused(shapes):
    """A field that is a mere choice of implementation is left to the user."""
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.transformer import TransformerConfig

    from megatron_ibpo.policy.forward_backward import _optimizer_config
    from megatron_ibpo.policy.model import _own_fields

    choices = {
        "apply_rope_fusion", "batch_p2p_comm", "bias_activation_fusion", "masked_softmax_fusion",
        "moe_permute_fusion", "moe_router_dtype", "moe_token_dispatcher_type", "overlap_p2p_comm",
    }  # fmt: skip
    set_by_us = {name for shape in shapes.values() for name in _own_fields(shape, Config(), use_te=True)}
    assert set_by_us - MODEL_OURS.keys() - ENTRIES.keys() == choices
    assert MODEL_OURS.keys() | UNCOUNTED.keys() <= {field.name for field in fields(TransformerConfig)}
    assert OPTIMIZER_OURS.keys() <= {field.name for field in fields(MegatronOptimizerConfig)}
    assert _optimizer_config(Config(), 1e-3).lr == 1e-3


def test_settings_reach_megatron(shapes):
    from megatron.core.transformer.enums import AttnBackend

    from megatron_ibpo.policy.forward_backward import _optimizer_config
    from megatron_ibpo.policy.model import transformer_config

    config = overriding(
        "attention_backend=flash", "bias_dropout_fusion=true", optimizer=["decoupled_weight_decay=false"]
    )
    core = transformer_config(shapes["dense"], config)
    assert core.attention_backend is AttnBackend.flash
    assert core.bias_dropout_fusion
    assert transformer_config(shapes["dense"], Config()).attention_backend is AttnBackend.auto
    assert not _optimizer_config(config, 1e-3).decoupled_weight_decay
    halved = overriding(optimizer=["exp_avg_dtype=bf16"])
    halved.optimizer.use_precision_aware_optimizer = True
    assert as_dtype(halved) is torch.bfloat16
    with pytest.raises(ValueError, match="--model-override fp8=hybrid, fp4=e2m1: Megatron refuses it"):
        transformer_config(shapes["dense"], overriding("fp8=hybrid", "fp4=e2m1"))
    with pytest.raises(ValueError, match="attention_backend=quick: there are flash, fused"):
        transformer_config(shapes["dense"], overriding("attention_backend=quick"))


def as_dtype(config):
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

    from megatron_ibpo.policy.overrides import as_megatron

    return as_megatron(optimizer_overrides(config), MegatronOptimizerConfig)["exp_avg_dtype"]


def test_they_are_flags_and_recipe_keys_and_rows_of_the_table(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model-override: {fp8: hybrid, recompute_modules: '[moe]'}\n")
    config = parse_config(["--config", str(recipe), "--optimizer-override", "decoupled_weight_decay=false"])
    assert model_overrides(config) == {"fp8": "hybrid", "recompute_modules": ["moe"]}
    assert optimizer_overrides(config) == {"decoupled_weight_decay": False}
    rows = {size.name: (size.value, size.meaning) for size in run_sizes(config, 1)}
    assert rows["fp8"] == ("hybrid", "--model-override")
    assert rows["decoupled_weight_decay"] == ("false", "--optimizer-override")


@pytest.mark.parametrize(
    ("bf16", "precise", "offload", "settings", "device", "host"),
    [
        (True, False, False, (), 12, 0),
        (False, False, False, (), 8, 0),
        (True, True, False, (), 12, 0),
        (True, True, False, ("exp_avg_dtype=bf16", "exp_avg_sq_dtype=bf16"), 8, 0),
        (True, True, False, ("exp_avg_dtype=fp8", "exp_avg_sq_dtype=fp16"), 7, 0),
        (True, True, True, (), 0, 16),
        (True, True, True, ("optimizer_offload_fraction=0.25",), 9, 4),
    ],
)
def test_bytes_of_optimizer_state_follow_the_settings(bf16, precise, offload, settings, device, host):
    config = overriding(optimizer=settings, bf16=bf16)
    config.optimizer.use_precision_aware_optimizer, config.optimizer.optimizer_cpu_offload = precise, offload
    counted = optimizer_bytes(config)
    assert (counted.device, counted.host) == (device, host)


@pytest.mark.slow
def test_the_dry_run_counts_it(models, planner):
    needs_gpus = ("moe_token_dispatcher_type=flex", "moe_enable_deepep=true")
    config = overriding(*needs_gpus, optimizer=("exp_avg_dtype=bf16",), bf16=True)
    config.optimizer.use_precision_aware_optimizer = True
    config.model.hf_checkpoint = models["next"]
    config.rollout.rollout_max_response_len = 100
    (stage,) = planner(make_plan, config, 1).stages
    assert stage.optimizer / stage.gradients == 10 / 4, "4 + 2 + 4 bytes of state, 4 of gradients"
    config.model.model_override = ("fp8=hybrid", "fp4=e2m1")
    with pytest.raises(ValueError, match="Megatron refuses it"):
        planner(make_plan, config, 1)
