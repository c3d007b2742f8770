"""Cost of the driver: its own sampling code against a fleet of stand-ins, in processor time and memory.

    python tools/bench_driver.py --save tools/results/driver_load.json
    python tools/bench_driver.py --real-calls --save tools/results/driver_load.json

Without --real-calls: Sampler, groups, sampling ahead, IBPO's corrections, journal, decoding and closing of
batches are those of a run, in a separate process for each row. Engines and verifiers are stand-ins that
answer at times of a virtual clock: log-normal times, half of the responses right. The stand-ins' own
computation is measured separately and subtracted. Ray is not included. With --real-calls: the same Sampler
calls engines in separate processes through Ray, which answer at once.

Processor time is the driver process's. Memory is the growth of its peak resident memory from the start of the
clock. Each part keeps the other part's results in --save.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import logging
import os
import queue
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import bench
import numpy as np
from simulated_engines import in_virtual_time

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest, TokenIds, token_ids
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.config import DataConfig, RolloutConfig
from megatron_ibpo.credit import CreditContext, Vocabulary, any_group, credit_of, find_operator
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.journal import Journal, read_journal
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.plan.workload import SIGMA
from megatron_ibpo.rewards import Outcome, Verifier
from megatron_ibpo.run.cost import CostMeter
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.ahead import Ahead, Pace
from megatron_ibpo.sampling.groups import GroupSampler, JournalMemory, Rules
from megatron_ibpo.sampling.requests import group_requests, scorer

ROOT = Path(__file__).resolve().parents[1]
SHAPE = ROOT / "examples/models/qwen3_next_80b_a3b"
"""Shape of the model, for the cost meter."""
GROUP = 8
STALENESS = 3
"""Staleness at which a quarter of the groups under way makes a batch."""
PROMPT_TOKENS = 200
MEAN_SECONDS = 80.0
"""Mean time of a response: 4,096 tokens at 20 ms. It is time of the stand-ins' clock, whatever the length of
the arrays."""
LONGEST = 2.0
"""Longest response, as a multiple of the mean; longer ones are truncated."""
VERIFIER_SECONDS = 1.0
PAUSE_SECONDS = 5.0
"""Seconds between two batches."""
VOCABULARY = 17_000
TIMEOUT_S = 900.0

T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """The load of the driver."""

    engines: int
    in_flight: int
    """Responses requested at the start, all at once."""
    tokens: int
    """Tokens of every response."""
    journal: bool
    batches: int
    """Batches after which the clock is stopped."""

    @property
    def groups_per_batch(self) -> int:
        """Groups of a batch."""
        return self.in_flight // GROUP // (STALENESS + 1)


LOADS = [
    Load(64, 6_400, tokens=64, journal=True, batches=1),
    Load(256, 25_600, tokens=64, journal=True, batches=1),
    Load(1024, 100_000, tokens=64, journal=True, batches=1),
    Load(1024, 100_000, tokens=64, journal=False, batches=1),
    Load(64, 6_400, tokens=1024, journal=True, batches=1),
]


@dataclass
class Clock:
    """Processor seconds of this thread by activity."""

    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self.spent[name] += time.thread_time() - began

    def timed(self, name: str, function: Callable[..., T]) -> Callable[..., T]:
        def called(*arguments: Any) -> T:
            with self.measuring(name):
                return function(*arguments)

        return called


@dataclass(eq=False)
class StandIn:
    """An `engines.AsyncEngine` that answers each request when its time is over."""

    tokens: int
    clock: Clock
    counts: Counter[str]
    _ends: list[tuple[float, int, SampleRequest]] = field(default_factory=list)
    _aborted: set[int] = field(default_factory=set)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _version: int = 0

    async def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        with self.clock.measuring("stand-ins"):
            now, self._version = asyncio.get_running_loop().time(), version
            for number, request in requests:
                heapq.heappush(self._ends, (now + seconds(request.seed), number, request))
        self.counts["submits"] += 1
        self.counts["requests"] += len(requests)
        self._news.set()

    async def take(self, timeout: float) -> list[tuple[int, Sample]]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            now = loop.time()
            finished = self._finished(now)
            if finished or now >= deadline:
                self.counts["takes"] += 1
                self.counts["samples"] += len(finished)
                return finished
            self._news.clear()
            due = min(deadline, self._ends[0][0]) if self._ends else deadline
            timer = loop.call_at(due, self._news.set)
            await self._news.wait()
            timer.cancel()

    async def abort(self, numbers: Collection[int]) -> None:
        self._aborted |= set(numbers)

    async def kill(self, reason: str) -> None:
        raise AssertionError(f"no stand-in stops answering: {reason}")

    def _finished(self, now: float) -> list[tuple[int, Sample]]:
        finished: list[tuple[int, Sample]] = []
        if not self._ends or self._ends[0][0] > now:
            return finished
        with self.clock.measuring("stand-ins"):
            while self._ends and self._ends[0][0] <= now:
                _, number, request = heapq.heappop(self._ends)
                if number not in self._aborted:
                    finished.append((number, sample_for(request, self.tokens, self._version)))
        return finished


def seconds(seed: int) -> float:
    """Return the seconds of the response to the request with this seed, log-normal and truncated."""
    drawn = random.Random(seed).lognormvariate(-(SIGMA**2) / 2, SIGMA)
    return MEAN_SECONDS * min(LONGEST, drawn)


def sample_for(request: SampleRequest, tokens: int, version: int) -> Sample:
    """Return a sample with arrays of its own, as in a run."""
    return Sample(
        prompt_token_ids=request.prompt_token_ids,
        token_ids=np.random.default_rng(request.seed % 97).integers(300, VOCABULARY, tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        finish_reason="length",
        temperature=request.temperature,
        versions=((0, version),),
        loss_mask=np.ones(tokens, np.bool_),
    )


@dataclass(eq=False)
class StandInPool:
    """A `rewards.Pool` with as many verifiers as needed, which judges every other response right."""

    counts: Counter[str]
    deaths: int = 0
    _calls: Iterator[int] = field(default_factory=itertools.count)

    def submit(self, target: str, arguments: tuple[Any, ...]) -> Future[Outcome]:
        outcome: Future[Outcome] = Future()
        value = float(next(self._calls) % 2)
        asyncio.get_running_loop().call_later(VERIFIER_SECONDS, outcome.set_result, Outcome(value))
        self.counts["verdicts"] += 1
        return outcome

    def close(self) -> None:
        pass


def make_tokenizer() -> HuggingFaceTokenizer:
    """Return a byte-level tokenizer like Qwen's, of three-letter words with a space before them: four
    characters per token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=3)
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("Ġ" + "".join(word) for word in letters)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words[:VOCABULARY])}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0]))


def correction_prompt(prompt: Prompt, wrong: TokenIds, references: Sequence[TokenIds]) -> TokenIds:
    return np.concatenate([prompt.head_ids, wrong, *references, prompt.tail_ids])


@dataclass(frozen=True)
class Row:
    """The measurements of a load."""

    engines: int
    in_flight: int
    tokens: int
    journal: bool
    batches: int
    samples: int
    """Samples scored during the measurement, including corrections."""
    open_at_start: int
    """Requests that engines owed after the first ones were sent."""
    open_requests: float
    """The same, as the mean over the ends of batches."""
    processor_seconds: float
    """Processor time of the driver, without the stand-ins'."""
    stand_in_seconds: float
    wall_seconds: float
    samples_per_second: float
    """Samples per second of processor time."""
    events_per_second: float
    """Requests, samples, calls of verifiers and their verdicts, four per sample."""
    microseconds_per_sample: dict[str, float]
    calls_per_sample: dict[str, float]
    """Calls of engines, which are messages to other processes in a run."""
    peak_mb: float
    """Peak memory beyond that at the start, in MiB."""
    before_mb: float
    journal_mb: float


def measure(load: Load, directory: Path) -> Row:
    """Measure from the first request to the end of the last batch.

    Args:
        directory: directory for the journal.
    """
    clock, counts = Clock(), Counter[str]()
    tokenizer = make_tokenizer()
    tokenizer.decode([300, 301])
    rollout = RolloutConfig(
        rollout_batch_size=load.groups_per_batch,
        n_samples_per_prompt=GROUP,
        rollout_max_response_len=load.tokens,
    )
    context = CreditContext(
        credit_of("ibpo"), rollout, Vocabulary(correction_prompt), 4 * load.tokens + PROMPT_TOKENS, 0, 0
    )
    prompt_ids = token_ids(np.arange(PROMPT_TOKENS) % VOCABULARY)
    meter = CostMeter(read_hf_config(SHAPE), 1)
    marks: list[dict[str, Any]] = []
    peaks: list[float] = []

    def draw(ordinal: int, attempt: int) -> tuple[Prompt, list[SampleRequest], CreditContext]:
        own_ids = prompt_ids.copy()
        own_ids[0] = ordinal % VOCABULARY
        prompt = Prompt(ordinal, own_ids, PROMPT_TOKENS - 1, "", "", "")
        step = ordinal // load.groups_per_batch
        return (
            prompt,
            group_requests([prompt], rollout, seed=0, step=step, attempt=attempt),
            replace(context, step=step),
        )

    def mark() -> None:
        marks.append(
            {
                "processor": time.thread_time(),
                "wall": time.perf_counter(),
                "spent": dict(clock.spent),
                "counts": Counter(counts),
            }
        )

    async def loop(journal: Journal | None) -> None:
        engines = [StandIn(load.tokens, clock, counts) for _ in range(load.engines)]
        verifier = Verifier(StandInPool(counts), DataConfig(rm_type="math"))
        decode = clock.timed("decoding", tokenizer.decode)
        sampler = Sampler(engines, scorer(verifier, lambda _, s: decode(s.token_ids)), stall_timeout=1e9)
        memory = None
        if journal is not None:
            with_room = clock.timed("journal", lambda write: write())
            memory = JournalMemory(journal, read_journal(directory, 0), with_room)
        rules = Rules(load.groups_per_batch, 1, any_group, any_group)
        groups = GroupSampler(sampler, find_operator(context.algorithm), rules, memory)
        ahead = Ahead(groups, draw, Pace(STALENESS), version=0)
        mark()
        for step in range(load.batches):
            started = asyncio.create_task(ahead.batch())
            await asyncio.sleep(0.01)  # a tick of the virtual clock, in which everything is sent
            counts["open at start"] += round(sampler.take_metrics()["samples_in_flight"]) * (step == 0)
            batch = await started
            with clock.measuring("meter"):
                meter.sampling(batch.sampled)
            if memory is not None:
                memory.close(step + 1, batch)
            await asyncio.sleep(PAUSE_SECONDS)
            sampler.version = step + 1
            await ahead.advance(step + 1)
            counts["open"] += round(sampler.take_metrics()["samples_in_flight"])
        mark()
        peaks.append(bench.peak_bytes() / 2**20)
        await ahead.close()

    memory_before = bench.resident_bytes() / 2**20
    if load.journal:
        with Journal(directory, 0, "", 0) as journal:
            in_virtual_time(loop(journal))
    else:
        in_virtual_time(loop(None))
    first, last = marks[0], marks[-1]
    spent = {name: seconds - first["spent"].get(name, 0.0) for name, seconds in last["spent"].items()}
    count = last["counts"] - first["counts"]
    samples = count["verdicts"]
    processor = last["processor"] - first["processor"] - spent["stand-ins"]
    stages = {name: spent.get(name, 0.0) for name in ("decoding", "journal", "meter")}
    stages = {"event loop and groups": processor - sum(stages.values())} | stages
    return Row(
        **asdict(load),
        samples=samples,
        open_at_start=count["open at start"],
        open_requests=round(count["open"] / load.batches),
        processor_seconds=round(processor, 3),
        stand_in_seconds=round(spent["stand-ins"], 3),
        wall_seconds=round(last["wall"] - first["wall"], 3),
        samples_per_second=round(samples / processor, 1),
        events_per_second=round(4 * samples / processor, 1),
        microseconds_per_sample={name: round(1e6 * s / samples, 2) for name, s in stages.items()},
        calls_per_sample={name: round(count[name] / samples, 4) for name in ("submits", "takes")},
        peak_mb=round(peaks[0] - memory_before, 1),
        before_mb=round(memory_before, 1),
        journal_mb=round(sum(path.stat().st_size for path in directory.iterdir()) / 2**20, 1),
    )


# ------------------------------------------------------------------------------------------ real calls

ANSWERING = "bench_driver:Answering"
PROCESSES = 2
CALLS = ((64, 8_000), (4096, 4_000))
"""(tokens of a response, responses), a few at a time."""
AT_ONCE = 64


class Answering:
    """An engine inside its process that answers at once, with arrays of its own."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._finished: queue.SimpleQueue[tuple[int, Sample]] = queue.SimpleQueue()

    def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        for number, request in requests:
            self._finished.put((number, sample_for(request, self._tokens, version)))

    def take(self, timeout: float) -> list[tuple[int, Sample]]:
        """Return one sample at a time, since most looks at an engine of a large model find one."""
        with suppress(queue.Empty):
            return [self._finished.get(timeout=timeout)]
        return []

    def abort(self, numbers: Collection[int]) -> None:
        raise AssertionError("nothing is given up here")


def real_calls(tokens: int, responses: int) -> dict[str, Any]:
    """Measure the driver process's time per response requested from an engine through Ray, with one call to
    submit and one to take it; Sampler and all of Ray's threads are included."""
    import ray

    from megatron_ibpo.cluster.actor import Host, on_node, result
    from megatron_ibpo.cluster.engine_processes import CALLS_AT_ONCE, Member, RemoteEngine

    node = ray.get_runtime_context().get_node_id()
    hosts = {
        index: Host(f"engine {index}", on_node(node), gpus=0, threads=CALLS_AT_ONCE, environment={})
        for index in range(PROCESSES)
    }
    try:
        for host in hosts.values():
            result(host.build(ANSWERING, {}, tokens), host.name, TIMEOUT_S)
        engines = [RemoteEngine(Member(index, host)) for index, host in hosts.items()]
        prompt = Prompt(0, token_ids(np.arange(PROMPT_TOKENS)), PROMPT_TOKENS - 1, "", "", "")

        async def score(_: Prompt, sample: Sample) -> None:
            sample.reward = float(sample.token_ids[0])

        async def ask(count: int) -> float:
            sampler = Sampler(engines, score, stall_timeout=TIMEOUT_S)
            began = time.process_time()

            async def one_after_another(first: int) -> None:
                for seed in range(first, count, AT_ONCE):
                    await sampler.answer(prompt, [SampleRequest(prompt.token_ids, seed, tokens)])

            await asyncio.gather(*(one_after_another(first) for first in range(AT_ONCE)))
            await sampler.settle()
            return time.process_time() - began

        asyncio.run(ask(responses // 10))  # warm
        began = time.perf_counter()
        spent = asyncio.run(ask(responses))
        wall = time.perf_counter() - began
    finally:
        for host in hosts.values():
            host.kill()
    return {
        "tokens": tokens,
        "samples": responses,
        "processor_seconds": round(spent, 3),
        "wall_seconds": round(wall, 3),
        "microseconds_per_sample": round(1e6 * spent / responses, 1),
    }


def through_ray() -> dict[str, Any]:
    """Measure engines in separate processes."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tools"), *filter(None, sys.path)])
    sys.path.append(str(ROOT / "tools"))
    import ray

    ray.init(
        num_cpus=PROCESSES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=2**28,
        _node_ip_address="127.0.0.1",
    )
    try:
        rows = [real_calls(tokens, responses) for tokens, responses in CALLS]
    finally:
        ray.shutdown()
    return {"machine": about(), "calls_per_sample": {"submits": 1, "takes": 1}, "rows": rows}


# ------------------------------------------------------------------------------------------------ all of it


@dataclass
class Arguments(bench.Saving):
    real_calls: bool = False
    """Measure engines in separate processes instead of the load."""
    only: int | None = None
    """Run only the load with this number, and print its result as JSON."""
    directory: Path | None = None
    """Directory for journals, which are deleted again; None: the directory for temporary files."""


def about() -> dict[str, Any]:
    return machine("ray", "numpy") | {"load": os.getloadavg()[0]}  # load from other work on the machine


def in_own_process(number: int, directory: Path | None) -> dict[str, Any]:
    flags = ["--only", str(number)]
    if directory is not None:
        flags += ["--directory", str(directory)]
    return bench.in_own_process(__file__, *flags, timeout=TIMEOUT_S, OMP_NUM_THREADS="1")


def main(arguments: Arguments) -> None:
    if arguments.only is not None:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            print(json.dumps(asdict(measure(LOADS[arguments.only], Path(directory)))))
        return
    if arguments.real_calls:
        keep(arguments.save, {"real_calls": through_ray()})
        return
    machine_state = about()
    rows: list[dict[str, Any]] = []
    for number in range(len(LOADS)):
        rows.append(in_own_process(number, arguments.directory))
        keep(arguments.save, {"load": {"machine": machine_state, "rows": rows}})


def keep(path: Path | None, results: dict[str, Any]) -> None:
    """Print the results, and write them beside the other part's in the file."""
    print(json.dumps(results, indent=1), flush=True)
    bench.write(path, results, keeping=True)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
