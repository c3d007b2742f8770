"""New weights arrive while requests run: is every token sampled with the weights that its record names?

The two ways in which running requests go on are tried: with their caches recomputed, and with those of the
old weights (`--no-recompute-kv-after-update`). On a GPU weights arrive by memory handles, since one GPU has
no place for a second member of an NCCL group; of that transport only the loss of a member is tried.
"""

import time
from dataclasses import replace

from job import check
from references import free_memory, nearer, reference, score, wider_dtype
from training import start_policy
from vllm_engine import TIMEOUT_S, config_of, open_engine, requests_of, sequences_of, transport_of

from megatron_ibpo.engines.registry import TRANSPORTS
from megatron_ibpo.weights.transfer.link import UpdateOrder

REQUESTS = 32
MOMENT = 0.3  # share of the undisturbed time after which the update begins
OLD, NEW = 1, 2  # versions
PARTS = ("old", "new", "first new", "last old")  # tokens of responses by both


def run(job):
    config = config_of(job, "qwen3")
    policy, rank = start_policy(config)
    found = {}
    for name, recompute in (("recompute", True), ("keep", False)):
        rollout = replace(config.rollout, recompute_kv_after_update=recompute)
        with open_engine(job, replace(config, rollout=rollout)) as engine:
            samples, found[name] = update_in_flight(job, config, policy, rank, engine, job.scratch / name)
        found[name] |= judged(job, config, samples, job.scratch / name, recompute)
        job.note(**found)
    job.note(nccl=lose_a_member(job, rank), summary=summary(found))
    for name, own in found.items():
        check(own["problem"] == "", f"{name}: {own['problem']}")
        enough = own["responses_of_both"] >= REQUESTS // 4
        check(enough, f"{name}: the update came too early or too late: {own}")
        for part in PARTS:
            check(own[part]["holds"], f"{name}: {part} is not of the recorded weights: {own[part]}")


def update_in_flight(job, config, policy, rank, engine, directory):
    """Return the samples of requests during which the weights changed, and seconds; and leave the weights of
    before and after in `directory`."""
    rank.open_transport(TRANSPORTS[transport_of(job)])
    check(rank.connect({0: engine}, [0]) == {}, "the engine refused to connect")
    send(rank, engine, OLD)
    policy.save_hf(directory / "old")
    requests = in_flight(job, config)
    started = time.perf_counter()
    undisturbed = engine.generate(requests, version=OLD, timeout=TIMEOUT_S)
    seconds = time.perf_counter() - started
    policy.update(sequences_of(undisturbed))
    policy.save_hf(directory / "new")
    engine.submit(list(enumerate(requests)), OLD)
    time.sleep(MOMENT * seconds)
    update_seconds = send(rank, engine, NEW)
    samples = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(samples) < len(requests) and time.monotonic() < deadline:
        samples.update(engine.take(1.0))
    return samples, {"undisturbed_seconds": seconds, "update_seconds": update_seconds}


def send(rank, engine, version):
    started = time.perf_counter()
    report = rank.send({0: engine}, [0], UpdateOrder(version, sleeping=False, check=True, timeout=TIMEOUT_S))
    check(report.failures == {}, f"the update failed: {report.failures}")
    return time.perf_counter() - started


def in_flight(job, config):
    """Return requests of many lengths, so that some end before the update."""
    most = config.rollout.rollout_max_response_len - 64
    requests = requests_of(config.model.hf_checkpoint, REQUESTS, most)
    return [
        replace(request, max_tokens=most * (number + 4) // (REQUESTS + 3))
        for number, request in enumerate(requests)
    ]


def judged(job, config, samples, directory, recompute):
    """Compare every span of every response with both weights. Where caches are kept, the new weights read
    what the old ones computed of the tokens before."""
    problem = problem_of(samples, in_flight(job, config))
    mixed = [sample for sample in samples.values() if len(sample.versions) == 2]
    found = {"responses": len(samples), "responses_of_both": len(mixed), "problem": problem}
    if problem or not mixed:
        return found
    models = [reference(directory / name, job.device, wider_dtype(config)) for name in ("old", "new")]
    columns = {part: ([], [], []) for part in PARTS}
    for sample in mixed:
        switch = sample.versions[1][0]
        old, new = (score(model, sample)[0] for model in models)
        right = new if recompute else score(models[1], sample, earlier=models[0], switch=switch)[0]
        spans = slice(None, switch), slice(switch, None), slice(switch, switch + 1), slice(switch - 1, switch)
        for (part, column), span in zip(columns.items(), spans, strict=True):
            is_old = part.endswith("old")
            own = (sample.logprobs, old, new) if is_old else (sample.logprobs, right, old)
            for kept, values in zip(column, own, strict=True):
                kept.append(values[span])
    del models
    free_memory()
    return found | {part: nearer(*column) for part, column in columns.items()}


def problem_of(samples, requests):
    """Return what is wrong with the records themselves; empty if nothing is."""
    if len(samples) != len(requests):
        return f"{len(requests) - len(samples)} of {len(requests)} responses never came"
    for number, sample in samples.items():
        if len(sample.token_ids) != requests[number].max_tokens:
            return f"response {number} has {len(sample.token_ids)} of {requests[number].max_tokens} tokens"
        starts, versions = zip(*sample.versions, strict=True)
        in_order = starts[0] == 0 and sorted(set(starts)) == list(starts)
        if not in_order or versions not in ((OLD,), (NEW,), (OLD, NEW)):
            return f"response {number} has the spans {sample.versions}"
    return ""


def lose_a_member(job, rank):
    """Have an engine fail as it joins the group of NCCL: the trainer must not wait for it."""
    if not job.on_gpu:
        return "not tried: there is no GPU"
    rank.open_transport(TRANSPORTS["nccl"])
    rank.connect({0: Gone()}, [0])
    started = time.perf_counter()
    report = rank.send({0: Gone()}, [0], UpdateOrder(NEW, sleeping=False, check=False, timeout=TIMEOUT_S))
    seconds = time.perf_counter() - started
    check("it has gone" in report.failures.get(0, ""), f"the loss was not noticed: {report.failures}")
    return {"seconds_until_given_up": seconds, "failures": report.failures}


class Gone:
    """A link to an engine that ends when it is to join a group."""

    def begin(self, method, *arguments):
        self._called = method

    def result(self, timeout):
        if self._called == "init_weight_transfer":
            raise RuntimeError("it has gone")


def summary(found):
    texts = []
    for name, own in found.items():
        both = f"{own['responses_of_both']} of {own['responses']} responses by both weights"
        text = f"{name}: {both}, update {own['update_seconds']:.2f} s"
        if "new" in own:
            gaps = f"{own['new']['to_right']:.1e} from new weights, {own['new']['to_wrong']:.1e} from old"
            text += f", new tokens {gaps}"
        texts.append(text)
    return "; ".join(texts)
