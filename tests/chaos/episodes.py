"""Kills the processes of episodes that a scripted policy plays, and plays each that got a score once more."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil

from chaos.episode_game import Game
from chaos.episodes_audit import replay_problems
from chaos.processes import below, by_kind
from chaos.results import append, read
from megatron_ibpo.basics.records import Prompt, SampleRequest, token_ids
from megatron_ibpo.config import EnvironmentConfig
from megatron_ibpo.environments.chat import PlainChat
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.sampling.episodes import Episodes
from support.byte_tokenizers import byte_level
from support.paths import ROOT
from support.samples import sample_of

KILLS_OF_A_PIECE = 50
AT_ONCE = 24
LIMITS = EnvironmentConfig(step_timeout=3.0, environment_processes=16, max_turns=12)
GAME = {"environment": "chaos.episode_game:Game"}
SIGNALS = ["SIGKILL"] * 6 + ["SIGTERM"] * 2 + ["SIGSTOP"]
TOKENIZER = byte_level()
END = TOKENIZER.eos_id
CHAT = PlainChat(TOKENIZER, [END])
ASKED = token_ids(TOKENIZER.encode_prompt("Add."))


async def say(request):
    await asyncio.sleep(0.01)
    return sample_of(request.prompt_token_ids, [*TOKENIZER.encode(f" {request.seed % 97}"), END])


async def one_piece(pool, seed, piece, kills):
    rng, numbers = random.Random(f"{seed}/{piece}"), count(piece * 10**6)
    episodes = Episodes(pool, CHAT, LIMITS, seed, 1.0, None)
    hits, outcomes, problems = Counter(), Counter(), []

    async def hit():
        """The processes of episodes, and now and then the one that they are forks of."""
        while hits.total() < kills:
            await asyncio.sleep(rng.uniform(0.005, 0.08))
            with suppress(psutil.Error, IndexError):  # there is none, or it has just ended
                victim = rng.choice(by_kind(below(os.getpid()))["episode"])
                name, how = "episode", rng.choice(SIGNALS)
                if rng.random() < 0.05:
                    victim, name, how = victim.parent(), "zygote", "SIGKILL"
                victim.send_signal(signal.Signals[how])
                hits[f"{name} {how}"] += 1

    async def play():
        while not killing.done():
            number = next(numbers)
            prompt = Prompt(number, ASKED, len(ASKED), str(2 + number % 8), "", "Add.", GAME)
            outcomes["asked"] += 1
            request = SampleRequest(ASKED, rng.randrange(2**31), 2000)
            sample = await episodes.play(prompt, request, say, held_out=False)
            if sample.reward is None:
                outcomes["absent"] += 1
                found = [] if sample.reward_error else ["no reward, and no reason"]
            else:
                outcomes["scored"] += 1
                found = replay_problems(sample, prompt, Game(), CHAT, [END], seed)
            problems.extend(f"episode {number}: {one}" for one in found)

    killing = asyncio.create_task(hit())
    await asyncio.gather(killing, *(play() for _ in range(AT_ONCE)))
    if lost := outcomes["asked"] - outcomes["scored"] - outcomes["absent"]:
        problems.append(f"{lost} episodes were lost")
    found = {"hits": dict(hits), "episodes": dict(outcomes)}
    return found | episodes.take_metrics() | {"problems": problems}


def main():
    kills, seed = map(int, [*sys.argv[1:], *(100, 0)[len(sys.argv) - 1 :]])
    results = Path(os.environ.get("CHAOS_RESULTS", ROOT / "tools/results/chaos_episodes.jsonl"))
    while True:
        own = read(results, seed)
        done = sum(record["kills"] for record in own)
        if done >= kills:
            break
        began, number = time.monotonic(), min(KILLS_OF_A_PIECE, kills - done)
        with EnvironmentPool(LIMITS) as pool:
            pool.check(*GAME.values())
            found = asyncio.run(one_piece(pool, seed, len(own), number))
        if left := [one.pid for one in below(os.getpid())]:
            found["problems"].append(f"still running: {left}")
        seconds = round(time.monotonic() - began, 1)
        record = {"seed": seed, "piece": len(own), "kills": number, "seconds": seconds} | found
        append(results, [record])
        print(json.dumps(record), flush=True)
        if found["problems"]:
            return 1
    total = dict(sum((Counter(record["episodes"]) for record in own), Counter()))
    print(f"{done} kills: {total}, 0 lost, every scored one equal to its replay")
    return 0


if __name__ == "__main__":
    sys.exit(main())
