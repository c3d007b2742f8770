"""The driver ends the right processes when engines die, and some deaths end a run; with stand-ins."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ibpo.cluster import engine_handles
from megatron_ibpo.cluster import engines as module
from megatron_ibpo.cluster.engine_handles import Member, RemoteEngine
from megatron_ibpo.cluster.engines import Engines
from megatron_ibpo.engines import EngineError
from megatron_ibpo.weights.transfer.update_order import UpdateOrder


class Process:
    name, built = "engine", None

    def __init__(self):
        self.killed = False

    def call(self, *_):
        return None

    def kill(self):
        self.killed = True


class StandsStill(Process):
    async def call(self, *_):
        await asyncio.Event().wait()


@pytest.fixture
def engines(monkeypatch):
    monkeypatch.setattr(module, "result", lambda *_: None)
    order = UpdateOrder(version=0, sleeping=False, check=False, timeout=1.0)
    nothing = dict.fromkeys(("trainers", "placement", "group")) | {"engine": "vllm"}
    settings = SimpleNamespace(transport="gloo", sleep_mode=False, extra_arguments={})
    found: Any = Engines(**nothing, settings=settings, logs=Path("logs"), order=order, start_timeout=1.0)
    found.members = {index: Member(index, Process()) for index in range(3)}
    return found


def test_an_update_ends_the_engines_that_died_in_it_and_not_what_took_their_places_meanwhile(
    engines, monkeypatch
):
    first, successor = {index: member.host for index, member in engines.members.items()}, Process()

    def update(*_):
        engines.members[1].host = successor  # the sampler noticed first
        return 0, 0, {0: "it hangs", 1: "it has ended"}

    monkeypatch.setattr(engines, "_catch_up", update)
    engines.update_weights(1)
    assert [first[0].killed, successor.killed, first[2].killed] == [True, False, False]


def test_an_engine_whose_process_stands_still_is_ended_by_force_so_that_nobody_waits_for_it_again(
    engines, monkeypatch
):
    monkeypatch.setattr(engine_handles, "END_TIMEOUT_S", 0.01)
    engines.members[1].host = StandsStill()
    asyncio.run(RemoteEngine(engines.members[1]).kill("it hangs"))
    assert [engines.members[index].host.killed for index in range(3)] == [False, True, False]


def test_three_deaths_within_a_minute_of_work_and_one_step_end_the_run(engines):
    for version in (1, 1, 2, 2):
        engines.order = replace(engines.order, version=version)
        engines._count_death(engines.members[0])
    with pytest.raises(EngineError, match="engine 0 died 3 times within 0 seconds of work"):
        engines._count_death(engines.members[0])


def test_engines_that_died_before_their_trainers_did_start_anew(engines):
    for _ in range(2):
        engines._count_death(engines.members[1])
    engines.trainers = type("Trainers", (), {"all": lambda *_: None})()
    engines.placement = type("Placement", (), {"engines": ()})()
    engines.meet_trainers()
    engines._count_death(engines.members[1])
