"""Episodes in processes of their own: what dies, hangs or errs ends its own episode, with the kind of fault,
and nothing is left running."""

import asyncio
import json
import os
import random
import re
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

from megatron_ibpo.config import ConfigError, EnvironmentConfig
from megatron_ibpo.environments import EpisodeFaultError, EpisodeScore
from megatron_ibpo.environments.processes import EnvironmentPool
from support.sandboxed import needs_sandbox
from support.waiting import eventually

COUNTING = """
    import ctypes, gc, json, os, random, socket, subprocess, sys, tempfile, time
    from megatron_ibpo.environments import Opening, Turn
    from megatron_ibpo.rewards import ResponseError

    def said(text):
        return Turn([{"role": "user", "content": text}])

    def attempt(action, *arguments):
        try:
            action(*arguments)
        except OSError as error:
            return type(error).__name__
        return "done"

    class Counting:
        '''Counts its turns, and does what it is told.'''

        def reset(self, question, label, metadata, seed):
            self.turns, self.told = 0, {}
            if question == "raise":
                raise LookupError("no such question")
            if question == "nothing":
                return None
            if question == "no messages":
                return Opening([])
            return Opening([{"role": "user", "content": json.dumps([question, label, metadata, seed])}])

        def step(self, message):
            self.turns += 1
            word, _, rest = message["content"].partition(" ")
            return getattr(self, "on_" + word)(rest)

        def score(self):
            if "score" in self.told:
                return eval(self.told["score"])
            return {"score": float(self.turns), "turns": self.turns}

        def close(self):
            if "close" in self.told:
                exec(self.told["close"])

        def on_count(self, rest):
            return said(str(self.turns))

        def on_pid(self, rest):
            return said(str(os.getpid()))

        def on_random(self, rest):
            return said(str(random.random()))

        def on_sleep(self, rest):
            time.sleep(float(rest))
            return said("awake")

        def on_end(self, rest):
            return Turn(done=True)

        def on_eval(self, rest):
            return eval(rest)

        def on_tell(self, rest):
            name, _, self.told[name] = rest.partition(" ")
            return said("told")

        def on_leave(self, rest):  # a child, and one that has lost its parent and its session
            child = subprocess.Popen(["sleep", "1000"])
            program = "echo $$ > written; mv written pid; exec sleep 1000"
            subprocess.run(["setsid", "--fork", "sh", "-c", program], cwd=rest)
            while not os.path.exists(f"{rest}/pid"):
                time.sleep(0.01)
            return said(f"{child.pid} {open(f'{rest}/pid').read().strip()}")

        def on_junk(self, rest):
            sockets = [one for one in gc.get_objects() if isinstance(one, socket.socket)]
            [own] = [one for one in sockets if one.fileno() >= 0]
            own.sendall(b"junk\\n")
            return said("")
"""
TARGET = "counting:Counting"
ZYGOTE = "megatron_ibpo.environments.zygote"


@pytest.fixture(scope="module", autouse=True)
def users_module(tmp_path_factory):
    directory = tmp_path_factory.mktemp("user")
    (directory / "counting.py").write_text(textwrap.dedent(COUNTING))
    (directory / "broken.py").write_text("import no_such_package\n")
    (directory / "deadly.py").write_text("import os\nos.abort()\n")
    sys.path.insert(0, str(directory))
    yield directory
    sys.path.remove(str(directory))


@pytest.fixture(scope="module")
def pool():
    with EnvironmentPool(EnvironmentConfig(environment_processes=4)) as opened:
        opened.check(TARGET)
        yield opened


@asynccontextmanager
async def episode(pool, question="?", seed=0):
    session = await pool.open(TARGET, question, "42", {"level": 1}, seed)
    try:
        yield session
    finally:
        await session.close()


async def told(session, text):
    """Return what the environment answers."""
    turn = await session.step({"role": "assistant", "content": text})
    return turn.messages[0]["content"] if turn.messages else turn


async def told_alone(pool, text, question="?"):
    async with episode(pool, question) as session:
        return await told(session, text)


async def fault_of(pool, *texts, question="?"):
    """Return the fault of an episode in which the environment is told this, and then asked for the score."""
    try:
        async with episode(pool, question) as session:
            for text in texts:
                await told(session, text)
            await session.score()
    except EpisodeFaultError as fault:
        return fault.kind, str(fault)


def is_gone(pid):
    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_an_episode_has_an_opening_turns_and_a_score(pool):
    async def play():
        async with episode(pool, "how many?", seed=7) as session:
            assert json.loads(session.opening.messages[0]["content"]) == ["how many?", "42", {"level": 1}, 7]
            assert [await told(session, "count") for _ in range(3)] == ["1", "2", "3"]
            assert (await told(session, "end")).done
            assert await session.score() == EpisodeScore(4.0, {"turns": 4.0})

    asyncio.run(play())


def test_each_episode_is_a_process_and_starts_alike_from_its_seed(pool):
    async def play():
        async with episode(pool) as one, episode(pool) as other:
            assert await told(one, "pid") != await told(other, "pid")
            assert await told(one, "random") == await told(other, "random")

    asyncio.run(play())


def test_as_many_processes_as_were_needed_at_once_are_forked_ahead_and_one_that_was_killed_is_no_fault():
    async def pids_of_two(pool):
        async with episode(pool) as one, episode(pool) as other:
            pids = {int(await told(one, "pid")), int(await told(other, "pid"))}
            return pids, psutil.Process(min(pids)).parent()

    def forked_ahead(zygote, ended):
        def found():
            return {child.pid for child in zygote.children() if not is_gone(child.pid)}

        assert eventually(lambda: len(found()) == 2 and found().isdisjoint(ended), seconds=10)
        return found()

    with EnvironmentPool(EnvironmentConfig()) as pool:
        ended, zygote = asyncio.run(pids_of_two(pool))
        spares = forked_ahead(zygote, ended)
        assert asyncio.run(pids_of_two(pool)) == (spares, zygote)
        killed = forked_ahead(zygote, spares)
        for pid in killed:
            psutil.Process(pid).kill()
        assert eventually(lambda: all(map(is_gone, killed)), seconds=10)
        played, _ = asyncio.run(pids_of_two(pool))
        assert played.isdisjoint(killed)
        assert not pool.faults


def test_where_no_process_can_live_forking_ahead_ends(users_module, tmp_path):
    """A class whose forks die from some moment on, and are counted."""
    (users_module / "dying.py").write_text(
        "import os\nfrom counting import Counting\n"
        f"here = {str(tmp_path)!r}\n"
        "def forked():\n"
        "    if os.path.exists(here + '/die'):\n"
        "        open(here + '/deaths', 'a').write('x')\n"
        "        os._exit(1)\n"
        "os.register_at_fork(after_in_child=forked)\n"
    )

    async def play(pool):
        session = await pool.open("dying:Counting", "?", "", {}, 0)
        (tmp_path / "die").touch()
        await session.close()

    with EnvironmentPool(EnvironmentConfig()) as pool:
        asyncio.run(play(pool))
        assert eventually((tmp_path / "deaths").exists, seconds=10)
        time.sleep(0.5)
    assert (tmp_path / "deaths").read_text() == "x"


@pytest.mark.parametrize(
    ("texts", "kind", "says"),
    [
        (["eval os.kill(os.getpid(), 9)"], "death", r"step: its process died \(SIGKILL\)"),
        (["eval ctypes.string_at(0)"], "death", r"step: its process died \(SIGSEGV\)"),
        (["eval os._exit(3)"], "death", r"step: its process died \(status 3\)"),
        (["eval {}['key']"], "error", r"step: KeyError: 'key' \(<string>:1 in <module>\)"),
        (["eval sys.exit(1)"], "error", "step: SystemExit: 1"),
        (["eval 'a text'"], "error", r"step must return Turn\(messages, done\), got str"),
        (["eval Turn()"], "error", "a turn that is not done has at least one message"),
        (["eval Turn(['a text'])"], "error", r"a message is \{role, content\}"),
        (["eval said(b'bytes')"], "error", "bytes is not JSON serializable"),
        (["eval said('x' * 2**24)"], "error", "16,777,[0-9]* bytes, and at most 16,777,216 can be sent"),
        (["junk"], "error", "its process wrote an unreadable answer: Expecting value"),
        (["tell score float('nan')"], "error", "score: ValueError: expected a finite number, got nan"),
        (["tell score 'good'"], "error", "score: TypeError: expected a number, got str 'good'"),
    ],
)
def test_a_fault_has_its_kind_and_says_what_happened(pool, texts, kind, says):
    faults = pool.faults[kind]
    found, text = asyncio.run(fault_of(pool, *texts))
    assert found == kind
    assert re.search(says, text), text
    assert pool.faults[kind] == faults + 1


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ("raise", "reset: LookupError: no such question"),
        ("nothing", r"reset must return Opening\(messages, tools\), got NoneType"),
        ("no messages", "an opening has at least one message"),
    ],
)
def test_an_environment_that_does_not_open_is_an_error(pool, question, says):
    kind, text = asyncio.run(fault_of(pool, question=question))
    assert kind == "error"
    assert re.search(says, text), text


def test_what_takes_too_long_is_ended():
    async def play(pool):
        slow = ["sleep .8"] * 3
        return await asyncio.gather(
            fault_of(pool, "sleep 1000"), fault_of(pool, *slow), told_alone(pool, "pid")
        )

    settings = EnvironmentConfig(step_timeout=1.5, episode_timeout=2.0)
    with EnvironmentPool(settings) as pool:
        pool.check(TARGET)
        hung, slow, fine = asyncio.run(play(pool))
    assert hung == ("step_timeout", "step: no answer within 1.5 s")
    assert slow == ("episode_timeout", "step: its calls took 2 s in total")
    assert fine.isdecimal()


def test_a_fault_of_the_response_is_a_score_as_for_a_reward_function(pool):
    async def play():
        async with episode(pool) as session:
            await told(session, "tell score (_ for _ in ()).throw(ResponseError())")
            return await session.score()

    assert asyncio.run(play()) == EpisodeScore(0.0, {"response_error": 1.0})


@pytest.mark.parametrize(
    ("told_score", "found"),
    [
        ("dict(score=1, turns=[0, 0.5])", EpisodeScore(1.0, {"turn_1": 0.0, "turn_2": 0.5})),
        ("dict(score=1, turns='many')", "expected a list of numbers as 'turns', got 'many'"),
        ("dict(score=1, turns=[0, None])", "got NoneType None"),
        ("float('nan')", "expected a finite number, got nan"),
    ],
)
def test_a_score_may_have_rewards_of_turns_and_is_checked(pool, told_score, found):
    async def play():
        async with episode(pool) as session:
            await told(session, f"tell score {told_score}")
            return await session.score()

    if isinstance(found, EpisodeScore):
        assert asyncio.run(play()) == found
    else:
        with pytest.raises(EpisodeFaultError, match=re.escape(found)):
            asyncio.run(play())


@pytest.mark.parametrize("last", ["count", "eval os.kill(os.getpid(), 9)"], ids=["closed", "killed"])
def test_nothing_that_an_episode_has_started_outlives_it(pool, last, tmp_path):
    async def play():
        with suppress(EpisodeFaultError):
            async with episode(pool) as session:
                started = [int(pid) for pid in (await told(session, f"leave {tmp_path}")).split()]
                started.append(int(await told(session, "pid")))
                assert not any(map(is_gone, started))
                await told(session, last)
        return started

    pids = asyncio.run(play())
    assert eventually(lambda: all(map(is_gone, pids)), seconds=10)


def test_a_cancelled_step_ends_its_process(pool):
    async def play():
        async with episode(pool) as session:
            pid = int(await told(session, "pid"))
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await told(session, "sleep 1000")
        return pid

    assert is_gone(asyncio.run(play()))


def test_only_so_many_episodes_are_open_at_once_and_others_have_their_turn(pool):
    async def play(name):
        async with episode(pool):
            order.append(name)
            open_now.append(len(order) - len(ended))
            await asyncio.sleep(0)
            ended.append(name)

    async def play_all():
        await asyncio.gather(*map(play, range(12)))

    order, ended, open_now = [], [], []
    asyncio.run(play_all())
    assert max(open_now) <= 4
    assert sorted(order) == list(range(12))


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("broken:Any", "--environment broken:Any: .*no_such_package"),
        pytest.param(
            "deadly:Any", r"its process ended while importing it \(SIGABRT\)", marks=pytest.mark.slow
        ),
    ],
)
def test_an_environment_that_cannot_be_imported_is_refused_in_one_line(pool, target, says):
    with pytest.raises(ConfigError, match=says) as raised:
        pool.check(target)
    assert "\n" not in str(raised.value)


OWNER = """
    import asyncio, sys
    from megatron_ibpo.config import EnvironmentConfig
    from megatron_ibpo.environments.processes import EnvironmentPool

    async def play(pool):
        session = await pool.open("counting:Counting", "?", "", {}, 0)
        turn = await session.step({"role": "assistant", "content": "leave " + sys.argv[1]})
        pid = await session.step({"role": "assistant", "content": "pid"})
        print(turn.messages[0]["content"], pid.messages[0]["content"], flush=True)
        await session.step({"role": "assistant", "content": "sleep 1000"})

    asyncio.run(play(EnvironmentPool(EnvironmentConfig())))
"""


@pytest.mark.slow
def test_episodes_and_what_they_started_die_with_their_owner(users_module, tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(users_module), *sys.path])},
        stdout=subprocess.PIPE,
    )
    with owner:
        try:
            processes = [int(pid) for pid in owner.stdout.readline().split()]
            assert len(processes) == 3
        finally:
            owner.kill()
    assert eventually(lambda: all(map(is_gone, processes)), seconds=10)


PROBE = (
    "json.dumps({'root': attempt(open, '/root_file', 'w'), 'network': attempt(socket.create_connection, "
    "('127.0.0.1', PORT)), 'others': len([p for p in os.listdir('/proc') if p.isdecimal()]) < 10, "
    "'temporary': tempfile.mkdtemp()})"
)


@needs_sandbox
def test_a_sandboxed_environment_has_no_network_and_a_temporary_directory_only(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        with EnvironmentPool(EnvironmentConfig(environment_sandbox=True)) as pool:
            pool.check(TARGET)
            probe = "eval said(" + PROBE.replace("PORT", str(port)) + ")"
            found = json.loads(asyncio.run(told_alone(pool, probe)))
            kind, text = asyncio.run(fault_of(pool, "eval os.kill(os.getpid(), 9)"))
    assert found["root"] == found["network"] == "OSError" or found["network"].endswith("Error")
    assert found["others"]
    assert not Path(found["temporary"]).exists()
    assert (kind, text) == ("death", "step: its process died (SIGKILL)")


def test_without_bubblewrap_a_sandboxed_environment_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with (
        EnvironmentPool(EnvironmentConfig(environment_sandbox=True)) as pool,
        pytest.raises(ConfigError, match=r"--environment-sandbox: .*bwrap.*install bubblewrap"),
    ):
        pool.check(TARGET)


def test_whatever_is_killed_every_episode_answers_or_fails_and_nothing_is_left():
    rng, outcomes, killed, turns = random.Random(0), [], Counter(), 6
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def started():
        return [child for child in psutil.Process().children(recursive=True) if child.pid not in before]

    def kill():
        """Kill an episode's process or, now and then, the one that it is a fork of."""
        found = [child for child in started() if child.cmdline()[2:3] == [ZYGOTE]]
        pids = {child.pid for child in found}
        episodes = [one for one in found if one.ppid() in pids]
        victim = rng.choice(episodes)
        kind = "zygote" if sum(killed.values()) in (8, 24) else "episode"
        (victim if kind == "episode" else victim.parent()).kill()
        killed[kind] += 1

    async def play(pool, number):
        try:
            async with episode(pool, str(number)) as session:
                assert json.loads(session.opening.messages[0]["content"])[0] == str(number)
                for turn in range(1, turns + 1):
                    assert await told(session, "count") == str(turn)
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
