"""The examples of README.md and docs/extending.md, rewards.md, python.md do what the pages say."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from tiny_tokenizer import make_tiny_tokenizer

from megatron_ibpo.basics.records import Group
from megatron_ibpo.commands import loss
from megatron_ibpo.config import Config, ConfigError, DataConfig, RolloutConfig, config_yaml
from megatron_ibpo.credit import fill_batch, find_group_filter
from megatron_ibpo.data import DataError, open_sources
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.engines.registry import (
    check_engine,
    engine_needs,
    engine_settings,
    samples_in_trainer,
    start_engine,
)
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.report import read_rows
from megatron_ibpo.rewards import LabelError, Score, check_labels, extracted_answer, open_verifier
from megatron_ibpo.run.settings import parse_config
from support.credit_cases import GSPO, RIGHT, Loop, algorithm, by_kind, group, prompt, scored, token_weights
from support.documented_modules import write_modules
from support.example_runs import finished, start_script
from support.paths import ROOT


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    write_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


ASKED = prompt()  # its label is 13


def test_the_rewards():
    for name, expected in (
        ("short_answers", {"it is 13": 1.0, "it is 14": 0.0, "well " * 60 + "13": 0.9}),
        ("many_answers", {"12!": 0.0, "13!": 1.0, "14!": 0.0}),
    ):
        with open_verifier(DataConfig(rm_type=f"{name}:score", reward_threshold=0.9)) as verifier:
            found = verifier.score([(ASKED, response) for response in expected])
        assert [score.reward for score in found] == [*expected.values()]
        assert all(score.correct == (score.reward > 0) for score in found), (name, expected)


def test_the_reward_that_says_more():
    data = DataConfig(rm_type="my_rewards:score", reward_workers=1)
    with open_verifier(data) as verifier:
        right, endless = verifier.score([(ASKED, "it is 13"), (ASKED, "13" * 60_000)])
        check_labels(verifier._pool, [ASKED], data)
        with pytest.raises(LabelError, match="it is empty"):
            check_labels(verifier._pool, [replace(ASKED, label=" ")], data)
    assert right == Score(1.0, True, details={"words": 3.0})
    assert endless == Score(0.0, False, details={"response_error": 1.0})
    assert [extracted_answer(ASKED, text, data) for text in ("it is 13", "")] == ["13", None]


def test_the_prompts(tmp_path):
    def open_rows(source, split="train"):
        return open_sources([source], HuggingFaceTokenizer(make_tiny_tokenizer()), DataConfig(), split=split)

    train, held_out = open_rows("import://sums:rows"), open_rows("import://sums:rows", "eval")
    assert [len(train), len(held_out)] == [50, 50]
    first = held_out.batch(0, 1)[0]
    assert (first.text, first.label, first.metadata, first.task) == ("5+0=", "5", {"words": 10}, "sums:rows")
    seen = {made.text for made in train.batch(0, 50)}
    assert seen == {f"{a}+{b}=" for a in range(5) for b in range(10)}
    assert not seen & {made.text for made in held_out.batch(0, 50)}
    unusable = (("1 / 0", "it raised ZeroDivisionError"), ("['1+1=']", "train row 0: .* found str"))
    for number, (body, says) in enumerate(unusable):
        (tmp_path / f"bad_{number}.py").write_text(f"def rows(split):\n    return {body}\n")
        with pytest.raises(DataError, match=f"import://bad_{number}:rows.*{says}"):
            open_rows(f"import://bad_{number}:rows")


def credited(groups, loop=None, **settings):
    return (loop or Loop(None)).credit(groups, algorithm(**settings))


def test_the_filter_of_groups_and_the_estimators():
    usable = find_group_filter(algorithm(group_filter="hard_enough:use"))
    rounds = [[group([13], [13], index=0), group([13], [14], index=1)], [group([14], [14], index=2)]]
    groups, metrics = fill_batch(rounds.__getitem__, 2, 2, usable=usable, preferred=usable)
    assert [made.prompt.index for made in groups] == [1, 2]
    assert metrics["groups_refused"] == 1
    groups = [Group(ASKED, scored([13], [14], [15]))]
    credit = credited(groups, **GSPO | {"advantages": "above_median:advantages"})
    assert [s.advantage for s in credit.sequences] == [1.0, 0.0, 0.0]
    # in the batch centred rewards are ±1/2 in the first group and 0 in the second; their std is √(1/8)
    groups = [Group(ASKED, scored([13], [14])), Group(prompt(1), scored([14], [15]))]
    credit = credited(groups, **GSPO | {"advantages": "batch_std:BatchStd"})
    found = [s.advantage for s in credit.sequences]
    assert found == pytest.approx([2**0.5, -(2**0.5), 0.0, 0.0], abs=1e-6)


def test_a_users_critic_estimator_equals_ours_bit_for_bit():
    def values(sequences):
        return [np.linspace(-0.3, s.reward, len(s.response_token_ids), dtype=np.float32) for s in sequences]

    groups = [group(RIGHT, [14], index=0), group([12, 13], [14, 15], index=1)]
    ours, theirs = (
        Loop(None).credit(groups, algorithm("ppo", advantages=name), values=values)
        for name in ("critic", "own_gae:OwnGae")
    )
    for one, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert other.token_advantages.tolist() == one.token_advantages.tolist()
        assert other.returns.tolist() == one.returns.tolist()
    assert theirs.metrics == ours.metrics


@pytest.mark.slow
def test_three_steps_with_it_are_those_with_ours(tmp_path):
    recipe = str(ROOT / "examples/recipes/tiny_qwen3_study.yaml")
    flags = "--advantage-estimator ppo --rollout-backend lean --num-rollout 3 --rollout-batch-size 4 "
    flags += "--n-samples-per-prompt 4 --eval-num-prompts 0"
    runs = []
    for name in ("critic", "own_gae:OwnGae"):
        run_dir = tmp_path / name.partition(":")[0]
        command = [sys.executable, "-m", "megatron_ibpo.commands.train", "--config", recipe]
        command += [*flags.split(), "--advantages", name, "--run-dir", str(run_dir)]
        subprocess.run(command, check=True, timeout=300, cwd=tmp_path)
        rows = read_rows(run_dir / "metrics.jsonl")
        names = ("step", "reward", "loss", "grad_norm", "critic_loss", "critic_grad_norm", "value_mean")
        runs.append([[row[name] for name in names] for row in rows if row["kind"] == "step"])
    ours, theirs = runs
    assert [row[0] for row in ours] == [1, 2, 3]
    assert all(row[5] > 0 for row in ours), "the critic learns"
    assert theirs == ours


def test_the_credit_of_tokens_and_the_operators():
    credit = credited([group(RIGHT, [14, 15, 16])], **GSPO | {"token_credit": "second_half:weigh"})
    assert token_weights(credit.sequences) == [None, (0.0, 0.0, 1.0, 1.0)]
    # lengths with the end: 5 of the right response, 4 and 2 of the wrong ones; λ = .3
    same_length = {"ibpo_operator": "same_length:SameLength", "ibpo_lambda": 0.3, "advantages": "group-mean"}
    credit = credited([group(RIGHT, [10, 11, 14], [14])], **same_length)
    assert [s.reward for s in credit.sequences] == pytest.approx([1.0, 0.3 * 0.8, 0.3 * 0.4])
    assert credit.metrics["groups_judged"] == 1
    # of two wrong responses the first is answered correctly at its second try
    second = iter([[10, 13], [10, 15]])
    loop = Loop(lambda asked: next(second))
    credit = credited([group(RIGHT, [14], [15])], loop, ibpo_operator="second_try:SecondTry")
    assert loop.asked == [(1, 5, 27)] * 2
    assert [s.reward for s in by_kind(credit, "response")] == [1.0, 0.3, 0.0]
    assert [s.reward for s in by_kind(credit, "correction")] == [1.0, 0.0]


def test_the_engine(tmp_path, monkeypatch):
    name = "counted_engine:CountedEngine"
    check_engine(RolloutConfig(rollout_backend=name))
    assert not samples_in_trainer(name)

    def init(self, settings, log, again):  # vLLM takes ten seconds to start
        self.log = log

    monkeypatch.setattr("megatron_ibpo.engines.Engine.__init__", init)
    monkeypatch.setattr("megatron_ibpo.engines.Engine.submit", lambda *_: None)
    engine = start_engine(name, None, tmp_path / "engine_0.log", False)
    engine.submit([(0, "a request"), (1, "another")], 0)
    assert (tmp_path / "engine_0.requests").read_text() == "2\n"


def test_an_engine_without_stated_needs_has_vllms(tmp_path):
    config = Config()
    config.rollout.parameters["vllm_max_num_seqs"] = 32
    usual = engine_needs(config)
    assert (usual.most_running, usual.memory_share, usual.kv_cache_bytes) == (32, 0.6, None)
    assert engine_needs(config, on_gpu=False).kv_cache_bytes == 512 * 1024**2
    (tmp_path / "own_engines.py").write_text("""
from dataclasses import replace
from megatron_ibpo.engines import Engine
class Silent: ...
class Half:
    def submit(self, requests, version): ...
class Frugal:
    @staticmethod
    def needs(config, on_gpu):
        own = {'kv_cache_bytes': 10**9 if on_gpu else 10**6, 'kv_cache_flag': '--frugal-cache'}
        return replace(Engine.needs(config, on_gpu), **own)
""")
    for name in ("lean", "counted_engine:CountedEngine", "own_engines:Silent"):
        config.rollout.rollout_backend = name
        assert engine_needs(config) == usual, name
    config.rollout.rollout_backend = "own_engines:Frugal"
    assert engine_needs(config) == replace(usual, kv_cache_bytes=10**9, kv_cache_flag="--frugal-cache")
    assert engine_needs(config, on_gpu=False).kv_cache_bytes == 10**6
    with pytest.raises(ValueError, match="lacks wait_ready, take, abort"):
        check_engine(RolloutConfig(rollout_backend="own_engines:Half"))
    with pytest.raises(ConfigError, match=r"--rollout-backend vlm: unknown engine.*vllm"):
        check_engine(RolloutConfig(rollout_backend="vlm"))


def test_an_engines_settings_are_flags_of_its_own_runs_only(tmp_path, capsys):
    (tmp_path / "echoing.py").write_text('''
from dataclasses import dataclass
from typing import Annotated
from megatron_ibpo.config import COUNT, built
from megatron_ibpo.engines import Engine

@dataclass
class Settings:
    """Settings of the echo."""

    echo_length: Annotated[int, COUNT] = 4
    """Tokens of an answer."""

class Echo(Engine):
    parameters = Settings

    @staticmethod
    def make_settings(rollout, *arguments, **named):
        return built(Settings, rollout.parameters).echo_length

class Unbuilt(Engine):
    parameters = Settings
''')
    name, recipe = f"{tmp_path}/echoing.py:Echo", tmp_path / "recipe.yaml"
    recipe.write_text(f"rollout-backend: {name}\necho-length: 5\n")
    from_recipe, by_flag = ["--config", str(recipe)], ["--config", str(recipe), "--echo-length", "6"]
    shape = read_hf_config(ROOT / "examples/tiny_qwen3")
    for words, length in ((["--rollout-backend", name], 4), (from_recipe, 5), (by_flag, 6)):
        config = parse_config(words)
        assert config.rollout.parameters == {"echo_length": length}
        assert engine_settings(config.rollout, tmp_path, shape, "gloo", gpus=(), num_threads=1) == length
    recipe.write_text(config_yaml(config))
    assert parse_config(from_recipe) == config
    other = parse_config([*from_recipe, "--rollout-backend", "vllm"])
    assert "echo_length" not in other.rollout.parameters, "the flag replaces the recipe's engine"
    with pytest.raises(SystemExit):
        parse_config([*from_recipe, "--help-all"])
    shown = capsys.readouterr().out
    assert f"parameters of --rollout-backend {name}" in shown
    assert re.search(r"--echo-length INT \[6\]\n +Tokens of an answer. Range: between 1 and", shown)
    assert "--vllm-dtype" not in shown
    with pytest.raises(ConfigError, match=r"--echo-length: no such setting"):
        parse_config(["--echo-length", "3"])
    with pytest.raises(ConfigError, match=r"--vllm-dtype: --rollout-backend .*Echo has no such parameter"):
        parse_config([*from_recipe, "--vllm-dtype", "float32"])
    with pytest.raises(ConfigError, match=r"--echo-length: must be between 1 .*, is 0"):
        check_engine(parse_config([*from_recipe, "--echo-length", "0"]).rollout)
    with pytest.raises(ValueError, match="needs make_settings"):
        check_engine(RolloutConfig(rollout_backend=name.replace("Echo", "Unbuilt")))


BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)


CHECKS = [
    "assert third.metrics['step'] == 3",
    "assert second.metrics['step'] == 2",
    "assert {group.prompt.text for group in own_step.groups} == {*answers}",
]


def test_the_parts_that_are_used_alone():
    found = {}
    exec("\n".join(["import megatron_ibpo as mi", *BLOCKS[3:]]), found)
    assert found["distances"].tolist() == [0.4, 0.0]
    assert found["kept"].tolist() == [True, False, True, True]
    assert found["edits"].tolist() == [2]
    assert found["shaped"] == pytest.approx([1.0, 0.3, 0.0])
    advantages = [sequence.advantage for sequence in found["credit"].sequences]
    assert advantages[0] > 0 > advantages[1] > advantages[2]
    assert found["loss"].item() == pytest.approx(-0.25)
    assert found["logits"].grad.abs().sum() > 0
    assert found["rewards"] == [1.0, 0.0]


@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_runs_are_stepped_resumed_and_evaluated(tmp_path):
    """The page is run as a program without a main guard, in a directory of the user's."""
    (tmp_path / "program.py").write_text("\n".join([*BLOCKS[:3], *CHECKS, ""]))
    command, environment = [sys.executable, "program.py"], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_rows(tmp_path / "runs/notebook/metrics.jsonl")
    assert [(row["kind"], row["step"]) for row in rows] == [("step", 1), ("step", 2), ("step", 3)]
    assert f"\n2 {rows[1]['reward']} {rows[1]['loss']}\n" in done.stdout
    summary = json.loads((tmp_path / "runs/notebook/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    command = [sys.executable, "-m", "megatron_ibpo.commands.evaluate", "runs/notebook"]
    command += ["--eval-num-prompts", "4"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vllm or transformers does" in done.stderr
    assert (tmp_path / "runs/notebook/evaluate/results.json").exists()


@pytest.mark.kernel
def test_the_readmes_loss_transcript_equals_the_commands_output(tmp_path, capsys):
    page = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"`my\.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    (transcript,) = re.findall(r"\$ bash tools/ibpo\.sh loss my\.py:MINE\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my.py").write_text(code)
    assert loss.main(["my.py:MINE"]) == 0
    printed = capsys.readouterr().out
    parts = [re.sub(r"\d\.\de-\d\d", "ERROR", text) for text in (printed, *transcript.split("…\n"))]
    places = [parts[0].find(part.strip()) for part in parts[1:]]
    assert places == sorted(places)
    assert min(places) == 0, "every part of the transcript is there, in its order"


@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_training_command_of_the_readme_runs_as_written(tmp_path):
    """It runs in full, from another directory but for its path."""
    command = re.search(r"^bash examples/(\S+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    script = start_script(tmp_path / "run", script=command[1], directory=tmp_path)
    status, output = finished(script, timeout=1700)
    assert status == 0, output[-5000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 24
    assert summary["accuracy_end"] > summary["accuracy_start"] + 0.1
