"""Token edit distance and masks compared with rapidfuzz, on the same pairs in the same run.

    python tools/bench_edit_distance.py --save tools/results/bench_edit_distance.json

IBPO_EDIT_DISTANCE_ISA=avx2 measures as a machine without AVX-512 would, as far as its instructions go.

Single thread, CPU time, medians, alternating sides, batches of many different pairs (a repeated pair would
train the branch predictor). rapidfuzz gets lists of ints, and in its best case strings with the true distance
as its hint; making those is not counted. Ids are uniform, Zipf-distributed over 150 000, or those of a
byte-level BPE trained on the source of Python's standard library, which is then also the text of the
sequences.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import bench
import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import Levenshtein
from rich.console import Console
from rich.table import Table

from megatron_ibpo import _edit_distance
from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.edit_distance import batch_distance, unmodified_mask

Ids = npt.NDArray[np.int64]
VOCABULARY = 150_000
UNRELATED = 1.0
EDITS = (0.02, 0.2, 0.6, UNRELATED)
PAIRS = {64: 2048, 128: 1024, 256: 1024, 512: 512, 4096: 96, 32768: 6}
"""Pairs of a batch by length, about as many as a training step corrects. The cost of a call itself, and of
cold caches after the other side's turn, is then small."""
DISTANCE_TARGETS = {
    64: (4, 4, 4, 4), 128: (4, 4, 4, 4), 256: (4, 4, 4, 4), 512: (8, 8, 8, 8),
    4096: (25, 25, 12, 12), 32768: (180, 60, 22, 18),
}  # fmt: skip
MASK_TARGETS = {512: 2, 4096: 10, 32768: 20}
BEST_CASE_TARGET = 1.5


@dataclass
class Arguments(bench.Saving):
    only: str = ""
    """Regular expression that the names of cases, such as zipf-4096-0.2, must contain."""
    repeats: int = 5
    """Turns of each side."""
    quick: bool = False
    """Few pairs and one turn, only to check that it runs."""


@dataclass
class Row:
    """One case; times are per pair, in microseconds of CPU."""

    case: str
    what: str
    ours_us: float
    peer: str
    peer_us: float
    times: float
    wanted: float | None
    gcups: float
    """Billions of table cells of the pair per second of this project's time."""


class Texts:
    """Sources of sequences, by name."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        weights = 1 / np.arange(1, VOCABULARY + 1)
        self._cumulative = np.cumsum(weights) / weights.sum()
        self._names = self.rng.permutation(VOCABULARY)
        self._real: Ids | None = None

    def sequence(self, kind: str, length: int) -> Ids:
        if kind == "uniform":
            return self.rng.integers(0, VOCABULARY, length)
        if kind == "zipf":
            return self._names[np.searchsorted(self._cumulative, self.rng.random(length))]
        if self._real is None:
            self._real = real_ids()
        start = self.rng.integers(0, len(self._real) - length)
        return self._real[start : start + length].copy()

    def pair(self, kind: str, length: int, edits: float) -> tuple[Ids, Ids]:
        """Return a sequence and a copy with this share of its tokens replaced, deleted or preceded by
        another."""
        a, replacements = self.sequence(kind, length), self.sequence(kind, length)
        if edits == UNRELATED:
            return a, replacements
        change = np.where(self.rng.random(length) < edits, self.rng.integers(1, 4, length), 0)
        copies = np.array([1, 1, 0, 2])[change]
        b = np.repeat(a, copies)
        changed = (change == 1) | (change == 3)
        b[(np.cumsum(copies) - copies)[changed]] = replacements[changed]
        return a, b


def real_ids() -> Ids:
    """Return the source of Python's standard library as tokens."""
    from tokenizers import ByteLevelBPETokenizer

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(file) for file in files], vocab_size=32_000, show_progress=False)
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return np.array(tokenizer.encode(text).ids)


def ragged(sequences: list[Ids]) -> tuple[Ids, Ids]:
    return np.concatenate(sequences), np.cumsum([0, *map(len, sequences)])


def medians(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the CPU seconds of each side."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            started = time.thread_time()
            run()
            seconds[name].append(time.thread_time() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def cases(arguments: Arguments) -> list[tuple[str, int, float, str]]:
    every = [
        (kind, length, edits, f"{kind}-{length}-{'unrelated' if edits == UNRELATED else edits}")
        for kind in ("zipf", "uniform", "real")
        for length in PAIRS
        for edits in EDITS
    ]
    return [case for case in every if re.search(arguments.only, case[-1])]


def compare(kind: str, length: int, edits: float, name: str, texts: Texts, arguments: Arguments) -> list[Row]:
    count = 2 if arguments.quick else PAIRS[length]
    pairs = [texts.pair(kind, length, edits) for _ in range(count)]
    a, b = ragged([a for a, _ in pairs]), ragged([b for _, b in pairs])
    lists = [(a.tolist(), b.tolist()) for a, b in pairs]
    strings = [("".join(map(chr, a)), "".join(map(chr, b))) for a, b in lists]
    hints = batch_distance(*a, *b, normalized=False).tolist()
    if hints != [Levenshtein.distance(*pair) for pair in lists]:
        raise AssertionError(f"{name}: the distances differ from rapidfuzz's")
    best = list(zip(strings, hints, strict=True))
    sides: dict[str, Callable[[], object]] = {
        "distance": lambda: batch_distance(*a, *b, normalized=False, num_threads=1),
        "rapidfuzz": lambda: [Levenshtein.distance(*pair) for pair in lists],
        "rapidfuzz best": lambda: [Levenshtein.distance(*pair, score_hint=hint) for pair, hint in best],
    }
    if length in MASK_TARGETS:
        sides["distance + mask"] = lambda: unmodified_mask(*a, *b, num_threads=1)
        sides["rapidfuzz editops"] = lambda: [Levenshtein.editops(*pair) for pair in lists]
    seconds = medians(sides, 1 if arguments.quick else arguments.repeats)
    cells = statistics.mean(len(a) * len(b) for a, b in pairs)

    def row(what: str, peer: str, wanted: float | None) -> Row:
        ours = seconds[what] / count
        theirs = seconds[peer] / count
        return Row(name, what, ours * 1e6, peer, theirs * 1e6, theirs / ours, wanted, cells / ours / 1e9)

    rows = [
        row("distance", "rapidfuzz", DISTANCE_TARGETS[length][EDITS.index(edits)]),
        row("distance", "rapidfuzz best", BEST_CASE_TARGET),
    ]
    if length in MASK_TARGETS:
        rows.append(row("distance + mask", "rapidfuzz editops", MASK_TARGETS[length]))
    return rows


def compare_instruction_sets(texts: Texts, arguments: Arguments) -> list[Row]:
    """Compare the instruction sets, each one forced, at 4k and 32k."""
    rows = []
    for kind, length, edits, name in cases(arguments):
        if kind != "zipf" or length < 4096:
            continue
        for isa in _edit_distance.supported_isas():
            os.environ["IBPO_EDIT_DISTANCE_ISA"] = isa
            (plain, *_) = compare(kind, length, edits, f"{name}-{isa}", texts, arguments)
            plain.wanted = {"avx2": 6 if (length, edits) == (32768, UNRELATED) else None, "portable": 2}.get(
                isa
            )
            if isa != "avx512":
                rows.append(plain)
        del os.environ["IBPO_EDIT_DISTANCE_ISA"]
    return rows


def scaling(texts: Texts, arguments: Arguments) -> dict[str, float]:
    """Return wall time on one thread over that on two."""
    speedups = {}
    for length, edits in ((512, 0.2), (4096, 0.2), (32768, UNRELATED)):
        count = 4 if arguments.quick else 8 * PAIRS[length]
        pairs = [texts.pair("zipf", length, edits) for _ in range(count)]
        a, b = ragged([a for a, _ in pairs]), ragged([b for _, b in pairs])
        seconds: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(1 if arguments.quick else arguments.repeats):
            for threads, values in seconds.items():
                started = time.perf_counter()
                batch_distance(*a, *b, num_threads=threads)
                values.append(time.perf_counter() - started)
        speedups[f"zipf-{length}-{edits}"] = statistics.median(seconds[1]) / statistics.median(seconds[2])
    return speedups


def full_context() -> dict[str, float]:
    """Measure 256k tokens with 2 % edits, distance and mask: CPU milliseconds, and the process's largest
    growth in MiB.

    It runs in a fresh process, whose high-water mark of resident memory is reset before the call.
    """
    code = """
import numpy as np, sys, time
sys.path.insert(0, sys.argv[1])
from bench_edit_distance import Texts
from megatron_ibpo.edit_distance import unmodified_mask
def resident(field):
    return int(next(l for l in open("/proc/self/status") if l.startswith(field)).split()[1]) / 1024
texts = Texts(1)
pairs = [texts.pair("zipf", 262_144, 0.02) for _ in range(3)]
unmodified_mask([[1, 2]], None, [[1]], None, num_threads=1)
open("/proc/self/clear_refs", "w").write("5")
before, times = resident("VmRSS"), []
for i, (a, b) in enumerate(pairs):
    ends = [np.array([0, len(x)]) for x in (a, b)]
    started = time.thread_time()
    unmodified_mask(a, ends[0], b, ends[1], num_threads=1)
    times.append(time.thread_time() - started)
    if i == 0:
        grown = resident("VmHWM") - before
print(sorted(times)[1] * 1000, grown)
"""
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    milliseconds, grown = map(float, output.split())
    return {"cpu_ms": milliseconds, "grown_mib": grown}


def show(rows: list[Row], console: Console) -> None:
    table = Table("case", "what", "µs a pair", "GCUPS", "peer", "its µs", "times", "wanted")
    for row in rows:
        missed = row.wanted is not None and row.times < row.wanted
        table.add_row(
            row.case,
            row.what,
            f"{row.ours_us:.2f}",
            f"{row.gcups:.1f}",
            row.peer,
            f"{row.peer_us:.2f}",
            f"[red]{row.times:.1f}[/]" if missed else f"{row.times:.1f}",
            "" if row.wanted is None else f"{row.wanted:g}",
        )
    console.print(table)


def main(arguments: Arguments) -> None:
    console = Console(width=130 if not sys.stdout.isatty() else None)
    texts = Texts(seed=0)
    rows: list[Row] = []
    for case in cases(arguments):
        rows += compare(*case, texts, arguments)
        console.print(f"{case[-1]}: {rows[-1].what} {rows[-1].times:.1f} times", style="dim")
    forced_isa = os.environ.get("IBPO_EDIT_DISTANCE_ISA")
    if forced_isa is None:
        rows += compare_instruction_sets(texts, arguments)
    show(rows, console)
    isas = _edit_distance.supported_isas()
    results: dict[str, object] = {
        "machine": machine("rapidfuzz", "numpy") | {"instruction_sets": isas},
        "isa": forced_isa or isas[0],
        "rows": [asdict(row) for row in rows],
        "two_threads": scaling(texts, arguments),
        "full_context": full_context(),
    }
    console.print("two threads over one:", results["two_threads"])
    console.print("256k tokens, 2 % edits, distance + mask (wanted 60 ms, 8 MiB):", results["full_context"])
    bench.write(arguments.save, results)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
