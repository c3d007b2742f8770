"""Time and memory until the first batch of a large JSONL file.

    python tools/bench_data.py --directory runs --save tools/results/bench_data.json

Each opening is a separate process. "Cold" follows dropping the file from the page cache, "warm" follows
reading it. The file is made before the clock starts, and deleted again.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import bench

from megatron_ibpo.basics.entry_point import run_tool

TOKENIZER = Path(__file__).resolve().parents[1] / "examples" / "tiny_qwen3"
ROW_BYTES = 1024
"""Approximate bytes of a question with its label."""
BATCH = 128


@dataclass
class Arguments(bench.Saving):
    directory: Path = Path(".")
    """Directory of the file, which is deleted again."""
    gigabytes: float = 10.0
    opens: Path | None = None
    """Open this file, print the measurements, and exit; the benchmark starts this itself."""


@dataclass
class Opening:
    """One opening in a separate process, after imports and the loading of the tokenizer."""

    seconds_to_first_batch: float
    seconds_to_tenth_batch: float
    peak_rss_mb: float
    """Peak memory of the whole process."""
    rss_before_mb: float
    """Memory before the file was opened: Python, libraries, tokenizer."""


def write_file(path: Path, size: float) -> int:
    """Write a JSONL file of about this many bytes. Returns the number of its rows."""
    rng = random.Random(0)
    blocks = [[_row(rng) for _ in range(1000)] for _ in range(50)]
    rows = 0
    with path.open("wb", buffering=2**24) as file:
        while file.tell() < size:
            block = rng.choice(blocks)
            file.writelines(block)
            rows += len(block)
        file.flush()
        os.fsync(file.fileno())
    return rows


def _row(rng: random.Random) -> bytes:
    length = rng.randint(ROW_BYTES // 4, ROW_BYTES * 7 // 4)
    terms = "+".join(str(rng.randint(1, 999)) for _ in range(length // 4))
    return json.dumps({"prompt": terms[:length], "label": rng.randint(0, 10**6)}).encode() + b"\n"


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def open_file(path: Path) -> Opening:
    """Open the file in this process."""
    from megatron_ibpo.config import DataConfig
    from megatron_ibpo.data import load_tokenizer, open_source

    tokenizer = load_tokenizer(TOKENIZER)
    before = bench.resident_bytes()
    started = time.perf_counter()
    source = open_source(str(path), tokenizer, DataConfig(), split="train", max_prompt_len=4096)
    source.batch(0, BATCH)
    first = time.perf_counter() - started
    for step in range(1, 10):
        source.batch(step, BATCH)
    tenth = time.perf_counter() - started
    peak = bench.peak_bytes()
    return Opening(round(first, 3), round(tenth, 3), round(peak / 2**20, 1), round(before / 2**20, 1))


def main(arguments: Arguments) -> None:
    if arguments.opens is not None:
        print(json.dumps(asdict(open_file(arguments.opens))))
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        path = Path(scratch) / "rows.jsonl"
        rows = write_file(path, arguments.gigabytes * 1e9)
        size = path.stat().st_size
        openings = {}
        for name in ("cold", "warm"):
            if name == "cold":
                drop_from_cache(path)
            openings[name] = bench.in_own_process(__file__, "--opens", str(path), timeout=600)
            print(name, openings[name], flush=True)
    found = {"bytes": size, "rows": rows, "batch": BATCH, "openings": openings}
    bench.save(arguments.save, found)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
