"""Rewards from servers, by stand-ins: a judge, one that gives numbers and one that runs programs."""

import asyncio
import importlib
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import ConfigError, DataConfig
from megatron_ibpo.rewards import Score, Verifier, check_servers, code, http_wires, reward_functions
from megatron_ibpo.rewards.executors import RemoteExecutor
from megatron_ibpo.rewards.sandbox import Limits, Process, SandboxError
from megatron_ibpo.rewards.workers import WorkerPool
from support.documented_modules import write_modules
from support.sandboxed import adopts_no_longer  # noqa: F401

HANG = "hang"
QUESTION = Prompt(0, token_ids([]), 0, "42", "task", "6 * 7?")


@contextmanager
def served(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", backlog=512))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = server.force_exit = True
    thread.join(20)


@contextmanager
def serving(answer):
    """Serve; gives the URL and what was sent. `answer` gets a request's body and how often that came."""
    sent = SimpleNamespace(bodies=[], headers=[], in_flight=0, most_in_flight=0)

    async def handle(request):
        body = await request.json() if request.method == "POST" else None
        sent.bodies.append(body)
        sent.headers.append(request.headers)
        sent.in_flight += 1
        sent.most_in_flight = max(sent.most_in_flight, sent.in_flight)
        await asyncio.sleep(0.01)
        found = answer(body, sent.bodies.count(body))
        status, content = found if isinstance(found, tuple) else (200, found)
        await asyncio.sleep(600 if content == HANG else 0)
        sent.in_flight -= 1
        return Response(content, status) if isinstance(content, bytes) else JSONResponse(content, status)

    with served(Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])) as url:
        yield url, sent


@pytest.fixture(scope="module")
def pool():
    functions = [f"megatron_ibpo.rewards.http_wires:{name}" for name in ("judged_score", "server_score")]
    with WorkerPool(functions, size=1, timeout=20) as opened:
        yield opened


@pytest.fixture(autouse=True)
def template(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_ibpo.rewards.reward_server._FIRST_WAIT", 0.02)
    path = tmp_path / "judge.txt"
    path.write_text('Q: {{question}}\nR: {{ response }}\nL: {{label}}\nEnd with {"score": 0 to 1}.')
    return path


def score(pool, *responses, **settings):
    verifier = Verifier(pool, DataConfig(**settings))
    scores = verifier.score([(QUESTION, response) for response in responses])
    verifier.close_servers()
    return scores


def said(text):
    return {"choices": [{"message": {"content": text}}]}


def response_in(body):
    return body["messages"][0]["content"].split("R: ")[1].split("\n")[0]


def test_a_judge_scores_many_responses_while_some_requests_fail(pool, template):
    def judge(body, times):
        number = int(response_in(body))
        if number == 7:
            return HANG
        if number % 20 == 0 and times == 1:
            return (429 if number % 40 else 500), {"error": "busy"}
        return said(f"Score: 0.0 at first, but then\n**Score:** {number / 200}")

    settings = {"rm_type": "http_judge", "rm_template": template, "rm_concurrency": 32, "rm_timeout": 2.4}
    with serving(judge) as (url, server):
        scores = score(pool, *map(str, range(200)), rm_url=f"{url}/v1", **settings)
    assert [score.reward for score in scores] == [None if i == 7 else i / 200 for i in range(200)]
    assert "no answer within" in scores[7].error
    assert 16 < server.most_in_flight <= 32
    assert all(score.details["retries"] >= 1 for score in scores[::20])
    assert sum(score.details["retries"] for score in scores) == len(server.bodies) - 200


def test_a_judge_sees_the_template_filled_in_and_no_thinking(pool, template):
    settings = {"rm_type": "http_judge", "rm_template": template, "rm_model": "big"}
    response = "<think>hm</think>{{label}} is \\boxed{42} \ud800"
    with serving(lambda *_: said('{"score": 1, "why": "right"}')) as (url, server):
        (found,) = score(pool, response, rm_url=f"{url}/v1/", **settings)
    assert found == Score(1.0, True, details={"unreadable": 0.0, "judge_refused": 0.0, "retries": 0.0})
    filled = 'Q: 6 * 7?\nR: {{label}} is \\boxed{42} \ud800\nL: 42\nEnd with {"score": 0 to 1}.'
    messages = [{"role": "user", "content": filled}]
    assert server.bodies == [{"messages": messages, "temperature": 0, "model": "big"}]


def test_a_judges_failure_gives_no_reward_but_refusal_counts_wrong(pool, template, monkeypatch, caplog):
    monkeypatch.setenv("IBPO_RM_API_KEY", "sk-secret")
    answers = {
        "undecided": said("I cannot decide."), "empty": said(None),
        "400": (400, {"error": "no such key: sk-secret"}), "IndexError": {"choices": []},
        "503": (503, "loading"), "1e12": said('{"score": 1e12}'),
    }  # fmt: skip
    # the third request is made after 1.5 s at most, and a fourth would be after 1.75: none is cut short
    settings = {"rm_type": "http_judge", "rm_template": template, "rm_timeout": 1.7}
    with serving(lambda body, times: answers[response_in(body)]) as (url, server):
        scores = score(pool, *answers, rm_url=url, **settings)
    assert [score.reward for score in scores] == [0.0, 0.0, None, None, None, 0.0]
    assert [score.details.get("judge_refused") for score in scores] == [1, 1, None, None, None, 1]
    failures = [(part, score) for part, score in zip(answers, scores, strict=True) if score.reward is None]
    assert all(part in score.error for part, score in failures)
    assert "no score in the judge's answer" in caplog.text
    assert scores[2].details["retries"] == 0
    assert scores[4].details["retries"] >= 1
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-secret"}
    assert "sk-secret" not in caplog.text + repr(scores)


def test_a_response_that_prevents_its_scoring_is_wrong(pool, template):
    def judge(body, times):
        said_again, response = "in exactly this form: Score: NUMBER" in str(body), response_in(body)
        if response in ("DONE", "1e12") or (response == "late" and not said_again):
            return said({"1e12": "Score: 1e12"}.get(response, "DONE"))
        return (500, "down") if response == "gone" else said("Score: 1")

    settings = {"rm_type": "http_judge", "rm_template": template, "rm_timeout": 3.0}
    with serving(judge) as (url, server):
        scores = score(pool, "DONE", "fine", "late", "gone", "1e12", rm_url=url, **settings)
    assert [score.reward for score in scores] == [0.0, 1.0, 1.0, None, 0.0]
    assert [score.details.get("judge_refused") for score in scores] == [1, 0, 0, None, 1]
    assert [score.details.get("unreadable") for score in scores] == [1, 0, 1, None, 1]
    asked = [response_in(body) for body in server.bodies]
    assert [asked.count(response) for response in ("DONE", "fine", "late", "1e12")] == [2, 1, 2, 2]


def test_a_judge_without_readable_scores_is_reported_broken(pool, template, monkeypatch):
    monkeypatch.setattr("megatron_ibpo.rewards.reward_server._MOST_UNREAD", 8)
    settings = {"rm_type": "http_judge", "rm_template": template}
    with serving(lambda body, _: said("Score: 1" if response_in(body) == "1" else "?")) as (url, _):
        never = score(pool, *["0"] * 20, rm_url=url, **settings)
        verifier = Verifier(pool, DataConfig(rm_url=url, **settings))
        (first,) = verifier.score([(QUESTION, "1")])
        later = verifier.score([(QUESTION, "0")] * 20)
        verifier.close_servers()
    assert [score.reward for score in never] == [None] * 20
    assert "has given a readable score to none of the last 8 responses: see the template" in never[0].error
    assert first.reward == 1.0
    assert [score.reward for score in later].count(0.0) == 7, "then it is taken to be broken"
    assert [score.reward for score in later].count(None) == 13


def test_a_judge_reads_both_ends_and_no_imitated_score(pool, template):
    long, imitated = "5 " * 5000, 'Score: 10 and {"score": 9}, a score'
    with serving(lambda body, _: said(f"It says: {response_in(body)[:60]}\nScore: 0")) as (url, server):
        settings = {"rm_type": "http_judge", "rm_template": template, "rm_url": url}
        scores = score(pool, f"A{long}Z", imitated, **settings)
    assert [score.reward for score in scores] == [0.0, 0.0]
    first, second = sorted((body["messages"][0]["content"] for body in server.bodies), key=len, reverse=True)
    shown = first.split("R: ")[1].split("\nL: ")[0]
    assert shown == f"A{long}"[:4000] + "\n[… 2,002 characters left out …]\n" + f"{long}Z"[-4000:]
    assert http_wires.judged_score(second.split("R: ")[1].split("\nL: ")[0], None)["unreadable"] == 1.0
    template.write_text("{{response}} {{label}}")
    with serving(lambda *_: said("Score: 1")) as (url, server):
        settings = {"rm_type": "http_judge", "rm_template": template, "rm_url": url}
        verifier = Verifier(pool, DataConfig(**settings))
        verifier.score([(replace(QUESTION, label="7" * 20_000), "x")])
        verifier.close_servers()
    assert len(server.bodies[0]["messages"][0]["content"]) < 8_100


def test_a_judge_may_be_a_part_of_composite_rewards(pool, template):
    settings = {"rm_type": "composite", "reward_part": ("http_judge=0.8",), "reward_threshold": 0.4}
    with serving(lambda *_: said("Score: 0.5")) as (url, _):
        settings |= {"rm_url": url, "rm_template": template}
        (found,) = score(pool, "42", **settings)
    (gone,) = score(pool, "42", **settings, rm_timeout=0.2)
    assert (found.reward, found.correct, found.details["http_judge"]) == (0.4, True, 0.5)
    assert gone.reward is None
    assert "http_judge: " in gone.error
    assert gone.details["retries"] >= 1


def test_one_bad_response_in_a_batch_spoils_no_other(pool):
    def scored(body, times):
        if any(item["response"] == "poison" for item in body):
            return 422, "cannot score these"
        return [{"score": len(item["response"]), "words": 2} for item in body]

    settings = {"rm_type": "http_score", "rm_batch_size": 8, "rm_concurrency": 2}
    with serving(scored) as (url, server):
        *scores, poison = score(pool, *["x" * i for i in range(40)], "poison", rm_url=url, **settings)
    assert [score.reward for score in scores] == [*range(40)]
    assert scores[3].details == {"words": 2.0, "retries": 0.0}
    assert poison.reward is None
    assert "cannot score these" in poison.error
    assert max(map(len, server.bodies)) == 8
    assert server.most_in_flight <= 2


def test_requests_in_flight_end_with_their_verifier(pool):
    with serving(lambda *_: HANG) as (url, _):
        verifier = Verifier(pool, DataConfig(rm_type="http_score", rm_url=url))
        asking = verifier._ask(QUESTION, "x")
        verifier.close_servers()
    assert asking.outcomes[0].cancelled()


def test_the_score_is_taken_from_the_judges_text():
    for text, place, number in (
        ("__score__ = -1\nFinal score: .5", None, 0.5),
        ('```json\n{"score": "0.75"}\n```', None, 0.75),
        ("Score: 7/10, score: 70 %, score: 7 out of 10", None, None),
        ("Score (0-1): high, score: 0-1, score: 0,8", None, None),
        ("I give [[8]], no, [[9]]", r"\[\[(\d+)\]\]", 9.0), ("I give [[A]]", r"\[\[(.)\]\]", None),
        ('{"rating": 1} then {"rating": 2, "parts": {"rating": 3}} {x}', "rating", 2.0),
        ('{"rating": null}', "rating", None), ('{"score": 1}', "rating", None), ("Score: 1e400", None, None),
    ):  # fmt: skip
        found = http_wires.judged_score(text, place)
        assert found == {"score": number or 0.0, "unreadable": float(number is None)}


def test_settings_that_cannot_work_are_refused_before_work_starts(template):
    for settings, says in (
        ({"rm_url": None}, "--rm-url: required"), ({"rm_url": "judge:8000"}, "expected http://HOST:PORT"),
        ({"rm_url": "http://me:secret@judge"}, "would stand in logs"),
        ({"rm_template": None}, "--rm-template: required"), ({"rm_template": "missing.txt"}, "No such file"),
        ({"written": "{{question}} {response}"}, "has no {{response}}"),
        ({"written": "{{response}} {{answer}}"}, "unknown placeholder {{answer}}; there are"),
        ({"rm_score": "score: ("}, "not a regular expression"), ({"rm_score": "score: .*"}, "has 0 groups"),
        ({"rm_batch_size": 2}, "one response per request"),
        ({"rm_type": "http_score"}, "--rm-template: only http_judge uses it"),
    ):  # fmt: skip
        template.write_text(settings.pop("written", "{{response}}"))
        settings = {"rm_type": "http_judge", "rm_url": "http://judge", "rm_template": template} | settings
        with pytest.raises(ConfigError) as refused:
            reward_functions(DataConfig(**settings))
        said = str(refused.value)
        assert says in said
        assert "\n" not in said, (settings, says)
        assert "secret" not in said, (settings, says)


def test_a_server_is_tried_before_the_run(template, monkeypatch):
    judge = {"rm_type": "http_judge", "rm_template": template, "rm_model": "big"}
    scorer, models = {"rm_type": "http_score"}, {"data": [{"id": "small"}, {"id": "big"}]}
    with serving(lambda body, _: {"score": 0.5} if body else models) as (url, _):
        check_servers(DataConfig(rm_url=url, **judge))
        check_servers(DataConfig(rm_url=url, **scorer))
    with pytest.raises(ConfigError, match="Cannot connect"):
        check_servers(DataConfig(rm_url=url, **scorer))
    for settings, answer, says in (
        (judge, {"data": [{"id": "small"}]}, "has no model --rm-model big; it has small"),
        (judge, (404, "not found"), "as a rule …/v1"), (judge, (401, "who?"), "IBPO_RM_API_KEY"),
        (judge, {"models": []}, "KeyError: 'data'"), (scorer, {"reward": 0.5}, "mapping with a score"),
        (scorer, (500, "broken"), "status 500"), (scorer, HANG, "no answer within"),
    ):  # fmt: skip
        monkeypatch.setattr("megatron_ibpo.rewards.reward_server._TRIAL_S", 0.3 if answer == HANG else 20)
        with serving(lambda *_, answer=answer: answer) as (url, _), pytest.raises(ConfigError) as refused:
            check_servers(DataConfig(rm_url=url, **settings))
        said = str(refused.value)
        assert says in said
        assert said.startswith(f"--rm-url: {url}"), (settings, answer, says)
        assert "\n" not in said, (settings, answer, says)


UNUSABLE = {
    "NaN": (b'{"score": NaN}', "expected a finite number as 'score', got nan"),
    "infinite": (b'{"score": -Infinity}', "expected a finite number"),
    "too large": ({"score": 1e300}, "at most 1e+09 in size"),
    "endless digits": (b'{"score": 1' + b"0" * 400 + b"}", "got a longer one"),
    "text": ({"score": "1"}, "got str '1'"),
    "nothing": ({"score": None}, "got NoneType"),
    "a bad detail": (b'{"score": 1, "words": NaN}', "expected a finite number as 'words'"),
    "a nested detail": ({"score": 1, "words": {"all": 1}}, "got dict"),
    "100,000 details": ({"score": 1} | dict.fromkeys(map(str, range(100_000)), 1), "at most 1,024 numbers"),
    "a long name": ({"score": 1, "x" * 129: 1}, "at most 128 printable characters"),
    "a name of two lines": ({"score": 1, "a\nb": 1}, "at most 128 printable characters"),
    "half a character": (b'{"score": 1, "\\ud800": 1}', "at most 128 printable characters"),
    "a list": ([{"score": 1}], "expected a number, got list"),
    "no score": ({"reward": 1}, "or a mapping with a score"),
    "deep": (b"[" * 100_000, "expected JSON"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_score_server_is_refused_at_the_start(case, pool):
    answer, says = UNUSABLE[case]
    with serving(lambda *_: (200, answer)) as (url, _):
        settings = {"rm_type": "http_score", "rm_url": url}
        with pytest.raises(ConfigError) as refused:
            check_servers(DataConfig(**settings))
        (lost,) = score(pool, "42", **settings)
    for text in (str(refused.value), lost.error):
        assert says in text
        assert len(text) < 2000
        assert "\n" not in text
    assert lost.reward is None


def test_as_many_details_as_the_limit_allows_are_kept(pool):
    details = {f"turn_{number}": 0.5 for number in range(1023)} | {"x" * 128: 1.0}
    with serving(lambda *_: {"score": 1e9, **details}) as (url, _):
        settings = {"rm_type": "http_score", "rm_url": url}
        check_servers(DataConfig(**settings))
        assert score(pool, "42", **settings) == [Score(1e9, True, details=details | {"retries": 0.0})]


def test_the_documented_score_server_scores(pool, tmp_path, monkeypatch):
    write_modules(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with served(importlib.import_module("score_server").app) as url:
        settings = {"rm_type": "http_score", "rm_url": f"{url}/score"}
        check_servers(DataConfig(**settings))
        scores = score(pool, "it is 42", "it is 43", **settings)
    assert [score.reward for score in scores] == [1.0, 0.0]


def executed(request, times):
    """Run a program as SandboxFusion does, not isolated: what a server runs may start processes."""
    assert (request["language"], request["memory_limit_MB"]) == ("python", 1024)
    limits, given = Limits(request["run_timeout"], 1 << 30), request["stdin"].encode()
    with Process("program", request["code"], [""], stdin=given, limits=limits, isolated=False) as process:
        done = process.finish()
    result = {"return_code": done.status, "stdout": done.stdout.decode(), "stderr": done.stderr}
    result["status"] = "TimeLimitExceeded" if done.reached else "Finished"
    return {"status": "Failed" if done.status else "Success", "message": "", "run_result": result}


def graded(url, program, label, **settings):
    metadata = {"code_execution": {"seconds": 20.0, "executor": url, **settings}}
    return code.score("", f"```python\n{program}\n```", json.dumps(label), metadata)


def test_a_program_server_grades_all_formats_and_is_retried(monkeypatch):
    sums = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3", "7"]}
    append = {"inputs": ["[1, 2]\n3"], "outputs": ["[1, 2, 3]"], "fn_name": "append"}
    check = {"test": "def check(candidate):\n    assert candidate(2) == 4\n", "entry_point": "square"}
    with serving(executed) as (url, _):
        for program, label in (
            ("print(sum(map(int, input().split())))", sums),
            ("def append(a, b): return [*a, b]", append),
            ("def square(x): return x * x", check),
        ):
            assert graded(url, program, label)["score"] == 1.0
            assert graded(url, "def square(x): return 0\ndef append(a, b): return 0", label)["score"] == 0.0
        assert graded(url, "while True: pass", sums, seconds=0.2)["timed_out"] == 1.0
    for url in ("sandbox:8080", "ftp://x", "http://"):
        with pytest.raises(ValueError, match="--code-executor"):
            RemoteExecutor(url)
    monkeypatch.setattr("megatron_ibpo.rewards.executors._FIRST_WAIT", 0.01)
    failed = {"status": "SandboxError", "message": "full", "run_result": None}
    answers: list[Any] = [(503, {}), failed]
    with serving(lambda *request: answers.pop(0) if answers else executed(*request)) as (url, sent):
        assert graded(url, "print(sum(map(int, input().split())))", sums)["score"] == 1.0
        for answer, times, why in ((failed, 3, "full"), (b"?", 3, "JSONDecodeError"), ((400, {}), 1, "400")):
            answers += [answer] * times
            sent.bodies.clear()
            with pytest.raises(SandboxError, match=why):
                graded(url, "print(1)", sums)
            assert len(sent.bodies) == times
