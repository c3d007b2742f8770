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

EXAMPLES = ROOT / "examples"
RECIPES = sorted(EXAMPLES.glob("recipes/*.yaml"))
ALGORITHMS = sorted(EXAMPLES.glob("algorithms/*.yaml"))
STUDY = EXAMPLES / "recipes" / "tiny_qwen3_study.yaml"


def loss_of(*files, flags=()):
    configs = [text for file in files for text in ("--config", str(file))]
    return parse_config([*configs, *flags]).loss


def own(name):
    return {key: parameter.default for key, parameter in VARIANTS[name].params.items()}


@pytest.fixture
def spo(monkeypatch):
    """Install a variant like the example of the docs: one parameter, and none of the clips' names."""
    monkeypatch.setitem(VARIANTS, "spo", Variant(clipped_surrogate, params={"eps": Parameter(0.2, 0.0)}))


def check_variants(recipe, names):
    files = (recipe,) if recipe in RECIPES else (STUDY, recipe)
    before = loss_of(*files)
    for name in names:
        loss = loss_of(*files, flags=["--loss-variant", name])
        check_loss(loss)
        expected = loss_params(before) if name == before.loss_variant else own(name)
        assert loss_params(loss) == expected, (recipe.name, name)


def test_every_variant_runs_with_its_own_parameters_in_some_recipes(spo):
    names = list(VARIANTS)
    for number, recipe in enumerate([*RECIPES, *ALGORITHMS]):
        check_variants(recipe, [names[number % len(names)]])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*RECIPES, *ALGORITHMS], ids=lambda path: path.stem)
def test_every_variant_runs_with_its_own_parameters_in_every_recipe(spo, recipe):
    check_variants(recipe, VARIANTS)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda path: path.stem)
def test_an_algorithm_over_a_recipe_of_another_variant_has_its_own_clips(algorithm):
    """The study's recipe clips at 3e-3, which is GSPO's: only algorithms with GSPO's loss keep it."""
    loss = loss_of(STUDY, algorithm)
    clips = {"eps_low": 3e-3, "eps_high": 3e-3}
    assert loss_params(loss) == (clips if loss.loss_variant == "gspo" else own(loss.loss_variant))


def write(path, text):
    path.write_text(text)
    return path


def test_parameters_given_with_a_variant_or_after_it_stay(tmp_path):
    base = write(tmp_path / "base.yaml", "loss-variant: sapo\nloss-param: [tau_pos=1.5]\n")
    clips = write(tmp_path / "clips.yaml", "eps-clip: 0.1\n")
    assert loss_params(loss_of(base)) == {"tau_pos": 1.5, "tau_neg": 1.05}
    assert loss_params(loss_of(base, flags=["--loss-variant", "grpo"])) == own("grpo")
    assert loss_params(loss_of(base, flags=["--loss-variant", "sapo"]))["tau_pos"] == 1.5
    flags = ["--loss-variant", "grpo", "--eps-clip", "0.3"]
    assert loss_params(loss_of(base, clips, flags=flags)) == {"eps_low": 0.3, "eps_high": 0.3}
    back = write(tmp_path / "back.yaml", "loss-variant: dapo\n")
    assert loss_params(loss_of(clips, back, flags=["--advantage-estimator", "gspo"])) == own("gspo")


def test_any_parameter_can_be_set_by_name():
    loss = LossConfig(loss_variant="dual-clip", eps_clip=0.1, loss_param=("bound=5", "eps_high=0.3"))
    assert loss_params(loss) == {"eps_low": 0.1, "eps_high": 0.3, "bound": 5.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_variant": "gpso"}, "--loss-variant gpso: unknown loss variant; .*; did you mean 'gspo'"),
        ({"loss_variant": "sapo", "eps_clip": 0.1}, "'sapo' has no parameter eps_high, eps_low; it has"),
        ({"loss_param": ("tau=1",)}, "'gspo' has no parameter tau; it has eps_low, eps_high"),
        ({"loss_param": ("eps_low=wide",)}, "--loss-param eps_low=wide: must be a number"),
        ({"loss_param": ("eps_low=.1",), "eps_clip": 0.2}, "--loss-param eps_low: is set by --eps-clip"),
        ({"loss_param": ("eps_low=-1",)}, "eps_low of loss variant 'gspo' must be above 0 and at most 1"),
        ({"eps_clip": 2.0}, "eps_low of loss variant 'gspo' must be above 0 and at most 1, is 2.0"),
    ],
)
def test_what_a_variant_does_not_take_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        check_loss(LossConfig(**fields))


def test_a_variant_of_the_users_own_by_import_path(tmp_path, monkeypatch):
    write(
        tmp_path / "my_loss.py",
        "from megatron_ibpo.loss import Parameter, Variant\n"
        "def term(log_ratio, logprobs, advantages, *, width):\n"
        "    return -log_ratio * advantages * width, log_ratio > width\n"
        "MINE = Variant(token_term=term, params={'width': Parameter(0.5, above=0.0)})\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--loss-variant", "my_loss:MINE"]
    assert loss_params(loss_of(STUDY, flags=flags)) == {"width": 0.5}
    assert loss_params(loss_of(STUDY, flags=[*flags, "--loss-param", "width=0.7"])) == {"width": 0.7}
    sys.modules.pop("my_loss")


@pytest.mark.parametrize(
    ("argument", "flags", "says"),
    [
        ("ref_logprobs", {}, "reads ref_logprobs, which need a reference policy; set --kl-coef above 0"),
        (
            "positions",
            {"parallel": ParallelConfig(context_parallel_size=2)},
            "reads token positions.*context-parallel",
        ),
        ("_", {}, "term has an argument '_'; a term reads its inputs by these names: log_ratio, logprobs"),
    ],
)
def test_an_input_that_a_term_cannot_have_is_refused_before_the_start(
    tmp_path, monkeypatch, argument, flags, says
):
    write(
        tmp_path / "reads.py",
        "from megatron_ibpo.loss import Variant\n"
        f"def term(log_ratio, advantages, {argument}):\n"
        f"    return -log_ratio * advantages * {argument}, advantages > 0\n"
        "READS = Variant(token_term=term)\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=says):
        check_loss_of_run(Config(loss=LossConfig(loss_variant="reads:READS"), **flags))
    sys.modules.pop("reads", None)
