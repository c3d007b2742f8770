"""Weight updates measured: live export to an engine, alongside a plain broadcast.

    python tools/bench_weight_update.py --save tools/results/bench_weight_update.json

It starts trainer ranks and one vLLM engine on this machine and sends the weights to the engine repeatedly, in
turns with a plain gloo broadcast of the same bytes to an idle process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import bench

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.versions import machine

Family = Literal["dense", "moe"]
MIB = 1024**2


@dataclass
class Arguments(bench.Saving):
    """Measure live export to one engine, alongside a plain gloo broadcast of the same bytes in the same
    run."""

    families: tuple[Family, ...] = ("dense", "moe")
    """dense: a Qwen3. moe: a Qwen3-Next with many small experts."""
    ranks: tuple[int, ...] = (1, 2)
    """Trainer ranks, tensor-parallel (and expert-parallel) over all of them; one case each."""
    gigabytes: float = 1.0
    """Approximate size of the bfloat16 weights."""
    bucket_mib: int = 128
    """--update-weight-buffer-size."""
    rounds: int = 7
    """Rounds of each kind, in turns, after one that is not counted."""


def main(arguments: Arguments) -> None:
    results, load = [], [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="weight-update-") as scratch:
        for family in arguments.families:
            checkpoint = _make_checkpoint(Path(scratch) / family, family, int(arguments.gigabytes * 1e9))
            for ranks in arguments.ranks:
                result = {"family": family, **_measure(checkpoint, ranks, arguments, Path(scratch))}
                print({name: value for name, value in result.items() if name != "all_seconds"}, flush=True)
                results.append(result)
            shutil.rmtree(checkpoint)
    load.append(os.getloadavg()[0])
    options = {"bucket_mib": arguments.bucket_mib, "rounds": arguments.rounds}
    measured_on = machine() | {"load_average_before_and_after": load}
    bench.write(arguments.save, {"machine": measured_on, "options": options, "results": results})


def _measure(checkpoint: Path, ranks: int, arguments: Arguments, scratch: Path) -> dict[str, Any]:
    """Measure one case, on separate trainer ranks."""
    out = scratch / "result.json"
    task = json.dumps(
        {
            "checkpoint": str(checkpoint),
            "bucket_bytes": arguments.bucket_mib * MIB,
            "rounds": arguments.rounds,
            "out": str(out),
        }
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, __file__, "--as-trainer", task], check=True, timeout=1800, env=environment)
    return {"ranks": ranks, **json.loads(out.read_text())}


def _make_checkpoint(directory: Path, family: Family, num_bytes: int) -> Path:
    """Write random bfloat16 weights of about `num_bytes`, with a config.json for trainer and vLLM."""
    import torch
    from safetensors.torch import save_file

    from megatron_ibpo.models import read_hf_config
    from megatron_ibpo.models.weight_map import weight_map

    directory.mkdir(parents=True)
    sizes = {
        "vocab_size": 32000, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 2048, "eos_token_id": 1,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "dtype": "bfloat16", "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
    }  # fmt: skip
    if family == "moe":
        sizes |= {
            "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"],
            "full_attention_interval": 4, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "num_experts": 128, "num_experts_per_tok": 4,
            "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip

    def entries(layers: int) -> list[Any]:
        (directory / "config.json").write_text(json.dumps(sizes | {"num_hidden_layers": layers}))
        return [piece for entry in weight_map(read_hf_config(directory)).values() for piece in entry.pieces]

    def size(pieces: list[Any]) -> int:
        return 2 * sum(torch.Size(piece.shape).numel() for piece in pieces)

    four = size(entries(8)) - size(entries(4))
    layers = 4 * max(1, round((num_bytes - size(entries(4))) / four) + 1)
    draw = torch.Generator().manual_seed(0)
    tensors = {
        piece.name: torch.empty(piece.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=draw)
        for piece in entries(layers)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


# ------------------------------------------------------------------------------------- on a trainer rank


def _as_trainer(task: dict[str, Any]) -> None:
    import torch

    from megatron_ibpo.basics.distributed import start_world
    from megatron_ibpo.config import Config, ParallelConfig
    from megatron_ibpo.models import read_hf_config
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.model import build_model
    from megatron_ibpo.policy.process_start import hush_megatron
    from megatron_ibpo.weights.formats.hf_models import load_hf
    from megatron_ibpo.weights.layout.export import HFExport

    hush_megatron()
    torch.set_num_threads(1)
    world = start_world()
    checkpoint = Path(task["checkpoint"])
    shape = read_hf_config(checkpoint)
    config = Config()
    config.model.bf16 = True
    config.parallel = ParallelConfig(
        tensor_model_parallel_size=world.size,
        expert_model_parallel_size=world.size if shape.is_moe else 1,
        expert_tensor_parallel_size=1,
        sequence_parallel=world.size > 1,
    )
    parallel.initialize(config.parallel, world, seed=0)
    chunks = build_model(shape, config)
    load_hf(chunks, shape, checkpoint)
    result = _in_turns(HFExport(chunks, shape), world, checkpoint, task)
    if world.is_rank_0:
        Path(task["out"]).write_text(json.dumps(result))
    parallel.destroy()
    world.close()


def _in_turns(source: Any, world: Any, checkpoint: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Run in turns: a broadcast, live export to a process that only receives, vLLM loading weights that it
    already has (zeros), and live export to vLLM."""
    total = sum(meta.num_bytes for meta in source.metadata())
    bucket = task["bucket_bytes"]
    engine = _start_engine(checkpoint) if world.is_rank_0 else None
    plain = _Peer(_receive_broadcasts) if world.is_rank_0 else None
    sink = _Peer(_receive_weights) if world.is_rank_0 else None
    try:
        to_vllm = _open(source, world, engine, bucket)
        to_sink = _open(source, world, sink, bucket)
        broadcast = _open_broadcast(plain, total, bucket) if plain is not None else lambda: None
        load = _open_rehearsal(source, engine)
        kinds: dict[str, Callable[[], Any]] = {
            "plain": broadcast,
            "transport": to_sink,
            "load": load,
            "vllm": to_vllm,
        }
        rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for number in range(task["rounds"] + 1):
            for kind, run in kinds.items():
                row = _timed(run, world, engine.pid if engine and kind == "vllm" else None)
                if number:
                    rows[kind].append(row)
        return _summary(rows, total, bucket) if world.is_rank_0 else {}
    finally:
        for started in (engine, plain, sink):
            if started is not None:
                started.close()


def _timed(run: Callable[[], Any], world: Any, engine_pid: int | None) -> dict[str, Any]:
    """Return the seconds until all ranks are done, and the growth of memory in bytes: of the ranks, and of
    the engine."""
    watched = [pid for pid in (os.getpid(), engine_pid) if pid is not None]
    peaks_before = [_reset_peak(pid) for pid in watched]
    world.barrier()
    began = time.perf_counter()
    sent = run()
    world.barrier()
    seconds = time.perf_counter() - began
    rises = [
        bench.peak_bytes(pid) - peak_before for pid, peak_before in zip(watched, peaks_before, strict=True)
    ]
    moved = world.all_gather(None if sent is None else (sent.num_bytes, sent.needed_bytes))
    return {
        "seconds": seconds,
        "rises": world.all_gather(rises[0]),
        "engine_rise": rises[1] if engine_pid is not None else None,
        "ratio": None if sent is None else sum(part[0] for part in moved) / moved[0][1],
    }


def _summary(rows: dict[str, list[dict[str, Any]]], total: int, bucket: int) -> dict[str, Any]:
    """Return rates from the median of the rounds, and from the best one, which other work on the machine
    disturbs least."""
    seconds = {kind: [row["seconds"] for row in runs] for kind, runs in rows.items()}
    rises = [rise for kind in ("transport", "vllm") for row in rows[kind] for rise in row["rises"]]
    return {
        "weights_gb": round(total / 1e9, 3),
        "median": _rates({kind: statistics.median(values) for kind, values in seconds.items()}, total),
        "best": _rates({kind: min(values) for kind, values in seconds.items()}, total),
        "trainer_memory_rise_in_buckets": round(max(rises) / bucket, 2),
        "engine_memory_rise_in_buckets": round(max(row["engine_rise"] for row in rows["vllm"]) / bucket, 2),
        "bytes_sent_over_needed": round(max(row["ratio"] for row in rows["vllm"]), 6),
        "all_seconds": {kind: [round(value, 3) for value in values] for kind, values in seconds.items()},
    }


def _rates(seconds: dict[str, float], total: int) -> dict[str, float]:
    rate = {kind: total / value / 1e9 for kind, value in seconds.items()}
    figures = {
        "plain_broadcast_gb_s": rate["plain"],
        "live_export_gb_s": rate["transport"],
        "vllm_load_alone_gb_s": rate["load"],
        "live_export_and_load_gb_s": rate["vllm"],
        "live_export_over_plain": rate["transport"] / rate["plain"],
        "live_export_and_load_over_plain": rate["vllm"] / rate["plain"],
        "live_export_and_load_over_load_alone": rate["vllm"] / rate["load"],
    }
    return {name: round(value, 3) for name, value in figures.items()}


def _open(source: Any, world: Any, link: Any, bucket: int) -> Callable[[], Any]:
    """Return an update of the engine behind `link` (on the driver), after the first one, in which they
    connect."""
    from megatron_ibpo.engines.registry import TRANSPORTS
    from megatron_ibpo.weights.transfer.link import UpdateOrder
    from megatron_ibpo.weights.transfer.update import open_transport, update_engines

    transport = open_transport(
        TRANSPORTS["gloo"], world, workers_per_engine=1, bucket_bytes=bucket, timeout=300
    )
    links = {} if link is None else {0: link}
    order = UpdateOrder(version=1, sleeping=False, check=False, timeout=300)

    def run() -> Any:
        sent = update_engines(transport, world, source, order, links, [0])
        if sent.failures:
            raise RuntimeError(f"the update failed: {sent.failures[0]}")
        return sent

    if failures := transport.connect(source, links, [0]):
        raise RuntimeError(f"meeting the engine failed: {failures[0]}")
    return run


def _open_rehearsal(source: Any, engine: Any) -> Callable[[], None]:
    """Return vLLM's own part of an update: loading and repacking tensors of zeros."""
    wire = pickle.dumps(source.metadata())

    def run() -> None:
        if engine is not None:
            engine.call("rehearse_weight_update", wire, timeout=300)

    return run


def _start_engine(checkpoint: Path) -> Any:
    from megatron_ibpo.config import RolloutConfig
    from megatron_ibpo.engines.registry import start_instrument
    from megatron_ibpo.models import read_hf_config

    parameters = {"vllm_kv_cache_bytes": 64 * MIB, "vllm_dtype": "bfloat16"}
    rollout = RolloutConfig(rollout_max_context_len=256, parameters=parameters)
    threads, log = os.cpu_count() or 1, checkpoint.parent / "engine.log"  # the trainers are idle meanwhile
    engine = start_instrument(
        rollout, checkpoint, read_hf_config(checkpoint), on_gpu=False, num_threads=threads, log=log
    )
    engine.wait_ready(600)
    return engine


class _Peer:
    """A process that answers like an engine, for the methods that `function` knows."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, peer_end = context.Pipe()
        self._process = context.Process(target=function, args=(peer_end,), daemon=True)
        os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # as engines have it
        try:
            self._process.start()
        finally:
            del os.environ["THP_MEM_ALLOC_ENABLE"]

    def begin(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def result(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            raise RuntimeError(f"no answer within {timeout} seconds")
        return self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _receive_weights(pipe: Any) -> None:
    """Act as a worker that needs everything and loads nothing."""
    from megatron_ibpo.weights.layout.regions import need_all
    from megatron_ibpo.weights.transfer.gloo import GlooReceiver, join_group
    from megatron_ibpo.weights.transfer.wire import Answer

    receiver: Any = None
    while True:
        method, arguments = pipe.recv()
        answer: Any = None
        if method == "rehearse_weight_update":
            answer = [pickle.dumps(Answer(need_all(pickle.loads(arguments[0])), [], None))]
        elif method == "init_weight_transfer":
            (info,) = arguments
            plan = pickle.loads(info["plan"])
            group = join_group(info["address"], info["port"], info["first_worker"], info["size"])
            receiver = GlooReceiver(group, plan, need_all(plan.metas), info["timeout"])
        elif method == "take_weights":
            for _ in receiver.tensors():
                pass
            answer = [([], {})]
        pipe.send(answer)


def _receive_broadcasts(pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from megatron_ibpo.weights.transfer.gloo import join_group

    _, (port, sizes) = pipe.recv()
    group = join_group("127.0.0.1", port, 1, 2)
    buffer = torch.zeros(max(sizes), dtype=torch.uint8)
    pipe.send(None)
    while True:
        pipe.recv()
        for size in sizes:
            group.broadcast([buffer[:size]], dist.BroadcastOptions()).wait()
        pipe.send(None)


def _open_broadcast(peer: _Peer, total: int, bucket: int) -> Callable[[], None]:
    """Return a plain broadcast of `total` bytes, bucket by bucket, between buffers that already exist."""
    import torch
    import torch.distributed as dist

    from megatron_ibpo.basics.rendezvous import LOOPBACK
    from megatron_ibpo.weights.transfer.gloo import open_group

    sizes = [bucket] * (total // bucket) + [total % bucket] * bool(total % bucket)
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    peer.begin("join", store.port, sizes)
    group = open_group(store, 0, 2)
    peer.result(60)
    buffer = torch.zeros(bucket, dtype=torch.uint8)

    def run() -> None:
        peer.begin("receive")
        for size in sizes:
            group.broadcast([buffer[:size]], dist.BroadcastOptions()).wait()
        peer.result(300)

    return run


def _reset_peak(pid: int) -> int:
    """Reset the peak of a process's memory; return its present memory in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return bench.resident_bytes(pid)


if __name__ == "__main__":
    if "--as-trainer" in sys.argv:
        _as_trainer(json.loads(sys.argv[-1]))
    else:
        run_tool(main, Arguments, __doc__)
