"""Settings given as Python objects become files of the run, which its processes and later runs read."""

import datetime
import json
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import yaml

import megatron_ibpo as mi
from megatron_ibpo.config import ConfigError, config_yaml, load_hook
from megatron_ibpo.credit import find_estimator
from megatron_ibpo.loss.variants import clipped_surrogate
from megatron_ibpo.rewards.composite import parts_of
from support.paths import ROOT

ROWS = [{"prompt": "1+2=", "label": "3"}, {"prompt": "2+2=", "label": "4", "metadata": {"words": 1}}]


class Table:
    """A data set as `datasets` gives it: rows by iteration, in a format."""

    features = ("prompt", "label")

    def __init__(self, rows=ROWS, kind="torch"):
        self.rows, self.kind = rows, kind

    def with_format(self, kind):
        return Table(self.rows, kind)

    def __iter__(self):
        return iter(self.rows if self.kind is None else map(str, self.rows))


def in_a_module(prompt, response, label, metadata):
    return 1.0


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda **settings: mi.load_recipe("small_cpu", run_dir="run", **settings)


def in_another_process(config, setting):
    """Call the setting's function as a process of the run does, which has nothing of this one."""
    code = (
        "import sys; from megatron_ibpo.config import load_hook; "
        "print(load_hook('--rm-type', sys.argv[1])('', '3', '3', {}))"
    )
    command = [sys.executable, "-c", code, setting]
    return subprocess.run(command, cwd="/", env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


def test_a_lambda_runs_in_other_processes_with_its_closure(load, tmp_path):
    right = 0.75
    config = load(rm_type=lambda prompt, response, label, metadata: right * (response == label))
    done = in_another_process(config, config.data.rm_type)
    assert done.stdout == "0.75\n", done.stderr
    resumed = mi.load_recipe(write(tmp_path, config), load="run")
    assert resumed.data.rm_type == config.data.rm_type, "a configuration is plain data"


def write(folder, config):
    recipe = folder / "config.yaml"
    recipe.write_text(config_yaml(config))
    return recipe


def test_local_classes_and_estimators_can_be_stored(load):
    class Game:
        def reset(self):
            return "guess"

    config = load(
        environment=Game,
        advantages=lambda rewards: [2 * reward for reward in rewards],
        group_filter=lambda group: len(group) > 1,
    )
    assert load_hook("--environment", config.environment.environment)().reset() == "guess"
    assert find_estimator(config.algorithm)([1.0, 0.5]) == [2.0, 1.0]
    assert load_hook("--group-filter", config.algorithm.group_filter)([1, 2])


def test_rewards_in_lists_and_mappings_are_stored_under_their_names(tmp_path, monkeypatch):
    def close(prompt, response, label, metadata):
        return 0.5

    def short(prompts, completions, **columns):
        return [1.0]

    monkeypatch.chdir(tmp_path)
    run_dir = "lr=1e-3-a"  # neither the sign nor the dash of a directory is part of a weight or a name
    settings = {"rm_type": "composite", "reward_part": {"math": 0.9, close: 0.2, in_a_module: -0.1}}
    for rewards in (short, [short, f"{__file__}:in_a_module"]):
        config = mi.load_recipe(
            "small_cpu", run_dir=run_dir, environment="openenv://a:1", environment_reward=rewards, **settings
        )
        assert load_hook("--environment-reward", config.environment.environment_reward[0])([], []) == [1.0], (
            rewards
        )
    parts = parts_of("composite", config.data)
    assert [(part.metric, part.weight) for part in parts] == [
        ("math", 0.9), ("close", 0.2), ("in_a_module", -0.1),
    ]  # fmt: skip
    assert [load_hook("--reward-part", part.name)("", "", "", {}) for part in parts[1:]] == [0.5, 1.0]
    assert [path.rpartition(":")[2] for path in config.environment.environment_reward] == [
        "short",
        "in_a_module",
    ]
    resumed = mi.load_recipe(write(tmp_path, config), load=run_dir)
    assert resumed.data.reward_weights == config.data.reward_weights
    with pytest.raises(ConfigError, match="two functions are called close; rename one"):
        parts_of("composite", replace(config.data, reward_part=("a.py:close=1", "b.py:close=0.1")))


def test_a_function_of_a_module_is_named_where_it_stands(load):
    config = load(rm_type=in_a_module)
    assert config.data.rm_type == f"{__file__}:in_a_module"


@pytest.mark.parametrize("rows", [ROWS, Table(), [ROWS, "reasoning_gym://chain_sum"], [Table()]])
def test_rows_are_written_once_as_a_file_of_the_run(load, rows):
    path, *others = load(prompt_data=rows).data.prompt_data
    with open(path) as file:
        assert [json.loads(line) for line in file] == ROWS
    assert load(prompt_data=rows).data.prompt_data == (path, *others)
    assert others in ([], ["reasoning_gym://chain_sum"])


def test_a_table_is_stored_as_its_files_are_read(load):
    columns = {"when": datetime.date(2020, 1, 1), "sound": b"12", "share": float("nan")}
    (path,) = load(prompt_data=Table([ROWS[0] | columns])).data.prompt_data
    with open(path) as file:
        assert json.load(file) == ROWS[0] | {"when": "2020-01-01", "sound": "<2 bytes>", "share": None}


@pytest.mark.slow
def test_data_sets_of_the_library_are_taken(load):
    """Of what is installed: `pip install --target DIRECTORY datasets`, with DIRECTORY in PYTHONPATH."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "label": n % 2} for n in range(6)]
    features = datasets.Features(
        {
            "prompt": [{name: datasets.Value("string") for name in ("role", "content")}],
            "label": datasets.ClassLabel(names=["even", "odd"]),
        }
    )
    table = datasets.Dataset.from_list(rows, features=features)
    splits = table.train_test_split(test_size=2, shuffle=False)
    for given, expected in (
        (table.with_format("torch"), rows),
        (splits["test"], rows[4:]),
        (table.to_iterable_dataset().take(3), rows[:3]),
        (table.select([5, 0]), [rows[5], rows[0]]),
    ):
        (path,) = load(prompt_data=given).data.prompt_data
        with open(path) as file:
            assert [json.loads(line) for line in file] == expected
    with pytest.raises(
        ConfigError, match="prompt_data: a DatasetDict has several splits; give one of 'train', "
    ):
        load(prompt_data=splits)


def test_rows_replace_held_out_prompts_and_sources_stay_sources(load):
    assert load(prompt_data=ROWS).data.eval_prompt_data is None
    held_out = load(eval_prompt_data=ROWS).data.eval_prompt_data
    assert held_out.endswith(".jsonl")
    weighted = load(prompt_data=[{"path": "reasoning_gym://chain_sum", "weight": 2}])
    assert weighted.data.prompt_data == ("reasoning_gym://chain_sum?weight=2",)


def test_an_unstorable_value_is_refused_in_one_line(load):
    lock = threading.Lock()
    for settings, says in (
        ({"rm_type": lambda *_: lock.locked()}, "rm_type: .*lambda.* cannot be copied .*make what"),
        ({"prompt_data": [*ROWS, {"prompt": object()}]}, "prompt_data, row 2: cannot be written as JSON"),
        ({"prompt_data": [{"prompt": float("nan")}]}, "prompt_data, row 0: cannot be written as JSON"),
        (
            {"prompt_data": {"a": Table(), "b": Table()}},
            "prompt_data: a DatasetDict .*; give one of 'a', 'b'",
        ),
        ({"prompt_data": [[*ROWS], 3]}, r"prompt_data: .*, 3\] is not a list, each item text"),
        ({"num_rollout": lambda: 3}, "num_rollout: .*is not a whole number"),
    ):
        with pytest.raises(ConfigError, match=says) as refused:
            load(**settings)
        assert "\n" not in str(refused.value), settings


def test_a_stored_object_that_has_changed_since_is_not_loaded(load, tmp_path):
    config = load(rm_type=lambda prompt, response, label, metadata: 1.0)
    (pickle,) = (tmp_path / "run/from_python").glob("*.pickle")
    pickle.write_bytes(pickle.read_bytes() + b".")
    with pytest.raises(ConfigError, match="is not the file that was stored; give the object again"):
        load_hook("--rm-type", config.data.rm_type)


def test_the_loss_and_a_run_accept_a_variant_object(load):
    def token_term(log_ratio, advantages, *, width):
        return clipped_surrogate(log_ratio, advantages, eps_low=width, eps_high=width)

    wide = mi.Variant(token_term=token_term, params={"width": mi.Parameter(0.5, above=0.0)})
    assert mi.make_objective(wide, {"width": 0.25}).params == {"width": 0.25}
    with pytest.raises(ValueError, match="loss variant 'of your own' has no parameter eps"):
        mi.make_objective(wide, {"eps": 1.0})
    config = load(loss_variant=wide)
    assert mi.make_objective(config.loss.loss_variant).params == {"width": 0.5}


def test_recipes_are_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in (ROOT / "examples/recipes").glob("*.yaml"):
        assert mi.load_recipe(file.stem) == mi.load_recipe(file.name) == mi.load_recipe(file)
    by_flag = mi.parse_config(["--config", "tiny_qwen3_next_ibpo"])
    assert by_flag == mi.load_recipe("tiny_qwen3_next_ibpo")
    with pytest.raises(ConfigError, match=r"no recipe of that name; there are .*; did you mean 'small_cpu'"):
        mi.load_recipe("smal_cpu")
    (tmp_path / "small_cpu.yaml").write_text(yaml.dump({"num-rollout": 7}))
    assert mi.load_recipe("small_cpu.yaml").run.num_rollout == 7, "a file of yours comes first"
