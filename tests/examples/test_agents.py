"""The bundled agents: two environments played by hand, their prompts, their warm starts, and runs."""

import itertools
import json

import pytest
from agent_demonstrations import LESSONS, demonstrations
from agent_prompts import calculator, guess_number
from agent_tokenizer import make_agent_tokenizer
from guess_number import HIGHER, LOWER, NO_NUMBER, GuessNumber
from use_calculator import CALCULATE, CANNOT_COMPUTE, UNREADABLE, UseCalculator, calculate

from megatron_ibpo.data import load_tokenizer
from support.example_runs import finished, rows_of, start_script
from support.paths import ROOT

CHECKPOINTS = {"calculator": "tiny_qwen3_agent", "guess_number": "tiny_qwen3_next_agent"}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


def called(*arguments, name="calculate"):
    """A message that calls the tool with each of these, of which text is an expression."""
    given = [{"expression": one} if isinstance(one, str) else one for one in arguments]
    calls = [{"id": "a", "type": "function", "function": {"name": name, "arguments": one}} for one in given]
    return said("", tool_calls=calls)


@pytest.mark.parametrize(("messages", "replies", "score"), [
    ([called("37*84"), said("37 times 84 is 3,108.")], [["3108"], None], (1, 0, 1)),  # the last number
    ([said("I do not know.")], [None], (0, 0, 0)),
    ([said("3108")], [None], (1, 0, 0)),  # in the head
    ([called("37*84"), said("-3108")], [["3108"], None], (0, 0, 0)),
    ([called("37*8", "296+1"), said("297")], [["296", "297"], None], (0, 0, 1)),
    ([called("37*84", name="compute"), said("3108")], [[CANNOT_COMPUTE], None], (1, 1, 0)),
    ([said("<tool_call>", malformed_tool_calls=["{"]), called("1")], [[UNREADABLE], ["1"]], (0, 0, 0)),
    ([called("37*", 1, {}, [1], {"expression": 1})], [[CANNOT_COMPUTE] * 5], (0, 5, 0)),
])  # fmt: skip
def test_courses_of_an_episode_with_the_tool(messages, replies, score):
    environment, question = UseCalculator(), "What is 37*84?"
    opening = environment.reset(question, "3108", {}, seed=0)
    assert [*opening.messages, *opening.tools] == [{"role": "user", "content": question}, CALCULATE]
    turns = [environment.step(message) for message in messages]
    assert [None if turn.done else [one["content"] for one in turn.messages] for turn in turns] == replies
    names = ("score", "tool_errors", "answers_of_the_tool")
    assert environment.score() == dict(zip(names, score, strict=True))


def test_the_tool_computes_only_sums_and_products():
    assert [calculate(text) for text in ("37*84-5219", " 2 * (3 + -4) ", "99*99+9999")] == [-2111, -2, 19800]
    for wrong in ("", "2**9", "1/2", "1.5", "True", "x", "f(1)", "(" * 99, "9" * 101, "1;2"):
        with pytest.raises(ValueError):  # noqa: PT011 of any text
            calculate(wrong)


def test_a_game_is_won_by_the_number_in_time():
    for guesses, replies, score in (
        (["15", "", "I guess 9"], [LOWER, NO_NUMBER, None], 1),
        (["1", "2", "3", "4", "5"], [HIGHER] * 4 + [None], 0),
        (["1", "2", "3", "4", "9"], [HIGHER] * 4 + [None], 1),
    ):
        environment = GuessNumber()
        environment.reset("Guess.", "9", {"tries": 5}, seed=0)
        turns = [environment.step(said(guess)) for guess in guesses]
        assert [None if turn.done else turn.messages[0]["content"] for turn in turns] == replies
        assert environment.score() == {"score": score, "turns_used": len(guesses)}


def test_agent_prompts_are_deterministic_with_their_values_as_labels():
    for prompts in (calculator, guess_number):
        assert prompts("eval") == prompts("eval")
        assert len(prompts("eval")) == 512
    training, held_out = calculator("train"), calculator("eval")
    assert not {row["prompt"] for row in training} & {row["prompt"] for row in held_out}
    assert all(row["label"] == str(calculate(row["metadata"]["expression"])) for row in held_out)
    assert {int(row["label"]) for row in guess_number("eval")} == set(range(1, 31))


def test_the_tokenizer_writes_every_demonstration(tmp_path):
    make_agent_tokenizer().save_pretrained(tmp_path)
    for name in CHECKPOINTS.values():
        for file in ("tokenizer.json", "chat_template.jinja"):
            assert (ROOT / "examples" / name / file).read_text() == (tmp_path / file).read_text()
    tokenizer = load_tokenizer(tmp_path)
    for lesson in LESSONS:
        rows = [*itertools.islice(demonstrations(lesson, "eval"), 40)]
        tools = [tool["function"] for tool in rows[0]["tools"]]
        for row in rows:
            text = tokenizer.render_chat(row["messages"], tools=tools)
            assert tokenizer.unk_id not in tokenizer.encode(text), row
            assert tokenizer.decode_all(tokenizer.encode(text)) == text, row


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("agent", CHECKPOINTS)
def test_a_run_of_an_agent_trains_on_episodes(tmp_path, monkeypatch, agent):
    monkeypatch.setenv("AGENT", agent)
    monkeypatch.setenv("HF_CHECKPOINT", str(ROOT / "examples" / CHECKPOINTS[agent]))
    flags = ["--num-rollout", "2", "--rollout-batch-size", "4", "--eval-num-prompts", "16"]
    status, output = finished(start_script(tmp_path / "run", *flags, script="run_agent.sh"), timeout=500)
    assert status == 0, output[-5000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    for row in rows_of(tmp_path / "run"):
        assert row["reward/turns"] > 1
        assert 0 <= row["reward"] < 1
        # of vLLM and the trainer, on every turn
        assert row["logprob_diff_abs_mean"] < row["logprob_diff_bound"]
