"""`ibpo evaluate`: what it is told, what it leaves, and two of them compared."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import psutil
import pytest
import torch

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.commands.evaluate import main, policy_of
from megatron_ibpo.config import Config, EvalSampling, ParallelConfig, write_config
from megatron_ibpo.data import load_tokenizer
from megatron_ibpo.evaluate import KeptSamples, SetEvaluation, evaluate, open_eval_sets
from megatron_ibpo.evaluate.sets import finish_results
from megatron_ibpo.report.run_report import report_evaluation
from megatron_ibpo.report.summary import measures
from megatron_ibpo.run.settings import check_evaluation
from megatron_ibpo.study.paired_evaluations import compare_evaluations
from megatron_ibpo.weights.formats.convert import hf_to_megatron
from support.eval_samples import judged, read_samples
from support.paths import ROOT

TINY = ROOT / "examples/tiny_qwen3_next"
TOKENIZER = load_tokenizer(TINY)


@pytest.fixture
def run_dir(tmp_path):
    """A run of training that resumed another one, and has exported its policy."""
    config, sums = Config(), "reasoning_gym://chain_sum"
    config.model.hf_checkpoint = TINY
    config.data.eval_prompt_data, config.data.prompt_data = sums, (sums,)
    config.rollout.rollout_max_response_len = 48
    config.run.run_dir, config.run.load, config.run.seed = tmp_path / "run", tmp_path / "another", 7
    config.cluster.ray_address = "10.0.0.1:6379"
    (tmp_path / "run/hf").mkdir(parents=True)
    write_config(config, tmp_path / "run/config.yaml")
    return tmp_path / "run"


def test_a_policy_is_a_checkpoint_or_a_runs_export(run_dir, tmp_path, monkeypatch):
    stored = run_dir / "checkpoints/step_000020"
    (stored / "hf").mkdir(parents=True)
    for name in ("metadata.json", "run_state.json"):
        (stored / name).write_text("{}")
    policy = policy_of([str(run_dir), "--n-samples-per-eval-prompt", "4", "--seed", "8"])
    config = policy.config
    assert policy.stored is None, "what the run exported"
    assert config.model.hf_checkpoint == run_dir / "hf"
    assert config.run.run_dir == run_dir / "evaluate"
    assert (config.run.n_samples_per_eval_prompt, config.run.seed) == (4, 8)
    assert config.rollout.rollout_max_response_len == 48
    assert config.data.eval_prompt_data == "reasoning_gym://chain_sum"
    assert (config.run.load, config.cluster.ray_address) == (None, None)
    monkeypatch.setenv("IBPO_CWD", str(run_dir.parent))  # where the user stands
    assert policy_of(["run"]).config.model.hf_checkpoint == run_dir / "hf"
    (run_dir / "hf").rmdir()
    policy = policy_of([str(run_dir)])
    assert (policy.stored, policy.config.rollout.rollout_max_response_len) == (stored, 48)
    policy = policy_of([str(stored)])
    assert (policy.stored, policy.name) == (stored, str(stored))
    assert policy.config.model.hf_checkpoint == stored / "hf"
    # another policy is evaluated by the settings of a run
    policy = policy_of([str(run_dir), "--hf-checkpoint", str(TINY), "--run-dir", str(tmp_path / "b")])
    assert (policy.stored, policy.config.model.hf_checkpoint) == (None, TINY)
    assert policy.config.run.run_dir == tmp_path / "b"
    assert policy_of([str(TINY)]).config.model.hf_checkpoint == TINY


def test_a_run_sampled_in_its_trainer_is_evaluated_by_engines(run_dir, capsys):
    by_default = policy_of([str(run_dir)]).config.rollout
    recipe = run_dir / "config.yaml"
    recipe.write_text(recipe.read_text().replace("rollout-backend: null", "rollout-backend: lean"))
    config = policy_of([str(run_dir)]).config
    (line,) = capsys.readouterr().err.splitlines()
    assert "--rollout-backend lean samples in a trainer's process; without one, vllm or transformers" in line
    assert config.rollout == by_default
    check_evaluation(config)


def test_impossible_evaluations_are_refused_before_anything_starts(run_dir, capsys):
    (run_dir / "hf").rmdir()
    of_tiny = ["--hf-checkpoint", str(TINY)]
    compares = [*of_tiny, "--eval-prompt-data", "a.jsonl", "--eval-compare-and-correct"]
    for words, says in [
        ([], "--hf-checkpoint: required"),
        (of_tiny, "--eval-prompt-data: required for evaluation"),
        ([*of_tiny, "--load", "runs/a"], "--load: only for training"),
        (compares, "--n-samples-per-eval-prompt is 1"),
        ([str(run_dir)], f"{run_dir}/hf: not found. A run exports its policy"),
    ]:
        assert main(words) == 2
        said = capsys.readouterr().err
        assert says in said
        assert "Traceback" not in said, (words, says)


SUMS = "reasoning_gym://chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=1&compact=1"


def opened(tmp_path, *specs, **settings):
    given = {"rollout_max_response_len": 48, "eval_num_prompts": 3, "hf_checkpoint": str(TINY)} | settings
    recipe = tmp_path / "evaluation.yaml"  # is read ten times as fast as flags
    recipe.write_text(json.dumps(given | {"run_dir": str(tmp_path / "out")}))
    config = policy_of(["--config", str(recipe), "--eval-prompt-data", *map(str, specs)]).config
    check_evaluation(config)
    return open_eval_sets(config, TOKENIZER, 512, ibpo_k=2)


def rows(tmp_path, *fields):  # a simple sum each, with these fields beside it
    sums = ({"prompt": f"{n}+1=", "label": str(n + 1)} | more for n, more in enumerate(fields))
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sums))
    return path


def test_several_sets_have_names_also_for_other_temperatures(tmp_path):
    path = rows(tmp_path, {})
    (alone,) = opened(tmp_path, path)
    assert (alone.name, alone.metrics({"accuracy": 0.5})) == ("mine", {"accuracy": 0.5})
    for specs in ([f"my={path}", SUMS], [f"my={path}", "--eval-prompt-data", SUMS]):
        both = [(own.name, own.is_named, len(own.prompts)) for own in opened(tmp_path, *specs)]
        assert both == [("my", True, 1), ("chain_sum", True, 3)], specs
    plain, cool = opened(tmp_path, SUMS, eval_other_temperatures=[0.6])
    assert plain.metrics({"accuracy": 0.5}) == {"accuracy": 0.5}, "it keeps its metrics without a name"
    assert cool.metrics({"accuracy": 0.7}) == {"eval/chain_sum@0.6/accuracy": 0.7}
    assert (plain.sampling.temperature, cool.sampling.temperature) == (1.0, 0.6)
    assert [p.text for p in cool.prompts] == [p.text for p in plain.prompts]
    both = {"accuracy": 0.5, "greedy_accuracy": 0.9, "eval/chain_sum@0.6/accuracy": 0.7}
    found = measures(both | {"eval/chain_sum@0.6/greedy_accuracy": 0.9})
    assert list(found) == ["accuracy", "greedy", "chain_sum@0.6/accuracy", "chain_sum@0.6/greedy"]


def test_answers_are_extracted_where_the_verifier_defines_them(tmp_path):
    path = rows(tmp_path, {"level": 1, "id": "a"}, {"x": 0})
    (boxed,) = opened(tmp_path, path, rm_type="math")
    for response, answer in (
        (r"first \boxed{1}, no: \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"so \boxed{1} or \boxed{ \frac{1}{2} }.", r"1,\frac{1}{2}"),
        (r"<think>\boxed{1}</think> It is 2.", "2"),
        ("no idea", None),
    ):
        assert boxed.answer(boxed.prompts[0], response) == answer
    assert boxed.notes == (f"{path}: fields that are not used: 'level', 'x'",)
    (tmp_path / "zero.py").write_text("def score(question, response, label, metadata):\n    return 0.0\n")
    (own,) = opened(tmp_path, path, rm_type=f"{tmp_path / 'zero.py'}:score")
    assert own.answer is None
    (generated,) = opened(tmp_path, SUMS)
    assert generated.answer(generated.prompts[0], "1+1=2#2") == "2"


def test_tuning_and_test_halves_share_no_question(tmp_path):
    def texts(half, spec):
        (own,) = opened(tmp_path, spec, eval_half=half, eval_num_prompts=60)
        return [prompt.text for prompt in own.prompts]

    tuning, test, again = (texts(half, SUMS) for half in ("tuning", "test", "test"))
    assert len(tuning) == len(test) == 60
    assert not set(tuning) & set(test)
    assert test == again
    mine = rows(tmp_path, *[{}] * 40)
    tuning, test = (texts(half, mine) for half in ("tuning", "test"))
    assert sorted(tuning + test) == sorted(f"{n}+1=" for n in range(40))
    mine = rows(tmp_path, {"prompt": tuning.pop()})
    with pytest.raises(ValueError, match="--eval-half test: none of the prompts"):
        texts("test", mine)


def test_evaluation_sampling_follows_flags_then_the_preset_then_training(tmp_path):
    flags = {"eval_preset": "qwen3-next-80b-a3b", "n_samples_per_eval_prompt": 2, "eval_top_p": 1.0}
    for settings, expected in (
        ({}, EvalSampling(1, 48, 0.9, 1.0, -1)),
        ({"eval_preset": "qwen3-32b"}, EvalSampling(64, 64, 0.6, 0.95, 20)),
        (flags, EvalSampling(2, 64, 0.7, 1.0, 20)),
    ):
        length = {"eval_max_response_len": 64} if settings else {}
        (own,) = opened(tmp_path, SUMS, rollout_temperature=0.9, **settings, **length)
        assert own.sampling == expected


def test_a_set_that_cannot_be_used_is_refused(tmp_path):
    one_sample = {"n_samples_per_eval_prompt": 1, "eval_compare_and_correct": True}
    for specs, settings, says in [
        (["a=x.jsonl", "a=y.jsonl"], {}, "--eval-prompt-data: must be SPEC, or NAME=SPEC each"),
        (["aime26://a.jsonl"], {}, "no benchmark 'aime26'; there are aime25, "),
        (["aime25:///nowhere.jsonl"], {}, "benchmark file /nowhere.jsonl: no such file"),
        ([SUMS, SUMS], {}, "two sets would be called 'chain_sum'; give them names, NAME=SPEC"),
        ([SUMS], {"eval_max_response_len": 512}, "512 leaves no room for "),
        ([SUMS], {"eval_preset": "qwen3-32"}, "no preset 'qwen3-32'; there are qwen3-32b, "),
        ([SUMS], {"eval_preset": "qwen3-32b"} | one_sample, "--n-samples-per-eval-prompt is 1"),  # not its 64
    ]:
        with pytest.raises(ValueError, match=re.escape(says)):
            opened(tmp_path, *specs, **settings)


def written(own, policy_says):
    """Samples of a set, two of each prompt, whose (text, is right) is `policy_says(prompt index, number)`."""

    def sample(asked):
        kind, index, number = asked.key
        text, correct = policy_says(index, number)
        asks = {"set": own.name, "kind": kind, "prompt": asked.prompt.text, "label": asked.prompt.label}
        asks |= {"answer": text or None, "mean_logprob": -1.0 - number}
        return judged(index, number, text, float(correct), **asks)

    made = evaluate(own.prompts, lambda asked: [*map(sample, asked)], own.sampling, has_answers=True)
    return SetEvaluation(own, *made)


def test_an_evaluation_leaves_results_a_picture_and_a_table(tmp_path, capsys):
    (own,) = opened(tmp_path, f"sums={SUMS}", n_samples_per_eval_prompt=2)
    one = written(own, lambda index, number: ("yes", True) if index == 0 or number else ("", False))
    with KeptSamples(tmp_path / "out", "/models/a", {"sums": {"--seed": 0}}):
        pass
    seconds, counts = {"start": 1.5, "evaluate": 2.5}, {"engine_restarts": 0, "verifier_deaths": 1}
    report_evaluation(tmp_path / "out", "/models/a", [one], seconds=seconds, counts=counts)
    results = json.loads((tmp_path / "out/results.json").read_text())
    of_set = results.pop("sets")["sums"]
    assert of_set["measures"] == one.evaluation.metrics()
    assert of_set["problems"]["id"] == ["0", "1", "2"]
    assert of_set["problems"]["accuracy"] == [1, 0.5, 0.5]
    assert of_set["intervals"]["accuracy"] == [one.evaluation.accuracy_low, one.evaluation.accuracy_high]
    expected = {"status": "finished", "policy": "/models/a", "seconds_by_stage": seconds, "counts": counts}
    assert results.items() >= expected.items()
    assert matplotlib.image.imread(tmp_path / "out/evaluation.png").shape[0] > 300
    lines = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert ["accuracy, sampled", "0.667"] in [[cell.strip() for cell in line] for line in lines]


@pytest.fixture
def left(tmp_path):
    """Leave a finished evaluation of two samples of twelve problems, and return its directory."""
    sums = opened(tmp_path, SUMS, n_samples_per_eval_prompt=2, eval_num_prompts=12)[0]

    def write(policy_says, settings=None, change=lambda sums: {}):
        own, directory = replace(sums, **change(sums)), Path(tempfile.mkdtemp(dir=tmp_path))
        made_by = {"--seed": 0, "policy": str(directory)} | (settings or {})
        with KeptSamples(directory, "p", {own.name: made_by}):
            finish_results(directory, [written(own, lambda *key: ("x", policy_says(*key)))], {})
        return directory

    return write


def test_two_evaluations_are_compared_problem_by_problem(left):
    worse, better = left(lambda index, number: False), left(lambda index, number: number == 0)
    (one,) = compare_evaluations(worse, better, "accuracy")
    assert (one.first, one.second, one.difference.mean, one.problems, one.unpaired) == (0, 0.5, 0.5, 12, 0)
    assert one.p == pytest.approx(2 / 2**12), "all twelve signs alike, of 2^12"
    assert one.settings == (), "the policies may differ"
    first = left(lambda index, number: index < 6)
    second = left(lambda index, number: index >= 6, {"--eval-temperature": 0.7})
    (one,) = compare_evaluations(first, second, "accuracy")
    assert one.difference.mean == 0
    assert one.difference.low < 0 < one.difference.high
    assert one.p == 1
    assert one.settings == ("--eval-temperature None and 0.7",)
    # four problems differ, three for the fourth, one for the third: of 2^4 signs, the sum is at least 2 from
    # 0 in 2·(1 + 4) = 10
    third, fourth = left(lambda index, number: index == 3), left(lambda index, number: index < 3)
    (one,) = compare_evaluations(third, fourth, "accuracy")
    assert one.p == pytest.approx(10 / 16)


def test_two_evaluations_are_compared_or_refused_as_incomparable(left, capsys):
    first = left(lambda *_: False)
    second = left(lambda *_: True, change=lambda sums: {"prompts": sums.prompts[:10]})
    others = left(lambda *_: True, change=lambda sums: {"name": "others"})
    asked = left(lambda *_: True, change=lambda own: {"prompts": [replace(own.prompts[0], text="?")]})
    assert main(["compare", str(first), str(second)]) == 0
    shown = capsys.readouterr().out
    assert "2 problems in only one of the two, left out" in shown
    assert re.search(r"chain_sum\s+│\s+10 │\s+0.000 │\s+1.000 │\s+\+1.000 ", shown)
    assert "0.0020" in shown, "ten signs alike, of 2^10"
    for second, more, says in [
        (first, ["--measure", "pass_at_9"], "'pass_at_9' was not measured in both; in both are accuracy"),
        (others, [], "no set is in both"),
        (asked, [], "these problems differ between the two: 0"),
    ]:
        assert main(["compare", str(first), str(second), *more]) == 2
        assert says in capsys.readouterr().err


def start(policy, run_dir):
    sums = "reasoning_gym://chain_sum?min_terms=5&max_terms=7&min_digits=1&max_digits=1&compact=1"
    words = [  # float32, where what is sampled does not depend on which other requests run beside it
        policy, "--run-dir", run_dir, "--eval-prompt-data", f"sums={sums}",
        f"short={sums.replace('5', '2').replace('7', '3')}", "--eval-num-prompts", 12,
        "--n-samples-per-eval-prompt", 3, "--eval-compare-and-correct", "--eval-max-response-len", 48,
        "--rollout-max-response-len", 48, "--vllm-dtype", "float32",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_ibpo.commands.evaluate", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def evaluated(policy, run_dir):
    """Run it; return what it says, what was measured of each set, and all responses."""
    process = start(policy, run_dir)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-5000:]
    results = json.loads((run_dir / "results.json").read_text())
    assert results["status"] == "finished"
    samples = [sample for name in ("sums", "short") for sample in read_samples(run_dir, name)]
    measured = {name: (entry["measures"], entry["problems"]) for name, entry in results["sets"].items()}
    return output, measured, {(sample.set, *sample.key): sample.text for sample in samples}


def lines_of(run_dir):
    return sum(path.read_bytes().count(b"\n") for path in run_dir.glob("*.samples.jsonl"))


@pytest.mark.engine
@pytest.mark.slow  # test_evaluate.py kills it at many places, with a simulated engine
@pytest.mark.timeout(900)
def test_a_killed_evaluation_resumes_to_the_same_results(tmp_path):
    dense = ROOT / "examples/tiny_qwen3"
    stored, whole, killed = (tmp_path / name for name in ("stored", "whole", "killed"))
    hf_to_megatron(dense, stored, ParallelConfig(), World(0, 1, torch.device("cpu"), None))
    output, *expected = evaluated(stored, whole)
    assert f"converting {stored} to Hugging Face format in {whole}/policy-" in output
    assert list(whole.glob("policy-*")) == [], "removed at the end"
    assert "sums: accuracy " in output
    assert (whole / "evaluation.png").exists()
    in_all = 2 * 12 * (3 + 1 + 3)  # of both sets: samples, greedy ones and corrections
    assert len(expected[1]) == lines_of(whole) == in_all

    process = start(dense, killed)
    while lines_of(killed) < 20:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(started, timeout=30)
    for left in alive:
        left.kill()
    psutil.wait_procs(alive, timeout=10)
    kept = lines_of(killed)
    assert 20 <= kept < in_all
    output, *found = evaluated(dense, killed)
    assert f"{kept} samples of an earlier start are reused" in output
    assert found == expected
