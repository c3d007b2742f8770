"""Environments of the real packages play unchanged. Tests of packages that are not installed are skipped.

pip install --no-deps --target DIRECTORY skyrl-gym gem-llm textarena    # and what they import
pip install --no-deps --target DIRECTORY -r requirements/bench.txt    # TRL
PYTHONPATH=.:DIRECTORY python -m pytest tests/environments/test_real_frameworks.py
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import pytest

from megatron_ibpo.environments.adapters import load_environment
from megatron_ibpo.environments.protocol import Turn
from support.environment_frameworks import write_compared_environments
from support.players import call, guess_number, say

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    monkeypatch.setenv("IBPO_CWD", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_compared_environments(tmp_path)
    return tmp_path


def needs(package):
    return pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)


@pytest.mark.parametrize("package", ["skyrl_gym", "gem", "textarena", "openenv"])
def test_the_compared_environments_play_with_the_real_base_classes(directory, package):
    needs(package)
    ours, _ = guess_number(load_environment("guess_ours:GuessTheNumber")(), seed=3)
    name = package.partition("_")[0]
    target = f"guess_{name}:GuessTheNumber"
    with serving(directory, "guess_openenv") if name == "openenv" else nullcontext(target) as target:
        theirs, _ = guess_number(load_environment(target)(), seed=3)
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


@pytest.mark.parametrize("name", ["gem", "v0", "v0-raw", "v0-train"])
def test_a_game_of_gem_and_one_of_textarena_in_every_wrapping_is_won(directory, name):
    needs("gem" if name == "gem" else "textarena")
    target, form = "gem.envs.game_env.guess_the_number:GuessTheNumberEnv", "\\boxed{{{}}}"
    if name != "gem":
        target, form = f"made_{name.replace('-', '_')}:make", "[{}]"
        code = f"def make():\n    import textarena\n    return textarena.make('GuessTheNumber-{name}')\n"
        (directory / target.replace(":make", ".py")).write_text(code)
    environment = load_environment(target)()
    shown = environment.reset("", "", {}, 2**40 + 5).messages
    assert "You have to guess the number between 1 and 20" in shown[0]["content"]
    low, high, turn = 1, 20, Turn(shown)
    while not turn.done:
        guess = (low + high) // 2
        turn = environment.step(say(form.format(guess)))
        told = turn.messages[0]["content"] if turn.messages else ""
        assert turn.done or "You have to guess" not in told, "the opening is not shown again"
        low, high = (guess + 1, high) if "higher" in told else (low, guess - 1)
    score = environment.score()
    assert score > 0 if name == "gem" else score == {"score": 1, "unfinished": 0.0}
    environment.close()


def test_an_environment_of_trl_scores_after_the_last_turn_and_is_let_go(directory):
    needs("trl.experimental.harbor")
    (directory / "of_trl.py").write_text(
        inspect.cleandoc("""
        from trl.experimental.harbor import HarborBashEnv

        class Bash(HarborBashEnv):  # an environment of Harbor's tasks, without the container
            ended = []

            async def _start(self, task_dir):
                self._env = []
                return f"Do {task_dir}."

            def _exec(self, command, timeout=180):
                self._env.append(command)
                return "(empty output, rc=0)"

            async def _verify(self):
                return float(len(self._env))

            async def _stop(self):
                self.ended.append(self._env)
    """)
    )
    environment = load_environment("of_trl:Bash")()
    opening = environment.reset("", "", {"task_dir": "task 3"}, 0)
    assert opening.messages[0]["content"].startswith("Do task 3.")
    [answer] = environment.step(call("bash", command="ls")).messages
    assert answer["content"] == "(empty output, rc=0)"
    assert environment.step(say("Done.")).done
    assert environment.score() == {"score": 1.0, "tool_calls": 1, "tool_errors": 0}
    ended = sys.modules["of_trl"].Bash.ended
    assert not ended
    environment.close()
    assert len(ended) == 1


@contextmanager
def serving(directory, module):
    command = [sys.executable, "-m", "uvicorn", f"{module}:app", "--port", "0"]
    with subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stderr if "running on" in line)
            yield "openenv://" + re.search(r"http://(\S+)", line)[1]
        finally:
            server.terminate()


def test_tools_of_a_real_openenv_server_are_called(directory):
    needs("openenv")
    (directory / "adds.py").write_text(
        inspect.cleandoc("""
        from fastmcp import FastMCP
        from openenv.core.env_server import (
            CallToolAction, CallToolObservation, MCPEnvironment, Observation, State, create_app
        )

        class Adds(MCPEnvironment):
            def __init__(self):
                server = FastMCP("adds")

                @server.tool
                def add(a: int, b: int) -> int:
                    "Add two numbers."
                    return a + b

                super().__init__(server)

            def reset(self, seed=None, episode_id=None, **row):
                return Observation()

            def _step_impl(self, action, timeout_s=None, **options):
                raise ValueError("only tools")

            state = property(lambda self: State())

        app = create_app(Adds, CallToolAction, CallToolObservation)
    """)
    )
    with serving(directory, "adds") as server:
        environment = load_environment(server)()
        opening = environment.reset("2 + 3?", "", {}, 0)
        assert opening.messages == [{"role": "user", "content": "2 + 3?"}]
        [tool] = opening.tools
        assert (tool["name"], tool["description"]) == ("add", "Add two numbers.")
        assert tool["parameters"]["required"] == ["a", "b"]
        for message, answer in (
            (call("add", a=2, b=3), "5"),
            (call("add", a="two"), "{'error': "),
            (call("subtract"), "{'error': "),
        ):
            assert environment.step(message).messages[0]["content"].startswith(answer)
        assert environment.step(say("5")).done
        assert environment.score() == 0.0
        environment.close()
