"""A whole run but for the model: engines write what a seed says, trainers note what they get."""

import asyncio
import atexit
import json
import random
import tempfile
import zlib
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import islice
from unittest.mock import Mock, patch

import numpy as np

from megatron_ibpo.basics.sampling_mask import sampling_mask
from megatron_ibpo.cluster.deaths import ProcessDiedError
from megatron_ibpo.cluster.placement import Node, plan_placement
from megatron_ibpo.engines.registry import on_device
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.policy.group import About
from megatron_ibpo.rewards import Outcome, Verifier, open_pool
from megatron_ibpo.run.open import open_run
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.run.state import Launched, Processes
from megatron_ibpo.run.steps import steps
from support.paths import ROOT
from support.samples import sample_of

MODEL = ROOT / "examples/tiny_qwen3"
FLAGS = (
    "--hf-checkpoint", str(MODEL), "--prompt-data", "import://support.live_loop:questions",
    "--rm-type", "support.live_loop:reward", "--reward-threshold", "1", "--reward-workers", "1",
    "--rollout-batch-size", "4", "--n-samples-per-prompt", "3", "--rollout-max-response-len", "12",
    "--rollout-temperature", "0.7", "--ibpo-corrections", "2", "--operator-skill-prompts", "0",
    "--eval-num-prompts", "0", "--max-tokens-per-gpu", "512", "--seed", "5",
)  # fmt: skip
LETTERS = tuple(range(40, 60))  # tokens that engines write


def questions(split):
    return ({"prompt": f"{number}+{number * number}", "label": str(number)} for number in range(50))


def reward(question, response, label, metadata):
    return float(zlib.crc32(f"{question}|{response}|{label}".encode()) % 3 == 0)


def config_of(run_dir, *flags):
    config = parse_config([*FLAGS, "--run-dir", str(run_dir), *flags])
    return on_device(config, read_hf_config(MODEL), on_gpu=False)


def written(request):
    """Return what an engine answers, whichever policy it has."""
    draw = random.Random(request.seed + 1000 * int(request.prompt_token_ids.sum()))
    return [draw.choice(LETTERS) for _ in range(draw.randint(1, request.max_tokens))]


class Engine:
    """Finishes what it was asked in an order of its own, a few at a time."""

    def __init__(self):
        self.version, self.asked, self.open, self.draw = 0, [], {}, random.Random(0)

    async def submit(self, requests, version):
        assert self.version >= version, "older weights than were asked for"
        self.asked += [request for _, request in requests]
        self.open |= {number: (request, self.version) for number, request in requests}

    async def take(self, timeout):
        await asyncio.sleep(0.001)
        numbers = [number for number in self.open if self.draw.random() < 0.4]
        return [(number, self._sample(*self.open.pop(number))) for number in numbers]

    async def abort(self, numbers):
        for number in numbers:
            self.open.pop(number, None)

    async def kill(self, why):
        raise AssertionError(why)

    def _sample(self, request, version):
        ids = written(request)
        ended = "stop" if len(ids) < request.max_tokens else "length"
        own = {"finish_reason": ended, "temperature": request.temperature, "versions": ((0, version),)}
        mask = sampling_mask([[*{token, request.seed % 64}] for token in ids]) if request.is_cut else None
        return sample_of(request.prompt_token_ids, ids, sampling_mask=mask, **own)


def scored(target, arguments):
    future = Future()
    future.set_result(Outcome(reward(*arguments)))
    return future


def put_in_place_of_processes(monkeypatch, module, open_engine):
    """Let a module of `study` take this engine and rewards at once, where it would start processes."""
    monkeypatch.setattr(module, "open_engine", open_engine)
    monkeypatch.setattr(module, "ThreadedEngine", lambda opened: opened)
    monkeypatch.setattr(module, "open_verifier", lambda data: Verifier(Mock(submit=scored, deaths=0), data))


class Engines:
    count = alive = 2
    reproducible = prefix_caching = True
    revive = None  # none dies

    def __init__(self):
        self.engines, self.version, self.met = [Engine(), Engine()], 0, 0

    @property
    def asked(self):
        return [request for engine in self.engines for request in engine.asked]

    def clients(self):
        return self.engines

    def update_weights(self, version):
        self.version = version
        for engine in self.engines:
            engine.version = version
        return {}

    def meet_trainers(self):
        self.met += 1

    wake = sleep = admit = lambda self: None


class Trainers:
    """`policy.group.RankCalls` of one rank, which notes its work and saves that it was saved."""

    def __init__(self, dies_at=None):
        """`dies_at`: number of the update in which it dies once, from 0 on."""
        self.dies_at, self.restarted_from = dies_at, []
        self.updates = []  # sequences trained on, if none died

    def call_each(self, method, arguments):
        assert method == "update"
        if self.dies_at == len(self.updates):
            self.dies_at = None
            raise ProcessDiedError("trainer 0 was killed")
        ((mini_batches,),) = arguments
        batches = [own for mini in mini_batches for own in mini.cut.micro_batches]
        self.updates.append([plain(sequence) for own in batches for sequence in own.sequences])
        return [{"loss": 0.0, "updates_skipped": 0.0}]

    def call_all(self, method, *arguments):
        if method == "about":
            return [About(1, "torch", {}, "CPU", ())]
        if method == "save":
            directory, step, state, _ = arguments
            here = directory / f"step_{step:06d}"
            here.mkdir(parents=True)
            (here / "run_state.json").write_text(json.dumps({"step": step, **state}))
        return [method == "save_rests"]

    def share(self, value):
        return value

    def restart(self, config, checkpoint):
        self.restarted_from.append(checkpoint)


def plain(record):
    values = {name: getattr(record, name) for name in record.__slots__}
    if (mask := values.get("sampling_mask")) is not None:
        values["sampling_mask"] = [mask[position].tolist() for position in range(len(mask))]
    return {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in values.items()}


class Steps:
    def __init__(self, run, backend):
        self.run, self.engines, self.trainers, self.groups = run, backend.engines, backend.trainers, []

    def take(self, count):
        self.groups += [step.groups for step in islice(steps(self.run), count)]

    @property
    def all_groups(self):
        return [group for groups in self.groups for group in groups]


@cache
def verifiers():
    data = config_of(tempfile.gettempdir()).data
    opened = open_pool(data, [data.rm_type])
    atexit.register(opened.__exit__, None, None, None)
    return opened.__enter__()


class StandIns:
    def __init__(self, trainers=None, wait_ready=lambda: None):
        self.engines, self.trainers, self.wait_ready = Engines(), trainers or Trainers(), wait_ready

    def check(self, config, shape):
        pass

    def connect(self, config):
        return nullcontext(lambda: None)

    def place(self, config, *, samples=True):
        here = Node("here", "here", cpus=1, gpus=0)
        return plan_placement([here], num_trainers=1, engines=None, on_gpu=False)

    def launch(self, resolved, inputs, judges, stack):
        processes = Processes(
            trainers=self.trainers, engines=self.engines, deaths=dict, verifiers=judges.pool,
            placement_note="in a test", wait_ready=self.wait_ready,
        )  # fmt: skip
        return Launched({}, lambda checkpoint: processes)


@contextmanager
def in_place(backend):
    """Runs opened meanwhile get these processes; all share the verifier, whose start takes longest."""
    with (
        patch("megatron_ibpo.run.inputs.start_pool", lambda *_: nullcontext(verifiers())),
        patch("megatron_ibpo.run.open.choose_backend", lambda *_: backend),
    ):
        yield


@contextmanager
def live_run(config, trainers=None):
    backend = StandIns(trainers)
    with in_place(backend), open_run(config) as run:
        yield Steps(run, backend)
