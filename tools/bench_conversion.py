"""Conversion of checkpoints measured alongside `cp`.

    python tools/bench_conversion.py --save tools/results/bench_convert.json

Synthetic bfloat16 checkpoints: a dense Qwen3 and a Qwen3-Next with thousands of small experts. The tool and
`cp` of the same bytes take turns, both from a source in the system's cache, both until the disk has
everything. The tool runs as a user runs it, in a separate process: the time includes its start, and the peak
of resident memory (mapped files included) is the system's figure.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import bench
import torch
from rich.console import Console
from rich.table import Table

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.weight_map import weight_map
from megatron_ibpo.weights.formats.hugging_face import SafetensorsFile, file_names, write_index
from megatron_ibpo.weights.layout.regions import TensorMeta, plan_buckets

Family = Literal["dense", "moe"]
SHARD_BYTES = 2 * 1000**3
WANTED_SHARE, WANTED_MEMORY = 0.6, 1.5e9
LOOK_EVERY_S = 0.02
CONFIGS: dict[Family, dict[str, Any]] = {
    "dense": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "moe": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
}
"""Configurations without `num_hidden_layers`, which follows from the requested size."""


@dataclass
class Convert(bench.Saving):
    """Convert in both directions alongside `cp` of the same bytes in the same run."""

    families: tuple[Family, ...] = ("dense", "moe")
    """dense: a Qwen3. moe: a Qwen3-Next with 128 experts of 1.6 MB per layer."""
    gigabytes: float = 4.3
    """Approximate size of the bfloat16 weights."""
    rounds: int = 5
    """Rounds of each kind, in turns."""
    flags: tuple[str, ...] = ("--tensor-model-parallel-size", "2")
    """Layout flags for convert_hf_to_megatron.py."""
    peer: str | None = None
    """Shell command of another converter from Hugging Face to Megatron, with {source} and {target} in it; it
    takes turns too, for the families in `peer_families`."""
    peer_families: tuple[Family, ...] = ("dense",)
    directory: Path | None = None
    """Directory to write to; needs three times the size. None: a temporary directory."""


def convert(arguments: Convert) -> None:
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-convert-", dir=arguments.directory) as scratch:
        for family in arguments.families:
            rows += measure(family, arguments, Path(scratch) / family)
            shutil.rmtree(Path(scratch) / family)
    show(rows)
    options = {"flags": arguments.flags, "rounds": arguments.rounds, "peer": arguments.peer is not None}
    bench.save(arguments.save, {"options": options, "rows": rows}, "torch", "safetensors", "megatron-core")


def measure(family: Family, arguments: Convert, scratch: Path) -> list[dict[str, Any]]:
    """Measure both directions for one model."""
    hf, stored = scratch / "hf", scratch / "stored"
    largest = make_checkpoint(hf, family, int(arguments.gigabytes * 1e9))
    to_megatron = ["convert_hf_to_megatron.py", "--hf-checkpoint", hf, *arguments.flags]
    peer = arguments.peer if family in arguments.peer_families else None
    first = compare("HF to Megatron", hf, to_megatron, scratch, arguments.rounds, peer)
    run_converter([*to_megatron, "--save", stored])
    to_hf = ["convert_megatron_to_hf.py", "--load", stored]
    second = compare("Megatron to HF", stored, to_hf, scratch, arguments.rounds)
    return [{"family": family, "largest_tensor_bytes": largest, **row} for row in (first, second)]


def compare(
    direction: str, source: Path, tool: list[Any], scratch: Path, rounds: int, peer: str | None = None
) -> dict[str, Any]:
    """Compare the tool, cp and the peer in turns."""
    num_bytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    kinds = ["cp", "tool"] + (["peer"] if peer else [])
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    inside, peaks = [], []
    for kind in bench.in_turns(kinds, rounds):
        with fresh_target(source, scratch / "copy") as target:
            started = time.perf_counter()
            if kind == "cp":
                subprocess.run(["cp", "-r", source, target], check=True)
                sync(target)
            elif kind == "peer":
                assert peer is not None
                command = peer.format(source=source, target=target)
                subprocess.run(command, shell=True, check=True, capture_output=True)
                sync(target)
            else:
                peak, seconds_inside = run_converter([*tool, "--save", target])
                peaks.append(peak)
                inside.append(seconds_inside)
            seconds[kind].append(time.perf_counter() - started)
    shares = [cp / ours for cp, ours in zip(seconds["cp"], seconds["tool"], strict=True)]
    return {
        "direction": direction,
        "bytes": num_bytes,
        "cp_seconds": seconds["cp"],
        "tool_seconds": seconds["tool"],
        "tool_seconds_without_start": inside,
        **({"peer_seconds": seconds["peer"]} if peer else {}),
        "share_of_cp": statistics.median(shares),
        "share_of_cp_all": shares,
        "peak_bytes": max(peaks),
    }


@contextmanager
def fresh_target(source: Path, target: Path) -> Iterator[Path]:
    """Provide a cached source, an idle disk, and a target that is cleared afterwards."""
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(2**24):
                    pass
    os.sync()
    yield target
    shutil.rmtree(target)


def sync(directory: Path) -> None:
    files = [path for path in directory.rglob("*") if path.is_file()]
    subprocess.run(["sync", *files], check=True)


def run_converter(command: list[Any]) -> tuple[int, float]:
    """Return (peak of resident memory in bytes, seconds by the tool's own count: without Python's start)."""
    line = [sys.executable, Path(__file__).with_name(command[0]), *command[1:]]
    peak = 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(line, stderr=output)
        while process.poll() is None:
            peak = max(peak, bench.peak_bytes(process.pid))
            time.sleep(LOOK_EVERY_S)
        output.seek(0)
        output_text = output.read()
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{output_text}")
    seconds = re.search(r"GB in ([\d.]+) s", output_text)
    assert seconds is not None, output_text
    return peak, float(seconds[1])


def make_checkpoint(directory: Path, family: Family, num_bytes: int) -> int:
    """Write random weights between -4 and 4, in files of 2 GB. Returns its largest tensor's bytes."""
    directory.mkdir(parents=True)
    for layers in range(4, 400, 4):
        config = {**CONFIGS[family], "num_hidden_layers": layers, "tie_word_embeddings": False}
        (directory / "config.json").write_text(json.dumps(config))
        entries = weight_map(read_hf_config(directory)).values()
        metas = [
            TensorMeta(piece.name, torch.bfloat16, piece.shape) for entry in entries for piece in entry.pieces
        ]
        if sum(meta.num_bytes for meta in metas) >= num_bytes:
            break
    groups = [metas[run.start : run.stop] for run in plan_buckets(metas, SHARD_BYTES)]
    files = dict(zip(file_names(len(groups)), groups, strict=True))
    largest = max(meta.num_bytes for meta in metas)
    pool = (torch.rand(largest // 2 + 2**20, generator=torch.Generator().manual_seed(0)) * 8 - 4).bfloat16()
    for number, (name, members) in enumerate(files.items()):
        file = SafetensorsFile(directory / name, members)
        for place, meta in enumerate(members):
            start = (number * 7919 + place * 104729) % 2**20
            file.write(meta.name, pool[start : start + meta.num_bytes // 2].view(meta.shape))
        file.close()
    write_index(directory, files)
    return largest


def show(rows: list[dict[str, Any]]) -> None:
    rates = "cp GB/s", "tool GB/s", "share of cp", "peer GB/s"
    columns = "model", "direction", "GB", *rates, "peak GB", "allowed GB"
    table = Table(*columns)
    for row in rows:
        size = row["bytes"] / 1e9
        allowed = (WANTED_MEMORY + row["largest_tensor_bytes"]) / 1e9
        missed = row["share_of_cp"] < WANTED_SHARE
        peer = row.get("peer_seconds")
        table.add_row(
            row["family"],
            row["direction"],
            f"{size:.2f}",
            f"{size / statistics.median(row['cp_seconds']):.2f}",
            f"{size / statistics.median(row['tool_seconds']):.2f}",
            f"[red]{row['share_of_cp']:.2f}[/]" if missed else f"{row['share_of_cp']:.2f}",
            f"{size / statistics.median(peer):.2f}" if peer else "",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{allowed:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    run_tool(convert, Convert, __doc__)
