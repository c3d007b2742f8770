"""Kills the processes of episodes while they are played, and plays each one that got a score once more."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from chaos.episode_game import Game
from chaos.processes import below, by_kind
from chaos.results import append, read
from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest, token_ids
from megatron_ibpo.config import EnvironmentConfig
from megatron_ibpo.environments.chat import PlainChat
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.sampling.episodes import Episodes
from support.byte_tokenizers import byte_level
from support.paths import ROOT
from support.replayed_episodes import replay_problems

KILLS_OF_A_PIECE = 50
PROCESSES, AT_ONCE = 16, 24
LIMITS = EnvironmentConfig(step_timeout=3.0, environment_processes=PROCESSES, max_turns=12)
GAME = "chaos.episode_game:Game"
TURN_S = 0.01  # seconds that the policy takes for a turn
SIGNALS = ["SIGKILL"] * 6 + ["SIGTERM"] * 2 + ["SIGSTOP"]

TOKENIZER = byte_level()
END = TOKENIZER.eos_id
CHAT = PlainChat(TOKENIZER, [END])


def prompt_of(number: int) -> Prompt:
    ids = token_ids(TOKENIZER.encode_prompt("Add."))
    return Prompt(number, ids, len(ids), str(2 + number % 8), "", "Add.", {"environment": GAME})


async def say(request: SampleRequest) -> Sample:
    await asyncio.sleep(TURN_S)
    ids = token_ids([*TOKENIZER.encode(f" {request.seed % 97}"), END])
    shape = len(ids)
    return Sample(
        prompt_token_ids=request.prompt_token_ids, token_ids=ids, logprobs=np.zeros(shape, np.float32),
        finish_reason="stop", temperature=1.0, versions=((0, 0),), loss_mask=np.ones(shape, bool),
    )  # fmt: skip


class Killer:
    def __init__(self, rng: random.Random, kills: int) -> None:
        self._rng, self._left = rng, kills
        self.hits: Counter[str] = Counter()

    async def run(self) -> None:
        while self._left:
            await asyncio.sleep(self._rng.uniform(0.005, 0.08))
            with suppress(psutil.Error, IndexError):  # there is none, or it has just ended
                self._hit()
                self._left -= 1

    def _hit(self) -> None:
        episodes = by_kind(below(os.getpid()))["episode"]
        victim, name, how = self._rng.choice(episodes), "episode", self._rng.choice(SIGNALS)
        if self._rng.random() < 0.05:
            victim, name, how = victim.parent(), "zygote", "SIGKILL"
        victim.send_signal(signal.Signals[how])
        self.hits[f"{name} {how}"] += 1


async def one_piece(pool: EnvironmentPool, seed: int, piece: int, kills: int) -> dict[str, Any]:
    rng = random.Random(f"{seed}/{piece}")
    episodes = Episodes(pool, CHAT, LIMITS, seed, 1.0, None)
    killer = Killer(rng, kills)
    killing = asyncio.create_task(killer.run())
    numbers = iter(range(piece * 10**6, (piece + 1) * 10**6))
    outcomes: Counter[str] = Counter()
    problems: list[str] = []

    async def play() -> None:
        while not killing.done():
            number = next(numbers)
            prompt = prompt_of(number)
            request = SampleRequest(prompt.token_ids, rng.randrange(2**31), 2000)
            outcomes["asked"] += 1
            sample = await episodes.play(prompt, request, say, held_out=False)
            if sample.reward is None:
                outcomes["absent"] += 1
                if not sample.reward_error:
                    problems.append(f"episode {number}: no reward, and no reason")
                continue
            outcomes["scored"] += 1
            found = replay_problems(sample, prompt, Game(), CHAT, ends=[END], seed=seed)
            problems.extend(f"episode {number}: {one}" for one in found)

    await asyncio.gather(*(play() for _ in range(AT_ONCE)))
    await killing
    lost = outcomes["asked"] - outcomes["scored"] - outcomes["absent"]
    if lost:
        problems.append(f"{lost} episodes were lost")
    metrics = episodes.take_metrics()
    return {"hits": dict(killer.hits), "episodes": dict(outcomes), **metrics, "problems": problems}


def main() -> int:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    results = Path(os.environ.get("CHAOS_RESULTS", ROOT / "tools/results/chaos_episodes.jsonl"))
    while True:
        own = [record for record in read(results) if record["seed"] == seed]
        done = sum(record["kills"] for record in own)
        if done >= kills:
            break
        began, number = time.monotonic(), min(KILLS_OF_A_PIECE, kills - done)
        with EnvironmentPool(LIMITS) as pool:
            pool.check(GAME)
            found = asyncio.run(one_piece(pool, seed, len(own), number))
        left = [one.pid for one in psutil.Process().children(recursive=True)]
        if left:
            found["problems"].append(f"still running: {left}")
        record = {
            "seed": seed, "piece": len(own), "kills": number, "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip
        append(results, [record | found])
        print(json.dumps(record | found), flush=True)
        if found["problems"]:
            return 1
    total: Counter[str] = Counter()
    for record in own:
        total.update(record["episodes"])
    print(f"{done} kills: {dict(total)}, 0 lost, every scored one equal to its replay")
    return 0


if __name__ == "__main__":
    sys.exit(main())
