"""Trainer and engine share one device: sleep, train, wake, update, sample; and the memory at every moment."""

import time
from dataclasses import replace

import torch
from job import apart, check
from references import judge_samples, logprobs_of, nearer, wider_dtype
from training import start_policy
from vllm_engine import (
    TIMEOUT_S,
    config_of,
    free_bytes,
    only_with,
    open_engine,
    requests_of,
    sequences_of,
    transport_of,
)

from megatron_ibpo.engines.registry import TRANSPORTS
from megatron_ibpo.weights.transfer.link import UpdateOrder


def run(job):
    config = config_of(job, "qwen3")
    with open_engine(job, config) as engine:
        found = share_device(job, config, engine)
    job.note(**found, predicted_bytes=predicted(job, config), summary=summary(job, found))
    check_shared(found)


def share_device(job, config, engine):
    """Take one step of a run and sample before and after it, in the order of `run.on_cluster`; return what
    was found. On CPUs engines do not sleep."""
    sleeps = job.on_gpu
    moments = Moments(job)
    moments.note("engine started")
    if sleeps:
        engine.call("sleep", timeout=TIMEOUT_S)
        moments.note("engine asleep")
    policy, rank = start_policy(config)
    moments.note("trainer built")
    link = Watched(engine, moments)
    rank.open_transport(TRANSPORTS[transport_of(job)])
    refused = rank.connect({0: link}, [0])
    check(refused == {}, f"the engine refused to connect: {refused}")

    def update(version):
        started = time.perf_counter()
        report = rank.send({0: link}, [0], UpdateOrder(version, sleeps, check=True, timeout=TIMEOUT_S))
        check(report.failures == {}, f"the update failed: {report.failures}")
        return time.perf_counter() - started

    def sampled(version):
        requests = requests_of(config.model.hf_checkpoint, 32 if job.on_gpu else 16, 64, seed=version)
        samples = engine.generate(requests, version=version, timeout=TIMEOUT_S)
        moments.note(f"sampled with version {version}")
        return samples

    found = {"engines_sleep": sleeps, "transport": transport_of(job), "checksums_compared": True}
    found["first_update_seconds"] = update(1)
    before = sampled(1)
    if sleeps:
        engine.call("sleep", timeout=TIMEOUT_S)
        moments.note("engine asleep again")
    old = policy.logprobs(sequences_of(before))
    moments.note("log-probs of the trainer")
    started = time.perf_counter()
    step = policy.update(sequences_of(before))
    moments.note("trained")
    found |= {"step": step, "step_seconds": time.perf_counter() - started, "update_seconds": update(2)}
    after = sampled(2)
    new = policy.logprobs(sequences_of(after))
    if sleeps:
        rank.make_room()
    found["samples"] = judge_samples(job, config, before, old)
    stale = logprobs_of(config.model.hf_checkpoint, job, wider_dtype(config), after)[0]
    found["new_weights"] = nearer([sample.logprobs for sample in after], new, [stale])
    return found | {"free_bytes": moments.free, "used_bytes": moments.used}


class Moments:
    """Free and used bytes of the device at each moment, by name."""

    def __init__(self, job):
        self._job, self.free, self.used = job, {}, {}
        self._total = torch.cuda.get_device_properties(0).total_memory if job.on_gpu else 0

    def note(self, name):
        self.free[name] = free_bytes(self._job)
        self.used[name] = max(0, self._total - self.free[name])
        self._job.note(free_bytes=self.free)


class Watched:
    """A link to an engine that notes the device's memory after each answer within an update."""

    def __init__(self, engine, moments):
        self._engine, self._moments, self._called = engine, moments, ""

    def begin(self, method, *arguments):
        self._called = " ".join(map(str, (method, *arguments))) if method == "wake" else method
        self._engine.begin(method, *arguments)

    def result(self, timeout):
        answer = self._engine.result(timeout)
        self._moments.note(f"in update: {self._called}")
        return answer


def predicted(job, config):
    """Return the plan's bytes in use in each phase, on such a device."""
    total = torch.cuda.get_device_properties(0).total_memory if job.on_gpu else 80 * 2**30
    return apart(_predict, config, total)


def _predict(config, total):
    from megatron_ibpo.plan.feasibility import Plan, make_plan, peaks

    run = replace(config.run, dry_run_gpu_memory_gib=total / 2**30, dry_run_gpus_per_node=1)
    plan = make_plan(replace(config, run=run), 1)
    return {"problems": plan.problems} | (peaks(plan, 0) if isinstance(plan, Plan) else {})


def check_shared(found):
    check(not found["samples"]["problem"], found["samples"]["problem"])
    check(found["step"]["updates_skipped"] == 0, f"the step was lost: {found['step']}")
    check(found["new_weights"]["holds"], f"the engine samples with the old weights: {found['new_weights']}")


def summary(job, found):
    moved = found["new_weights"]
    gaps = f"{moved['to_right']:.1e} from the trainer's, {moved['to_wrong']:.1e} from the old ones"
    seconds = f"update {found['update_seconds']:.2f} s, step {found['step_seconds']:.2f} s"
    text = f"log-probs after an update {gaps}; {seconds}"
    if not job.on_gpu:
        return f"{text}; over gloo, engines on CPUs do not sleep"
    moments = {"asleep": "engine asleep", "training": "trained", "sampling": "sampled with version 2"}
    used = ", ".join(f"{name} {found['used_bytes'][at] / 2**30:.1f}" for name, at in moments.items())
    return f"{text}; GiB used: {used}{only_with(job)}"
