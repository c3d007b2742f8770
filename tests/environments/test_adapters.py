"""Environments of other frameworks, and on servers of OpenEnv, play as they do there."""

from __future__ import annotations

import inspect
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import accumulate
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ibpo.basics.reward_value import read_reward
from megatron_ibpo.config import ConfigError, EnvironmentConfig, load_hook
from megatron_ibpo.environments.frameworks import load_environment
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.environments.protocol import EpisodeFaultError
from support import openenv_server
from support.documented_modules import write_modules
from support.openenv_server import BreaksTheConnection, Observation, create_app, serving, serving_connections
from support.paths import ROOT

FRAMEWORKS = ROOT / "examples/frameworks"


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    """A directory of the user's; what is imported from it is forgotten after the test."""
    monkeypatch.setenv("IBPO_CWD", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def made(directory):
    def make(code):
        module = f"mine_{len([*directory.iterdir()])}"
        (directory / f"{module}.py").write_text(inspect.cleandoc(code))
        return load_environment(f"{module}:Thing")()

    return make


def say(text):
    return {"role": "assistant", "content": text}


def call(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return say("") | {"tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


def opening(environment, question="", label="", seed=0, **row):
    return [message["content"] for message in environment.reset(question, label, row, seed).messages]


def shown(environment, message):
    return environment.step(message).messages[0]["content"]


def guess_number(environment, seed):
    """Halve what is left of the numbers until the guess is right: (guesses, score)."""
    tools = environment.reset("", "", {}, seed).tools
    low, high, guesses, told = 1, 20, [], ""
    while "right" not in told:
        guesses.append(guess := (low + high) // 2)
        turn = environment.step(call("guess", number=guess) if tools else say(str(guess)))
        if turn.done:
            break
        told = turn.messages[-1]["content"].lower()
        assert sum(word in told for word in ("higher", "lower", "right")) == 1, told
        low, high = (guess + 1, high) if "higher" in told else (low, guess - 1)
    assert turn.done or environment.step(say("Done.")).done
    score = environment.score()
    environment.close()
    return guesses, score


def test_one_game_plays_alike_under_five_frameworks(directory, monkeypatch):
    class SkyrlEnv:
        def get_metrics(self):
            return {}

        def close(self):
            pass

    class GemEnv:
        def reset(self, seed=None):
            random.seed(seed)

    stand_ins: dict[str, dict[str, Any]] = {
        "skyrl_gym.envs.base_text_env": {"BaseTextEnv": SkyrlEnv, "BaseTextEnvStepOutput": dict},
        "gem": {"Env": GemEnv},
        "openenv.core.env_server": {"Environment": object, "State": dict, **vars(openenv_server)},
    }
    for name, members in stand_ins.items():
        for module in accumulate(name.split("."), "{}.{}".format):
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
        vars(sys.modules[name]).update(members)
    shutil.copytree(FRAMEWORKS, directory, dirs_exist_ok=True)
    targets = [f"guess_{name}:GuessTheNumber" for name in ("ours", "trl", "skyrl", "gem")]
    with serving(load_hook("--environment", "guess_openenv:app")) as server:
        for seed in range(3):
            games = [guess_number(load_environment(target)(), seed) for target in [*targets, server]]
            assert {str(guesses) for guesses, _ in games} == {str(games[0][0])}, seed
            assert {read_reward(score)[0] for _, score in games} == {1.0}, seed


def test_no_environment_is_refused_with_the_methods_looked_for(directory):
    code = """
        class Game:
            def play(self): pass
        GAME = Game()
        class Sized:
            def __init__(self, size): pass
        class Undocumented:
            def reset(self): pass
            def play(self): pass
        class Untyped(Undocumented):
            def play(self, move): "Play."
        class Undescribed(Undocumented):
            def play(self, move: str): "Play."
    """
    (directory / "mine.py").write_text(inspect.cleandoc(code))
    for target, problem in (
        ("mine", "expected an import path package.module:name"),
        ("mine:Gme", "defines no 'Gme'; did you mean 'Game'?"),
        ("mine:GAME", "is of type Game, but must be callable with no arguments"),
        ("mine:Game", "the methods of no known framework. Known are reset, step, score and close (ours)"),
        ("mine:Sized", "needs size; name a function without arguments that returns the environment"),
        ("mine:Undocumented", "play() is a tool, unless its name begins with _: Cannot generate JSON schema"),
        ("mine:Untyped", "Argument move is missing a type hint in function play"),
        ("mine:Undescribed", "the docstring has no description for the argument 'move'"),
        ("http://127.0.0.1:8000", "expected an import path, or openenv://HOST:PORT"),
        ("openenv://host:80?action=code", "unknown setting 'action'; did you mean 'action_field'?"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_environment(target)()
        said = str(refused.value)
        assert said.startswith(f"--environment {target}: ")
        assert problem in said
        assert "\n" not in said, (target, problem)


def test_trl_methods_are_tools_and_errors_are_their_answers(made):
    environment = made('''
    class Thing:
        def reset(self, word, **row):
            self._row, self._word, self.reward = row, word, 0.0
            return [{"type": "text", "text": f"\\nThe word has {len(word)} letters."}]

        def guess(self, guess: str) -> str:
            """Make a guess.

            Args:
                guess: The guessed word."""
            if self.reward:
                raise ValueError("Game over.")
            self.reward = float(guess == self._word)
            return f"{len(set(guess) & set(self._word))} letters are in it"

        async def look(self) -> dict:
            """Look at the row."""
            return self._row
    ''')
    first = environment.reset("Play.", "five", {"word": "crane", "n": 2}, 0)
    assert first.messages == [{"role": "user", "content": "Play.\nThe word has 5 letters."}]
    assert [tool["name"] for tool in first.tools] == ["guess", "look"]
    prompt = [{"role": "user", "content": "Play."}]
    unexpected = "Thing.guess() got an unexpected keyword argument 'word'"
    for message, answer in (
        (call("guess", guess="crust"), "2 letters are in it"),
        (call("look"), str({"n": 2, "prompt": prompt, "label": "five"})),
        (call("guess", word="crane"), str({"error": unexpected})),
        (call("think"), "{'error': 'Tool think not found.'}"),
        (call("guess", guess="crane"), "5 letters are in it"),
        (call("guess", guess="crane"), "{'error': 'Game over.'}"),
    ):
        assert shown(environment, message) == answer
    assert environment.step(say("It is crane.")).done
    assert environment.score() == {"score": 1.0, "tool_calls": 6, "tool_errors": 3}
    environment.close()


def test_trl_tools_may_fault_and_environments_need_a_reward(made):
    code = """
    from megatron_ibpo.environments.protocol import EpisodeFaultError

    class Thing:
        def reset(self): pass

        def run(self) -> str:
            "Run."
            raise EpisodeFaultError("error", "the sandbox is gone")
    """
    with pytest.raises(TypeError, match=r"Thing has no get_reward\(\), and no attribute `reward`"):
        opening(made(code))
    environment = made(code + "\n        get_reward = lambda self: 1.0")
    opening(environment)
    with pytest.raises(EpisodeFaultError, match="the sandbox is gone"):
        environment.step(call("run"))


def test_trl_reward_functions_add_to_the_environments_reward(directory):
    code = """
        class Thing:
            def reset(self, word, **row): self.word = word
            def spell(self) -> str:
                "Spell."
                return self.word
        class Paid(Thing):
            def get_reward(self): return 10.0
        class Plain:
            def reset(self, seed=None): return "", {}
            def step(self, text): return "", 1.0, True, False, {}
        async def length(environments, completions, log_metric, **columns):
            log_metric("messages", len(completions[0]))
            return [len(environment.word) for environment in environments]
        def spelled(prompts, completions, word, label, **_):
            assert (prompts, label) == ([[{"role": "user", "content": "Spell."}]], ["5"])
            return [completions[0][1]["content"] == word[0]]
        def of_others(completions, **_): return [None]
        def too_many(completions, **_): return [1.0, 2.0]
        def by_ids(completion_ids, **_): return [1.0]
    """
    (directory / "mine.py").write_text(inspect.cleandoc(code))

    def score(name, *functions):
        environment = load_environment(f"mine:{name}", [f"mine:{function}" for function in functions])()
        opening(environment, "Spell.", "5", word="crane")
        environment.step(call("spell"))
        environment.step(say("crane"))
        return environment.score()

    counts = {"tool_calls": 1, "tool_errors": 0}
    both = {"messages": 3, "length": 5.0, "spelled": 1.0}
    assert score("Thing", "length", "spelled", "of_others") == {"score": 6.0, **both, **counts}
    assert score("Paid", "spelled")["score"] == 11.0
    with pytest.raises(EpisodeFaultError, match="of_others returned None: the episode has no reward"):
        score("Thing", "of_others")
    with pytest.raises(ValueError, match=r"too_many\(\) returned 2 rewards for one episode"):
        score("Thing", "too_many")
    for name, functions, says in (
        ("Thing", ["by_ids"], "mine:by_ids: reads completion_ids, which environments here do not have"),
        ("Thing", ["length", "length"], "another function is called length too"),
        ("Plain", ["length"], "mine:Plain is of Gym's kind, which scores itself; drop the flag"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_environment(f"mine:{name}", [f"mine:{function}" for function in functions])


def test_a_skyrl_environment_sees_its_row_and_sums_its_rewards(made):
    environment = made("""
    class Thing:
        def __init__(self, env_config=None, extras={}): self.extras = extras

        def init(self, prompt): return [{"role": "system", "content": str(sorted(self.extras))}, *prompt], {}

        def step(self, action):
            right = action == self.extras["reward_spec"]["ground_truth"]
            return {"observations": [], "reward": 0.25 + right, "done": False, "metadata": {}}

        def get_metrics(self): return {"steps": 2, "kind": "text"}
    """)
    texts = opening(environment, "6 * 7?", "42", max_turns=3)
    assert texts == ["['extra_info', 'max_turns', 'reward_model', 'reward_spec']", "6 * 7?"]
    assert environment.step(say("41")).messages == [{"role": "user", "content": ""}]
    environment.step(say("42"))
    assert environment.score() == {"steps": 2, "score": 1.5}
    environment.close()


def test_a_gym_environment_ends_on_truncation_and_follows_its_seed(made):
    def gym(turn, first="'Go.'"):
        return made(f"""
        import random
        import numpy as np

        class Thing:
            def reset(self, *, seed=None, options=None):
                np.random.seed(seed)
                return {first}, {{}}

            def step(self, action): return {turn}
        """)

    environment = gym("('There.', 0.5, False, action == 'stop', {})")
    assert opening(environment, "You are a robot.", seed=2**62) == ["You are a robot.\n\nGo."]
    assert not environment.step(say("go")).done
    assert environment.step(say("stop")).done
    assert environment.score() == 1.0
    environment.close()
    environment = gym("None", first="f'{random.random()} {np.random.rand()}'")
    first, same, other = (opening(environment, seed=seed) for seed in (7, 7, 8))
    assert first == same != other, "whether it draws from the global generators of Python or NumPy"
    random.seed()
    np.random.seed()
    for turn, problem in (
        ("([0, 1], 0.0, False, False, {})", r"step\(\) returned list \[0, 1\]; an observation must be text"),
        ("('There.', 0.0, False, {})", r"step\(\) returned .*, expected \(observation, reward, terminated,"),
        ("('There.', float('nan'), False, False, {})", "expected a finite number, got nan"),
    ):
        environment = gym(turn)
        opening(environment)
        with pytest.raises((TypeError, ValueError), match=problem):
            environment.step(say("go"))


def test_a_textarena_game_shows_new_text_and_its_final_reward(made):
    code = """
    class Thing:
        def reset(self, num_players, seed=None): self.moves = []

        def get_observation(self): return 0, {observation}

        def step(self, action):
            self.moves.append(action)
            return action == "end", {{}}

        def close(self): return ({{0: -1}} if "end" in self.moves else None), {{}}
    """
    raw = "[(-1, 'Move.', 1), *[(0, move, 2) for move in self.moves[-1:]]]"
    wrapped = "'\\n[GAME] Move.' + ''.join(f'\\n[GAME] You went {move}.' for move in self.moves)"
    for observation, first, second in (
        (raw, "Move.", "Move."),
        (wrapped, "\n[GAME] Move.", "\n[GAME] You went left."),
    ):
        environment = made(code.format(observation=observation))
        assert opening(environment) == [first]
        assert shown(environment, say("left")) == second
    assert shown(environment, say("up")) == "\n[GAME] You went up."
    assert environment.score() == {"score": 0.0, "unfinished": 1.0}
    assert environment.step(say("end")).done
    assert environment.score() == {"score": -1, "unfinished": 0.0}
    environment.close()


def test_the_documented_calculator_is_played(directory):
    write_modules(directory)
    environment = load_environment("calculator:Calculator")()
    first = environment.reset("123 * 456?", "56088", {}, 0)
    assert [tool["name"] for tool in first.tools] == ["multiply"]
    assert shown(environment, call("multiply", a=123, b="many")).startswith("error: ")
    assert shown(environment, call("multiply", a=123, b=456)) == "56088"
    assert environment.step(say("It is 56088")).done
    assert environment.score() == 1.0


def test_an_openenv_client_uses_the_named_action_and_observation_fields():
    class Coding:
        def reset(self, question, label, seed, episode_id, difficulty=0):
            return Observation(output=f"{question} {label} {seed} {difficulty}")

        def step(self, action):
            return Observation(output=action.code.upper(), exit_code=0, metadata={"t": 1}, reward=0.5)

    with serving(create_app(Coding)) as server, EnvironmentPool(EnvironmentConfig()) as pool:
        pool.check(server)  # which resets nothing
        environment = load_environment(f"{server}?action_field=code")()
        texts = opening(environment, "Print.", "a", seed=2**31 + 5, difficulty=2)
        assert texts == ["Print.\n\nPrint. a 5 2"]
        turn = environment.step(say("print"))
        assert turn.messages == [{"role": "user", "content": '{"output": "PRINT", "exit_code": 0}'}]
        environment.step(say("print"))
        assert environment.score() == 1.0
        environment.close()
        environment = load_environment(f"{server}?action_field=code&observation_field=output")()
        assert opening(environment, label="b") == [" b 0 0"]
        assert shown(environment, say("print")) == "PRINT"
        environment.close()
        environment = load_environment(f"{server}?observation_field=stdout")()
        with pytest.raises(EpisodeFaultError, match="an observation has no field 'stdout'"):
            opening(environment)
        environment.close()


def test_the_policy_calls_the_tools_of_a_server():
    class Tools:  # an environment whose actions are calls of tools, as OpenEnv's MCP environments
        tools = ({"name": "add", "description": "Add.", "inputSchema": {"type": "object"}},)

        def reset(self, **row):
            return Observation()

        def step(self, action):
            assert action.type == "call_tool"
            name, error = action.tool_name, None
            if name != "add":
                error = {"error_type": "tool_not_found", "message": f"Unknown tool: {name}"}
            elif action.arguments["a"] < 0:
                error = {"error_type": "transport_error", "message": "the tools' server is gone"}
            result = {"content": [{"type": "text", "text": "3"}], "data": action.arguments["a"] + 1}
            found = {"result": None, "reward": 0.0} if error else {"result": result, "reward": 1.0}
            return Observation(tool_name=name, error=error, **found)

    with serving(create_app(Tools)) as server:
        environment = load_environment(server)()
        first = environment.reset("Add.", "", {}, 0)
        assert first.messages == [{"role": "user", "content": "Add."}]
        assert first.tools == [{"name": "add", "description": "Add.", "parameters": {"type": "object"}}]
        [answer] = environment.step(call("add", a=2)).messages
        assert answer == {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "3"}
        assert shown(environment, call("multiply", a=2)) == "{'error': 'Unknown tool: multiply'}"
        assert environment.step(say("3")).done
        assert environment.score() == 1.0
        with pytest.raises(EpisodeFaultError, match="the tools' server is gone") as fault:
            environment.step(call("add", a=-1))
        assert fault.value.kind == "wire"
        environment.close()


def test_a_failure_on_the_wire_is_a_fault_without_reward():
    class Fails:
        def reset(self, **row):
            return Observation(message="How?")

        def step(self, action):
            if action.message == "hang up":
                raise BreaksTheConnection
            if action.message == "raise":
                raise RuntimeError("no such move")
            return Observation(message="Over.", done=True)

    def play(environment, move):
        opening(environment)
        environment.step(say(move))
        environment.score()

    with serving(create_app(Fails)) as server:
        for how, problem in (
            ("hang up", "the connection broke"),
            ("raise", "EXECUTION_ERROR: no such move"),
            ("end", "gave no reward"),
        ):
            environment = load_environment(server)()
            with pytest.raises(EpisodeFaultError, match=problem) as fault:
                play(environment, how)
            assert fault.value.kind == "wire", (how, problem)
            assert server in str(fault.value), (how, problem)
            environment.close()
    with pytest.raises(EpisodeFaultError, match="cannot be reached") as fault:
        opening(load_environment(server)())
    assert fault.value.kind == "wire"


def test_a_server_that_opens_no_session_is_found_early():
    def shout(socket):
        for text in socket:
            socket.send(text.upper())

    @contextmanager
    def http():
        with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
            Thread(target=server.handle_request).start()
            yield f"openenv://127.0.0.1:{server.server_port}"

    for server, problem in (
        (nullcontext("openenv://127.0.0.1:9"), "cannot be reached: .*refused"),
        (http(), "cannot be reached: .*HTTP"),
        (serving_connections(shout), "expected JSON with type and data"),
        (serving(create_app(lambda: {}["game"])), "FACTORY_ERROR: 'game'"),
    ):
        with server as target, EnvironmentPool(EnvironmentConfig()) as pool:
            with pytest.raises(ConfigError, match=problem) as refusal:
                pool.check(target)
            assert str(refusal.value).startswith(f"--environment {target}: "), (server, problem)
            assert "\n" not in str(refusal.value), (server, problem)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["skyrl_gym", "gem", "textarena", "openenv"])
def test_the_compared_environments_play_with_the_real_base_classes(directory, package):
    """Of what is installed: `pip install --no-deps --target DIRECTORY skyrl-gym gem-llm textarena openenv`,
    and what they import, with DIRECTORY in PYTHONPATH."""
    pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)
    shutil.copytree(FRAMEWORKS, directory, dirs_exist_ok=True)
    name, target = package.partition("_")[0], f"guess_{package.partition('_')[0]}:GuessTheNumber"
    command = [sys.executable, "-m", "uvicorn", "guess_openenv:app", "--port", "0"]
    with ExitStack() as ends:
        if name == "openenv":
            server = subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True)
            ends.callback(server.terminate)
            line = next(line for line in server.stderr if "running on" in line)
            target = "openenv://" + re.search(r"http://(\S+)", line)[1]
        theirs, _ = guess_number(load_environment(target)(), 3)
    assert theirs == guess_number(load_environment("guess_ours:GuessTheNumber")(), 3)[0]


VERIFIERS = """
    import asyncio, json
    from contextlib import asynccontextmanager
    from types import SimpleNamespace as Made
    from urllib.request import Request, urlopen

    TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

    class Tasks(list):
        INFINITE = False

    class Env:
        taskset = Tasks(["one", "two", "three"])

        def __init__(self, plan): self.plan = plan

        @asynccontextmanager
        async def serving(self): yield

        async def ask(self, url, messages, stream):
            body = {"messages": messages, "tools": TOOLS, "stream": stream, "model": "any"}
            def sent():
                request = Request(f"{url}/chat/completions", json.dumps(body).encode())
                with urlopen(request, timeout=20) as answer:
                    return answer.read().decode()
            text = await asyncio.to_thread(sent)
            if not stream:
                return json.loads(text)["choices"][0]["message"]
            first, _, done, _ = text.split("\\n\\n")
            assert done == "data: [DONE]"
            return json.loads(first.removeprefix("data: "))["choices"][0]["delta"]

        async def run_episode(self, task, context):
            said = [{"role": "user", "content": [{"type": "text", "text": f"Task {task}."}]}]
            try:
                total = await self.plan(self, task, context.client.base_url, said)
            except ValueError as error:
                return Made(ok=False, traces=[], errors=[Made(type="ValueError", message=str(error))])
            reward, agent = Made(value=total), Made(trainable=True)
            trace = Made(rewards={"sum": reward, "none": None}, metrics={"said": len(said)}, reward=total,
                         agent=agent, errors=[])
            judge = Made(agent=Made(trainable=False), errors=[])
            return Made(ok=True, traces=[judge, trace], errors=[])

    async def sums(self, task, url, said):
        for stream in (True, False):
            answer = await self.ask(url, said, stream)
            said.append({key: value for key, value in answer.items()})
            for made in answer.get("tool_calls", ()):
                given = json.loads(made["function"]["arguments"])
                said.append({"role": "tool", "tool_call_id": made["id"], "content": str(sum(given.values()))})
        return float(said[-1]["content"] == "5")

    async def rewrites(self, task, url, said):
        await self.ask(url, said, False)
        await self.ask(url, [{"role": "user", "content": "A summary."}] * 3, False)

    async def endless(self, task, url, said):
        while True:
            said += [await self.ask(url, said, False), {"role": "user", "content": "More."}]

    async def fails(self, task, url, said): raise ValueError("no sandbox")

    SUMS, REWRITES, ENDLESS, FAILS = map(Env, (sums, rewrites, endless, fails))
    def made(): return Env(sums)

    class Taskset:
        def load(self): ...
        @classmethod
        def task_type(cls): ...
"""


@pytest.fixture
def verifiers(directory, monkeypatch):
    """A stand-in for the package: what an episode is given, and what it asks for over HTTP, is theirs."""
    v1 = ModuleType("verifiers.v1")
    for name in ("EvalClientConfig", "ModelContext"):
        setattr(v1, name, SimpleNamespace)
    package: Any = ModuleType("verifiers")
    package.v1 = v1
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", v1)
    (directory / "mine.py").write_text(inspect.cleandoc(VERIFIERS))


@pytest.mark.usefixtures("verifiers")
@pytest.mark.parametrize("name", ["SUMS", "made"])
def test_an_episode_of_verifiers_asks_the_policy_for_its_messages(name):
    environment = load_environment(f"mine:{name}")()
    first = environment.reset("Now:", "", {"task_index": 1}, 0)
    assert [message["content"] for message in first.messages] == ["Now:\n\nTask two."]
    assert [tool["name"] for tool in first.tools] == ["add"]
    assert shown(environment, call("add", a=2, b=3)) == "5"
    assert environment.step(say("5")).done
    assert environment.score() == {"score": 1.0, "sum": 1.0, "said": 4}
    # turns are used up: the episode gets empty messages until it ends
    environment = load_environment(f"mine:{name}")()
    assert opening(environment, seed=3) == ["Task one."]
    assert environment.score()["score"] == 0.0


@pytest.mark.usefixtures("verifiers")
def test_a_failure_in_an_episode_of_verifiers_is_a_fault(monkeypatch):
    in_threads, submit = [], ThreadPoolExecutor.submit

    def noted(executor, call, *arguments):
        in_threads.append((call, submit(executor, call, *arguments)))
        return in_threads[-1][1]

    monkeypatch.setattr(ThreadPoolExecutor, "submit", noted)

    def environment_of(name):
        return load_environment(f"mine:{name}")()

    with pytest.raises(EpisodeFaultError, match="ended before the policy was asked; ValueError: no sandbox"):
        opening(environment_of("FAILS"))
    rewriting = environment_of("REWRITES")
    opening(rewriting)
    with pytest.raises(EpisodeFaultError, match="its harness rewrote the context, or several agents"):
        rewriting.step(say("1"))
    endless = environment_of("ENDLESS")
    opening(endless)
    with pytest.raises(EpisodeFaultError, match="it has not ended after 64 empty messages"):
        endless.score()
    # those of the stand-in's client, `partial` of `asyncio.to_thread`, end by its time-out
    unfinished = [call for call, work in in_threads if not work.done() and not isinstance(call, partial)]
    assert in_threads
    assert not unfinished, "Python would wait for them when it ends"
    with pytest.raises(ConfigError, match="a taskset of verifiers; name an environment that plays it"):
        load_environment("mine:Taskset")
