"""Engines that sleep, die and join: in which order processes are asked, with stand-ins for these."""

import asyncio
import os
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_ibpo.cluster import engine_processes
from megatron_ibpo.cluster.deaths import ProcessDiedError, exit_reason, record_peak_memory
from megatron_ibpo.cluster.engine_processes import EngineProcesses, Member, RemoteEngine
from megatron_ibpo.cluster.engines import Engines
from megatron_ibpo.config import Config
from megatron_ibpo.engines import EngineError
from megatron_ibpo.report import Stages
from megatron_ibpo.report.run_dir import DiskWait
from megatron_ibpo.run import saving
from megatron_ibpo.run import steps as loop
from megatron_ibpo.run.cost import Spent
from megatron_ibpo.run.state import Progress, Run
from megatron_ibpo.weights.transfer.link import UpdateOrder
from support.waiting import eventually

SEND_WEIGHTS = EngineProcesses.send_weights


class Process:
    """An engine's, which notes in `events` what it is asked."""

    built = None

    def __init__(self, name, events):
        self.name, self.events, self.faults = name, events, set()

    def call(self, call, *arguments, **_):
        self.events.append((self.name, call, *arguments))
        if "stands still" in self.faults:
            return asyncio.Event().wait()
        return EngineError("no") if self.faults & {call, *arguments} else None

    def kill(self):
        self.events.append((self.name, "killed"))


@pytest.fixture
def engines(monkeypatch):
    """Two that sleep, and in `events` all that is asked of them and of the trainers; `lost` are the deaths of
    trainers over updates that engine 1 is in."""
    events = []

    def result(answer, *_):
        if isinstance(answer, Exception):
            raise answer

    def send_weights(_, asked, order):
        events.append(("update", *asked, order))
        if 1 in asked and found.lost:
            raise found.lost.pop()
        return 0, 0, {}

    monkeypatch.setattr(engine_processes, "result", result)
    monkeypatch.setattr(EngineProcesses, "send_weights", send_weights)
    processes: Any = EngineProcesses(
        trainers=SimpleNamespace(
            call_all=lambda method, *_: events.append(("trainers", method)),
            close=lambda: events.append(("trainers", "close")),
        ),
        placement=SimpleNamespace(engines=("a slot", "a slot")),
        group=None, engine="vllm", logs=Path("logs"), start_timeout=1.0,
        settings=SimpleNamespace(sleep_mode=True, transport="ipc", drafts=False, drafts_with_mtp=False),
        members={index: Member(index, Process(f"engine {index}", events)) for index in range(2)},
    )  # fmt: skip
    found: Any = Engines(processes, update()[-1])
    found.events, found.lost = events, []
    return found


def update(*engines, version=0):
    return ("update", *engines, UpdateOrder(version=version, sleeping=True, check=False, timeout=1.0))


SLEEP = [("engine 0", "call", "sleep"), ("engine 1", "call", "sleep")]


def killed(engines):
    return [event[0] for event in engines.events if event[1] == "killed"]


def test_waking_engines_get_their_last_weights_once(engines):
    engines.order = replace(engines.order, version=3)
    engines.wake()
    assert engines.events == [update(0, 1, version=3)]
    assert not engines.order.sleeping
    engines.wake()
    assert len(engines.events) == 1


def test_an_engine_that_cannot_sleep_or_stands_still_is_killed(engines, monkeypatch):
    engines.wake()
    engines.events.clear()
    engines.members[1].host.faults.add("sleep")
    engines.sleep()
    assert engines.events[:2] == SLEEP
    assert killed(engines) == ["engine 1"]
    monkeypatch.setattr(engine_processes, "END_TIMEOUT_S", 0.01)
    engines.members[0].host.faults.add("stands still")
    asyncio.run(RemoteEngine(engines.members[0]).kill("it hangs"))
    assert killed(engines) == ["engine 1", "engine 0"]


def test_an_update_kills_its_dead_engines_but_not_their_successors(engines, monkeypatch):
    def update(*_):
        engines.members[1].host = Process("successor", engines.events)  # the sampler noticed first
        return 0, 0, {0: "it hangs", 1: "it has ended"}

    monkeypatch.setattr(EngineProcesses, "send_weights", update)
    engines.update_weights(1)
    assert killed(engines) == ["engine 0"]


def use_trainers(engines, call_each, monkeypatch):
    """Have updates go to stand-ins for the trainers, who are asked by `call_each`."""
    monkeypatch.setattr(EngineProcesses, "send_weights", SEND_WEIGHTS)
    engines.processes.trainers.call_each = call_each
    placement = engines.processes.placement
    placement.owners, placement.trainers = [0, 0, 0], ["a slot"]


@pytest.mark.parametrize("fails", [1, 2])
def test_an_engine_that_failed_an_update_gets_a_second_pass(engines, monkeypatch, fails):
    """Engine 1 fails so often. The one that took the weights is not asked again."""
    passes = []

    def call_each(method, calls):
        _, asked, *_ = calls[0]
        passes.append((method, asked))
        failures = {1: "its memory was full"} if 1 in asked and len(passes) <= 2 * fails else {}
        if method == "connect":
            return [{}]
        return [SimpleNamespace(failures=failures, num_bytes=10 * len(asked), needed_bytes=10 * len(asked))]

    use_trainers(engines, call_each, monkeypatch)
    metrics = engines.update_weights(4)
    assert passes == [("connect", [0, 1]), ("send", [0, 1]), ("connect", [1]), ("send", [1])]
    assert metrics["weight_update_bytes"] == 30
    assert killed(engines) == (["engine 1"] if fails == 2 else [])


def test_the_second_pass_skips_the_successor_of_a_dead_engine(engines, monkeypatch):
    """The sampler replaces engine 1 between the first pass, in which it fails, and the second."""
    asked = []

    def call_each(method, calls):
        asked.append((method, [link.host.name for link in calls[0][0].values()]))
        if method == "connect":
            return [{}]
        engines.members[1].replaced_by(Process("successor", engines.events))
        return [SimpleNamespace(failures={1: "it hangs"}, num_bytes=10, needed_bytes=10)]

    use_trainers(engines, call_each, monkeypatch)
    engines.update_weights(4)
    assert asked == [("connect", ["engine 0", "engine 1"]), ("send", ["engine 0", "engine 1"])]
    assert killed(engines) == []
    assert [engines.members[index].connected for index in (0, 1)] == [True, False]


def test_three_deaths_within_a_minute_and_one_step_end_training(engines):
    for version in (1, 1, 2, 2):
        engines.order = replace(engines.order, version=version)
        engines._count_death(engines.members[0])
    with pytest.raises(EngineError, match="engine 0 died 3 times within 0 seconds of work"):
        engines._count_death(engines.members[0])
    for _ in range(2):
        engines._count_death(engines.members[1])
    engines.meet_trainers()  # engines that died before their trainers did start anew
    engines._count_death(engines.members[1])


@pytest.mark.parametrize("asked", ["update_weights", "wake"])
def test_engines_sleep_again_when_a_trainer_dies_over_an_update(engines, asked):
    engines.lost.append(ProcessDiedError("trainer 1"))
    with pytest.raises(ProcessDiedError):
        engines.update_weights(3) if asked == "update_weights" else engines.wake()
    assert engines.events[1:] == [("trainers", "close"), *SLEEP], "no trainer takes memory meanwhile"
    assert engines.order.sleeping


def test_an_engine_revived_during_sampling_sleeps_before_it_joins(engines, monkeypatch):
    """Training waits for it: it needs the room that trainers leave while others sample."""
    up = threading.Event()
    monkeypatch.setattr(engines.processes, "start_again", lambda _: up.wait(20))
    engines.wake()
    engines.events.clear()

    async def work():
        revived = asyncio.create_task(engines.revive(1))
        while not engines.members[1].starting:
            await asyncio.sleep(0.01)
        sleeping = asyncio.create_task(asyncio.to_thread(engines.sleep))
        await asyncio.sleep(0.1)
        assert engines.events == []
        up.set()
        await asyncio.wait_for(sleeping, 20)
        assert engines.events == SLEEP
        engines.admit()
        await asyncio.wait_for(revived, 20)
        assert engines.events == [*SLEEP, update(1)]

    asyncio.run(work())


def test_an_engine_that_died_is_not_started_beside_training(engines, monkeypatch):
    """Its death may be found when the others have gone to sleep, which is when trainers train."""
    started = threading.Event()
    monkeypatch.setattr(engines.processes, "start_again", lambda _: started.set())

    async def work():
        revived = asyncio.create_task(engines.revive(1))
        await asyncio.sleep(3 * engine_processes.LOOK_EVERY_S)
        assert not started.is_set()
        engines.sleep()  # and is not waited for
        engines.wake()
        assert await asyncio.to_thread(started.wait, 20)
        revived.cancel()

    asyncio.run(work())


def test_engine_starts_and_weight_transfers_never_overlap(engines, monkeypatch):
    """Engine 1 is up again while engine 0 starts, and a third engine dies while these two get weights."""
    steps, up, sent = [], threading.Event(), threading.Event()

    def call_each(method, calls):
        steps.append(f"trainers {method}")
        if method == "send":
            sent.wait(20)
            steps.append("sent")
        return [{}] if method == "connect" else [SimpleNamespace(failures={}, num_bytes=1, needed_bytes=1)]

    def start(member):
        steps.append(f"engine {member.index} starts")
        up.wait(20)
        steps.append(f"engine {member.index} is up")

    use_trainers(engines, call_each, monkeypatch)
    monkeypatch.setattr(engines.processes, "start_again", start)
    engines.order = replace(engines.order, sleeping=False)
    engines.members[1].absent, engines.members[1].join_future = True, Future()
    engines.members[2] = Member(2, Process("engine 2", engines.events))

    async def work():
        first = asyncio.create_task(engines.revive(0))
        while not steps:
            await asyncio.sleep(0.01)
        engines.admit()
        assert steps == ["engine 0 starts"], "engine 1 joins later, and sampling does not wait"
        up.set()
        while engines.members[0].join_future is None:
            await asyncio.sleep(0.01)
        joining = asyncio.create_task(asyncio.to_thread(engines.admit))
        while "trainers send" not in steps:
            await asyncio.sleep(0.01)
        last = asyncio.create_task(engines.revive(2))
        await asyncio.sleep(3 * engine_processes.LOOK_EVERY_S)
        sent.set()
        await asyncio.wait_for(asyncio.gather(joining, first), 20)
        while engines.members[2].join_future is None:
            await asyncio.sleep(0.01)
        last.cancel()

    asyncio.run(work())
    of_first, of_last = ([f"engine {n} starts", f"engine {n} is up"] for n in (0, 2))
    assert steps == [*of_first, "trainers connect", "trainers send", "sent", *of_last]


@pytest.fixture
def losing_a_trainer(engines):
    """Engine 1 is up again and to join, and the first trainer that is to give it weights dies over it, when
    it may be awake."""
    engines.wake()
    engines.members[1].absent, engines.members[1].join_future = True, Future()
    engines.events.clear()
    engines.lost.append(ProcessDiedError("trainer 1 was killed"))
    return engines


@pytest.mark.parametrize("asked", ["admit", "update_weights"])
def test_a_joining_engine_sleeps_if_trainers_die_while_others_sample(losing_a_trainer, asked):
    engines = losing_a_trainer
    if asked == "update_weights":
        engines.order = replace(engines.order, sleeping=True)
        engines.update_weights(0)
    else:
        engines.admit()
    assert engines.events[-3:] == [update(1), ("trainers", "close"), ("engine 1", "call", "sleep")]
    engines.events.clear()
    engines.admit()
    assert engines.events == [], "there are no trainers to ask"
    engines.sleep()
    engines.meet_trainers()
    engines.wake()
    assert engines.events[-3:] == [("trainers", "open_transport"), update(0), update(1)]
    assert not any(member.absent for member in engines.members.values())


def test_without_sampling_engines_trainers_restart_and_a_joining_engine_sleeps(losing_a_trainer):
    engines = losing_a_trainer
    del engines.members[0]
    with pytest.raises(ProcessDiedError):
        engines.admit()
    assert engines.events == [update(1), ("trainers", "close"), ("engine 1", "call", "sleep")]
    engines.sleep()  # as the start of trainers does
    engines.meet_trainers()
    engines.admit()
    assert not any(member.absent for member in engines.members.values())
    engines.events.clear()
    engines.sleep()
    assert engines.events == [("engine 1", "call", "sleep")], "it was awake"


def run_of(run_dir):
    config, asked = Config(), mock.Mock()
    config.run.run_dir = run_dir
    run = Run(
        config=config, foundation=None, data=None, policy=asked.policy, engines=asked.engines,
        rollouts=SimpleNamespace(state=dict, past=lambda steps, _: [[] for _ in steps]),
        journal=SimpleNamespace(pending_bytes=0, saved=lambda _: None),
        reporter=SimpleNamespace(note=print), disk=DiskWait(0, print),
        stages=Stages(), cost=SimpleNamespace(spent=Spent()), progress=Progress(),
    )  # fmt: skip
    return run, asked


def names(asked):
    return " ".join(name.split(".")[-1] for name, *_ in asked.mock_calls)


@pytest.mark.parametrize("dies_over", ["saved", "update"])
def test_engines_sleep_before_trainers_that_died_start_again(tmp_path, dies_over):
    """This holds whatever they died over: after an update of the engines these are awake."""
    run, asked = run_of(tmp_path)
    asked.policy.take_passes = list
    died, done = ProcessDiedError("trainer 0 was killed"), {"updates_skipped": 0.0}
    getattr(asked.policy, dies_over).side_effect = [died, done]
    saving.save_if_due(run) if dies_over == "saved" else loop.update(run, [])
    assert names(asked).startswith(f"{dies_over} sleep restart meet_trainers ")
    assert names(asked).endswith(dies_over), "what it died over is done again"


def test_checkpoints_and_exports_are_gathered_while_engines_sleep(tmp_path):
    run, asked = run_of(tmp_path)
    run.config.run.export_interval, run.config.run.save_interval = 2, 4
    for run.progress.step in range(1, 5):
        saving.save_if_due(run)
    assert names(asked) == "saved saved sleep save_hf saved saved sleep save sleep save_hf"


def test_the_exit_reason_tells_a_kill_from_a_crash(tmp_path):
    # as Ray 2.60 writes it
    who = "The actor died.\n\tclass_name: P\n\tpid: 4711\n\tnamespace: n\n\tip: 10.0.0.7\n"
    no_word = who + "The actor is dead. Worker unexpectedly exits with a connection error code 2."
    of_worker = tmp_path / "worker-1-2-4711.err"
    of_worker.write_text(":actor_name:P\n")
    (tmp_path / "peak-4711").write_text(str(3 * 1024**2))
    said = exit_reason(no_word, tmp_path)
    assert said.startswith("was killed by SIGKILL (process 4711 on 10.0.0.7). Most often that is the")
    assert "its memory had reached 3.0 of " in said
    of_worker.write_text("*** SIGSEGV received at time=1 on cpu 1 ***\n")
    assert exit_reason(no_word, tmp_path) == "crashed with SIGSEGV (process 4711 on 10.0.0.7)"
    there = exit_reason(no_word, None)  # of another node less is known
    assert there.startswith("was killed by SIGKILL, or crashed in native code (process 4711 on 10.0.0.7).")
    assert there.endswith("see dmesg on that node")
    asked = exit_reason(who + "exit code 1. The process receives a SIGTERM.", None)
    assert asked == "was ended by SIGTERM (process 4711 on 10.0.0.7)"
    by_us = exit_reason(who + "The actor is dead because it was killed by `ray.kill`.", tmp_path)
    assert by_us == "was ended by the run itself (process 4711 on 10.0.0.7)"
    of_node = "The actor died.\nThe actor died because its node has died."
    assert exit_reason(of_node, None).startswith("has ended: The actor died because its")
    assert exit_reason("", None) == "has ended: the reason is not known"


def test_a_process_notes_how_much_memory_it_has_had(tmp_path):
    record_peak_memory(tmp_path, os.getpid())
    peak = tmp_path / f"peak-{os.getpid()}"
    assert eventually(lambda: peak.exists() and int(peak.read_text() or 0) > 10 * 1024, seconds=5)
