"""Does a correction know more than another try? By hand, and on policies whose skill is known."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from simulated_engines import SimulatedEngine, StepTime, in_virtual_time

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import Config, RolloutConfig
from megatron_ibpo.credit import Vocabulary, credit_of
from megatron_ibpo.data import PromptSource, load_tokenizer
from megatron_ibpo.report.page.directories import open_source
from megatron_ibpo.run.operator_skill import (
    Asking,
    Trial,
    Trials,
    corrects,
    operator_skill,
    premise,
    skill_json,
    skill_table,
    success_rate,
    try_corrections,
)
from megatron_ibpo.run.rollouts import LiveRollouts
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.requests import group_requests
from megatron_ibpo.study import single_engine
from support import live_loop
from support.credit_cases import AGREEMENT
from support.paths import ROOT

RIGHT, EOS, HEADING = 50, 1, 40
PROMPTS = [Prompt(index, token_ids([index + 60, 7]), 1, "", "", "") for index in range(60)]


def template(prompt, target, references):
    parts = [part for candidate in (target, *references) for part in ([HEADING], candidate)]
    return token_ids([*prompt.head_ids, *(int(i) for part in parts for i in part), *prompt.tail_ids])


async def score(prompt, sample):
    sample.correct = int(sample.token_ids[0]) == RIGHT
    sample.reward = float(sample.correct)


def another_try(request):
    """Right in half of the cases; wrong answers differ."""
    draw = request.seed >> 8  # the lowest bits of neighbours may be alike
    return [RIGHT if draw % 2 else 2 + draw % 30, EOS]


def copies_what_is_right(request):
    """Shown a right answer it gives that, and shown wrong ones alone the first of them."""
    shown = request.prompt_token_ids.tolist()
    if HEADING not in shown:
        return another_try(request)
    return [RIGHT if RIGHT in shown else shown[shown.index(HEADING) + 1], EOS]


def measured(policy, *, max_context=100, k=2, size=4, prompts=PROMPTS, score=score, **settings):
    rollout = RolloutConfig(n_samples_per_prompt=size, rollout_max_response_len=8)
    algorithm = credit_of("ibpo", ibpo_k=k)
    asking = Asking(algorithm, rollout, Vocabulary(template), max_context, seed=3, targets=2, **settings)
    engine = SimulatedEngine(StepTime(0.01, 0.001), policy)
    sampler = Sampler([engine], score, stall_timeout=60)
    tried, _ = in_virtual_time(try_corrections(sampler, prompts, asking))
    return tried, engine


def test_a_policy_that_copies_what_is_right_succeeds_where_there_is_something_to_copy():
    tried, _ = measured(copies_what_is_right)
    skill = operator_skill(tried)
    mixed = skill["ways"]["groups with a correct response"]
    assert list(mixed) == ["correct reference", "wrong reference", "no reference", "resample"]
    assert mixed["correct reference"]["success"]["estimate"] == 1.0
    assert mixed["correct reference"]["copies_reference"] == 1.0
    assert (
        mixed["wrong reference"]["success"]["estimate"] == mixed["no reference"]["success"]["estimate"] == 0
    )
    assert mixed["no reference"]["unchanged"] == 1.0
    assert mixed["wrong reference"]["copies_reference"] is None  # nothing succeeded
    resample = mixed["resample"]["success"]
    assert resample["low"] < 0.5 < resample["high"]
    above = mixed["correct reference"]["above_resample"]
    assert above["estimate"] == pytest.approx(1 - resample["estimate"])
    assert "IBPO's premise holds for this policy" in premise(skill)
    alone = skill["ways"]["groups without one"]
    assert "correct reference" not in alone
    assert set(alone) == {"wrong reference", "no reference", "resample"}
    # a prompt of 2 tokens, two headings, two answers; the answer and its end
    assert (mixed["correct reference"]["tokens_read"], mixed["correct reference"]["tokens_written"]) == (6, 2)
    assert mixed["resample"]["tokens_read"] == 2


def test_a_policy_whose_corrections_are_other_tries_is_found_out():
    tried, _ = measured(another_try, prompts=PROMPTS * 4)
    skill = operator_skill(tried)
    above = skill["ways"]["groups with a correct response"]["correct reference"]["above_resample"]
    assert above["low"] < 0 < above["high"]
    assert "IBPO's premise does not hold" in premise(skill) or "too few responses to say" in premise(skill)


def test_before_a_run_corrections_are_made_as_in_training():
    """One way for each wrong response, and two samples."""
    tried, _ = measured(copies_what_is_right, as_in_training=True)
    ways = operator_skill(tried)["ways"]
    assert list(ways["groups with a correct response"]) == ["correct reference", "resample"]
    assert list(ways["groups without one"]) == ["wrong reference", "resample"]
    alone, _ = measured(copies_what_is_right, k=1, as_in_training=True)
    assert {trial.way for trial in alone.trials} == {"no reference", "resample"}
    single, _ = measured(copies_what_is_right, size=1, as_in_training=True)
    assert {trial.way for trial in single.trials} == {"no reference", "resample"}


def test_two_wrong_responses_of_a_group_are_replaced_at_most():
    tried, _ = measured(another_try)
    resampled = [trial for trial in tried.trials if trial.way == "resample"]
    by_prompt = [sum(trial.prompt == number for trial in resampled) for number in range(len(PROMPTS))]
    wrong = [sum(not response.correct for response in group.responses) for group in tried.groups]
    assert by_prompt == [min(2, count) for count in wrong]


def test_every_sample_has_a_seed_of_its_own_that_training_does_not_use():
    _, engine = measured(another_try)
    seeds = {request.seed for _, request in engine.asked}
    assert len(seeds) == len(engine.asked)
    rollout = RolloutConfig(n_samples_per_prompt=4)
    trained = [
        request for step in range(3) for request in group_requests(PROMPTS, rollout, seed=3, step=step)
    ]
    assert seeds.isdisjoint(request.seed for request in trained)


@pytest.mark.parametrize(
    ("settings", "asked_before"),
    [
        ({}, 6),
        ({"max_staleness": 2}, 18),
        ({"over_sampling_batch_size": 9}, 9),
        ({"dynamic_sampling": True, "dynamic_sampling_rounds": 3}, 18),
    ],
)
def test_a_run_asks_prompts_that_no_engine_is_asked_before_the_first_update(settings, asked_before):
    of_algorithm = {name: value for name, value in settings.items() if name.startswith("dynamic")}
    of_rollout = {name: value for name, value in settings.items() if name not in of_algorithm}
    config = Config(
        algorithm=credit_of("ibpo", **of_algorithm), rollout=RolloutConfig(rollout_batch_size=6, **of_rollout)
    )
    task = SimpleNamespace(prompts=PromptSource(PROMPTS.__getitem__))
    asked = LiveRollouts(config, task, fleet=None, sampler=None).prompts_of_later_steps(4)
    assert [prompt.index for prompt in asked] == list(range(asked_before, asked_before + 4))


def test_corrections_that_do_not_fit_and_failures_of_the_verifier_are_counted():
    all_fit, _ = measured(another_try)
    tried, _ = measured(another_try, max_context=12)  # x̃ with a reference has 6 tokens, a response 8
    assert all_fit.too_long == 0
    assert tried.too_long == len(all_fit.trials) - len(tried.trials) > 0
    assert {trial.way for trial in tried.trials} == {"no reference", "resample"}

    async def fails_on_corrections(prompt, sample):
        if HEADING in sample.prompt_token_ids:
            sample.reward_error = "broken"
        else:
            await score(prompt, sample)

    broken, _ = measured(another_try, score=fails_on_corrections)
    assert {trial.way for trial in broken.trials} == {"resample"}
    assert broken.reward_errors > 0


# ------------------------------------------------------------------------------------------ intervals


def test_independent_trials_have_wilsons_interval():
    found = success_rate(range(10), [True] * 5 + [False] * 5)
    assert found == pytest.approx({"estimate": 0.5, "low": 0.2366, "high": 0.7634}, abs=0.02)
    none = success_rate(range(20), [False] * 20)
    assert none == pytest.approx({"estimate": 0.0, "low": 0.0, "high": 0.161}, abs=0.001)


def test_trials_that_are_the_same_within_a_prompt_count_once():
    prompts = [number // 4 for number in range(40)]
    alike = success_rate(prompts, [prompt % 2 == 0 for prompt in prompts])
    apart = success_rate(range(40), [number % 2 == 0 for number in range(40)])
    ten = success_rate(range(10), [number % 2 == 0 for number in range(10)])
    assert alike == pytest.approx(ten)
    assert alike["high"] - alike["low"] > 1.7 * (apart["high"] - apart["low"])


def trials_of(corrected, resampled):
    """One wrong response to each prompt, in groups with a correct one."""
    make = partial(
        Trial, target=0, has_correct_sibling=True, copies_reference=False, unchanged=False,
        tokens_read=9, tokens_written=5,
    )  # fmt: skip
    return [
        make(prompt, way=way, success=success)
        for way, outcomes in (("correct reference", corrected), ("resample", resampled))
        for prompt, success in enumerate(outcomes)
    ]


def skill_of(corrected, resampled):
    tried, _ = measured(another_try, prompts=PROMPTS[:2])
    return operator_skill(Trials(tried.groups, trials_of(corrected, resampled), 0, 0))


def test_the_gain_over_a_resample_is_paired():
    """Three prompts: gains 1, 0, 0. Mean 1/3; variance of the mean 3/2 · (4/9 + 1/9 + 1/9) / 9 = 1/9."""
    skill = skill_of([True, True, False], [False, True, False])
    above = skill["ways"]["all groups"]["correct reference"]["above_resample"]
    half = 1.96 / 3
    assert above == pytest.approx({"estimate": 1 / 3, "low": 1 / 3 - half, "high": 1 / 3 + half})


def test_the_premise_in_plain_words():
    many = [n % 10 < 3 for n in range(1000)]
    assert premise(skill_of(many, many[::-1])).startswith(
        "corrections succeed .30 with a correct reference, a resample succeeds .30: IBPO's premise does not "
        "hold for this policy (difference +0.00 ["
    )
    few = [True, False, False, True]
    assert "too few responses to say" in premise(skill_of(few, [not success for success in few]))
    assert "premise holds" in premise(skill_of([True] * 50, many[:50]))
    assert premise(skill_of([True], [False])).startswith("too few of 2 prompts")


def test_the_table_has_a_line_for_each_way_and_the_file_says_how_it_was_measured():
    skill = operator_skill(measured(copies_what_is_right)[0])
    lines = skill_table(skill).splitlines()
    assert len(lines) == 2 + 4 + 4 + 3
    assert len({line.count("|") for line in lines}) == 1
    kept = json.loads(skill_json(skill, {"seed": 3}))
    assert kept["settings"] == {"seed": 3}
    assert kept["premise"] == premise(skill)


MEASURED = sorted((ROOT / "tools/results").glob("operator_skill_*.json"))


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_kept_figures_are_of_policies_that_are_here_and_say_what_their_file_says(path):
    skill = json.loads(path.read_text())
    assert (ROOT / skill["settings"]["checkpoint"] / "model.safetensors").is_file()
    assert premise(skill) == skill["premise"]


def test_policies_taught_to_compare_know_more_than_another_try_and_the_others_do_not():
    told = {path.stem.removeprefix("operator_skill_"): json.loads(path.read_text()) for path in MEASURED}
    assert {"tiny_qwen3", "tiny_qwen3_hard", "default_skill_0.9"} <= told.keys()
    for name, skill in told.items():
        taught = name.endswith(("skill_0.9", "_mends", "_pairs", "_rule"))
        assert ("premise holds" if taught else "premise does not hold") in skill["premise"], name


def test_only_runs_that_have_responses_corrected_are_measured():
    assert corrects(credit_of("ibpo"))
    assert not corrects(credit_of("gspo"))
    assert not corrects(credit_of("ibpo", ibpo_operator=AGREEMENT))


# ---------------------------------------------------------------------------------------- where it is shown


def test_the_page_of_a_run_says_whether_the_premise_holds(tmp_path):
    (tmp_path / "config.yaml").write_text("advantage-estimator: ibpo\nhf-checkpoint: tiny\n")
    assert open_source(tmp_path).overview()["facts"] == ["not finished"]
    skill = operator_skill(measured(copies_what_is_right)[0])
    (tmp_path / "operator_skill.json").write_text(skill_json(skill))
    assert open_source(tmp_path).overview()["facts"] == ["not finished", premise(skill)]
    (tmp_path / "operator_skill.json").write_text("[]")
    with pytest.raises(ValueError, match="premise"):
        open_source(tmp_path).overview()


def test_a_checkpoint_answers_all_held_out_prompts_that_there_are_within_the_context_of_its_model(
    tmp_path, monkeypatch
):
    engine, decode = live_loop.Engine(), load_tokenizer(live_loop.MODEL).decode

    def open_engine(config, hf_dir, stack):
        told = (config.run.run_dir, hf_dir, config.rollout.rollout_max_context_len)
        assert told == (tmp_path / "scratch", live_loop.MODEL, 512)
        return engine

    live_loop.put_in_place_of_processes(monkeypatch, single_engine, open_engine)
    ask = partial(single_engine.skill_of_checkpoint, prompts=60, targets=2, seed=1)
    config = live_loop.config_of(tmp_path / "run")
    skill = ask(config, tmp_path / "scratch")
    rows, answers = list(live_loop.questions("eval")), [decode(live_loop.written(r)) for r in engine.asked]
    right = [
        live_loop.reward(row["prompt"], answer, row["label"], {})
        for row, answer in zip((row for row in rows for _ in range(3)), answers, strict=False)
    ]
    assert (skill["prompts"], skill["responses"], skill["accuracy"]) == (50, 150, sum(right) / 150)
    assert 50 < skill["ways"]["all groups"]["resample"]["trials"] <= 2 * 50
    assert skill["corrections_too_long"] == 0
    assert config.run.run_dir == tmp_path / "run"
    with pytest.raises(ValueError, match="the recipe names no prompts: --prompt-data"):
        ask(replace(config, data=replace(config.data, prompt_data=())), tmp_path / "scratch")
    with pytest.raises(ValueError, match="holds no policy in Hugging Face format"):
        ask(replace(config, model=replace(config.model, hf_checkpoint=tmp_path)), tmp_path / "scratch")


@pytest.mark.engine
@pytest.mark.slow
def test_the_command_measures_the_tiny_policy(tmp_path):
    """Its corrections are other tries."""
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "tools/operator_skill.py"), str(ROOT / "examples/tiny_qwen3"),
            "--prompts", "24", "--targets", "2", "--save", str(tmp_path / "skill.json"),
        ],
        capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    skill = json.loads((tmp_path / "skill.json").read_text())
    assert skill["premise"] in done.stdout
    assert skill["prompts"] == 24
    assert skill["responses"] == 24 * 8
    ways = skill["ways"]["groups with a correct response"]
    assert set(ways) == {"correct reference", "wrong reference", "no reference", "resample"}
    assert 0 < ways["correct reference"]["success"]["estimate"] < 0.7
