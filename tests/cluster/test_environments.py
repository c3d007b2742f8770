"""Episodes on the nodes of a cluster: spread by load, bound to their node, failing with it."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager

import pytest

from megatron_ibpo.cluster.environments import Environments
from megatron_ibpo.cluster.ray_session import open_ray
from megatron_ibpo.cluster.reservation import cluster_nodes
from megatron_ibpo.config import EnvironmentConfig
from megatron_ibpo.environments import EpisodeFaultError, EpisodeScore
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.rewards import WorkerError
from support.simulated_cluster import simulated_cluster
from support.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ECHO = """
import os, time
import psutil
from megatron_ibpo.environments import Opening, Turn

class Echo:
    def reset(self, question, label, metadata, seed):
        # of the process whose pool this is, above the zygote and its supervisor
        owner = psutil.Process().parents()[2].pid
        return Opening([{"role": "user", "content": f"{question} {owner}"}])

    def step(self, message):
        if message["content"] == "die":
            os.kill(os.getpid(), 9)
        if message["content"] == "sleep":
            time.sleep(1000)
        return Turn([message])

    def score(self):
        return 1.0

    def close(self):
        pass
"""
HELLO, DIE, SLEEP = ({"role": "user", "content": content} for content in ("hello", "die", "sleep"))
TARGET = "echoing:Echo"
CONFIG = EnvironmentConfig(environment_processes=8)


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    directory = tmp_path_factory.mktemp("user")
    (directory / "echoing.py").write_text(ECHO)
    sys.path.insert(0, str(directory))
    with (
        simulated_cluster(2) as cluster,
        open_ray(cluster.address, num_cpus=1),
        EnvironmentPool(CONFIG) as own,
        Environments(own, cluster_nodes(), CONFIG, [TARGET]) as opened,
    ):
        opened.wait_ready()
        yield opened
    sys.path.remove(str(directory))


@asynccontextmanager
async def begun(environments, count):
    """Open episodes, and the process that owns the pool of each."""
    sessions = [await environments.open(TARGET, "?", "", {}, 0) for _ in range(count)]
    yield sessions, [int(one.opening.messages[0]["content"].split()[1]) for one in sessions]
    await asyncio.gather(*[session.close() for session in sessions])


def test_episodes_are_spread_by_load_and_stay_on_their_node(environments):
    async def play():
        async with begun(environments, 6) as (sessions, owners):
            assert owners[0] == os.getpid()
            assert sorted(map(owners.count, set(owners))) == [3, 3]
            turns = await asyncio.gather(*[session.step(HELLO) for session in sessions])
            assert [turn.messages for turn in turns] == [(HELLO,)] * 6
            assert await sessions[1].score() == EpisodeScore(1.0)
        async with begun(environments, 1) as (_, owners):
            assert owners == [os.getpid()]

    asyncio.run(play())
    assert environments.deaths == 0


def test_a_fault_on_another_node_is_that_of_its_episode_alone(environments):
    async def play():
        async with begun(environments, 4) as (sessions, _):
            with pytest.raises(EpisodeFaultError, match=r"step: its process died \(SIGKILL\)") as raised:
                await sessions[1].step(DIE)
            assert raised.value.kind == "death"
            assert (await sessions[3].step(HELLO)).messages == (HELLO,)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sessions[3].step(SLEEP), 0.1)

    asyncio.run(play())


def test_the_episodes_of_a_killed_actor_fail_and_it_comes_back(environments):
    async def play():
        async with begun(environments, 4) as (sessions, owners):
            steps = [asyncio.create_task(session.step(SLEEP)) for session in sessions[1::2]]
            await asyncio.sleep(0.2)
            os.kill(owners[1], signal.SIGKILL)
            failed = await asyncio.gather(*steps, return_exceptions=True)
            assert [fault.kind for fault in failed] == ["death", "death"]
            with pytest.raises(EpisodeFaultError, match="its process died"):
                await sessions[1].step(HELLO)
            assert (await sessions[0].step(HELLO)).messages == (HELLO,)
        return owners[1]

    async def owners_now():
        async with begun(environments, 2) as (_, owners):
            return set(owners)

    victim = asyncio.run(play())
    assert eventually(lambda: len(now := asyncio.run(owners_now())) == 2 and victim not in now, seconds=60)


def test_a_node_that_cannot_import_an_environment_is_refused(environments):
    with (
        EnvironmentPool(CONFIG) as own,
        Environments(own, cluster_nodes(), CONFIG, ["echoing:Nobody"]) as opened,
        pytest.raises(WorkerError, match=r"environments of .*: --environment echoing:Nobody: .*'Nobody'"),
    ):
        opened.wait_ready()
