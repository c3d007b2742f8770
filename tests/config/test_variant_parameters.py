"""A loss variant's parameters are its own: whatever recipe, preset or flag comes with it."""

import sys

import pytest

from megatron_ibpo.config import Config, ConfigError, LossConfig, ParallelConfig
from megatron_ibpo.loss import VARIANTS, Parameter, Variant
from megatron_ibpo.loss.variants import clipped_surrogate
from megatron_ibpo.policy.loss_objective import check_loss, loss_params
from megatron_ibpo.run.checks import check_loss_of_run
from megatron_ibpo.run.settings import parse_config
from support.paths import ROOT

RECIPES, ALGORITHMS = (
    sorted((ROOT / "examples" / folder).glob("*.yaml")) for folder in ("recipes", "algorithms")
)
STUDY = ROOT / "examples/recipes/tiny_qwen3_study.yaml"


def loss_of(*files, flags=()):
    configs = [text for file in files for text in ("--config", str(file))]
    return parse_config([*configs, *flags]).loss


def own(name):
    return {key: parameter.default for key, parameter in VARIANTS[name].params.items()}


FURTHER = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, len(VARIANTS) + 1))]


@pytest.mark.parametrize("further", FURTHER)
def test_every_variant_runs_with_its_own_parameters_in_some_recipes_and_in_the_slow_ones_in_all(
    monkeypatch, further
):
    """One of the variants is like the example of the docs: one parameter, and none of the clips' names."""
    monkeypatch.setitem(VARIANTS, "spo", Variant(clipped_surrogate, params={"eps": Parameter(0.2, 0.0)}))
    names = [*VARIANTS]
    for number, recipe in enumerate([*RECIPES, *ALGORITHMS], start=further):
        files = (recipe,) if recipe in RECIPES else (STUDY, recipe)
        before, name = loss_of(*files), names[number % len(names)]
        loss = loss_of(*files, flags=["--loss-variant", name])
        check_loss(loss)
        expected = loss_params(before) if name == before.loss_variant else own(name)
        assert loss_params(loss) == expected, (recipe.name, name)


def test_an_algorithm_over_a_recipe_of_another_variant_has_its_own_clips():
    """The study's recipe clips at 3e-3, which is GSPO's: only algorithms with GSPO's loss keep it."""
    for algorithm in ALGORITHMS:
        loss = loss_of(STUDY, algorithm)
        clips = {"eps_low": 3e-3, "eps_high": 3e-3}
        assert loss_params(loss) == (clips if loss.loss_variant == "gspo" else own(loss.loss_variant))


def test_naming_another_loss_variant_forgets_the_parameters_of_the_previous_one(tmp_path):
    def recipe(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    base = recipe("base.yaml", "advantage-estimator: ibpo\neps-clip: 3e-3\nloss-param: {a: 1}\n")

    def clips(*flags, after=()):
        loss = loss_of(base, *after, flags=flags)
        return loss.eps_clip, loss.eps_clip_high, loss.loss_param

    assert clips() == (3e-3, None, ("a=1",))
    assert clips("--loss-variant", "gspo") == (3e-3, None, ("a=1",)), "the same variant"
    assert clips("--loss-variant", "sapo") == (None, None, ())
    assert clips("--loss-variant=cispo", "--eps-clip", "0.1") == (0.1, None, ()), "given at the same place"
    assert clips("--advantage-estimator", "grpo") == (None, None, ()), "the preset's variant has its own"
    assert clips("--advantage-estimator", "grpo", "--loss-variant", "sapo") == (None, None, ())
    later = recipe("later.yaml", "loss-variant: sapo\nloss-param: {tau_pos: 2.5}\n")
    assert clips(after=[later]) == (None, None, ("tau_pos=2.5",))
    assert loss_params(loss_of(base, later)) == {"tau_pos": 2.5, "tau_neg": 1.05}
    method = recipe("method.yaml", "advantage-estimator: dapo\neps-clip: 0.1\n")
    assert clips(after=[method]) == (0.1, None, ())
    assert clips("--advantage-estimator", "ibpo", after=[method]) == (None, None, ())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_variant": "gpso"}, "--loss-variant gpso: unknown loss variant; .*; did you mean 'gspo'"),
        ({"loss_variant": "sapo", "eps_clip": 0.1}, "'sapo' has no parameter eps_high, eps_low; it has"),
        ({"loss_param": ("eps_low=wide",)}, "--loss-param eps_low=wide: must be a number"),
        ({"loss_param": ("eps_low=.1",), "eps_clip": 0.2}, "--loss-param eps_low: is set by --eps-clip"),
        ({"eps_clip": 2.0}, "eps_low of loss variant 'gspo' must be above 0 and at most 1, is 2.0"),
    ],
)
def test_any_parameter_can_be_set_by_name_and_what_a_variant_does_not_take_is_refused(fields, message):
    loss = LossConfig(loss_variant="dual-clip", eps_clip=0.1, loss_param=("bound=5", "eps_high=0.3"))
    assert loss_params(loss) == {"eps_low": 0.1, "eps_high": 0.3, "bound": 5.0}
    with pytest.raises(ValueError, match=message):
        check_loss(LossConfig(**fields))


MODULE = """
from megatron_ibpo.loss import Parameter, Variant
def term(log_ratio, {argument}, advantages, *, width):
    return -log_ratio * advantages * width, log_ratio > width
MINE = Variant(token_term=term, params=dict(width=Parameter(0.5, above=0.0)))
"""
SPLIT = {"parallel": ParallelConfig(context_parallel_size=2)}


@pytest.mark.parametrize(
    ("argument", "settings", "says"),
    [
        ("logprobs", {}, None),
        ("ref_logprobs", {}, "reads ref_logprobs, which need a reference policy; set --kl-coef above 0"),
        ("positions", SPLIT, "reads token positions.*context-parallel"),
        ("_", {}, "term has an argument '_'; a term reads its inputs by these names: log_ratio, logprobs"),
    ],
)
def test_a_variant_of_the_users_own_reads_what_it_can_have(tmp_path, monkeypatch, argument, settings, says):
    (tmp_path / "my_loss.py").write_text(MODULE.format(argument=argument))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_loss", raising=False)
    if says:
        with pytest.raises(ConfigError, match=says):
            check_loss_of_run(Config(loss=LossConfig(loss_variant="my_loss:MINE"), **settings))
    else:
        flags = ["--loss-variant", "my_loss:MINE"]
        assert loss_params(loss_of(STUDY, flags=flags)) == {"width": 0.5}
        assert loss_params(loss_of(STUDY, flags=[*flags, "--loss-param", "width=0.7"])) == {"width": 0.7}
