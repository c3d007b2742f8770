"""Every function of the user is called once before engines start; a fault names its line and prompt."""

import re
import textwrap
from contextlib import ExitStack

import pytest

from megatron_ibpo.commands import train
from megatron_ibpo.config import ConfigError, DataConfig
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.rewards import Verifier, open_pool
from megatron_ibpo.run.inputs import environments_of, open_inputs, open_judges, open_run_data
from megatron_ibpo.run.preflight import check_judges, check_user_code, try_user_code
from megatron_ibpo.run.resolve import read_foundation
from megatron_ibpo.run.settings import parse_config
from support.paths import ROOT

TINY = ROOT / "examples/tiny_qwen3_words"
CODE = """
    from pathlib import Path

    import json, time
    from statistics import fmean, pstdev, stdev
    from megatron_ibpo.credit import LogProbQuery, TokenFactors
    from megatron_ibpo.environments import Opening, Turn
    from megatron_ibpo.rewards import ResponseError

    def note(what):
        with open(Path(__file__).parent / "calls", "a") as file:
            file.write(what + " ")

    def right(prompt, response, label, metadata):
        note("right")
        return {"score": float(label in response), "words": len(response.split())}

    def refuses(prompt, response, label, metadata):
        raise ResponseError("not this one")

    def misses_key(prompt, response, label, metadata):
        return float(metadata["answer"] == response)

    def in_library(prompt, response, label, metadata):
        return json.loads(response)

    def sleeps(prompt, response, label, metadata):
        time.sleep(600)

    def all_of_them(prompts, responses, labels, metadata):
        return [each["answer"] for each in metadata]

    all_of_them.batched = True

    def centred(rewards):
        note("centred")
        return [reward - sum(rewards) / len(rewards) for reward in rewards]

    def short(rewards):
        return rewards[1:]

    def divides(rewards):
        return [1 / 0 for _ in rewards]

    def wordy(group):
        note("wordy")
        return group.responses[0].reward_details["words"] == 4

    def standardised(rewards):
        return [(reward - fmean(rewards)) / stdev(rewards) for reward in rewards]

    def finished(group):
        lengths = [len(each.token_ids) for each in group.responses if each.finish_reason == "stop"]
        return max(lengths) / pstdev(lengths) > 1

    def surprising(groups, advantages, context):
        rows = [[(each - each.mean()) / each.std() for each in lps] for lps in map(logprobs, groups)]
        asked = [LogProbQuery(r.prompt_token_ids, r.token_ids, 1.0) for g in groups for r in g.responses]
        first, second, *_ = map(sum, context.logprobs(asked))
        return TokenFactors([[abs(each) / abs(first - second) for each in group] for group in rows])

    def logprobs(group):
        return [response.logprobs for response in group.responses]

    def filter_fails(group):
        return group.answers

    def weigh(groups, advantages, context):
        raise KeyError("weights")

    class Guess:
        def reset(self, question, label, metadata, seed):
            note("reset")
            return Opening([{"role": "user", "content": question}], [])
        def step(self, message):
            note("step")
            return Turn([], True)
        def score(self): return 1.0
        def close(self): pass

    class Broken(Guess):
        def step(self, message):
            return message["tool_calls"]
"""
PLACE = r" \(\S*{file}\.py:{line} in \S*\) on rows, prompt 0, with a made-up "


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("user")
    (made / "own_code.py").write_text(textwrap.dedent(CODE))
    (made / "extracts.py").write_text(
        "from own_code import right\n\ndef extract_answer(response):\n    return response.split()[9]\n"
    )
    (made / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+2=", "label": "3"}\n')
    return made


@pytest.fixture(autouse=True)
def in_directory(directory, monkeypatch):
    monkeypatch.chdir(directory)
    (directory / "calls").write_text("")


def line_of(text):
    return next(number for number, line in enumerate(textwrap.dedent(CODE).splitlines(), 1) if text in line)


def flags(*more):
    own = ["--rm-type", "own_code.py:right", "--reward-workers", "1", "--eval-num-prompts", "0"]
    sizes = ["--rollout-max-context-len", "64", "--rollout-max-response-len", "20"]
    return ["--hf-checkpoint", str(TINY), "--prompt-data", "rows.jsonl", *sizes, *own, *more]


@pytest.fixture
def pool():
    with open_pool(parse_config(flags()).data) as opened:
        yield opened


def tried(*more, logs=None, judges=None):
    """By this pool of processes, or one of its own."""
    config = parse_config(flags(*more))
    foundation = read_foundation(config)
    data = open_run_data(config, foundation)
    with ExitStack() as stack:
        pool = judges or stack.enter_context(open_pool(config.data))
        environments = stack.enter_context(EnvironmentPool(config.environment))
        own = environments if environments_of(data.first_prompts, config.environment) else None
        try_user_code(config, foundation.max_context, data, pool, own, trains=True, logs=logs)
        assert (environments.opened, environments.deaths, sum(environments.faults.values())) == (0, 0, 0)


def test_functions_that_work_are_called_once_and_nothing_is_counted(directory):
    tried("--advantages", "own_code.py:centred", "--group-filter", "own_code.py:wordy")
    calls = (directory / "calls").read_text().split()
    assert {name: calls.count(name) for name in ("right", "wordy")} == {"right": 1, "wordy": 1}
    assert "centred" in calls
    tried("--rm-type", "own_code.py:refuses", "--environment", "own_code.py:Guess")
    assert (directory / "calls").read_text().split()[-2:] == ["reset", "step"]


def test_functions_that_divide_by_group_differences_are_not_refused(pool):
    for threshold in ("0", "0.5"):
        functions = ("--advantages", "own_code.py:standardised", "--group-filter", "own_code.py:finished")
        tried(*functions, "--token-credit", "own_code.py:surprising", "--reward-threshold", threshold,
              judges=pool)  # fmt: skip


def test_a_fault_in_user_code_stops_the_start_with_details(tmp_path, pool):
    for flag, name, says, line in (
        ("--rm-type", "misses_key", "KeyError: 'answer'", 'metadata["answer"] =='),
        ("--rm-type", "all_of_them", "KeyError: 'answer'", 'each["answer"] for'),
        ("--rm-type", "in_library", "JSONDecodeError: Expecting value", "json.loads"),
        ("--advantages", "divides", "ZeroDivisionError", "1 / 0"),
        ("--group-filter", "filter_fails", "AttributeError", "group.answers"),
        ("--token-credit", "weigh", "KeyError: 'weights'", 'KeyError("weights")'),
    ):
        judges = None if flag == "--rm-type" else pool
        with pytest.raises(ConfigError) as error:
            tried(flag, f"own_code.py:{name}", logs=tmp_path / "logs", judges=judges)
        said = str(error.value)
        assert said.startswith(f"{flag} own_code.py:{name}: {says}"), said
        assert re.search(PLACE.format(file="own_code", line=line_of(line)), said), said
        assert "\n" not in said, said
        hint = "response, 'The answer is 2.' (return 0 or raise ResponseError for one that it cannot read)"
        assert (hint in said) == (flag == "--rm-type"), said
    trace = (tmp_path / "logs/reward_faults.log").read_text()
    assert trace.count("Traceback (most recent call last)") == 3
    assert 'return float(metadata["answer"] == response)' in trace
    for changed, says in (
        (("--rm-type", "own_code.py:sleeps", "--reward-timeout", "0.5"), "sleeps: timed out after 0.5 s"),
        (("--advantages", "own_code.py:short"), "must return one finite number per reward"),
        (("--environment", "own_code.py:Broken"), r"Broken: step: KeyError: 'tool_calls' \(.*own_code.py:"),
        (("--rm-type", "extracts.py:right"), r"its extract_answer: IndexError: .*extracts.py:4 in extract_"),
        (("--rm-type", "composite", "--reward-part", "own_code.py:misses_key=1"), "misses_key: KeyError"),
    ):
        with pytest.raises(ConfigError, match=says):
            tried(*changed, judges=pool if "--advantages" in changed else None)


def test_dry_run_evaluation_and_training_refuse_faulty_code_alike(directory, tmp_path, capfd):
    bad = flags("--rm-type", "own_code.py:misses_key", "--run-dir", str(tmp_path / "run"))
    assert train.main([*bad, "--dry-run"]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.search("KeyError: 'answer' .*own_code.py:[0-9]+ in misses_key. on rows, prompt 0", line), line
    for trains in (True, False):
        config = parse_config([*bad, "--eval-num-prompts", "1"])
        with ExitStack() as stack:
            inputs = open_inputs(config, read_foundation(config), trains=trains)
            judges = open_judges(inputs, stack)
            with pytest.raises(ConfigError, match="KeyError: 'answer'"):
                check_judges(inputs, judges)
    elsewhere = flags("--prompt-data", "nowhere.jsonl", "--dry-run")
    assert "not on this machine" in check_user_code(parse_config(elsewhere))


def test_a_fault_during_a_run_is_logged_with_its_traceback(directory, tmp_path, caplog):
    data = DataConfig(rm_type="own_code.py:misses_key", reward_workers=1)
    config = parse_config(flags())
    (prompt,) = open_run_data(config, read_foundation(config)).prompts.batch(0, 1)
    with open_pool(data) as pool:
        verifier = Verifier(pool, data, tmp_path / "logs")
        (score,) = verifier.score([(prompt, "2")])
        assert score.reward is None
        place = rf"own_code.py:{line_of('metadata[')} in misses_key\) on rows, prompt 0"
        assert re.search(place, score.error)
        assert re.search(place, caplog.text)
        log = tmp_path / "logs/reward_faults.log"
        assert 'metadata["answer"]' in log.read_text()
        log.write_text("x" * 2_000_000)
        verifier.score([(prompt, "2")])
    assert log.stat().st_size == 2_000_000, "a log of this size is long enough"
