"""Verifiers on the nodes of a cluster: all calls are answered, whatever dies."""

import os
import signal
import sys
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import psutil
import pytest
import ray

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.cluster.ray_session import open_ray
from megatron_ibpo.cluster.reservation import cluster_nodes
from megatron_ibpo.cluster.verifiers import Verifiers
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards import Verifier, WorkerError, open_pool, worker_count
from support.simulated_cluster import simulated_cluster
from support.waiting import eventually

pytestmark = pytest.mark.ray

OWNERS = """
import time
import psutil

def owner(prompt, response, label, metadata):
    time.sleep(0.01)
    return psutil.Process().parents()[1].pid  # of the process whose pool this is, above the supervisor
"""
OWNER = "owners:owner"
DATA = DataConfig(rm_type=OWNER, reward_workers=1)
ANSWER_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("user")
    (directory / "owners.py").write_text(OWNERS)
    sys.path.insert(0, str(directory))
    with simulated_cluster(3) as started, open_ray(started.address, num_cpus=1):
        yield started
    sys.path.remove(str(directory))


@pytest.fixture(scope="module")
def own(cluster):
    """The driver's own pool."""
    with open_pool(DATA) as pool:
        yield pool


@pytest.fixture(scope="module")
def verifiers(own):
    with Verifiers(own, cluster_nodes(), DATA) as opened:
        opened.wait_ready()
        yield opened
        pids = {int(pid) for pid in scored(opened, 60)} - {os.getpid()}
        owners = [psutil.Process(pid) for pid in pids]
    _, alive = psutil.wait_procs(owners, timeout=10)
    assert alive == []


def submitted(verifiers, count):
    return [verifiers.submit(OWNER, ("what?", f"answer {n}", "42", {})) for n in range(count)]


def scored(verifiers, count):
    """Return the owner of the worker of each of `count` calls."""
    return [call.result(ANSWER_TIMEOUT_S).value for call in submitted(verifiers, count)]


def test_calls_are_spread_over_all_nodes_by_load(verifiers):
    prompt = Prompt(0, token_ids([]), 0, "42", "task", "what?")
    scores = Verifier(verifiers, DATA).score([(prompt, f"answer {number}") for number in range(300)])
    shares = Counter(score.reward for score in scores)
    assert len(shares) == 3
    assert os.getpid() in shares
    assert min(shares.values()) > 60
    assert verifiers.deaths == 0
    assert [scored(verifiers, 1) for _ in range(4)] == [[os.getpid()]] * 4, "a single one stays here"


def test_a_worker_that_is_killed_on_another_node_is_counted_and_its_response_asked_again(verifiers, caplog):
    owner = psutil.Process(int(max(set(scored(verifiers, 60)) - {os.getpid()})))
    below = owner.children(recursive=True)
    (worker,) = [child for child in below if child.cmdline()[1:3] == ["-m", "megatron_ibpo.rewards.worker"]]
    calls = submitted(verifiers, 300)
    worker.kill()
    assert None not in [call.result(ANSWER_TIMEOUT_S).value for call in calls]
    assert eventually(lambda: verifiers.deaths == 1, seconds=60)
    assert "1 worker died" in caplog.text


def test_what_a_killed_actor_owes_is_scored_elsewhere_and_it_comes_back(verifiers):
    deaths = verifiers.deaths
    before = set(scored(verifiers, 60))
    victim = int(max(before - {os.getpid()}))
    calls = submitted(verifiers, 300)
    calls[60].result(ANSWER_TIMEOUT_S)
    os.kill(victim, signal.SIGKILL)
    owners = [call.result(ANSWER_TIMEOUT_S).value for call in calls]
    assert None not in owners
    assert verifiers.deaths == deaths + 1
    assert eventually(lambda: len(now := set(scored(verifiers, 60))) == 3 and victim not in now, seconds=60)
    assert verifiers.deaths == deaths + 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rm_type": "owners:nobody"}, ".*defines no 'nobody'"),
        # a server that is not there; a missing sandbox is found by the same check
        ({"rm_type": "code", "code_executor": "http://127.0.0.1:1"}, r"code rewards: .*127\.0\.0\.1:1"),
    ],
    ids=["it cannot load the function", "it cannot run programs"],
)
def test_a_node_that_cannot_score_is_refused_before_anything_starts(own, settings, says):
    here = ray.get_runtime_context().get_node_id()
    there = next(node for node in cluster_nodes() if node.node_id != here)
    data = DataConfig(reward_workers=1, reward_timeout=60.0, **settings)
    said = f"verifier of {there.address}: {says}"
    with Verifiers(own, [there], data) as verifiers, pytest.raises(WorkerError, match=said):
        verifiers.wait_ready()


def test_half_the_processors_of_a_node_score_responses():
    on = {cpus: worker_count(DataConfig(), cpus) for cpus in (1, 2, 5, 192)}
    assert on == {1: 2, 2: 2, 5: 2, 192: 96}
    assert worker_count(DataConfig(reward_workers=3), 192) == 3
    assert worker_count(DataConfig()) == max(2, len(os.sched_getaffinity(0)) // 2)


def test_a_node_alone_is_asked_without_a_detour(cluster):
    answer = Future()
    only = SimpleNamespace(submit=lambda target, arguments: answer)
    with Verifiers(only, cluster_nodes()[:1], DATA) as verifiers:
        verifiers.wait_ready()
        assert verifiers.submit(OWNER, ("what?", "42", "42", {})) is answer


@pytest.mark.slow
def test_what_a_lost_node_owes_is_scored_elsewhere_and_it_is_given_up(cluster, verifiers, caplog):
    deaths = verifiers.deaths
    calls = submitted(verifiers, 300)
    calls[60].result(ANSWER_TIMEOUT_S)
    cluster.remove_node()
    assert None not in [call.result(ANSWER_TIMEOUT_S).value for call in calls]
    assert eventually(
        lambda: "is not started again; the other nodes take over its work" in caplog.text, seconds=60
    )
    assert verifiers.deaths == deaths + 1
    assert len(set(scored(verifiers, 60))) == 2
