"""Episodes in processes of their own: what dies, hangs or errs ends its own episode, and nothing else."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import ConfigError, EnvironmentConfig
from megatron_ibpo.environments import EpisodeFaultError, EpisodeScore
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.run.trial import try_environment
from support.sandboxed import needs_sandbox
from support.waiting import eventually, has_ended

COUNTING = """
    import gc, json, os, random, socket, subprocess, sys, tempfile, time
    from megatron_ibpo.environments import Opening, Turn
    from megatron_ibpo.rewards import ResponseError

    def said(what): return Turn([{"role": "user", "content": str(what)}])

    def attempt(action, *arguments):
        try:
            action(*arguments)
        except OSError as error:
            return type(error).__name__
        return "done"

    class Counting:  # counts its turns, and evaluates what it is told
        def reset(self, question, label, metadata, seed):
            self.turns, self.rewarded = 0, "dict(score=float(self.turns), turns=self.turns)"
            if question.startswith("eval "):
                return eval(question[5:])
            return Opening(said(json.dumps([question, label, metadata, seed])).messages)

        def step(self, message):
            self.turns += 1
            return eval(message["content"])

        def score(self): return eval(self.rewarded)

        def close(self): pass

        def reward(self, expression):
            self.rewarded = expression
            return said("")

        def leave(self, place):  # a child, and one that has lost its parent and its session
            child = subprocess.Popen(["sleep", "1000"])
            program = "echo $$ > written; mv written pid; exec sleep 1000"
            subprocess.run(["setsid", "--fork", "sh", "-c", program], cwd=place)
            while not os.path.exists(f"{place}/pid"):
                time.sleep(0.01)
            return said(f"{os.getpid()} {child.pid} {open(f'{place}/pid').read().strip()}")

        def junk(self):
            [own] = [one for one in gc.get_objects() if isinstance(one, socket.socket) and one.fileno() >= 0]
            own.sendall(b"junk\\n")
"""
TRL_TOOLS = """
    import time

    class Stuck:
        def reset(self): self.reward = 0.0

        def search(self, query: str, limit: int) -> str:
            '''Search.

            Args:
                query: What to look for.
                limit: How many to find.'''
            time.sleep(1000)

    class Unscored(Stuck):
        def reset(self): self.calls = []

        def search(self, query: str, limit: int) -> str:
            self.calls.append((query, limit))
            return "nothing"
        search.__doc__ = Stuck.search.__doc__

    def calls(environments, **columns):
        return [float(environment.calls == [("42", 1)]) for environment in environments]
"""
TARGET, COUNT, PID = "counting:Counting", "said(self.turns)", "said(os.getpid())"
KILL_SELF, HANG = "os.kill(os.getpid(), 9)", "time.sleep(1000)"


@pytest.fixture(scope="module", autouse=True)
def users_module(tmp_path_factory):
    directory = tmp_path_factory.mktemp("user")
    (directory / "counting.py").write_text(textwrap.dedent(COUNTING))
    (directory / "broken.py").write_text("import no_such_package\n")
    (directory / "trl_tools.py").write_text(textwrap.dedent(TRL_TOOLS))
    (directory / "deadly.py").write_text("import os\nos.abort()\n")
    sys.path.insert(0, str(directory))
    yield directory
    sys.path.remove(str(directory))


@pytest.fixture(scope="module")
def pool():
    with EnvironmentPool(EnvironmentConfig(environment_processes=4)) as opened:
        opened.check(TARGET)
        yield opened


open_now: set[object] = set()


@asynccontextmanager
async def episode(pool, question="?", seed=0):
    session = await pool.open(TARGET, question, "42", {"level": 1}, seed)
    open_now.add(session)
    try:
        yield session
    finally:
        open_now.remove(session)
        await session.close()


async def told(session, text):
    turn = await session.step({"role": "assistant", "content": text})
    return turn.messages[0]["content"] if turn.messages else turn


async def play(pool, *texts, question="?"):
    """Return what the environment answers to each text, and its score at last."""
    async with episode(pool, question) as session:
        return [await told(session, text) for text in texts], await session.score()


def played(pool, *texts, **how):
    return asyncio.run(play(pool, *texts, **how))


def test_an_episode_is_a_process_that_follows_its_seed(pool):
    async def play():
        async with episode(pool, "how many?", seed=7) as session, episode(pool, seed=7) as other:
            assert json.loads(session.opening.messages[0]["content"]) == ["how many?", "42", {"level": 1}, 7]
            assert await told(session, PID) != await told(other, PID)
            assert await told(session, "said(random.random())") == await told(other, "said(random.random())")
            assert [await told(session, COUNT) for _ in range(2)] == ["3", "4"]
            assert (await told(session, "Turn(done=True)")).done
            assert await session.score() == EpisodeScore(5.0, {"turns": 5.0})

    asyncio.run(play())


def test_processes_are_forked_ahead_and_killed_spares_do_no_harm():
    async def pids_of_two(pool):
        async with episode(pool) as one, episode(pool) as other:
            pids = {int(await told(one, PID)), int(await told(other, PID))}
            return pids, psutil.Process(min(pids)).parent()

    def forked_ahead(zygote, ended):
        def found():
            return {child.pid for child in zygote.children() if not has_ended(child.pid)}

        assert eventually(lambda: len(found()) == 2 and found().isdisjoint(ended), seconds=10)
        return found()

    with EnvironmentPool(EnvironmentConfig()) as pool:
        ended, zygote = asyncio.run(pids_of_two(pool))
        spares = forked_ahead(zygote, ended)
        assert asyncio.run(pids_of_two(pool)) == (spares, zygote)
        killed = forked_ahead(zygote, spares)
        for pid in killed:
            psutil.Process(pid).kill()
        assert eventually(lambda: all(map(has_ended, killed)), seconds=10)
        played, _ = asyncio.run(pids_of_two(pool))
        assert played.isdisjoint(killed)
        assert not pool.faults


def test_where_no_process_can_live_forking_ahead_ends(users_module, tmp_path):
    """A class whose forks die from some moment on, and are counted."""
    code = f"""
        import os
        from counting import Counting
        def forked():
            if os.path.exists("{tmp_path}/die"):
                open("{tmp_path}/deaths", "a").write("x")
                os._exit(1)
        os.register_at_fork(after_in_child=forked)
    """
    (users_module / "dying.py").write_text(textwrap.dedent(code))

    async def play(pool):
        session = await pool.open("dying:Counting", "?", "", {}, 0)
        (tmp_path / "die").touch()
        await session.close()

    with EnvironmentPool(EnvironmentConfig()) as pool:
        asyncio.run(play(pool))
        assert eventually((tmp_path / "deaths").exists, seconds=10)
        time.sleep(0.5)
    assert (tmp_path / "deaths").read_text() == "x"


def test_faults_have_their_kind_and_a_responses_fault_a_score(pool):
    for text, kind, says in (
        (KILL_SELF, "death", r"step: its process died \(SIGKILL\)"),
        ("os._exit(3)", "death", r"step: its process died \(status 3\)"),
        ("{}['key']", "error", r"step: KeyError: 'key' \(<string>:1 in <module>\)"),
        ("sys.exit(1)", "error", "step: SystemExit: 1"),
        ("'a text'", "error", r"step must return Turn\(messages, done\), got str"),
        ("Turn()", "error", "a turn that is not done has at least one message"),
        ("Turn(['a text'])", "error", r"a message is \{role, content\}"),
        ("Turn([dict(role='user', content=b'bytes')])", "error", "bytes is not JSON serializable"),
        ("said('x' * 2**24)", "error", "16,777,[0-9]* bytes, and at most 16,777,216 can be sent"),
        ("self.junk()", "error", "its process wrote an unreadable answer: Expecting value"),
        ("self.reward('float(\"nan\")')", "error", "score: ValueError: expected a finite number, got nan"),
        ("self.reward('dict(score=1, turns=str())')", "error", "expected a list of numbers as 'turns', got"),
        ("self.reward('dict(score=1, turns=[0, None])')", "error", "got NoneType None"),
    ):
        faults = pool.faults[kind]
        with pytest.raises(EpisodeFaultError, match=says) as fault:
            played(pool, text)
        assert fault.value.kind == kind
        assert pool.faults[kind] == faults + 1
    for question, says in (
        ("eval {}['key']", "reset: KeyError: 'key'"),
        ("eval None", r"reset must return Opening\(messages, tools\), got NoneType"),
        ("eval Opening([])", "an opening has at least one message"),
    ):
        with pytest.raises(EpisodeFaultError, match=says):
            played(pool, question=question)
    for reward, score in (  # rewards of turns, and a fault of the response
        ("dict(score=1, turns=[0, 0.5])", EpisodeScore(1.0, {"turn_1": 0.0, "turn_2": 0.5})),
        ("(_ for _ in ()).throw(ResponseError())", EpisodeScore(0.0, {"response_error": 1.0})),
    ):
        assert played(pool, f"self.reward({reward!r})") == ([""], score)


def test_slow_calls_are_ended():
    async def play_all(pool):
        plays = play(pool, HANG), play(pool, *["said(time.sleep(.8))"] * 3), play(pool, COUNT)
        return await asyncio.gather(*plays, return_exceptions=True)

    with EnvironmentPool(EnvironmentConfig(step_timeout=1.5, episode_timeout=2.0)) as pool:
        pool.check(TARGET)
        hung, slow, fine = asyncio.run(play_all(pool))
    assert (hung.kind, str(hung)) == ("step_timeout", "step: no answer within 1.5 s")
    assert (slow.kind, str(slow)) == ("episode_timeout", "step: its calls took 2 s in total")
    assert fine[0] == ["1"]


def test_an_environment_is_tried_once_before_a_run_starts():
    def tried(name, *rewards):
        settings = EnvironmentConfig(environment_reward=rewards, step_timeout=1.0)
        with EnvironmentPool(settings) as pool:
            return try_environment(pool, f"trl_tools:{name}", Prompt(7, token_ids([]), 0, "42", "task", "?"))

    assert tried("Unscored", "trl_tools:calls") == {"calls": 1.0, "tool_calls": 1.0, "tool_errors": 0.0}
    for name, says in (
        ("Stuck", "step: no answer within 1 s"),
        ("Unscored", r"reset: .*no attribute `reward`.*--environment-reward file\.py:function"),
    ):
        with pytest.raises(
            ConfigError, match=f"--environment trl_tools:{name}: {says}.* on task, prompt 7"
        ) as refused:
            tried(name)
        assert "\n" not in str(refused.value), (name, says)


@pytest.mark.parametrize("last", [COUNT, KILL_SELF, HANG], ids=["closed", "killed", "cancelled"])
def test_nothing_that_an_episode_has_started_outlives_it(pool, last, tmp_path):
    async def play():
        with suppress(EpisodeFaultError, TimeoutError):
            async with episode(pool) as session:
                started = map(int, (await told(session, f"self.leave({str(tmp_path)!r})")).split())
                pids.extend(started)
                assert not any(map(has_ended, pids))
                async with asyncio.timeout(0.5):
                    await told(session, last)

    pids: list[int] = []
    asyncio.run(play())
    assert len(pids) == 3
    assert eventually(lambda: all(map(has_ended, pids)), seconds=10)


def test_an_environment_that_cannot_load_is_refused_in_one_line(pool, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with EnvironmentPool(EnvironmentConfig(environment_sandbox=True)) as sandboxed:
        for own, target, says in (
            (pool, "broken:Any", "--environment broken:Any: .*no_such_package"),
            (pool, "deadly:Any", r"ended while importing it \(SIGABRT\)"),
            (sandboxed, TARGET, r"--environment-sandbox: .*bwrap.*install bubblewrap"),
        ):
            with pytest.raises(ConfigError, match=says) as raised:
                own.check(target)
            assert "\n" not in str(raised.value), (own, target, says)


@pytest.mark.slow
def test_episodes_and_their_children_die_with_their_owner(users_module, tmp_path):
    program = f"""
        import asyncio
        from megatron_ibpo.config import EnvironmentConfig
        from megatron_ibpo.environments.processes import EnvironmentPool

        async def play(pool):
            session = await pool.open("{TARGET}", "?", "", {{}}, 0)
            turn = await session.step({{"role": "assistant", "content": "self.leave({str(tmp_path)!r})"}})
            print(turn.messages[0]["content"], flush=True)
            await session.step({{"role": "assistant", "content": "{HANG}"}})

        asyncio.run(play(EnvironmentPool(EnvironmentConfig())))
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(users_module), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as owner:
        processes = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(processes) == 3
    assert eventually(lambda: all(map(has_ended, processes)), seconds=10)


@needs_sandbox
def test_a_sandboxed_environment_has_no_network_and_only_temporary_files():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        socket.create_connection(address).close()
        probe = f"""said(json.dumps(dict(
            root=attempt(open, '/root_file', 'w'), network=attempt(socket.create_connection, {address}),
            processes=[name for name in os.listdir('/proc') if name.isdecimal()], made=tempfile.mkdtemp(),
        )))"""
        with EnvironmentPool(EnvironmentConfig(environment_sandbox=True)) as pool:
            pool.check(TARGET)
            ((answer,), _) = played(pool, probe)
            with pytest.raises(EpisodeFaultError, match=r"step: its process died \(SIGKILL\)"):
                played(pool, KILL_SELF)
    found = json.loads(answer)
    assert found["root"].endswith("Error")
    assert found["network"].endswith("Error")
    assert len(found["processes"]) < 10
    assert not Path(found["made"]).exists()


def test_whatever_is_killed_every_episode_answers_or_fails():
    rng, outcomes, killed, turns = random.Random(0), [], Counter(), 6
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def started():
        return [child for child in psutil.Process().children(recursive=True) if child.pid not in before]

    def kill():
        """Kill an episode's process or, now and then, the one that it is a fork of."""
        zygotes = [one for one in started() if one.cmdline()[2:3] == ["megatron_ibpo.environments.zygote"]]
        victim = rng.choice([one for one in zygotes if one.ppid() in {other.pid for other in zygotes}])
        kind = "zygote" if killed.total() in (8, 24) else "episode"
        (victim if kind == "episode" else victim.parent()).kill()
        killed[kind] += 1

    async def play(pool, number):
        try:
            async with episode(pool, str(number)) as session:
                assert len(open_now) <= 16
                assert json.loads(session.opening.messages[0]["content"])[0] == str(number)
                for turn in range(1, turns + 1):
                    assert await told(session, COUNT) == str(turn)
                    await asyncio.sleep(0.02)
                assert await session.score() == EpisodeScore(float(turns), {"turns": float(turns)})
            outcomes.append("scored")
        except EpisodeFaultError as fault:
            outcomes.append(fault.kind)

    async def play_all(pool):
        episodes = [asyncio.create_task(play(pool, number)) for number in range(60)]
        while not all(task.done() for task in episodes):
            await asyncio.sleep(0.03)
            with suppress(psutil.Error, IndexError):  # there is none, or it has just ended
                kill()
        await asyncio.gather(*episodes)

    with EnvironmentPool(EnvironmentConfig(environment_processes=16)) as pool:
        pool.check(TARGET)
        asyncio.run(play_all(pool))
        assert killed["zygote"]
        assert pool.opened == len(outcomes) == 60
        assert {"death": outcomes.count("death"), "scored": outcomes.count("scored")} == Counter(outcomes)
        assert pool.faults == {"death": outcomes.count("death")}
        assert outcomes.count("death") + killed["zygote"] >= pool.deaths >= outcomes.count("death")
    assert started() == []
