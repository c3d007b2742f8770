"""Speed of a step's samples from the engines' lists to the ranks that train on them, and memory of the
driver.

    python tools/bench_data_plane.py --save tools/results/bench_data_plane.json

4,096 samples of 16,384 tokens are ready in two engine processes as vLLM gives them: lists of Python ints and
floats. The clock runs until four data-parallel ranks have each laid out their micro-batches as tensors.

- arrays: engines make arrays of the lists, the driver plans, and each rank receives what it computes and
  packs it.
- lists: what the first version did. Every rank takes its engine's lists, all are gathered on all ranks as
  pickled objects, and each rank packs its micro-batches from them token by token.

Each path runs in separate processes. The lists of 4,096 samples would take about 20 GiB on four ranks, so
both paths are also compared at a quarter; nothing is scaled. Peaks are of resident memory (VmHWM), including
shared memory, the interpreter and its libraries; raw is int32 tokens, float32 log-probs, bool masks.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import bench
import numpy as np

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.versions import machine

RANKS = 4
ENGINES = 2
GROUP = 8
VOCABULARY = 150_000
MAX_TOKENS = 32_768
"""Most tokens in a micro-batch."""
RAW_BYTES = 4 + 4 + 1
WANTED_SECONDS, WANTED_OVER_RAW = 10.0, 2.5
TIMEOUT_S = 900.0


@dataclass
class Arguments(bench.Saving):
    samples: int = 4096
    tokens: int = 16_384
    repeats: int = 3
    """Repeats of the arrays; lists run once."""
    only: Literal["arrays", "lists"] | None = None
    """Run only this path, once, and print its result as JSON."""


@dataclass
class Row:
    path: str
    samples: int
    tokens: int
    raw_mb: float
    seconds: float
    """Seconds from the engines' lists to tensors on all ranks."""
    driver_peak_mb: float
    driver_peak_over_raw: float
    driver_before_mb: float
    """The driver's memory when the clock started."""
    largest_rank_peak_mb: float


def peak_mb() -> float:
    return bench.peak_bytes() / 2**20


def engine_lists(seed: int, count: int, tokens: int) -> list[tuple[list[int], list[float]]]:
    """Return `RequestOutput.outputs[0].token_ids` and `.logprobs.logprobs` for this many samples."""
    rng = np.random.default_rng(seed)
    return [
        (
            rng.integers(0, VOCABULARY, tokens).tolist(),
            (-rng.random(tokens, np.float32)).astype(np.float64).tolist(),
        )
        for _ in range(count)
    ]


def row(
    path: str, arguments: Arguments, seconds: float, before: float, rank_peaks: list[float], peak: float
) -> Row:
    raw = arguments.samples * arguments.tokens * RAW_BYTES / 2**20
    return Row(
        path, arguments.samples, arguments.tokens, raw, seconds, peak, peak / raw, before, max(rank_peaks)
    )


# ------------------------------------------------------------------------------------------------- arrays


class Engine:
    """Finished samples in vLLM's form, which it gives away as records."""

    def __init__(self, seed: int, count: int, tokens: int):
        self.lists = engine_lists(seed, count, tokens)
        self.total = sum(sum(ids) for ids, _ in self.lists)
        gc.freeze()  # as in the engine process: collecting walks over every list

    def ready(self) -> int:
        """Sum of all token ids."""
        return self.total

    def take(self, count: int) -> list[Any]:
        """Return the next samples as arrays, and drop their lists."""
        from megatron_ibpo.basics.records import Sample, token_ids

        taken, self.lists = self.lists[:count], self.lists[count:]
        samples = []
        for index, (ids, logprobs) in enumerate(taken):
            samples.append(
                Sample(
                    prompt_token_ids=token_ids([1]),
                    token_ids=token_ids(ids),
                    logprobs=np.array(logprobs, np.float32),
                    finish_reason="length",
                    temperature=1.0,
                    versions=((0, 0),),
                    loss_mask=np.ones(len(ids), np.bool_),
                    index=index,
                )
            )
        return samples


class Trainer:
    """One data-parallel rank, without a model."""

    def receive(self, share: Any) -> tuple[int, float]:
        """Lay out every micro-batch; return (sum of the token ids, peak memory)."""
        import torch

        from megatron_ibpo.policy.packing import lay_out, pack

        total = 0
        for minibatch in share:
            for micro_batch in minibatch.cut.micro_batches:
                batch = lay_out(pack(micro_batch), multiple=1, device=torch.device("cpu"))
                total += int((batch.rows.targets_N * batch.rows.response_mask_N.long()).sum())
        return total, peak_mb()

    def ready(self) -> float:
        import torch  # noqa: F401

        import megatron_ibpo.policy.packing  # noqa: F401

        return peak_mb()


def run_arrays(arguments: Arguments) -> Row:
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    import ray

    from megatron_ibpo.basics.records import TrainSequence
    from megatron_ibpo.config import Config, ModelConfig
    from megatron_ibpo.policy.planning import plan_update

    raw = arguments.samples * arguments.tokens * RAW_BYTES
    ray.init(
        num_cpus=ENGINES + RANKS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=int(2.5 * raw) + 2**28,
        _node_ip_address="127.0.0.1",
    )
    try:
        share = arguments.samples // ENGINES
        engines: list[Any] = [
            ray.remote(Engine).remote(seed, share, arguments.tokens) for seed in range(ENGINES)
        ]
        trainers: list[Any] = [ray.remote(Trainer).remote() for _ in range(RANKS)]
        expected = sum(ray.get([engine.ready.remote() for engine in engines], timeout=TIMEOUT_S))
        ray.get([trainer.ready.remote() for trainer in trainers], timeout=TIMEOUT_S)
        before = bench.resident_bytes() / 2**20
        config = Config(model=ModelConfig(max_tokens_per_gpu=MAX_TOKENS))

        started = time.perf_counter()
        asked = [engine.take.remote(GROUP) for _ in range(share // GROUP) for engine in engines]
        sequences = [
            TrainSequence(
                sample.prompt_token_ids,
                sample.token_ids,
                sample.loss_mask,
                advantage=1.0 if sample.index % 2 else -1.0,
                weight=1.0 / arguments.samples,
                prompt_index=group,
                group=group,
                index=sample.index,
                rollout_logprobs=sample.logprobs,
            )
            for group, samples in enumerate(asked)
            for sample in ray.get(samples, timeout=TIMEOUT_S)
        ]
        shares = plan_update(sequences, config, RANKS, float).shares
        received = [t.receive.remote(ray.put(share)) for t, share in zip(trainers, shares, strict=True)]
        found = ray.get(received, timeout=TIMEOUT_S)
        seconds = time.perf_counter() - started
        assert sum(total for total, _ in found) == expected, "tokens were lost on the way"
        return row("arrays", arguments, seconds, before, [peak for _, peak in found], peak_mb())
    finally:
        ray.shutdown()


# -------------------------------------------------------------------------------------------------- lists


def run_lists(arguments: Arguments) -> Row:
    """Run four processes of one gloo world; the first is the driver."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        results = context.Queue()
        ranks = [
            context.Process(target=list_rank, args=(rank, arguments, directory, results))
            for rank in range(RANKS)
        ]
        try:
            for process in ranks:
                process.start()
            found = sorted(results.get(timeout=TIMEOUT_S) for _ in ranks)
        finally:
            for process in ranks:
                process.join(10)
                process.kill()
    assert sum(total for _, total, *_ in found) == sum(own for *_, own in found), (
        "tokens were lost on the way"
    )
    _, _, seconds, before, peak, _ = found[0]
    return row("lists", arguments, seconds, before, [peak for *_, peak, _ in found], peak)


def list_rank(rank: int, arguments: Arguments, directory: str, results: Any) -> None:
    """Report (rank, sum of the packed token ids, seconds, memory before, peak, sum of its engine's token
    ids)."""
    import pickle
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from megatron_ibpo.policy.planning import plan_micro_batches

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=600),
    )
    lists = engine_lists(rank, arguments.samples // RANKS, arguments.tokens)
    own = sum(sum(ids) for ids, _ in lists)
    dist.barrier()
    gc.freeze()
    gc.disable()
    before = bench.resident_bytes() / 2**20
    started = time.perf_counter()
    sampled = pickle.loads(pickle.dumps([(tuple(ids), tuple(logprobs)) for ids, logprobs in lists]))
    parts: list[Any] = [None] * RANKS
    dist.all_gather_object(parts, sampled)
    everything = [sample for part in parts for sample in part]
    plan = plan_micro_batches([1 + len(ids) for ids, _ in everything], RANKS, MAX_TOKENS, float)
    total = 0
    for members in plan[rank]:
        total += packed_from_lists([everything[i] for i in members])
    dist.barrier()
    results.put((rank, total, time.perf_counter() - started, before, peak_mb(), own))
    dist.destroy_process_group()


def packed_from_lists(chosen: list[Any]) -> int:
    """Pack a micro-batch as the first version did; return the sum of its response tokens."""
    import torch

    def rows(parts: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value for part in parts for value in part], dtype=dtype)

    prompt = (1,)
    tokens = [[*prompt, *ids] for ids, _ in chosen]
    rows([own[:-1] for own in tokens], torch.int64)
    targets_N = rows([own[1:] for own in tokens], torch.int64)
    mask_N = rows([[0.0] * (len(prompt) - 1) + [1.0] * len(ids) for ids, _ in chosen], torch.float32)
    rows([[0.0] * (len(prompt) - 1) + list(logprobs) for _, logprobs in chosen], torch.float32)
    torch.cat([torch.arange(len(own) - 1) for own in tokens])
    return int((targets_N * mask_N.long()).sum())


# ------------------------------------------------------------------------------------------------ all of it


def in_own_process(path: str, arguments: Arguments, samples: int) -> Row:
    flags = ("--only", path, "--samples", str(samples), "--tokens", str(arguments.tokens))
    made = Row(**bench.in_own_process(__file__, *flags, timeout=TIMEOUT_S))
    print(
        f"{made.path}, {made.samples} samples of {made.tokens}: {made.seconds:.1f} s, driver at most "
        f"{made.driver_peak_mb:.0f} MiB = {made.driver_peak_over_raw:.2f} x raw, "
        f"largest rank {made.largest_rank_peak_mb:.0f} MiB",
        flush=True,
    )
    return made


def main(arguments: Arguments) -> None:
    if arguments.only:
        made = run_arrays(arguments) if arguments.only == "arrays" else run_lists(arguments)
        print(json.dumps(asdict(made)))
        return
    load = os.getloadavg()[0]  # load from other work on the machine
    quarter = arguments.samples // 4
    rows = [in_own_process("lists", arguments, quarter), in_own_process("arrays", arguments, quarter)]
    rows += [in_own_process("arrays", arguments, arguments.samples) for _ in range(arguments.repeats)]
    print(f"wanted of arrays: {WANTED_SECONDS:g} s, {WANTED_OVER_RAW:g} x raw")
    kept = {
        "machine": machine("ray", "torch", "numpy") | {"load": load},
        "wanted": {"seconds": WANTED_SECONDS, "driver_peak_over_raw": WANTED_OVER_RAW},
        "rows": [asdict(made) for made in rows],
    }
    bench.write(arguments.save, kept)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
