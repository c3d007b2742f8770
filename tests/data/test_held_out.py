"""Evaluation on prompts of the user's own where no others are named."""

import json

import pytest

from megatron_ibpo.config import Config, DataConfig
from megatron_ibpo.data import DataError, files, held_out, load_tokenizer, open_source
from megatron_ibpo.run.settings import parse_config
from support.paths import ROOT

TINY = load_tokenizer(ROOT / "examples/tiny_qwen3")
RECIPE = ROOT / "examples/recipes/small_cpu.yaml"


def rows(path, count, copies=1):
    found = [{"prompt": f"{number}=", "label": number} for number in range(count)] * copies
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


def opened(spec, split, seed=0):
    return open_source(spec, TINY, DataConfig(data_seed=seed), split=split, holds_out=True)


def labels(source, count=None):
    return [prompt.label for prompt in source.batch(0, count or len(source))]


@pytest.mark.parametrize("copies", [1, 3])
def test_a_small_share_of_a_file_is_held_out_once_and_never_trained_on(tmp_path, copies):
    path = rows(tmp_path / "train.jsonl", 100, copies)
    trained, evaluated = labels(opened(path, "train")), opened(path, "eval")
    assert len(evaluated) == 5
    assert "5 prompts of it, which are not trained on" in evaluated.notes[-1]
    assert len(trained) == 95 * copies
    assert not {*trained} & {*labels(evaluated)}
    assert labels(opened(path, "eval")) == labels(evaluated)
    assert labels(opened(path, "eval", seed=1)) != labels(evaluated)


def test_of_a_large_file_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SMALL_ROWS", 10)
    monkeypatch.setattr(held_out, "SHARE_OF_LARGE", 0.1)
    path = rows(tmp_path / "train.jsonl", 300, copies=2)
    evaluated = labels(opened(path, "eval"))
    assert 15 < len(evaluated) < 50
    assert {*labels(opened(path, "train"), 900)} == {str(n) for n in range(300)} - {*evaluated}


def test_a_data_set_with_a_part_for_it_is_trained_on_whole(tmp_path):
    rows(tmp_path / "set/train.jsonl", 40)
    rows(tmp_path / "set/test.jsonl", 7)
    evaluated = opened(str(tmp_path / "set"), "eval")
    assert (len(opened(str(tmp_path / "set"), "train")), len(evaluated)) == (40, 7)
    assert "its own held-out part, test.jsonl" in evaluated.notes[-1]


def test_too_few_prompts_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(DataError, match="--eval-prompt-data, or turn evaluation off by --eval-num-prompts 0"):
        opened(rows(tmp_path / "train.jsonl", 1), "train")


def test_prompts_of_the_users_own_take_back_the_held_out_ones_of_a_recipe(tmp_path):
    own = rows(tmp_path / "own.jsonl", 9)
    config = parse_config(["--config", str(RECIPE), "--prompt-data", own])
    assert (config.data.eval_prompt_data, config.holds_out) == (None, True)
    both = parse_config(["--config", str(RECIPE), "--prompt-data", own, "--eval-prompt-data", own])
    assert (both.data.eval_prompt_data, both.holds_out) == (own, False)
    (tmp_path / "held_out.yaml").write_text("eval-prompt-data: aime25://aime25.jsonl\n")
    chosen = ["--config", str(RECIPE), "--config", str(tmp_path / "held_out.yaml"), "--prompt-data", own]
    assert parse_config(chosen).data.eval_prompt_data == "aime25://aime25.jsonl"
    assert not parse_config([*chosen[:2], "--eval-num-prompts", "0", "--prompt-data", own]).holds_out
    assert not Config().holds_out
