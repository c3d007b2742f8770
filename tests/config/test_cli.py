"""Flags and recipes: what wins, what comes back, what is refused and how; help; hooks; loss variants."""

import copy
import dataclasses
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import typing
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.config import NOT_NEGATIVE, Config, ConfigError, LossConfig, ParallelConfig
from megatron_ibpo.config.config import ENTRIES
from megatron_ibpo.config.config_error import FLAGS, KEYS, SYNONYMS, VALUES
from megatron_ibpo.config.flags import COMMON_FLAGS
from megatron_ibpo.config.hooks import load_hook
from megatron_ibpo.config.presets import PRESETS
from megatron_ibpo.config.recipes import config_yaml
from megatron_ibpo.config.values import named_values
from megatron_ibpo.credit import Operator, find_operator
from megatron_ibpo.credit.registries import ESTIMATORS, OPERATORS, TOKEN_CREDITS
from megatron_ibpo.engines.registry import ENGINES
from megatron_ibpo.loss import VARIANTS
from megatron_ibpo.policy.loss_objective import check_loss, loss_params
from megatron_ibpo.rewards import Score, extracted_answer, open_verifier
from megatron_ibpo.run.settings import (
    REGISTRIES,
    check_loss_of_run,
    check_run,
    doubtful_settings,
    load_recipe,
    parse_config,
)
from support.paths import ROOT


@pytest.fixture
def parsed(tmp_path):
    """Parse recipes of these texts, in order, and flags after them."""

    def parse(*texts, flags="", **options):
        words = []
        for number, text in enumerate(texts):
            path = tmp_path / f"recipe{number or ''}.yaml"
            path.write_text(text, encoding="utf-8")
            words += ["--config", str(path)]
        return parse_config([*words, *shlex.split(flags)], **options)

    return parse


def test_no_two_settings_have_one_name():
    sections = [getattr(Config(), section.name) for section in dataclasses.fields(Config)]
    names = [field.name for section in sections for field in dataclasses.fields(section)]
    assert sorted(set(names) - {"parameters"}) == sorted(name for name in names if name != "parameters")


def test_flags_win_over_recipes_and_recipes_over_presets(parsed):
    config = parsed(
        "advantage-estimator: gspo\nlr: 3e-4\nrollout_batch_size: 16",
        "rollout-batch-size: 8\nclip-grad: 2",
        flags="--tensor-model-parallel-size 2 --no-sequence-parallel --clip-grad 3 --hf-checkpoint some_dir "
        "--eps-clip-high None --rollout-top-k -1",
    )
    assert config.algorithm.ibpo_operator == "none", "from the preset"
    assert config.optimizer.lr == 3e-4, "from the first recipe"
    assert config.rollout.rollout_batch_size == 8, "the later recipe wins"
    assert config.optimizer.clip_grad == 3.0, "the flag wins"
    parallel = config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel
    assert (*parallel, config.loss.eps_clip_high, config.rollout.rollout_top_k) == (2, False, None, -1)
    assert config.model.hf_checkpoint == Path.cwd() / "some_dir"


def test_default_lengths_yield_to_the_model_but_explicit_ones_stay(tmp_path, parsed):
    shape = json.loads((ROOT / "examples/tiny_qwen3/config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 256}))

    def lengths(*texts, flags=""):
        said = []
        config = parsed(*texts, flags=f"--hf-checkpoint {tmp_path} {flags}", note=said.append)
        sampled = config.rollout.rollout_max_context_len, config.rollout.rollout_max_response_len
        return (*sampled, config.run.eval_max_response_len), said

    own = "rollout-max-context-len: 512\nrollout-max-response-len: 96\neval-max-response-len: 64"
    found, said = lengths(own)
    assert found == (256, 48, 32)
    assert said[0] == "rollout_max_context_len 512 of the recipe → 256, the model's context"
    assert "rollout_max_response_len 96 → 48" in said[1]
    found, said = lengths(own, flags="--rollout_max_response_len=100")
    assert (found, len(said)) == ((256, 100, 32), 2)
    typed = lengths(own, flags="--rollout-max-context-len 512")  # opening the run refuses it
    assert typed == ((512, 96, 64), [])
    found, said = lengths()
    assert found[1] == 64
    assert said == ["rollout_max_response_len 8192 → 64, in proportion to the context of 256"]


def test_a_preset_counts_where_it_is_named(parsed):
    """It overrides what was read before it, so that a recipe of one method can be run with another."""
    base = "advantage-estimator: ibpo\nibpo-lambda: 0.3\neps-clip: 3e-3"
    assert parsed(base).algorithm.parameters["ibpo_lambda"] == 0.3, "its own file wins over a preset"
    by_flag = parsed(base, flags="--advantage-estimator=ibpo-joint-only")
    assert by_flag.algorithm.parameters["ibpo_lambda"] == 0.0
    assert by_flag.loss.eps_clip == 3e-3, "what the preset says nothing of stays"
    method = "advantage-estimator: ibpo-mask\nibpo-beta: 0.4"
    by_file = parsed(base, method, "ibpo-k: 3").algorithm.parameters
    assert (by_file["ibpo_lambda"], by_file["ibpo_beta"], by_file["ibpo_k"]) == (0.6, 0.4, 3)
    back = parsed(method, flags="--advantage-estimator gspo")
    assert back.algorithm.parameters == {}, "nothing of an earlier preset is left"
    default = Config().algorithm.advantage_estimator
    assert parsed() == parsed(flags=f"--advantage-estimator {default}"), "in force without a name"


def test_naming_another_choice_forgets_the_parameters_of_the_previous_one(parsed):
    base = "token-credit: wrong-weight-by-length\ntoken-credit-tokens: 5\nadvantages: critic\ngae-lambda: 0.5"
    kept = parsed(base, flags="--gae-gamma 0.9").algorithm.parameters
    assert (kept["token_credit_tokens"], kept["gae_lambda"], kept["gae_gamma"]) == (5, 0.5, 0.9)
    other = parsed(base, flags="--token-credit divergence-window --advantages group").algorithm.parameters
    assert other["token_credit_tokens"] == 2
    assert "gae_lambda" not in other


@dataclasses.dataclass
class Mine(Operator):
    mine_weight: Annotated[float, NOT_NEGATIVE] = 1.5
    """Weight of it."""

    def judge(self, groups, context):
        raise AssertionError("never asked")


MADE = Mine(2.0)  # an object that cannot be hashed


def test_parameters_of_a_users_method_have_equal_rights(parsed, capsys):
    path = f"{__name__}:Mine"
    assert parsed(f"ibpo-operator: {path}\nmine-weight: 2").algorithm.parameters == {"mine_weight": 2.0}
    config = parsed(flags=f"--ibpo-operator {path} --mine-weight 3")
    assert find_operator(config.algorithm) == Mine(3.0)
    assert parsed(config_yaml(config)) == config
    assert find_operator(parsed(flags=f"--ibpo-operator {__name__}:MADE").algorithm) is MADE
    with pytest.raises(ConfigError, match=r"yaml, line 2: mine-weigh: no such .* 'mine-weight'"):
        parsed(f"ibpo-operator: {path}\nmine-weigh: 2")
    with pytest.raises(SystemExit):
        parsed(flags=f"--ibpo-operator {path} --help-all")
    shown = capsys.readouterr().out
    assert re.search(r"--mine-weight .*\n +Weight of it\.", shown)
    assert "--ibpo-lambda" not in shown


@pytest.fixture(scope="module")
def default():
    return parse_config([])


@settings(max_examples=15)
@given(
    lr=st.floats(1e-12, 1.0),
    path=st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1),
    threshold=st.sampled_from(["adaptive", 0.25, 1.0]),
    high=st.none() | st.floats(1e-6, 0.5),
)
def test_a_written_configuration_reads_back_equal(tmp_path_factory, default, lr, path, threshold, high):
    config = copy.deepcopy(default)
    config.optimizer.lr = lr
    file = path.replace("?", "_")  # it would begin the settings of a source
    config.data.prompt_data = (str(Path("/data") / file), "reasoning_gym://chain_sum?weight=2")
    config.run.run_dir = Path("/runs") / path
    config.algorithm.parameters["ibpo_rewrite_threshold"] = threshold
    config.loss.eps_clip_high = high
    written = tmp_path_factory.mktemp("config") / "config.yaml"
    written.write_text(config_yaml(config), encoding="utf-8")
    assert parse_config(["--config", str(written)]) == config


def test_flags_that_are_wrong_are_refused_with_their_names(parsed, capsys):
    for flags, says in (
        # parameters that the choice does not have
        ("--advantage-estimator gspo --ibpo-lambda 0.3",
         "--ibpo-lambda: gspo with .* has no such parameter; --ibpo-operator compare-and-correct has it"),
        ("--ibpo-operator span-msking", "--ibpo-operator span-msking: unknown.*did you mean 'span-masking'"),
        # values of the wrong type
        ("--ibpo-k 2.5 --seed x", r"'2\.5' is not a whole number\n  --seed: 'x' is not"),
        # words that are no values
        ("--run-dir=", "^--run-dir: '' is not a path$"),
        ("--loss-variant gspo grpo", "^--loss-variant: takes one value, so grpo is one too many$"),
        ("--config a.yaml b.yaml --print-config=1", r"b\.yaml is one too many\n  --print-config 1: a switch"),
        ("--rm-type " + b"a\xff".decode(errors="surrogateescape"), "is not UTF-8"),
        ("--save DIR", r"^--save DIR: a switch, --save or --no-save, .* the directory is --run-dir$"),
        ("--no-ibpo-joint=1 --bf16 maybe", r"--no-ibpo-joint 1: a switch.*\n  --bf16 maybe: a"),
        ("stray --lr 1 2", r"stray: not a flag.*\n  --lr: takes one value, so 2 is one too many"),
        ("--load --colocate", "^--load: needs a value$"),
        ("--loss-param --lr 1", "^--loss-param: needs a value$"),
        ("--lora-targets all -lr 1", "^-lr: not a flag; flags begin with --$"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            parsed(flags=flags)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seed", "7", 7), ("lr", "3e-4", 3e-4), ("bf16", "False", False), ("rm_url", "None", None),
        ("rm_type", "None", "None"), ("run_dir", "/7", Path("/7")), ("loss_backend", "torch", "torch"),
    ],
)  # fmt: skip
def test_text_means_the_same_in_flags_recipes_and_python(name, text, value, tmp_path, parsed):
    (tmp_path / "empty.yaml").touch()
    for config in (
        parsed(flags=f"--{name} {text}"),
        parsed(f"{name}: '{text}'"),
        load_recipe(tmp_path / "empty.yaml", **{name: text}),
    ):
        assert ENTRIES[name].get(config) == value


def test_a_bad_recipe_is_refused_with_its_key_and_value(parsed):
    for text, says in (
        ("rollout_batchsize: 2", r"recipe.yaml, line 1: rollout_batchsize: no such .* 'rollout_batch_size'"),
        (
            "#\n\nrollout-batch-size: true",
            r"recipe.yaml, line 3: rollout-batch-size: True is not a whole number",
        ),
        ("sequence-parallel: 1", r"sequence-parallel: 1 is not true or false"),
        ("recompute-granularity: all", r"'all' is not one of 'none', 'full', 'selective'"),
        ('run-dir: ""', "run-dir: '' is not a path"),
        ("icepop: [1.2]", r"icepop: \[1.2\] is not a list of 2, each item a number or null"),
        *((f"prompt-data: {value}", "prompt-data") for value in ("{weight: 2}", "[{path: a, suffix: [b]}]")),
        ("lr: 1e-5\nrun-dir: a\nrun_dir: b", r"key 'run_dir' is given twice, on lines 2 and 3"),
        ("loss-param: {tau_pos: 1, tau_pos: 2}", r"key 'tau_pos' is given twice, on lines 1 and 1"),
        ("advantage-estimator: gspo\nibpo-k: 2", r"recipe\.yaml, line 2: --ibpo-k: gspo with"),
        ("advantage-estimator: ibop", r"no preset 'ibop'; there are .*; did you mean 'ibpo'\?$"),
        ("- lr", r"must hold `key: value` lines"),
        *((text, "is not YAML") for text in ("lr: [", "lr: !!python/object/apply:os.getcwd []")),
        # what the YAML library ends in other errors
        *((text, "recipe.yaml") for text in ("[" * 500, "lr: 2001-99-99", "lr: !!int x", "!!map x", "<<: 3")),
        *((text, "recipe.yaml") for text in ("lr: 0b", "? [a]\n: b", "lr: !!binary x")),
    ):
        with pytest.raises(ConfigError, match=says):
            parsed(text + "\n")
    # references that would fill the memory when they are written out
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 12))
    for key in ("lr: *l11\n", "vllm-arg: {a: *l11}\n"):
        with pytest.raises(ConfigError, match=r"^(?s:.{,500})\Z"):
            parsed(f"x: &x 1\nl0: &l0 [x]\n{levels}{key}")


@pytest.fixture
def runnable(tmp_path):
    config = parse_config([])
    config.model.hf_checkpoint = tmp_path
    config.data.eval_prompt_data = "reasoning_gym://chain_sum"
    config.data.prompt_data = (config.data.eval_prompt_data,)
    return config


def test_no_field_accepts_nan_infinity_or_a_huge_integer(runnable):
    types = {name: {entry.type, *typing.get_args(entry.type)} for name, entry in ENTRIES.items()}
    numbers = [name for name, kinds in types.items() if {int, float} & kinds]
    for value in (float("nan"), float("inf"), float("-inf"), 10**20, -(10**20)):
        config = copy.deepcopy(runnable)
        changed = [name for name in numbers if isinstance(value, float) or float not in types[name]]
        for name in changed:
            is_list = typing.get_origin(ENTRIES[name].type) is tuple
            ENTRIES[name].put(config, (value,) if is_list else value)
        with pytest.raises(ConfigError) as refused:
            check_run(config)
        for name in changed:
            assert f"--{name.replace('_', '-')}: must be a " in str(refused.value), value


def test_settings_that_cannot_work_are_refused(runnable):
    rates = {"filter_pass_rate": (0.1, 0.9)}
    for fields in (
        {"n_samples_per_prompt": 1},  # a group of one has no advantages
        {"num_steps_per_rollout": 3}, {"eps_clip": 0.0}, {"loss_variant": "gspo-token", "fuse_lm_head": True},
        {"ibpo_lambda": 2.0, "ibpo_beta": 0.5}, {"advantages": "groups"}, {"ibpo_operator": "span-msking"},
        {"rollout_max_context_len": 8192}, {"rollout_temperature_cycle": (1.0, float("inf"))},
        {"rollout_batch_size": 4_000_000},  # times responses: more sequences than fit into memory
        {"rollout_num_gpus": 4},  # and --colocate
        {"vllm_arg": ("swap_space=-inf",)}, {"vllm_arg": ("=3",)}, {"load": Path("nowhere")},
        {"hf_checkpoint": Path("nowhere")}, {"budget": 100.0},  # with the default schedule
        {"debug_rollout_only": True, "load_debug_rollout_data": Path(".")},
        {"ref_load": Path("/")},  # and no --kl-coef
        {"prompt_data": ("a.jsonl", "")}, {"apply_chat_template": True, "apply_chat_template_kwargs": "[1]"},
        {"system_prompt": "Be brief."},  # and no --apply-chat-template
        rates,  # and no --pass-rates
        {"filter_pass_rate": (0.9, 0.1), "pass_rates": Path("setup.py")},
        {**rates, "pass_rates": Path("nowhere")},
    ):  # fmt: skip
        config = copy.deepcopy(runnable)
        for name, value in fields.items():
            if name in ENTRIES:
                ENTRIES[name].put(config, value)
            else:
                section = config.rollout if name.startswith("vllm") else config.algorithm
                section.parameters[name] = value
        with pytest.raises(ConfigError) as refused:
            check_run(config)
        assert "1 problem in the configuration" in str(refused.value), fields


def test_unused_settings_may_be_absent_and_all_problems_are_named(runnable, monkeypatch):
    check_run(runnable)
    runnable.data.eval_prompt_data, runnable.run.eval_num_prompts = None, 0
    check_run(runnable)
    runnable.data.prompt_data, runnable.run.eval_num_prompts = (), Config().run.eval_num_prompts
    runnable.run.dry_run = True
    check_run(runnable)
    runnable.run.dry_run, runnable.model.hf_checkpoint = False, None
    runnable.optimizer.lr = -1.0
    runnable.parallel.context_parallel_size = 0
    with pytest.raises(ConfigError, match="5 problems") as refused:
        check_run(runnable)
    numbers = "--lr: must be above 0, is -1.0", "--context-parallel-size: must be between 1 and"
    for words in ("--hf-checkpoint", "--prompt-data", "--eval-prompt-data", *numbers):
        assert words in str(refused.value)
    runnable.run.use_wandb = runnable.run.use_trackio = True
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install wandb(?s:.*)pip install trackio"):
        check_run(runnable)


def test_a_bonus_that_cannot_change_an_advantage_is_noted():
    # the z-scores of two rewards are opposite and of one size, whatever the lower one is raised by
    for flags, is_noted in {
        "ibpo": True,
        "ibpo-mask --advantages group-bessel": True,
        "ibpo --n-samples-per-prompt 3": False,
        "ibpo --advantages group-mean": False,
        "ibpo-joint-only": False,
    }.items():
        words = ["--n-samples-per-prompt", "2", "--advantage-estimator", *flags.split()]
        config = parse_config(words)
        notes = doubtful_settings(config, find_operator(config.algorithm))
        assert any("--n-samples-per-prompt 2" in note for note in notes) == is_noted, flags


def test_a_recipe_may_build_on_another_whose_values_it_overrides(tmp_path):
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases/first.yaml").write_text("lr: 1\nadvantage-estimator: ibpo\nibpo-lambda: 0.1\n")
    recipe = tmp_path / "second.yaml"
    recipe.write_text("base: bases/first.yaml\nlr: 2\n")
    config = parse_config(["--config", str(recipe)])
    assert (config.optimizer.lr, config.algorithm.parameters["ibpo_lambda"]) == (2, 0.1)
    assert load_recipe(recipe) == config, "Python reads it as the command line does"
    recipe.write_text("base: bases/first.yaml\nadvantage-estimator: gspo\n")
    assert parse_config(["--config", str(recipe)]).algorithm.advantage_estimator == "gspo"
    (tmp_path / "bases/first.yaml").write_text("base: ../second.yaml\n")
    with pytest.raises(ConfigError, match=r"second\.yaml: builds on itself by its `base`"):
        parse_config(["--config", str(recipe)])
    for base, message in (("missing.yaml", "missing.yaml: cannot be read"), ("[a]", "is not the path")):
        recipe.write_text(f"base: {base}\n")
        with pytest.raises(ConfigError, match=message):
            parse_config(["--config", str(recipe)])


RECIPES, ALGORITHMS = (sorted(ROOT.glob(f"examples/{kind}/*.yaml")) for kind in ("recipes", "algorithms"))


@pytest.mark.parametrize("further", [range(1), pytest.param(range(1, len(RECIPES)), marks=pytest.mark.slow)])
def test_every_algorithm_works_after_a_models_recipe(tmp_path, further):
    """Each model's recipe comes before some of them, and in the slow test before all."""
    own = {"run-dir": str(tmp_path), "hf-checkpoint": str(ROOT / "examples/tiny_qwen3")}
    mine = tmp_path / "mine.yaml"  # read ten times as fast as flags
    mine.write_text(yaml.safe_dump({**own, "prompt-data": "a.jsonl", "eval-prompt-data": "b.jsonl"}))
    assert len(ALGORITHMS) > len(RECIPES) > len(further) > 0
    for number, algorithm in itertools.chain.from_iterable(enumerate(ALGORITHMS, first) for first in further):
        model = RECIPES[number % len(RECIPES)]
        config = parse_config([word for file in (model, algorithm, mine) for word in ("--config", str(file))])
        if "environment:" in model.read_text() and algorithm.stem == "ibpo_diverse":
            with pytest.raises(ConfigError, match="the environment writes the prompt"):
                check_run(config)
        else:
            check_run(config)


def test_named_values_merge_and_prompt_sources_may_be_mappings(parsed):
    first = "vllm-arg:\n  max-num-batched-tokens: 4096\n  enable_chunked_prefill: true"
    flags = "--vllm-arg max_num_batched_tokens=1 --vllm-arg x=a=b"
    config = parsed(first, "vllm-arg: [swap_space=1.5]", flags=flags)
    merged = {"max_num_batched_tokens": "1", "enable_chunked_prefill": "true", "swap_space": "1.5"}
    assert named_values(config.rollout.parameters["vllm_arg"]) == {**merged, "x": "a=b"}
    assert parsed(config_yaml(config)) == config
    data = parsed(r"""prompt-data:
  - {path: /data/a.jsonl, weight: 2, suffix: "Put it in \\boxed{}.", rm-type: math}
  - reasoning_gym://chain_sum?min_terms=5
  - path: reasoning_gym://countdown?level=1
    weight: 0.5
apply-chat-template-kwargs: {enable_thinking: false}
""").data
    assert data.prompt_data == (
        "/data/a.jsonl?weight=2&suffix=Put+it+in+%5Cboxed%7B%7D.&rm_type=math",
        "reasoning_gym://chain_sum?min_terms=5",
        "reasoning_gym://countdown?level=1&weight=0.5",
    )
    assert data.apply_chat_template_kwargs == '{"enable_thinking": false}'
    one = "prompt-data: /data/a.jsonl"
    assert parsed(one).data.prompt_data == ("/data/a.jsonl",)
    assert parsed(one, flags="--prompt-data /b /c").data.prompt_data == ("/b", "/c")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A directory where the user stands, while the process works in the repository's root."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("IBPO_CWD", str(tmp_path))
    monkeypatch.setattr("sys.path", [*sys.path])
    return tmp_path


def test_user_paths_start_at_the_working_directory(elsewhere, parsed):
    (elsewhere / "mine.yaml").write_text("lr: 1e-3\n")
    flags = "--config mine.yaml --hf-checkpoint examples/tiny_qwen3 --prompt-data a.jsonl --run-dir /abs "
    config = parsed(flags=flags + "--eval-prompt-data reasoning_gym://chain_sum")
    assert config.optimizer.lr == 1e-3
    assert config.model.hf_checkpoint == elsewhere / "examples/tiny_qwen3", "not the repository's"
    assert config.data.prompt_data == (str(elsewhere / "a.jsonl"),)
    assert config.data.eval_prompt_data == "reasoning_gym://chain_sum"
    assert config.run.run_dir == Path("/abs")
    says = f"--hf-checkpoint: {elsewhere}/examples/tiny_qwen3 is not a directory .relative paths count from"
    with pytest.raises(ConfigError, match=says):
        check_run(config)
    with pytest.raises(ConfigError, match=f"--config {elsewhere}/no.yaml: cannot be read"):
        parsed(flags="--config no.yaml")
    (elsewhere / "README.md").touch()
    text = "hf-checkpoint: examples/tiny_qwen3\nprompt-data: mine.jsonl\nload: README.md\nrun-dir: examples"
    config = parsed(text)
    assert config.model.hf_checkpoint == ROOT / "examples/tiny_qwen3"
    assert config.data.prompt_data == (str(elsewhere / "mine.jsonl"),), "found nowhere"
    assert config.run.load == elsewhere / "README.md", "found in both"
    assert config.run.run_dir == elsewhere / "examples", "it is written, not looked for"


def test_hooks_load_from_the_working_directory_or_the_repository(elsewhere):
    (elsewhere / "mine").mkdir()
    for folder, name in ((elsewhere, "own"), (elsewhere / "mine", "filed")):
        (folder / f"beside_{name}_hook.py").write_text("VALUE = 3\n")
        text = f"from beside_{name}_hook import VALUE\ndef score(*_): return VALUE\n"
        (folder / f"{name}_hook.py").write_text(text)
    for path in ("own_hook", "mine/filed_hook.py", f"{elsewhere}/mine/filed_hook.py"):
        assert load_hook("--rm-type", f"{path}:score")() == 3
    task = str(ROOT / "examples/studies/tasks/pairs.yaml")
    data = parse_config(
        ["--config", task, "--reward-workers", "1", "--allowed-rm-types", "own_hook:score"]
    ).data
    [rows] = [load_hook("--prompt-data", source.removeprefix("import://")) for source in data.prompt_data]
    row = rows("eval")[0]
    prompt = Prompt(0, (1,), 1, row["label"], row["task"], row["prompt"], row["metadata"])
    own = Prompt(1, (1,), 1, "", "test", "question", {"rm_type": "own_hook:score"})
    with open_verifier(data) as verifier:
        assert verifier.score([(prompt, "no sum")]) == [Score(0.0, False)]
        assert verifier.score([(own, "answer")])[0].reward == 3, "found where the user stands"
    assert extracted_answer(prompt, "1+1=2", data) == "2"


def test_a_hook_that_cannot_be_loaded_says_why(elsewhere):
    for name, text in {"lacking": "def score(): pass", "broken": "import absent_library", "json": ""}.items():
        (elsewhere / f"{name}.py").write_text(text)
    for path, says in {
        "not_there:f": f"no module 'not_there' in {elsewhere} or among the installed packages",
        "lacking:scor": "lacking.py defines no 'scor'; did you mean 'score'?",
        "broken:f": "cannot be imported: ModuleNotFoundError: No module named 'absent_library'",
        "not_there.py:f": f"no file {elsewhere}/not_there.py (relative paths count from {elsewhere}",
        "json.py:f": "a module 'json' is imported already from ",
    }.items():
        with pytest.raises(ConfigError, match=rf"^--rm-type {re.escape(path)}: .*{re.escape(says)}"):
            load_hook("--rm-type", path)


def test_the_scripts_hand_over_where_the_user_stands(tmp_path):
    (tmp_path / "mine.yaml").write_text("lr: 0.25\n")
    command = ["bash", str(ROOT / "examples/run_qwen3_next_ibpo.sh"), "--dry-run", "--config", "mine.yaml"]
    done = subprocess.run(
        [*command, "--print-config", "--run-dir", "out"], cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=True, env=os.environ | {"IBPO_PYTHON": sys.executable},
    )  # fmt: skip
    printed = yaml.safe_load(done.stdout)
    assert (printed["lr"], printed["run-dir"]) == (0.25, str(tmp_path / "out"))
    assert printed["hf-checkpoint"] == str(ROOT / "examples/tiny_qwen3_next_mends")


def test_parameters_of_an_engine_not_chosen_are_refused(parsed):
    written = config_yaml(parse_config(["--rollout-backend", "vllm", "--vllm-max-num-seqs", "64"]))
    assert parsed(written).rollout.parameters["vllm_max_num_seqs"] == 64
    with pytest.raises(ConfigError, match=r"line 2: --vllm-dtype: --rollout-backend lean has no such par"):
        parsed("rollout-backend: lean\nvllm-dtype: float32")


def test_another_loss_variant_drops_the_previous_ones_parameters(parsed):
    base = "advantage-estimator: ibpo\neps-clip: 3e-3\nloss-param: {a: 1}"

    def clips(flags="", *after):
        loss = parsed(base, *after, flags=flags).loss
        return loss.eps_clip, loss.eps_clip_high, loss.loss_param

    assert clips() == clips("--loss-variant gspo") == (3e-3, None, ("a=1",)), "the same variant"
    assert clips("--loss-variant=cispo --eps-clip 0.1") == (0.1, None, ()), "given at the same place"
    assert clips("--advantage-estimator grpo") == (None, None, ()), "the preset's variant has its own"
    assert clips("--advantage-estimator grpo --loss-variant sapo") == (None, None, ())
    later = "loss-variant: sapo\nloss-param: {tau_pos: 2.5}"
    assert clips("", later) == (None, None, ("tau_pos=2.5",))
    assert loss_params(parsed(base, later).loss) == {"tau_pos": 2.5, "tau_neg": 1.05}
    method = "advantage-estimator: dapo\neps-clip: 0.1"
    assert clips("", method) == (0.1, None, ())
    assert clips("--advantage-estimator ibpo", method) == (None, None, ())


def test_loss_parameters_are_set_by_name_and_foreign_ones_refused():
    loss = LossConfig(loss_variant="dual-clip", eps_clip=0.1, loss_param=("bound=5", "eps_high=0.3"))
    assert loss_params(loss) == {"eps_low": 0.1, "eps_high": 0.3, "bound": 5.0}
    for fields, message in (
        ({"loss_variant": "gpso"}, "--loss-variant gpso: unknown loss variant; .*; did you mean 'gspo'"),
        ({"loss_variant": "sapo", "eps_clip": 0.1}, "'sapo' has no parameter eps_high, eps_low; it has"),
        ({"loss_param": ("eps_low=wide",)}, "--loss-param eps_low=wide: must be a number"),
        ({"loss_param": ("eps_low=.1",), "eps_clip": 0.2}, "--loss-param eps_low: is set by --eps-clip"),
        ({"eps_clip": 2.0}, "eps_low of loss variant 'gspo' must be above 0 and at most 1, is 2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            check_loss(LossConfig(**fields))


def test_a_users_loss_variant_reads_only_available_inputs(tmp_path, monkeypatch, parsed):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_loss.py").write_text("""
from megatron_ibpo.loss import Parameter, Variant
def term(log_ratio, logprobs, advantages, *, width):
    return -log_ratio * advantages * width, log_ratio > width
def of_reference(log_ratio, ref_logprobs, advantages): ...
def of_positions(log_ratio, positions, advantages): ...
MINE = Variant(token_term=term, params=dict(width=Parameter(0.5, above=0.0)))
REFERENCE, POSITIONS = Variant(token_term=of_reference), Variant(token_term=of_positions)
""")
    for flags, width in ("", 0.5), ("--loss-param width=0.7", 0.7):
        loss = parsed("eps-clip: 3e-3", flags=f"--loss-variant my_loss:MINE {flags}").loss
        assert loss_params(loss) == {"width": width}
    bad = "from my_loss import Variant\nBAD = Variant(token_term=lambda log_ratio, _, advantages: None)"
    (tmp_path / "my_other_loss.py").write_text(bad)
    split = {"parallel": ParallelConfig(context_parallel_size=2)}
    unknown = "has an argument '_'; a term reads its inputs by these names: log_ratio, logprobs"
    for name, sections, says in (
        ("my_loss:REFERENCE", {}, "reads ref_logprobs, which need a reference policy; set --kl-coef above 0"),
        ("my_loss:POSITIONS", split, "reads token positions.*context-parallel"),
        ("my_other_loss:BAD", {}, unknown),
    ):
        with pytest.raises(ConfigError, match=says):
            check_loss_of_run(Config(loss=LossConfig(loss_variant=name), **sections))


EVERY_FLAG = {*ENTRIES, *(name for kind in REGISTRIES for one in kind.known for name in kind.entries(one))}


def flags_of(text):
    names = [name.replace("-", "_") for name in re.findall(r"^  --([a-z0-9-]+)", text, re.MULTILINE)]
    return [name for name in names if name in EVERY_FLAG]


def test_help_shows_common_flags_recipe_defaults_and_search_results(tmp_path, capsys, monkeypatch):
    def shown(*words, columns=100):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            parse_config(words)
        assert not ended.value.code
        return capsys.readouterr().out

    for columns in (60, 80, 200):
        text = shown("--help", columns=columns)
        assert flags_of(text) == list(COMMON_FLAGS), columns
        assert max(map(len, text.splitlines())) <= min(columns, 100)
    assert shown("-h", columns=200) == text
    (tmp_path / "mine.yaml").write_text("lr: 0.25\n")
    assert "[0.25]" in shown("--config", str(tmp_path / "mine.yaml"), "--help")
    for words, flags, says in (
        ("--help overlong", ["overlong_buffer_share"], "Range: between 0 and 1"),
        ("--help num-generations", [], "--n-samples-per-prompt"),
        ("--help tensor-model-paralel-size", [], "'tensor-model-parallel-size'"),
        ("--help=--lr-decay-style", ["lr_decay_style"], "{constant,linear,cosine}"),
    ):
        text = shown(*words.split())
        assert flags_of(text)[:1] == flags
        assert says in text
    chosen = parse_config(["--advantage-estimator", "gspo"])
    own = {name for one in REGISTRIES for name in one.entries(one.choice_in(chosen))}
    assert {*flags_of(shown("--advantage-estimator", "gspo", "--help-all"))} == {*ENTRIES, *own}


def test_every_foreign_or_mistyped_flag_is_answered_with_real_ones():
    def answers(*words):
        with pytest.raises(ConfigError) as refused:
            parse_config(words)
        return str(refused.value).splitlines()

    words = [f"--{name}" for flags in FLAGS.values() for name in flags]
    for word in words + [f"{key}=1" for keys in KEYS.values() for key in keys]:
        (line,) = answers(word)
        typed, _, answer = line.partition(": ")
        assert typed == word.removesuffix("=1")
        named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z0-9-]+)", answer)}
        assert {name.removeprefix("no_") for name in named} <= EVERY_FLAG, word
    _, of_verl, mistyped = answers("--lr", "1e-6", "+actor_rollout_ref.rollout.n=8", "--help-al")
    assert "actor_rollout_ref.rollout.n: a key of verl; here --n-samples-per-prompt" in of_verl
    assert "did you mean '--help-all'" in mistyped


def test_unknown_settings_get_one_answer_from_flags_recipes_and_python(tmp_path):
    names = {name.replace("-", "_") for flags in (*FLAGS.values(), SYNONYMS) for name in flags} - EVERY_FLAG
    misspelt = {f"{name[:2]}x{name[2:]}" for name in [*ENTRIES][::8] if len(name) > 6}
    names = sorted(names | misspelt | {key for keys in KEYS.values() for key in keys})
    dashed = [name if "." in name else name.replace("_", "-") for name in names]
    empty, recipe = tmp_path / "empty.yaml", tmp_path / "recipe.yaml"
    empty.touch()
    recipe.write_text("# a comment\n" + "".join(f"{name}: 1\n" for name in dashed))
    on_lines = [f"{recipe}, line {number}: {name}" for number, name in enumerate(dashed, start=2)]
    answers = []
    for typed, call in (
        ([f"--{name}" for name in dashed], lambda: parse_config([f"--{name}=1" for name in dashed])),
        (on_lines, lambda: parse_config(["--config", str(recipe)])),
        (dashed, lambda: load_recipe(empty, **dict.fromkeys(dashed, 1))),
        (names, lambda: load_recipe(empty, **dict.fromkeys(names, 1))),
    ):
        with pytest.raises(ConfigError) as refused:
            call()
        lines = [line.strip() for line in str(refused.value).splitlines()][-len(names) :]
        assert all(map(str.startswith, lines, [f"{name}: " for name in typed]))
        bare = [line.removeprefix(f"{name}: ") for line, name in zip(lines, typed, strict=True)]
        answers.append(
            [re.sub(r"'(--)?([\w-]+)'", lambda at: at[2].replace("_", "-"), text) for text in bare]
        )
    assert answers[1:] == answers[:1] * 3
    for name, answer in zip(names, answers[0], strict=True):
        assert re.search("; here |did you mean|no such parameter", answer), name


def test_a_foreign_recipe_is_answered_by_its_nested_keys(parsed):
    with pytest.raises(ConfigError) as refused:
        parsed("lr: 1\nactor_rollout_ref: {actor: {optim: {lr: 1.0e-6}, grad_clip: 1}, rollout: {n: 8}}")
    lines = str(refused.value).splitlines()
    assert [line.partition("; here ")[2] for line in lines] == [
        "--lr",
        "--clip-grad",
        "--n-samples-per-prompt",
    ]
    assert all("recipe.yaml, line 2: actor_rollout_ref." in line for line in lines)


def test_values_of_other_trainers_lead_to_ours(parsed):
    assert {*SYNONYMS.values()} <= {name.replace("_", "-") for name in EVERY_FLAG}
    known = {
        "--loss-variant": VARIANTS, "--advantages": ESTIMATORS, "--advantage-estimator": PRESETS,
        "--rollout-backend": ENGINES, "--ibpo-operator": OPERATORS, "--token-credit": TOKEN_CREDITS,
    }  # fmt: skip
    for flag, values in VALUES.items():
        for theirs, ours in values.items():
            assert theirs not in known.get(flag, ())
            assert flag not in known or ours in known[flag]
            with pytest.raises(ValueError, match=f"did you mean {ours!r}"):
                check_run(parsed(flags=f"{flag} {theirs} --prompt-data reasoning_gym://chain_sum"))
    with pytest.raises(ConfigError, match="did you mean 'ppo-clip'"):
        check_loss_of_run(load_recipe(ROOT / "examples/recipes/small_cpu.yaml", loss_variant="ppo"))
