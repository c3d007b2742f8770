"""Replacements of engines and trainers that were hit: how soon they work, how long they took to start."""

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from chaos.processes import actors_among, below, has_torch, title
from chaos.trial import ENGINES
from megatron_ibpo.cluster.deaths import MOST_DEATHS
from megatron_ibpo.cluster.engines import WITHIN_S

READY = re.compile(rb"pid=(\d+)\).*init engine")
AT_WORK = re.compile(rb"pid=(\d+)\).*reset prefix cache")
"""Comes with every update of weights, and so when an engine joins those that are at work."""
LOOK_EVERY_S = 0.25
MARGIN_S = 15.0
"""To the deaths that the program takes for a reason to stop: it measures work a little differently."""


@dataclass
class Replacement:
    hit: float  # time.monotonic() of the fault
    old: int  # process of the engine that was hit
    read_from: int  # bytes of its log that were there then
    ready: float | None = None
    start_seconds: float | None = None  # seconds from the new process's creation until vLLM was ready in it
    seconds: float | None = None  # seconds from the fault until the new engine had joined


@dataclass
class Engines:
    logs: Path
    since: float  # time.monotonic() when they began to work
    under_way: dict[int, Replacement] = field(default_factory=dict)
    worked: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of work before each death, by engine."""
    joined: dict[int, float] = field(default_factory=dict)

    def hit(self, index: int, pid: int, at: float) -> Replacement:
        log = self._log(index)
        self.worked.setdefault(index, []).append(at - self.joined.get(index, self.since))
        size = log.stat().st_size if log.exists() else 0
        self.under_way[index] = Replacement(at, pid, size)
        return self.under_way[index]

    def look(self) -> None:
        for index, one in list(self.under_way.items()):
            with self._log(index).open("rb") as log:
                log.seek(one.read_from)
                said = log.read()
            ready = [int(pid) for pid in READY.findall(said) if int(pid) != one.old]
            if ready and one.ready is None:
                one.ready = time.monotonic()
                one.start_seconds = _age(ready[-1])
            if one.ready is not None and any(int(pid) == ready[-1] for pid in AT_WORK.findall(said)):
                one.seconds = time.monotonic() - one.hit
                self.joined[index] = time.monotonic()
                del self.under_way[index]

    def working(self) -> int:
        return ENGINES - len(self.under_way)

    def spared(self) -> set[int]:
        """Engines that are not there, and those whose next death would rightly end the run."""
        now, spared = time.monotonic(), set(self.under_way)
        for index, worked in self.worked.items():
            last = [*worked, now - self.joined.get(index, self.since)][-MOST_DEATHS:]
            if len(last) == MOST_DEATHS and sum(last[1:]) < WITHIN_S + MARGIN_S:
                spared.add(index)
        return spared

    def _log(self, index: int) -> Path:
        return self.logs / f"engine_{index}.log"


def _age(pid: int) -> float | None:
    try:
        return time.time() - psutil.Process(pid).create_time()
    except psutil.Error:
        return None


class NewTrainer:
    def __init__(self, driver: int) -> None:
        self.start_seconds: float | None = None
        """Seconds from the first sight of its process until its part of the model was built."""
        self._driver = driver
        self._known = {one.pid for one in actors_among(below(driver))}
        self._seen: dict[int, float] = {}
        self._building: set[int] = set()
        self._next = time.monotonic()

    def look(self) -> None:
        """Called often. Ray shows in a process's title what it runs. It holds processes ready, so that a new
        trainer's may be older than the fault."""
        now = time.monotonic()
        if self.start_seconds is not None or now < self._next:
            return
        self._next = now + LOOK_EVERY_S
        titles = {
            one.pid: title(one) for one in actors_among(below(self._driver)) if one.pid not in self._known
        }
        for pid, said in titles.items():
            self._seen.setdefault(pid, now)
            if ".build" in said:
                self._building.add(pid)
            elif pid in self._building and has_torch(pid):
                self.start_seconds = now - self._seen[pid]
