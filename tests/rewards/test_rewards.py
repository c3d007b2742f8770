"""Verifiers: what they say of answers, and that their faults are never rewards."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_tokenizer import make_tiny_tokenizer
from worked_solutions import worked_solution

from megatron_ibpo import rewards
from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import ConfigError, DataConfig
from megatron_ibpo.data import open_sources
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.rewards import LabelError, Outcome, Score, Verifier, WorkerError, check_labels, open_pool
from megatron_ibpo.rewards.composite import Part, combined
from megatron_ibpo.rewards.reasoning_gym import extract_answer
from support.waiting import eventually, has_ended

USERS_REWARDS = """
    import itertools, math, os, subprocess, sys, time
    from megatron_ibpo.rewards import ResponseError

    not_a_function = 3
    class Unspeakable(Exception):
        def __str__(self): raise KeyError("no words")

    def fail(error): raise error

    def daemon(note):  # which has lost its parent and its session
        written = f"echo $$ {os.getpid()} > {note}.new; mv {note}.new {note}; exec sleep 1000"
        subprocess.run(["setsid", "--fork", "sh", "-c", written])
        while not os.path.exists(note):
            time.sleep(0.01)
        return 1.0

    def graded(prompt, response, label, metadata):
        print("a reward function may print")
        return eval(response, globals(), locals())

    def together(prompts, responses, labels, metadata):
        values = [eval(response) for response in responses]
        time.sleep(0.05)  # the next ones gather meanwhile
        assert prompts == ["what?"] * len(responses) and labels == ["42"] * len(responses)
        return [value or len(responses) for value in values if value != "few"]

    together.batched, late = True, graded

    def label_problem(label, metadata):
        if label == "hang":
            time.sleep(1000)
        return f"{label} is odd" if label.isdigit() and int(label) % 2 else None
"""
GRADED, TOGETHER = "users_rewards:graded", "users_rewards:together"
HANG = "time.sleep(1000)"
HANG_IN_C = "sum(itertools.repeat(0))"  # never lets another thread or a signal handler run


@pytest.fixture(scope="module", autouse=True)
def users_module(tmp_path_factory):
    directory = tmp_path_factory.mktemp("user")
    (directory / "users_rewards.py").write_text(textwrap.dedent(USERS_REWARDS))
    (directory / "broken_rewards.py").write_text("import no_such_library")
    sys.path.insert(0, str(directory))
    yield directory
    sys.path.remove(str(directory))


@contextmanager
def pool_of(*targets, **settings):
    with open_pool(DataConfig(rm_type=targets[0], **settings), targets[1:]) as pool:
        workers = [worker.process for worker in pool._workers]
        yield pool
        workers += [worker.process for worker in pool._workers]
    assert not any(worker.is_alive() for worker in workers)


@pytest.fixture(scope="module")
def pool():
    with pool_of(GRADED, TOGETHER, reward_workers=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def impatient():
    with pool_of(GRADED, TOGETHER, reward_workers=1, reward_timeout=0.5) as opened:
        yield opened


def verifier(pool, rm_type=GRADED, **settings):
    return Verifier(pool, DataConfig(rm_type=rm_type, **settings))


def asked(*responses, label="42", **metadata):
    prompt = Prompt(0, token_ids([]), 0, label, "task", "what?", metadata)
    return [(prompt, response) for response in responses]


def test_an_imported_reward_function_gets_arguments_and_returns_details(pool):
    graded = verifier(pool, reward_threshold=0.5)
    right = "(prompt, label, metadata) == ('what?', '42', {'level': 3})"
    assert graded.score(asked(right, level=3)) == [Score(1.0, True)]
    assert graded.score(asked("dict(score=1, tests=.25)")) == [Score(1.0, True, details={"tests": 0.25})]
    assert graded.score([]) == []
    in_order = [i / 100 for i in range(100)]
    assert graded.score(asked(*map(str, in_order))) == [Score(value, value >= 0.5) for value in in_order]
    forked = graded.score(asked("os.fork() == 0", "0.25", "0.5"))  # whose first call returns twice
    assert [score.reward for score in forked] == [0.0, 0.25, 0.5]


def test_a_fault_gives_no_reward_and_a_responses_fault_zero(pool):
    faults = {
        # half a character, which no log could be given
        r"fail(RuntimeError('cannot judge \ud800'))": r"RuntimeError: cannot judge \ud800",
        "fail(Unspeakable())": "Unspeakable: it cannot be shown, which fails with KeyError",
        "sys.exit(3)": "SystemExit: 3",
        "'0.5'": "TypeError: expected a number, got str '0.5'",
        "math.nan": "ValueError: expected a finite number, got nan",
        "1e308": "ValueError: expected a number of at most 1e+09 in size, got 1e+308: scale it",
        "-(10**400)": "expected a number of at most 1e+09 in size, got a longer one: scale it",
        "os._exit(7)": "the worker process died (status 7), and another one before it",
        "dict(tests=1)": "expected a number, or a mapping with a score",
        "dict(score=1, tests='all')": "expected a number as 'tests', got str 'all'",
    }
    before, *found, after = verifier(pool).score(asked("1", *faults, "0"))
    assert (before, after) == (Score(1.0, True), Score(0.0, False))
    for fault, error in zip(found, faults.values(), strict=True):
        assert (fault.reward, fault.correct) == (None, False)
        assert error in fault.error
    deep = []
    for _ in range(10_000):
        deep = [deep]
    (fault,), (after,) = (verifier(pool).score(asked("1", level=level)) for level in (deep, 3))
    assert "what it is called with cannot be sent: RecursionError" in fault.error
    assert after.reward == 1.0
    for rm_type in (GRADED, TOGETHER):
        pairs = asked("1", "fail(ResponseError('a tower of powers'))", "1")
        before, fault, after = verifier(pool, rm_type).score(pairs)
        assert fault == Score(0.0, False, details={"response_error": 1.0}), rm_type
        assert before.reward == after.reward == 1.0, rm_type


def test_a_killing_response_is_tried_twice_and_a_hanging_once(impatient, tmp_path):
    start, deaths = time.monotonic(), impatient.deaths
    hang = f"open({str(tmp_path / 'asked')!r}, 'a').write('x') and {HANG}"
    scores = verifier(impatient).score(asked("0", hang, "1", HANG_IN_C, "0", "os._exit(7)", "1"))
    assert time.monotonic() - start < 20
    assert [score.reward for score in scores] == [0.0, None, 1.0, None, 0.0, None, 1.0]
    assert scores[1].error == scores[3].error == "timed out after 0.5 s"
    assert impatient.deaths == deaths + 2
    assert (tmp_path / "asked").read_text() == "x"


@pytest.mark.parametrize("rm_type", [GRADED, TOGETHER])
def test_a_response_whose_process_is_killed_is_asked_again(pool, tmp_path, caplog, rm_type):
    deaths = pool.deaths
    died = str(tmp_path / "died")
    die_once = f"os.path.exists({died!r}) or (open({died!r}, 'w').close(), os.kill(os.getpid(), 9))"
    scores = verifier(pool, rm_type).score(asked("1", "1", die_once, "1"))
    assert pool.deaths == deaths + 1
    assert None not in [score.reward for score in scores]
    assert "the worker process died (SIGKILL)" in caplog.text
    assert "repeated" in caplog.text


@pytest.mark.slow
def test_a_successor_that_dies_loading_is_replaced_but_not_forever(users_module, monkeypatch):
    # how long one may take to load follows from how long the first one took
    monkeypatch.setattr("megatron_ibpo.rewards.workers._SHORTEST_START_TIMEOUT", 1.0)
    monkeypatch.setattr("megatron_ibpo.rewards.workers._START_SLACK", 4.0)
    deaths, hangs = users_module / "deaths", users_module / "hangs"
    code = f"""
        import os, time
        from pathlib import Path

        deaths, hangs = Path("{deaths}"), Path("{hangs}")
        if deaths.exists() and (left := int(deaths.read_text())):
            deaths.write_text(str(left - 1))
            os._exit(7)
        if hangs.exists():
            hangs.unlink()
            time.sleep(600)

        def pid(prompt, response, label, metadata):
            return os.getpid()
    """
    (users_module / "fragile_rewards.py").write_text(textwrap.dedent(code))
    with pool_of("fragile_rewards:pid", reward_workers=1) as fragile_pool:
        fragile = verifier(fragile_pool, "fragile_rewards:pid")

        def score_after(dying, worker):
            deaths.write_text(str(dying))
            os.kill(int(worker.reward), signal.SIGKILL)
            time.sleep(0.1)
            return fragile.score(asked("1"))[0]

        (before,) = fragile.score(asked("1"))
        after = score_after(2, before)
        assert after.reward not in (None, before.reward)
        assert fragile_pool.deaths == 1, "those that have loaded nothing do not count"
        with pytest.raises(WorkerError, match=r"ended while loading it \(status 7\)"):
            score_after(3, after)
        hangs.touch()
        began = time.monotonic()
        assert fragile.score(asked("1"))[0].reward not in (None, after.reward)
        assert time.monotonic() - began < 60, "it would hang for ten minutes"


def test_responses_are_scored_on_arrival_and_errors_logged_at_once(impatient, caplog):
    graded = verifier(impatient)  # whose one process answers them in order

    async def stream():
        pairs = asked("1", "fail(RuntimeError())", "0", "math.nan")
        return await asyncio.gather(*(graded.score_one(prompt, text) for prompt, text in pairs))

    assert [score.reward for score in asyncio.run(stream())] == [1.0, None, 0.0, None]
    assert "have failed on 1 responses: users_rewards:graded: RuntimeError" in caplog.text


def test_a_batched_function_gets_gathered_calls_and_their_total_time(impatient):
    # which has half a second for a call; a 64th of that were too short
    sizes = [score.reward for score in verifier(impatient, TOGETHER).score(asked(*["0"] * 150))]
    assert len(sizes) == 150
    assert max(sizes) == 64
    assert all(sizes.count(size) % size == 0 for size in set(sizes))


def test_one_bad_response_spoils_no_other_of_its_batch(impatient):
    for response, error in (
        ("fail(RuntimeError('cannot judge these'))", "RuntimeError: cannot judge these"),
        ("os._exit(7)", "the worker process died (status 7)"),
        (HANG, "timed out after 0.5 s"),
        ("math.nan", "expected a finite number, got nan"),
        ("'few'", "expected 1 numbers, got 0"),
    ):
        scores = verifier(impatient, TOGETHER).score(asked("0", "0", response, "0", "0"))
        assert [score.reward is None for score in scores] == [False, False, True, False, False], (
            response,
            error,
        )
        assert error in scores[2].error


def test_a_workers_children_end_with_it_and_output_is_bounded(tmp_path, capfd):
    def started(graded, number):
        """A child of the worker, a daemon that it left, and the worker."""
        note = tmp_path / f"note{number}"
        (child,) = graded.score(asked("subprocess.Popen(['sleep', '1000']).pid"))
        assert graded.score(asked(f"daemon({str(note)!r})")) == [Score(1.0, True)]
        pids = [int(child.reward), *map(int, note.read_text().split())]
        assert not any(map(has_ended, pids))
        return pids

    with pool_of(GRADED, reward_workers=1) as opened:
        graded = verifier(opened)
        first = started(graded, 1)
        os.kill(first[-1], signal.SIGKILL)
        assert eventually(lambda: all(map(has_ended, first)), 10)
        assert graded.score(asked(*["print('x' * 3_000_000) or 1"] * 4)) == [Score(1.0, True)] * 4
        second = started(graded, 2)
    assert eventually(lambda: all(map(has_ended, second)), 10)
    said = capfd.readouterr().err
    assert len(said) < 70_000
    assert f"reward function {GRADED} printed more than 65,536 bytes; the rest is left out" in said
    left_out = 4 * 3_000_001 + 6 * len("a reward function may print\n") - 65_536
    assert f"[{left_out:,} bytes that reward function {GRADED} printed were left" in said


def test_every_prompt_may_name_its_verifier(pool):
    pairs = [*asked("0.5", rm_type="users_rewards:late"), *asked("1")]
    pairs += [*asked("1", rm_type="maths"), *asked("1", rm_type="nowhere_at_all:score")]
    allowed = ("users_rewards:late", "nowhere_at_all:score")
    late, graded, misspelt, nowhere = verifier(pool, allowed_rm_types=allowed).score(pairs)
    assert [one.reward for one in (late, graded, misspelt, nowhere)] == [0.5, 1.0, None, None]
    assert "did you mean 'math'" in misspelt.error
    assert "no module 'nowhere_at_all'" in nowhere.error


def test_a_composite_is_the_weighted_sum_of_its_parts(pool):
    parts = (f"{GRADED}=0.9", f"{TOGETHER}=0.1")
    weighted = verifier(pool, "composite", reward_part=parts, reward_threshold=0.9)
    responses = "dict(score=1, tests=.25)", "0.5", "-3", "fail(RuntimeError())"
    both, half, none, fault = weighted.score(asked(*responses))
    assert both == Score(1.0, True, details={GRADED: 1.0, TOGETHER: 1.0, "tests": 0.25})
    assert (half.reward, half.correct) == (0.5, False)
    assert none.reward == 0.0, "clipped"
    assert fault.reward is None
    on_paper = [Part("a", 0.7), Part("b", 0.2), Part("c", 0.1)]
    assert combined(on_paper, [Outcome(1.0)] * 3).value == 1.0, "not a bit less"
    assert combined([Part("a", 1.0), Part("b", -0.25)], [Outcome(1.0)] * 2).value == 0.75


def test_weights_must_leave_correct_to_the_main_part():
    fine = DataConfig(rm_type="composite", reward_part=("math=0.9", "code:format=0.2"), reward_threshold=0.9)
    assert rewards.reward_functions(fine) == ["megatron_ibpo.rewards.math:score", "code:format"]
    for parts, threshold, says in (
        ((), 1.0, "has no parts"), (("math=1", "composite=0.1"), 1.0, "cannot contain itself"),
        (("math=0.5", "code:format=0.5"), 0.5, "could be correct without the first"),
        (("math=0.5", "code:format=0.4"), 1.0, "no response could be correct"),
        (("math=much",), 1.0, "must be a number"), (("math=0",), 1.0, "leave such a part out"),
        (("math=1", "code:format=-1e308"), 1.0, r"at most 1e\+09 in size"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            rewards.reward_functions(replace(fine, reward_part=parts, reward_threshold=threshold))


def test_labels_that_cannot_be_graded_are_named_before_work_starts(impatient):
    data = DataConfig(rm_type=GRADED)
    prompts = [prompt for label in ("2", "3", "hang", "5") for prompt, _ in asked("", label=label)]
    data = replace(data, allowed_rm_types=("operator:add",))
    ((unchecked, _),) = asked("", label="7", rm_type="operator:add")  # its module has no such function
    check_labels(impatient, [prompts[0], unchecked], data)
    says = "(?s)3 labels of the first 4 cannot.*task, prompt 0, label '3': .*3 is odd.*'hang': timed out"
    with pytest.raises(LabelError, match=says):
        check_labels(impatient, prompts, data)


def test_an_unloadable_function_is_refused_and_leaves_no_process():
    prompts = [prompt for prompt, _ in [*asked("", rm_type="users_rewards:missing"), *asked("")]]
    allowing = DataConfig(rm_type=GRADED, allowed_rm_types=("users_rewards:missing",))
    assert rewards.named_rm_types(prompts, allowing) == ["users_rewards:missing", GRADED]
    for rm_type, says in (
        ("maths", "did you mean 'math'"),
        ("users_rewards", "package.module:name"),
        ("users_rewards:missing", "defines no 'missing'"),
        ("users_rewards:not_a_function", "is not a function"),
        ("broken_rewards:score", "No module named 'no_such_library'"),
    ):
        with pytest.raises(ValueError, match=says):
            open_pool(DataConfig(rm_type=GRADED, reward_workers=1), [rm_type])
        for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
            assert rm_type not in Path(f"/proc/{child}/cmdline").read_text().split("\0")


def test_workers_and_their_children_die_with_their_owner(users_module, tmp_path):
    note = tmp_path / "note"
    code = f"""
        from megatron_ibpo.basics.records import Prompt, token_ids
        from megatron_ibpo.config import DataConfig
        from megatron_ibpo.rewards import open_verifier
        verifier = open_verifier(DataConfig(rm_type="{GRADED}", reward_workers=1, reward_timeout=100))
        for response in ("daemon({str(note)!r})", "{HANG_IN_C}"):
            print(verifier.score([(Prompt(0, token_ids([]), 0, "", "", ""), response)])[0].reward, flush=True)
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(users_module), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout.readline() == b"1.0\n"
            processes = note.read_text().split()
            time.sleep(0.5)  # until the worker hangs
            assert all(os.path.exists(f"/proc/{process}") for process in processes)
        finally:
            owner.kill()
    assert eventually(lambda: all(has_ended(int(process)) for process in processes), 10)


def test_workers_die_with_their_supervisor(impatient):
    graded = verifier(impatient)
    (before,) = graded.score(asked("os.getpid()"))
    worker = int(before.reward)
    parent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    assert eventually(lambda: has_ended(worker), 10)
    assert [score.reward for score in graded.score(asked("1"))] == [1.0]


@pytest.fixture(scope="module")
def reasoning_gym():
    with pool_of("reasoning_gym", reward_workers=1) as opened:
        yield verifier(opened, "reasoning_gym")


def test_worked_solutions_are_right_and_part_marks_are_no_reward(reasoning_gym):
    sums = "reasoning_gym://chain_sum?min_terms=5&max_terms=7&min_digits=1&max_digits=1&compact=1"
    source = open_sources([sums], HuggingFaceTokenizer(make_tiny_tokenizer()), DataConfig(), split="train")
    prompts = source.batch(0, 32)
    check_labels(reasoning_gym._pool, prompts, DataConfig())
    right = [(p, worked_solution(p.metadata["expression"])) for p in prompts]
    wrong = [(p, text + "0") for p, text in right if p.label != "0"]
    label = prompts[0].label
    # reasoning_gym itself gives .5 for an answer that holds the right one in twice its length
    padded = f"#{label}{'x' * len(label)}"
    wrong += [(prompts[0], text) for text in (padded, "", "#", "no number", f"{label} but #7000")]
    assert reasoning_gym.score(right) == [Score(1.0, True)] * len(right)
    assert reasoning_gym.score(wrong) == [Score(0.0, False)] * len(wrong)


def test_an_answer_that_breaks_the_scorer_is_wrong(reasoning_gym):
    def generated(task, label, **metadata):
        metadata |= {"source_dataset": task, "source_index": 0, "question": "what?"}
        return Prompt(0, token_ids([]), 0, label, task, "what?", metadata)

    factors, unlabelled = generated("prime_factorization", "2 × 3"), generated("prime_factorization", "none")
    pairs = [(factors, "I do not know"), (factors, "3 × 2"), (unlabelled, "2 × 3")]
    wrong, right, error = reasoning_gym.score(pairs)
    assert wrong == Score(0.0, False, details={"response_error": 1.0})
    assert (right.reward, error.reward) == (1.0, None)
    assert "ValueError" in error.error
    for prompt, says in (
        (generated("rush_hour", "None", board_config=""), "cannot be graded: its items have no answer"),
        (generated(None, "42"), "no item of reasoning_gym; use the --rm-type that grades it"),
        (unlabelled, "scorer of prime_factorization fails on 'none'"),
    ):
        with pytest.raises(LabelError, match=says):
            check_labels(reasoning_gym._pool, [factors, prompt], DataConfig())


def test_the_answer_follows_the_last_mark():
    for response, answer in (
        ("#3\n1+1=2#2 \n", "2"), (" 2 ", "2"), ("1+1=2#", None), (r"it is \boxed{15}.", "15"),
        ("## Answer\n<answer> 15 </answer> done", "15"), ("<think>#3</think> 15", "15"),
    ):  # fmt: skip
        assert extract_answer(response) == answer
    for response in ("A# #B", "so <answer>A# #B</answer>"):  # of a task whose answers contain the mark
        assert extract_answer(response, {"source_dataset": "ab"}) == "A# #B"
    for response, answer, place in (
        ("3+4=7#7", "7", 6), (r"so \boxed{ 1 + x }", "1+x", 11), ("3+4=7#7", "8", None), ("", "", None),
        ("7 ", "7", 0),
    ):  # fmt: skip
        assert rewards.answer_place(response, answer) == place
