"""Try bad inputs of every family, count how they end, and show it."""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from support.bad_inputs.children import Outcome, in_child, run_command
from support.bad_inputs.families import FAMILIES, Maker
from support.bad_inputs.place import Place
from support.paths import ROOT

RESULTS = ROOT / "tools/results/bad_inputs.json"
WRONG = ("traceback", "hang", "above 2 GB")
VERSIONS = ("torch", "megatron-core", "transformers", "tokenizers", "gguf", "reasoning-gym", "pyarrow")


def main(words: Sequence[str], seed: int, count: int) -> int:
    """Try the inputs; `words` are [SEED [COUNT [FILE [FAMILY]]]].

    The machine may have other work where COUNT is given, as in the test suite. Returns the exit status: 0
    where the table was made.
    """
    seed, whole = int(words[0]) if words else seed, len(words) < 2
    count = int(words[1]) if len(words) > 1 else count
    save = Path(words[2]) if len(words) > 2 else RESULTS if whole else None
    _import_all()
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as directory:
        place = _made(Path(directory))
        only = words[3:] or list(FAMILIES)
        found = {name: _family(name, seed, count, place, not whole) for name in FAMILIES if name in only}
    _show(found)
    if save is not None:
        save.write_text(json.dumps(_about(seed) | {"families": found}, indent=1, ensure_ascii=False) + "\n")
    return 0


def _import_all() -> None:
    """Import what the commands import, so that a child does not: no threads are started by it."""
    import gguf  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import reasoning_gym  # noqa: F401
    from transformers import AutoTokenizer, LlamaForCausalLM, Qwen3ForCausalLM  # noqa: F401
    from transformers.integrations import ggml  # noqa: F401

    import megatron_ibpo.plan.run_plan
    import megatron_ibpo.plan.search
    import megatron_ibpo.report.page.static
    import megatron_ibpo.run.in_one_process
    import megatron_ibpo.run.on_cluster
    import megatron_ibpo.run.open
    import megatron_ibpo.study.study_run
    import megatron_ibpo.weights.formats.convert
    import megatron_ibpo.weights.formats.gguf  # noqa: F401

    tasks = os.listdir("/proc/self/task")
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks]
    assert len(tasks) == 1, f"threads {names}: a fork would leave their locks behind"


def _made(directory: Path) -> Place:
    place = Place(directory)
    for work in (place.make, place.make_run, place.make_saved):
        made = in_child(work, directory / "log", busy=True)
        assert made.verdict == "taken", made
    for words in place.valid():
        outcome = _ended(words, directory / "log", busy=True)
        assert outcome.verdict == "taken", (words, outcome)
    return place


def _family(name: str, seed: int, count: int, place: Place, busy: bool) -> dict[str, Any]:
    """Try the inputs of a family and return how they ended."""
    make, share = FAMILIES[name]
    inputs = max(1, round(share * count / sum(number for _, number in FAMILIES.values())))
    verdicts: dict[str, int] = dict.fromkeys(("refused", "taken", *WRONG), 0)
    wrong, slowest, peak = [], 0.0, 0
    started = time.monotonic()
    for number in range(inputs):
        words, outcome = tried(name, make, seed, number, place, busy)
        verdicts[outcome.verdict] += 1
        slowest, peak = max(slowest, outcome.seconds), max(peak, outcome.peak_bytes)
        if outcome.verdict in WRONG:
            said = outcome.said[-600:].replace(str(place.directory), "…")
            command = " ".join(words)[:300].replace(str(place.directory), "…")
            wrong.append({"number": number, "ended": outcome.verdict, "command": command, "said": said})
            print(f"{name} {number}: {outcome.verdict}: {command}\n{said}\n", flush=True)
    seconds = time.monotonic() - started
    print(f"{name}: {verdicts}, {seconds:.0f} s", flush=True)
    return {
        "inputs": inputs,
        **verdicts,
        "longest_seconds": round(slowest, 1),
        "peak_mb": round(peak / 1e6),
        "seconds": round(seconds, 1),
        "wrong": wrong,
    }


def tried(
    name: str, make: Maker, seed: int, number: int, place: Place, busy: bool
) -> tuple[list[str], Outcome]:
    """Return one input, and how the command that read it ended."""
    here = place.directory / "here"
    here.mkdir()
    before = os.getcwd()
    os.chdir(here)
    try:
        words = make(random.Random(f"{seed} {name} {number}"), place, here)
        return words, _ended(words, place.directory / "log", busy)
    finally:
        os.chdir(before)
        shutil.rmtree(here)


def _ended(words: list[str], log: Path, busy: bool) -> Outcome:
    return in_child(partial(run_command, words[0], words[1:]), log, busy)


def _about(seed: int) -> dict[str, Any]:
    versions = {name: version(name) for name in VERSIONS}
    processors = f"{os.cpu_count()} processors, {platform.machine()}"
    return {
        "seed": seed,
        "date": str(date.today()),
        "machine": processors,
        "python": sys.version.split()[0],
    } | {"versions": versions}


def _show(found: dict[str, dict[str, Any]]) -> None:
    columns = ("inputs", "refused", "taken", "traceback", "hang", "above 2 GB", "longest_seconds", "peak_mb")
    table = Table("family", *columns)
    for name, row in found.items():
        table.add_row(name, *(str(row[column]) for column in columns))
    totals = [str(sum(row[column] for row in found.values())) for column in columns[:6]]
    table.add_row(
        "all", *totals, *(str(max(row[column] for row in found.values())) for column in columns[6:])
    )
    Console(width=140).print(table)
