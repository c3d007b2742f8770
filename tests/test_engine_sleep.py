"""Engines on the trainers' GPUs: who gives memory back before whom, with stand-ins for the processes."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ibpo.cluster import engines as module
from megatron_ibpo.cluster.engines import Engines
from megatron_ibpo.cluster.host import ProcessDiedError
from megatron_ibpo.config import Config
from megatron_ibpo.cost import Spent
from megatron_ibpo.loop import Progress, Run
from megatron_ibpo.report import Stages
from megatron_ibpo.rollout import EngineError
from megatron_ibpo.weights.transfer.order import Order


class Process:
    """An engine's, which notes in `events` what it is asked."""

    built = None

    def __init__(self, index, events):
        self.name, self.events, self.faults = f"engine {index}", events, set()

    def call(self, call, *arguments, **_):
        self.events.append((self.name, call, *arguments))
        return EngineError("no") if self.faults & {call, *arguments} else None

    def kill(self):
        self.events.append((self.name, "killed"))


@pytest.fixture
def engines(monkeypatch):
    """Two that sleep, and in `events` all that is asked of them and of the trainers."""

    def result(answer, *_):
        if isinstance(answer, Exception):
            raise answer

    monkeypatch.setattr(module, "result", result)
    monkeypatch.setattr(Engines, "events", [], raising=False)
    trainers = SimpleNamespace(all=lambda method: Engines.events.append(("trainers", method)))
    found = Engines(
        trainers=trainers,
        placement=SimpleNamespace(engines=("a slot", "a slot")),
        group=None,
        settings=SimpleNamespace(sleep_mode=True, transport="ipc"),
        logs=Path("logs"),
        order=Order(version=0, sleeping=True, check=False, timeout=1.0),
        start_timeout=1.0,
    )
    found.hosts = {index: Process(index, Engines.events) for index in range(2)}
    monkeypatch.setattr(found, "_catch_up", partial(updated, Engines.events))
    return found


def updated(events, engines, order):
    """All engines get the weights that they are to have."""
    events.append(("update", *engines, order))
    return 0, 0, {}


def update(*engines, version=0):
    return ("update", *engines, Order(version=version, sleeping=True, check=False, timeout=1.0))


def test_engines_that_wake_get_the_weights_that_they_had_before_and_wake_once(engines):
    engines.order = replace(engines.order, version=3)
    engines.wake()
    assert engines.events == [update(0, 1, version=3)]
    assert not engines.order.sleeping
    engines.wake()
    assert len(engines.events) == 1


def test_an_engine_that_does_not_sleep_is_ended(engines):
    engines.wake()
    engines.events.clear()
    engines.hosts[1].faults.add("sleep")
    engines.sleep()
    assert engines.events[:2] == [("engine 0", "call", "sleep"), ("engine 1", "call", "sleep")]
    assert engines.events[-1] == ("engine 1", "killed")
    assert ("engine 0", "killed") not in engines.events


@pytest.mark.parametrize("asked", ["update_weights", "wake"])
def test_engines_sleep_again_when_a_trainer_dies_over_an_update(engines, monkeypatch, asked):
    def died(*_):
        raise ProcessDiedError("trainer 1")

    monkeypatch.setattr(engines, "_catch_up", died)
    with pytest.raises(ProcessDiedError):
        engines.update_weights(3) if asked == "update_weights" else engines.wake()
    assert engines.events == [("engine 0", "call", "sleep"), ("engine 1", "call", "sleep")]
    assert engines.order.sleeping


def test_an_engine_that_comes_up_beside_sampling_sleeps_with_the_others_and_wakes_to_join(
    engines, monkeypatch
):
    """Training waits for it: it needs the room that trainers leave while others sample."""
    up = threading.Event()
    monkeypatch.setattr(engines, "_start_again", lambda _: up.wait(20))
    engines.wake()
    engines.events.clear()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    revived = asyncio.run_coroutine_threadsafe(engines.revive(1), loop)
    while not engines.starting:
        time.sleep(0.01)
    sleeping = threading.Thread(target=engines.sleep)
    sleeping.start()
    assert engines.events == []
    up.set()
    sleeping.join(20)
    assert engines.events == [("engine 0", "call", "sleep"), ("engine 1", "call", "sleep")]
    engines.events.clear()
    engines.admit()
    revived.result(20)
    assert engines.events == [update(1)]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


def test_trainers_that_start_beside_engines_that_are_awake_make_room(engines):
    engines.trainers.all = lambda *call: engines.events.append(call)
    engines.meet_trainers()
    assert engines.events == [("open_transport", "ipc")]
    engines.wake()
    engines.events.clear()
    engines.meet_trainers()
    assert engines.events == [("open_transport", "ipc"), ("make_room",)]


def test_checkpoints_and_exports_are_gathered_while_engines_sleep(tmp_path):
    events = []

    def noting(*names):
        return SimpleNamespace(**{name: lambda *_, n=name, **__: events.append(n) or True for name in names})

    config = Config()
    config.run.run_dir, config.run.export_interval, config.run.save_interval = tmp_path, 2, 4
    run = Run(
        config=config,
        task=None,
        rollouts=SimpleNamespace(state=dict),
        journal=SimpleNamespace(pending_bytes=0, saved=lambda _: None),
        policy=noting("saved", "save", "save_hf"),
        engines=noting("sleep"),
        reporter=SimpleNamespace(note=print),
        stages=Stages(),
        cost=SimpleNamespace(spent=Spent()),
        progress=Progress(),
    )
    for step in range(1, 5):
        run.progress.step = step
        run.save_if_due()
    assert events == [
        "saved",
        *("saved", "sleep", "save_hf"),
        "saved",
        *("saved", "sleep", "save", "sleep", "save_hf"),
    ]
