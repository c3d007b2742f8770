"""Verifiers and environments on the nodes of a cluster: spread by load, and nothing waits for the dead."""

import asyncio
import os
import signal
import sys
from collections import Counter
from contextlib import asynccontextmanager

import psutil
import pytest
import ray

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.cluster.node_pools import Environments, Verifiers
from megatron_ibpo.cluster.ray_session import open_ray
from megatron_ibpo.cluster.reservation import cluster_nodes
from megatron_ibpo.config import DataConfig, EnvironmentConfig
from megatron_ibpo.environments import EpisodeFaultError, EpisodeScore
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.rewards import Verifier, WorkerError, open_pool
from support.simulated_cluster import simulated_cluster
from support.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow]

USERS = """
import os, time
import psutil
from megatron_ibpo.environments import Opening, Turn

def owner(prompt, response, label, metadata):
    time.sleep(0.01)
    return psutil.Process().parents()[1].pid  # of the process whose pool this is, above the supervisor

class Echo:
    def reset(self, question, label, metadata, seed):
        # the owner of the pool is above the zygote and its supervisor
        return Opening([{"role": "user", "content": f"owner {psutil.Process().parents()[2].pid}"}])
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
OWNER, TARGET = "users:owner", "users:Echo"
CONFIG = EnvironmentConfig(environment_processes=8)
DATA = DataConfig(rm_type=OWNER, reward_workers=1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("user")
    (directory / "users.py").write_text(USERS)
    sys.path.insert(0, str(directory))
    with simulated_cluster(2) as started, open_ray(started.address, num_cpus=1):
        yield started
    sys.path.remove(str(directory))


@pytest.fixture(scope="module")
def verifiers(cluster):
    with open_pool(DATA) as own, Verifiers(own, cluster_nodes(), DATA) as opened:
        opened.wait_ready()
        yield opened
        pids = {int(pid) for pid in scored(opened, 60)} - {os.getpid()}
        owners = [psutil.Process(pid) for pid in pids]
    _, alive = psutil.wait_procs(owners, timeout=10)
    assert alive == []


def submitted(verifiers, count):
    return [verifiers.submit(OWNER, ("what?", f"answer {n}", "42", {})) for n in range(count)]


def answers(calls):
    return [call.result(60).value for call in calls]


def scored(verifiers, count):
    return answers(submitted(verifiers, count))


def test_calls_are_spread_over_all_nodes_by_load(verifiers):
    prompt = Prompt(0, token_ids([]), 0, "42", "task", "what?")
    scores = Verifier(verifiers, DATA).score([(prompt, f"answer {number}") for number in range(300)])
    shares = Counter(score.reward for score in scores)
    assert len(shares) == 2
    assert os.getpid() in shares
    assert min(shares.values()) > 90
    assert verifiers.deaths == 0
    assert [scored(verifiers, 1) for _ in range(4)] == [[os.getpid()]] * 4, "a single one stays here"


def test_a_worker_killed_on_another_node_loses_no_response(verifiers, caplog):
    owner = psutil.Process(int(max(set(scored(verifiers, 60)) - {os.getpid()})))
    below = owner.children(recursive=True)
    (worker,) = [child for child in below if child.cmdline()[1:3] == ["-m", "megatron_ibpo.rewards.worker"]]
    calls = submitted(verifiers, 300)
    worker.kill()
    assert None not in answers(calls)
    assert eventually(lambda: verifiers.deaths == 1, seconds=60)
    assert "1 worker died" in caplog.text


def test_calls_of_a_killed_actor_move_and_it_restarts(verifiers):
    deaths = verifiers.deaths
    victim = int(max(set(scored(verifiers, 60)) - {os.getpid()}))
    calls = submitted(verifiers, 300)
    calls[60].result(60)
    os.kill(victim, signal.SIGKILL)
    assert None not in answers(calls)
    assert verifiers.deaths == deaths + 1
    assert eventually(lambda: len(now := set(scored(verifiers, 60))) == 2 and victim not in now, seconds=60)
    assert verifiers.deaths == deaths + 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rm_type": "users:nobody"}, ".*defines no 'nobody'"),
        # a server that is not there; a missing sandbox is found by the same check
        pytest.param(
            {"rm_type": "code", "code_executor": "http://127.0.0.1:1"},
            r"code rewards: .*127\.0\.0\.1:1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_node_that_cannot_score_is_refused_before_anything_starts(cluster, settings, says):
    here = ray.get_runtime_context().get_node_id()
    there = next(node for node in cluster_nodes() if node.node_id != here)
    data = DataConfig(reward_workers=1, reward_timeout=60.0, **settings)
    said = f"verifier of {there.address}: {says}"
    with Verifiers(None, [there], data) as verifiers, pytest.raises(WorkerError, match=said):
        verifiers.wait_ready()


@pytest.fixture(scope="module")
def environments(cluster):
    with EnvironmentPool(CONFIG) as own, Environments(own, cluster_nodes()[:2], CONFIG, [TARGET]) as opened:
        opened.wait_ready()
        yield opened


@asynccontextmanager
async def begun(environments, count):
    sessions = [await environments.open(TARGET, "?", "", {}, 0) for _ in range(count)]
    yield sessions, [int(one.opening.messages[0]["content"].split()[1]) for one in sessions]
    await asyncio.gather(*[session.close() for session in sessions])


def test_episodes_are_balanced_over_nodes_and_fail_alone(environments):
    async def play():
        async with begun(environments, 6) as (sessions, owners):
            assert owners[0] == os.getpid()
            assert sorted(map(owners.count, set(owners))) == [3, 3]
            turns = await asyncio.gather(*[session.step(HELLO) for session in sessions])
            assert [turn.messages for turn in turns] == [(HELLO,)] * 6
            assert await sessions[1].score() == EpisodeScore(1.0)
            assert environments.deaths == 0
            with pytest.raises(EpisodeFaultError, match=r"step: its process died \(SIGKILL\)") as raised:
                await sessions[1].step(DIE)
            assert raised.value.kind == "death"
            assert (await sessions[3].step(HELLO)).messages == (HELLO,)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sessions[3].step(SLEEP), 0.1)
        async with begun(environments, 4) as (sessions, owners):
            steps = [asyncio.create_task(session.step(SLEEP)) for session in sessions[1::2]]
            await asyncio.sleep(0.2)
            os.kill(owners[1], signal.SIGKILL)
            failed = await asyncio.gather(*steps, return_exceptions=True)
            assert [fault.kind for fault in failed] == ["death", "death"]
            with pytest.raises(EpisodeFaultError, match="its process died"):
                await sessions[1].step(HELLO)
            assert (await sessions[0].step(HELLO)).messages == (HELLO,)

    asyncio.run(play())


def test_calls_of_a_lost_node_move_to_the_other_nodes(cluster, verifiers, caplog):
    deaths = verifiers.deaths
    calls = submitted(verifiers, 300)
    calls[60].result(60)
    cluster.remove_node()
    assert None not in answers(calls)
    given_up = "is not started again; the other nodes take over its work"
    assert eventually(lambda: given_up in caplog.text, seconds=60)
    assert verifiers.deaths == deaths + 1
    assert set(scored(verifiers, 60)) == {os.getpid()}
