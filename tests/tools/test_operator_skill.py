import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from simulated_engines import SimulatedEngine, StepTime, in_virtual_time

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.commands import skill as skill_command
from megatron_ibpo.config import Config, RolloutConfig
from megatron_ibpo.credit import Vocabulary, credit_of, find_operator
from megatron_ibpo.data import PromptSource, load_tokenizer
from megatron_ibpo.report.page.directories import open_source
from megatron_ibpo.run import operator_skill as skills
from megatron_ibpo.run.operator_skill import Asking, Trial, Trials, operator_skill, premise
from megatron_ibpo.run.rollouts import LiveRollouts
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.requests import group_requests
from megatron_ibpo.study import instruments
from support import live_loop
from support.credit_cases import AGREEMENT
from support.paths import ROOT

RIGHT, EOS, HEADING = 50, 1, 40
PROMPTS = [Prompt(index, token_ids([index + 60, 7]), 1, "", "", "") for index in range(60)]
MIXED, WRONG = "groups with a correct response", "groups without one"


def template(prompt, target, references):
    shown = [int(i) for candidate in (target, *references) for i in (HEADING, *candidate)]
    return token_ids([*prompt.head_ids, *shown, *prompt.tail_ids])


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
    asking = Asking(k, rollout, Vocabulary(template), max_context, seed=3, targets=2, **settings)
    engine = SimulatedEngine(StepTime(0.01, 0.001), policy)
    sampler = Sampler([engine], score, stall_timeout=60)
    return in_virtual_time(skills.try_corrections(sampler, prompts, asking))[0], engine


def ways_of(tried):
    return {trial.way for trial in tried.trials}


def test_a_policy_that_copies_succeeds_beside_a_right_response(tmp_path):
    algorithms = [credit_of("ibpo"), credit_of("gspo"), credit_of("ibpo", ibpo_operator=AGREEMENT)]
    are_measured = [skills.corrects(find_operator(algorithm)) for algorithm in algorithms]
    assert are_measured == [True, False, False]
    skill = operator_skill(measured(copies_what_is_right)[0])
    mixed = skill["ways"][MIXED]
    assert [*mixed] == ["correct reference", "wrong reference", "no reference", "resample"]
    right, wrong, alone, resample = mixed.values()
    assert right["success"]["estimate"] == right["copies_reference"] == 1.0
    assert wrong["success"]["estimate"] == alone["success"]["estimate"] == 0
    assert alone["unchanged"] == 1.0
    assert wrong["copies_reference"] is None  # nothing succeeded
    assert resample["success"]["low"] < 0.5 < resample["success"]["high"]
    assert right["above_resample"]["estimate"] == pytest.approx(1 - resample["success"]["estimate"])
    assert "IBPO's premise holds for this policy" in premise(skill)
    assert {*skill["ways"][WRONG]} == {"wrong reference", "no reference", "resample"}
    # a prompt of 2 tokens, two headings, two answers; the answer and its end
    assert (right["tokens_read"], right["tokens_written"], resample["tokens_read"]) == (6, 2, 2)
    assert len(skills.skill_table(skill).splitlines()) == 2 + 4 + 4 + 3
    (tmp_path / "config.yaml").write_text("advantage-estimator: ibpo\nhf-checkpoint: tiny\n")
    assert open_source(tmp_path).overview()["facts"] == ["not finished"]
    (tmp_path / "operator_skill.json").write_text(skills.skill_json(skill))
    assert open_source(tmp_path).overview()["facts"] == ["not finished", premise(skill)]
    (tmp_path / "operator_skill.json").write_text("[]")
    with pytest.raises(ValueError, match="premise"):
        open_source(tmp_path).overview()

    skill = operator_skill(measured(another_try, prompts=PROMPTS * 4)[0])
    above = skill["ways"][MIXED]["correct reference"]["above_resample"]
    assert above["low"] < 0 < above["high"], "a policy whose corrections are other tries is found out"


def test_before_a_run_corrections_are_made_as_in_training():
    """One way for each wrong response, and two samples."""
    as_in_training = partial(measured, copies_what_is_right, as_in_training=True)
    ways = operator_skill(as_in_training()[0])["ways"]
    assert [*ways[MIXED]] == ["correct reference", "resample"]
    assert [*ways[WRONG]] == ["wrong reference", "resample"]
    for settings in ({"k": 1}, {"size": 1}):
        assert ways_of(as_in_training(**settings)[0]) == {"no reference", "resample"}


def test_at_most_two_wrong_responses_are_replaced_and_failures_counted():
    all_fit, engine = measured(another_try)
    resampled = [trial.prompt for trial in all_fit.trials if trial.way == "resample"]
    wrong = [sum(not response.correct for response in group.responses) for group in all_fit.groups]
    assert [resampled.count(number) for number in range(len(PROMPTS))] == [min(2, count) for count in wrong]
    seeds = {request.seed for _, request in engine.asked}
    assert len(seeds) == len(engine.asked)
    rollout = RolloutConfig(n_samples_per_prompt=4)
    for step in range(3):
        of_training = group_requests(PROMPTS, rollout, seed=3, step=step)
        assert seeds.isdisjoint(request.seed for request in of_training), step
    tried, _ = measured(another_try, max_context=12)  # x̃ with a reference has 6 tokens, a response 8
    assert all_fit.too_long == 0
    assert tried.too_long == len(all_fit.trials) - len(tried.trials) > 0
    assert ways_of(tried) == {"no reference", "resample"}

    async def fails_on_corrections(prompt, sample):
        if HEADING in sample.prompt_token_ids:
            sample.reward_error = "broken"
        else:
            await score(prompt, sample)

    broken, _ = measured(another_try, score=fails_on_corrections)
    assert ways_of(broken) == {"resample"}
    assert broken.reward_errors > 0


def test_skill_is_measured_on_prompts_after_the_first_update():
    task = SimpleNamespace(prompts=PromptSource(PROMPTS.__getitem__))
    for algorithm, rollout, before in (
        ({}, {}, 6), ({}, {"max_staleness": 2}, 18), ({}, {"over_sampling_batch_size": 9}, 9),
        ({"dynamic_sampling": True, "dynamic_sampling_rounds": 3}, {}, 18),
    ):  # fmt: skip
        settings = RolloutConfig(rollout_batch_size=6, **rollout)
        config = Config(algorithm=credit_of("ibpo", **algorithm), rollout=settings)
        asked = LiveRollouts(config, None, task, fleet=None, sampler=None).prompts_of_later_steps(4)
        assert [prompt.index for prompt in asked] == [*range(before, before + 4)]


def test_trials_have_wilsons_interval_and_equal_ones_count_once():
    found = skills.success_rate(range(10), [True] * 5 + [False] * 5)
    assert found == pytest.approx({"estimate": 0.5, "low": 0.2366, "high": 0.7634}, abs=0.02)
    none = skills.success_rate(range(20), [False] * 20)
    assert none == pytest.approx({"estimate": 0.0, "low": 0.0, "high": 0.161}, abs=0.001)
    alternating, by_four = [number % 2 == 0 for number in range(40)], [number // 4 for number in range(40)]
    alike = skills.success_rate(by_four, [prompt % 2 == 0 for prompt in by_four])
    apart = skills.success_rate(range(40), alternating)
    assert alike == pytest.approx(skills.success_rate(range(10), alternating[:10]))
    assert alike["high"] - alike["low"] > 1.7 * (apart["high"] - apart["low"])


def test_the_gain_over_resampling_is_paired_with_a_verdict():
    """Three prompts: gains 1, 0, 0. Mean 1/3; variance of the mean 3/2 · (4/9 + 1/9 + 1/9) / 9 = 1/9."""
    groups = measured(another_try, prompts=PROMPTS[:2])[0].groups

    def skill_of(corrected, resampled):
        """One wrong response to each prompt, in groups with a correct one."""
        same = {"target": 0, "has_correct_sibling": True, "copies_reference": False, "unchanged": False}
        same |= {"tokens_read": 9, "tokens_written": 5}
        trials = [
            Trial(prompt, way=way, success=success, **same)
            for way, successes in (("correct reference", corrected), ("resample", resampled))
            for prompt, success in enumerate(successes)
        ]
        return operator_skill(Trials(groups, trials, 0, 0))

    skill, half = skill_of([True, True, False], [False, True, False]), 1.96 / 3
    above = skill["ways"]["all groups"]["correct reference"]["above_resample"]
    assert above == pytest.approx({"estimate": 1 / 3, "low": 1 / 3 - half, "high": 1 / 3 + half})
    many = [n % 10 < 3 for n in range(1000)]
    said = "a resample succeeds .30: IBPO's premise does not hold for this policy (difference +0.00 ["
    assert said in premise(skill_of(many, many[::-1]))
    few = [True, False, False, True]
    assert "too few responses to say" in premise(skill_of(few, [not success for success in few]))
    assert "premise holds" in premise(skill_of([True] * 50, many[:50]))
    assert premise(skill_of([True], [False])).startswith("too few of 2 prompts")


def test_only_policies_taught_to_compare_gain_over_another_try():
    paths = sorted((ROOT / "tools/results").glob("operator_skill_*.json"))
    told = {path.stem.removeprefix("operator_skill_"): json.loads(path.read_text()) for path in paths}
    assert {"tiny_qwen3", "tiny_qwen3_hard", "default_skill_0.9"} <= told.keys()
    for name, skill in told.items():
        assert (ROOT / skill["settings"]["checkpoint"] / "config.json").is_file()
        assert premise(skill) == skill["premise"]
        taught = name.endswith(("skill_0.9", "_mends", "_pairs", "_rule"))
        assert ("premise holds" if taught else "premise does not hold") in skill["premise"], name


def test_a_checkpoint_answers_all_held_out_prompts_that_there_are(tmp_path, monkeypatch, capsys):
    engine, decode, told = live_loop.Engine(), load_tokenizer(live_loop.MODEL).decode, []

    def open_engine(config, foundation, stack):
        told.append((config.run.run_dir, foundation.hf_dir, foundation.max_context))
        return engine

    live_loop.put_in_place_of_processes(monkeypatch, instruments, open_engine)
    ask = partial(instruments.skill_of_checkpoint, prompts=60, targets=2, seed=1)
    config = live_loop.config_of(tmp_path / "run")
    skill = ask(config, tmp_path / "scratch")
    assert told == [(tmp_path / "scratch", live_loop.MODEL, 512)]
    rows = [row for row in live_loop.questions("eval") for _ in range(3)]
    answers = [decode(live_loop.written(request)) for request in engine.asked[: len(rows)]]
    right = [
        live_loop.reward(row["prompt"], answer, row["label"], {})
        for row, answer in zip(rows, answers, strict=True)
    ]
    assert (skill["prompts"], skill["responses"], skill["accuracy"]) == (50, 150, sum(right) / 150)
    assert 50 < skill["ways"]["all groups"]["resample"]["trials"] <= 2 * 50
    assert skill["corrections_too_long"] == 0
    assert config.run.run_dir == tmp_path / "run"
    for part, says in (
        ({"data": replace(config.data, prompt_data=())}, "the recipe names no prompts: --prompt-data"),
        ({"model": replace(config.model, hf_checkpoint=tmp_path)}, "holds no policy in Hugging Face format"),
    ):
        with pytest.raises(ValueError, match=says):
            ask(replace(config, **part), tmp_path / "scratch")
    saved = tmp_path / "skill.json"
    words = [str(live_loop.MODEL), "--prompts", "4", "--targets", "2", "--save", str(saved)]
    assert skill_command.main(words) == 0
    assert json.loads(saved.read_text())["premise"] in capsys.readouterr().out
