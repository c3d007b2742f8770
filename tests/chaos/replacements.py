"""The engines of one driver's life: which are at work, and which must not die again now."""

import re
import time

from chaos.trial import ENGINES
from megatron_ibpo.cluster.deaths import MOST_DEATHS
from megatron_ibpo.cluster.engines import WITHIN_S

AT_WORK = re.compile(rb"pid=(\d+)\).*reset prefix cache")  # comes with every update of weights
MARGIN_S = 15.0  # the program measures work a little differently


class Engines:
    def __init__(self, logs):
        self.logs, self.since = logs, time.monotonic()
        self.under_way = {}  # engine → when it was hit, its process then, size of its log then, its record
        self.worked, self.joined = {}, {}  # engine → seconds of work before each death; when it joined last

    def hit(self, index, pid, at, record):
        """Note that this engine, or what holds it, was hit; its record gets the time until one has joined."""
        log = self._log(index)
        self.worked.setdefault(index, []).append(at - self.joined.get(index, self.since))
        self.under_way[index] = at, pid, log.stat().st_size if log.exists() else 0, record
        record |= {"engines_left": ENGINES - len(self.under_way), "replaced_seconds": None}

    def look(self):
        """Record the engines that have joined since."""
        for index, (at, old, size, record) in list(self.under_way.items()):
            with self._log(index).open("rb") as log:
                log.seek(size)
                joined = any(int(pid) != old for pid in AT_WORK.findall(log.read()))
            if joined:
                self.joined[index] = time.monotonic()
                record["replaced_seconds"] = round(self.joined[index] - at, 2)
                del self.under_way[index]

    def spared(self):
        """Engines that are not there, and those whose next death would rightly end the run."""
        now, spared = time.monotonic(), set(self.under_way)
        for index, worked in self.worked.items():
            last = [*worked, now - self.joined.get(index, self.since)][-MOST_DEATHS:]
            if len(last) == MOST_DEATHS and sum(last[1:]) < WITHIN_S + MARGIN_S:
                spared.add(index)
        return spared

    def _log(self, index):
        return self.logs / f"engine_{index}.log"
