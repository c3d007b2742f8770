"""Environments of the real packages play unchanged. The packages are no dependencies: tests of those that are
not installed are skipped.

    pip install --no-deps --target DIRECTORY skyrl-gym gem-llm textarena    # and what they import
    PYTHONPATH=.:DIRECTORY python -m pytest tests/environments/test_real_frameworks.py
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from megatron_ibpo.environments.adapters import load_environment
from support.environment_frameworks import write_compared_environments
from support.players import guess_number, say

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    monkeypatch.setenv("IBPO_CWD", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_compared_environments(tmp_path)
    return tmp_path


def needs(package):
    return pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)


@pytest.mark.parametrize(
    ("package", "name"), [("skyrl_gym", "skyrl"), ("gem", "gem"), ("textarena", "textarena")]
)
def test_the_compared_environments_play_with_the_real_base_classes(package, name):
    needs(package)
    ours, _ = guess_number(load_environment("guess_ours:GuessTheNumber")(), seed=3)
    theirs, _ = guess_number(load_environment(f"guess_{name}:GuessTheNumber")(), seed=3)
    assert theirs == ours


def test_a_problem_of_skyrl_gym_is_solved_in_two_turns():
    needs("skyrl_gym")
    environment = load_environment("skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv")()
    opening = environment.reset("What is 6 * 12?", "72", {"max_turns": 3}, 0)
    assert opening.messages == [{"role": "user", "content": "What is 6 * 12?"}]
    turn = environment.step(say("It is #### 71"))
    assert "step-by-step reasoning" in turn.messages[0]["content"]
    assert not turn.done
    assert environment.step(say("It is #### 72")).done
    assert environment.score() == {"steps": 2, "score": pytest.approx(0.2 / 3 + 1)}
    environment.close()


def test_a_game_of_gem_is_won():
    needs("gem")
    target = "gem.envs.game_env.guess_the_number:GuessTheNumberEnv"
    opening = load_environment(target)().reset("", "", {}, 2**40)
    assert "You have to guess the number between 1 and 20" in opening.messages[0]["content"]
    environment = load_environment(target)()
    low, high = 1, 20
    environment.reset("", "", {}, 5)
    while True:
        guess = (low + high) // 2
        turn = environment.step(say(f"\\boxed{{{guess}}}"))
        told = turn.messages[0]["content"]
        if turn.done:
            break
        low, high = (guess + 1, high) if "higher" in told else (low, guess - 1)
    assert told.startswith("Congratulations!")
    assert environment.score() > 0


@pytest.mark.parametrize("name", ["GuessTheNumber-v0", "GuessTheNumber-v0-raw", "GuessTheNumber-v0-train"])
def test_a_game_of_textarena_is_won_in_every_wrapping(directory, name):
    needs("textarena")
    module = f"made_{re.sub(r'[^a-z]', '', name)}"
    (directory / f"{module}.py").write_text(
        f"def make():\n    import textarena\n    return textarena.make({name!r})\n"
    )
    environment = load_environment(f"{module}:make")()
    opening = environment.reset("", "", {}, 5).messages[0]["content"]
    assert "You have to guess the number between 1 and 20" in opening
    low, high = 1, 20
    while True:
        guess = (low + high) // 2
        turn = environment.step(say(f"[{guess}]"))
        if turn.done:
            break
        told = turn.messages[0]["content"]
        assert "You have to guess" not in told
        low, high = (guess + 1, high) if "higher" in told else (low, guess - 1)
    assert environment.score() == {"score": 1, "unfinished": 0.0}
    environment.close()


def test_the_compared_server_plays_with_the_real_openenv(directory):
    needs("openenv")
    command = [sys.executable, "-m", "uvicorn", "guess_openenv:app", "--port", "0"]
    with subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stderr if "running on" in line)
            address = re.search(r"http://(\S+)", line)[1]
            ours, _ = guess_number(load_environment("guess_ours:GuessTheNumber")(), seed=3)
            theirs, score = guess_number(load_environment(f"openenv://{address}")(), seed=3)
        finally:
            server.terminate()
    assert theirs == ours
    assert score == 1.0
