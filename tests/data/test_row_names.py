"""A row of a data set is as untrusted as a model's text: no name in it is imported unless a flag has it."""

import json
import shutil
import sys
from dataclasses import replace

import pyarrow as pa
import pytest
from pyarrow import parquet
from tiny_tokenizer import make_tiny_tokenizer

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.commands.data import inspect_source
from megatron_ibpo.config import ConfigError, DataConfig, EnvironmentConfig, environment_in
from megatron_ibpo.data import DataError, load_tokenizer, open_sources
from megatron_ibpo.data.demonstrations import DemonstrationReader
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.rewards import (
    check_labels,
    extracted_answer,
    named_rm_types,
    open_pool,
    open_verifier,
    reward_functions,
)
from megatron_ibpo.rewards.verifier import functions_of

TINY = HuggingFaceTokenizer(make_tiny_tokenizer())
KEYS = (
    "task", "source", "data_source", "source_dataset", "agent_name", "tools", "tools_kwargs", "reward_part",
    "interaction_kwargs", "code_execution", "code_executor", "reward_model", "ability", "class", "id",
    "_target_", "custom_reward_function", "verifier", "env_class", "entry_point",
)  # fmt: skip
"""Keys under which other frameworks look up code, and our own."""


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module in the user's directory that leaves a file when it is imported."""
    made = tmp_path / "was_imported"
    text = (
        f"open({str(made)!r}, 'w').close()\nscore = lambda *_: 1.0\nextract_answer = str\nclass Game: pass\n"
    )
    (tmp_path / "trap.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield made
    sys.modules.pop("trap", None)


def row(**more):
    return {"prompt": "1+1=", "label": "2", **more}


def file_of(directory, rows, name="rows.jsonl"):
    (directory / name).write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(directory / name)


def prompt_of(**metadata):
    return Prompt(0, (1,), 1, "2", "task", "1+1=", metadata)


HOSTILE = {
    "rm_type": row(rm_type="trap:score"),
    "rm_type in metadata": row(metadata={"rm_type": "trap:score"}),
    "rm_type in extra_info": {
        "prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "extra_info": {"rm_type": "trap.py:score"}
    },
    "environment": row(metadata={"environment": "trap:Game"}),
    "a server": row(metadata={"environment": "openenv://169.254.169.254:80"}),
    "no text": row(metadata={"environment": ["trap:Game"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_row_that_names_code_is_refused_before_work_starts(case, tmp_path, trap):
    path = file_of(tmp_path, [row(), HOSTILE[case]])
    key = "environment" if "environment" in json.dumps(HOSTILE[case]) else "rm_type"
    flag = f"--allowed-{key.replace('_', '-')}s"
    line = rf"^{path}, line 2: {key} .*(trap|169\.254).*{flag}$"
    for split in ("train", "eval"):
        with pytest.raises(DataError, match=line):
            open_sources([path], TINY, DataConfig(), split=split)
    skipping = open_sources([path], TINY, DataConfig(skip_bad_rows=True), split="train")
    assert (len(skipping), skipping.tallies[0].counts) == (1, {"bad rows": 1})
    found = inspect_source(path, TINY, DataConfig(), split="train", max_prompt_len=None, most_rows=9, show=0)
    assert flag in found.as_json(TINY)["named"]["bad rows"][0]
    assert not trap.exists()


def test_user_tables_and_row_functions_may_name_no_code(tmp_path, trap):
    parquet.write_table(
        pa.Table.from_pylist([row(rm_type=None), row(rm_type="trap:score")]), tmp_path / "rows.parquet"
    )
    with pytest.raises(DataError, match=r"rows\.parquet, row 1: rm_type 'trap:score'"):
        open_sources([str(tmp_path / "rows.parquet")], TINY, DataConfig(), split="train")
    (tmp_path / "rows_of_user.py").write_text(f"def rows(split): return [{row(rm_type='trap:score')!r}]")
    with pytest.raises(DataError, match=r"train row 0: rm_type 'trap:score'"):
        open_sources([f"import://{tmp_path / 'rows_of_user.py'}:rows"], TINY, DataConfig(), split="train")
    assert not trap.exists()


def test_an_unchecked_row_that_names_code_has_no_reward(tmp_path, trap, monkeypatch):
    monkeypatch.setattr("megatron_ibpo.data.files.SMALL_ROWS", 3)
    monkeypatch.setattr("megatron_ibpo.data.prompt_files.FIRST_CHECKED", 1)
    monkeypatch.setattr("megatron_ibpo.data.prompt_files.SAMPLE_CHECKED", 0)
    path = file_of(tmp_path, [row(), *[row(rm_type="trap:score")] * 9])
    data = DataConfig(rm_type="math", reward_workers=1)
    drawn = next(p for p in open_sources([path], TINY, data, split="train").batch(0, 10) if p.metadata)
    with pytest.raises(DataError, match="line 2: rm_type 'trap:score'"):
        open_sources([path], TINY, data, split="eval").batch(0, 10)  # all are drawn at the start
    with open_verifier(data) as verifier:
        lost, fine = verifier.score([(drawn, "2"), (replace(drawn, metadata={}), r"\boxed{2}")])
    assert (lost.reward, fine.reward) == (None, 1.0)
    assert "rm_type 'trap:score': a row may not choose code" in lost.error
    assert extracted_answer(drawn, "2", data) is None
    assert not trap.exists()


def test_every_path_to_a_verifier_refuses_unlisted_code(trap):
    data, hostile = DataConfig(rm_type="math", reward_workers=1), prompt_of(rm_type="trap:score")
    ways = [lambda: named_rm_types([hostile], data), lambda: functions_of(hostile, data)]
    with open_pool(data) as pool:
        for way in [*ways, lambda: check_labels(pool, [hostile], data)]:
            with pytest.raises(ConfigError, match=r"rm_type 'trap:score'.*--allowed-rm-types"):
                way()
    with pytest.raises(ConfigError, match="unknown verifier"):
        functions_of(prompt_of(rm_type="trap"), data)
    assert not trap.exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"rm_type": "trap:score"},
        {"allowed_rm_types": ("trap:score",)},
        {"reward_part": ("math=1", "trap:score=0.1")},
        {"prompt_data": ("reasoning_gym://chain_sum", "a.jsonl?weight=2&rm_type=trap%3Ascore")},
        {"eval_prompt_data": ("own=b.jsonl?rm_type=trap:score",)},
    ],
)
def test_a_row_may_name_code_that_the_user_names(settings, trap):
    data = DataConfig(**settings)
    assert named_rm_types([prompt_of(rm_type="trap:score"), prompt_of()], data) == [
        "trap:score", *({data.rm_type} - {"trap:score"})
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--allowed-rm-types"):
        named_rm_types([prompt_of(rm_type="trap:score2")], data)


def test_rows_may_choose_built_in_and_allowed_verifiers():
    data = DataConfig(rm_type="math", allowed_rm_types=("my_rewards:score",))
    assert named_rm_types([prompt_of(rm_type="code"), prompt_of(rm_type=None)], data) == ["code", "math"]
    assert reward_functions(data)[1:] == ["my_rewards:score"]


def test_a_row_names_only_environments_of_flags():
    settings = EnvironmentConfig("mine:Own", allowed_environments=("games.py:Game",))
    for name in ("mine:Own", "games.py:Game"):
        assert environment_in({"environment": name}, settings) == name
    assert environment_in({"environment": None}, settings) == environment_in({}, settings) == "mine:Own"
    assert environment_in({}, EnvironmentConfig()) is None
    for name in ("os:system", "mine:Other", " mine:Own", "openenv://host:1", "", 5, {}):
        with pytest.raises(ConfigError, match="--allowed-environments"):
            environment_in({"environment": name}, settings)


def test_no_other_key_of_a_row_leads_to_code(tmp_path, trap):
    named = dict.fromkeys(KEYS, "trap:score")
    path = file_of(
        tmp_path, [row(**named, metadata=named), row(metadata={"nested": {"rm_type": "trap:score"}})]
    )
    data = DataConfig(rm_type="math", reward_workers=1)
    prompts = open_sources([path], TINY, data, split="eval").batch(0, 2)
    with open_verifier(data) as verifier:
        check_labels(verifier._pool, prompts, data)
        assert [one.reward for one in verifier.score([(one, r"\boxed{2}") for one in prompts])] == [1.0, 1.0]
    assert not trap.exists()


def test_demonstrations_read_no_name_of_code(tmp_path, trap):
    shown = row(rm_type="trap:score", metadata={"environment": "trap:Game"})
    path = file_of(tmp_path, [shown])
    rows = open_sources([path], TINY, DataConfig(), split="train", reader_type=DemonstrationReader)
    assert rows.batch(0, 1)[0].metadata == {}
    assert not trap.exists()


def test_the_code_of_a_model_directory_is_never_run(tmp_path, trap, monkeypatch):
    directory = tmp_path / "model"
    make_tiny_tokenizer().save_pretrained(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {
        "auto_map": {"AutoTokenizer": ["trap.Tokenizer", "trap.Tokenizer"]},
        "tokenizer_class": "Own",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy("trap.py", directory)
    monkeypatch.setattr("builtins.input", lambda _: "y")  # the library would ask at a terminal
    with pytest.raises(DataError, match="contains custom code"):
        load_tokenizer(directory)
    assert not trap.exists()
