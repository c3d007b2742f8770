"""Environments of the real packages play unchanged. The packages are no dependencies: tests of those that are
not installed are skipped.

    pip install --no-deps --target DIRECTORY skyrl-gym gem-llm textarena    # and what they import
    pip install --no-deps --target DIRECTORY -r requirements/bench.txt    # TRL
    PYTHONPATH=.:DIRECTORY python -m pytest tests/environments/test_real_frameworks.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from importlib import import_module

import pytest

from megatron_ibpo.environments.adapters import load_environment
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


def win(environment, form):
    """Halve what is left of 1 to 20 until the game is over; return what is shown, from the opening on."""
    low, high = 1, 20
    texts = [environment.reset("", "", {}, 5).messages[0]["content"]]
    while True:
        guess = (low + high) // 2
        turn = environment.step(say(form.format(guess)))
        texts += [message["content"] for message in turn.messages]
        if turn.done:
            return texts
        low, high = (guess + 1, high) if "higher" in texts[-1] else (low, guess - 1)


def test_a_game_of_gem_is_won():
    needs("gem")
    environment = load_environment("gem.envs.game_env.guess_the_number:GuessTheNumberEnv")()
    environment.reset("", "", {}, 2**40)
    first, *_, last = win(environment, "\\boxed{{{}}}")
    assert "You have to guess the number between 1 and 20" in first
    assert last.startswith("Congratulations!")
    assert environment.score() > 0


@pytest.mark.parametrize("name", ["GuessTheNumber-v0", "GuessTheNumber-v0-raw", "GuessTheNumber-v0-train"])
def test_a_game_of_textarena_is_won_in_every_wrapping(directory, name):
    needs("textarena")
    module = f"made_{re.sub(r'[^a-z]', '', name)}"
    code = f"def make():\n    import textarena\n    return textarena.make({name!r})\n"
    (directory / f"{module}.py").write_text(code)
    environment = load_environment(f"{module}:make")()
    first, *told = win(environment, "[{}]")
    assert "You have to guess the number between 1 and 20" in first
    assert not any("You have to guess" in text for text in told[:-1])
    assert environment.score() == {"score": 1, "unfinished": 0.0}
    environment.close()


OF_TRL = """
from contextlib import contextmanager
from types import SimpleNamespace

from trl.experimental.harbor import HarborBashEnv
from trl.experimental.openreward.environment import _RolloutEnvironment

class Bash(HarborBashEnv):
    '''An environment of Harbor's tasks, without the container.'''

    ended = []

    async def _start(self, task_dir):
        self._env = SimpleNamespace(commands=[])
        return f"Do {task_dir}."

    def _exec(self, command, timeout=180):
        self._env.commands.append(command)
        return "(empty output, rc=0)"

    async def _verify(self):
        return float(len(self._env.commands))

    async def _stop(self):
        self.ended.append(self._env)

class Server:
    '''Stands for a server of OpenReward's tasks.'''

    open_sessions = 0

    @contextmanager
    def session(self, **settings):
        Server.open_sessions += 1
        yield self
        Server.open_sessions -= 1

    def get_prompt(self):
        return [{"type": "text", "text": "Add."}]

    def call_tool(self, name, given):
        blocks = [{"type": "text", "text": str(given["a"] + given["b"])}]
        return SimpleNamespace(blocks=blocks, reward=0.5, metadata=None, finished=True)

NUMBER = {"type": "integer", "description": "A number."}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"properties": {"a": NUMBER, "b": {**NUMBER, "default": 1}}, "required": ["a"]},
}

def adds():
    return _RolloutEnvironment(base_url="http://host", _client=0, _env=Server(), _tool_specs=[ADD])
"""


@pytest.fixture
def of_trl(directory):
    needs("trl.experimental.openreward.environment")
    (directory / "of_trl.py").write_text(OF_TRL)
    sys.path.insert(0, str(directory))
    return import_module("of_trl")


def test_an_environment_of_trl_scores_after_the_last_turn_and_is_let_go(of_trl):
    environment = load_environment("of_trl:Bash")()
    opening = environment.reset("", "", {"task_dir": "task 3"}, 0)
    assert opening.messages[0]["content"].startswith("Do task 3.")
    [answer] = environment.step(call("bash", command="ls")).messages
    assert answer["content"] == "(empty output, rc=0)"
    assert environment.step(say("Done.")).done
    assert environment.score() == {"score": 1.0, "tool_calls": 1, "tool_errors": 0}
    assert not of_trl.Bash.ended
    environment.close()
    assert len(of_trl.Bash.ended) == 1


def test_an_environment_of_trl_whose_tools_a_server_lists_plays(of_trl):
    environment = load_environment("of_trl:adds")()
    assert environment.reset("2 + 3? ", "", {}, 0).messages[0]["content"] == "2 + 3? Add."
    contents = [
        environment.step(message).messages[0]["content"]
        for message in (call("add", a=2, b=3), call("add", a=2), call("add", b=2))
    ]
    assert contents[:2] == ["5", "3"]
    assert "missing 1 required positional argument: 'a'" in contents[2]
    assert environment.score() == {"score": 0.5, "tool_calls": 3, "tool_errors": 1}
    environment.close()
    assert of_trl.Server.open_sessions == 0


@contextmanager
def serving(directory, module):
    """Run an OpenEnv server, and give its address."""
    command = [sys.executable, "-m", "uvicorn", f"{module}:app", "--port", "0"]
    with subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stderr if "running on" in line)
            yield "openenv://" + re.search(r"http://(\S+)", line)[1]
        finally:
            server.terminate()


TOOLS = """
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

    @property
    def state(self):
        return State()

app = create_app(Adds, CallToolAction, CallToolObservation)
"""


def test_tools_of_a_real_openenv_server_are_called(directory):
    needs("openenv")
    (directory / "adds.py").write_text(TOOLS)
    with serving(directory, "adds") as server:
        environment = load_environment(server)()
        opening = environment.reset("2 + 3?", "", {}, 0)
        assert opening.messages == [{"role": "user", "content": "2 + 3?"}]
        [tool] = opening.tools
        assert (tool["name"], tool["description"]) == ("add", "Add two numbers.")
        assert tool["parameters"]["required"] == ["a", "b"]
        contents = [
            environment.step(message).messages[0]["content"]
            for message in (call("add", a=2, b=3), call("add", a="two"), call("subtract"))
        ]
        assert contents[0] == "5"
        assert all(content.startswith("{'error': ") for content in contents[1:])
        assert environment.step(say("5")).done
        assert environment.score() == 0.0
        environment.close()
