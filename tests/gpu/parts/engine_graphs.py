"""CUDA graphs and torch.compile: do graphs see new weights? How fast are they, and starts cold and warm?"""

import os
import time

from parts.engine_colocated import check_shared, share_device
from vllm_engine import NO_COMPILATION, TIMEOUT_S, WAYS, config_of, only_with, open_engine, requests_of


def run(job):
    os.environ["VLLM_CACHE_ROOT"] = str(job.scratch / "vllm")  # nothing is compiled yet
    config = config_of(job, "qwen3", graphs=True)
    with open_engine(job, config, ways()) as engine:
        cold, way = job.found["vllm"]["start_seconds"], job.found["way"]
        found = share_device(job, config, engine)
        graphs = speed(job, config, engine, version=2)
    job.note(graphs_are_on=job.on_gpu, cold_start_seconds=cold, tokens_per_second=graphs, **found)
    check_shared(found)
    with open_engine(job, config, {way: ways()[way]}):
        warm = job.found["vllm"]["start_seconds"]
    job.note(way=way, users_get_it=way == next(iter(ways())), warm_start_seconds=warm)
    job.note(summary=summary(job, found))


def ways():
    """Return the ways to capture graphs; the first is what users have, if that holds without graphs."""
    arguments, environment = WAYS.get(os.environ.get("IBPO_ENGINE_WAY", ""), ((), {}))
    return {
        "compiled, with graphs": (arguments, environment),
        "graphs of decoding alone, not compiled": ((*arguments, *NO_COMPILATION), environment),
    }


def speed(job, config, engine, version):
    """Return tokens per second of as many requests as in `engine-samples`, the second time."""
    requests = requests_of(config.model.hf_checkpoint, 64, 128 if job.on_gpu else 32, seed=7)
    for _ in range(2):
        started = time.perf_counter()
        engine.generate(requests, version=version, timeout=TIMEOUT_S)
        seconds = time.perf_counter() - started
    return sum(request.max_tokens for request in requests) / seconds


def summary(job, found):
    own, moved = job.found, found["new_weights"]
    if not job.on_gpu:
        return "without graphs, which CPUs have not: only that this part runs is shown"
    rate = f"{own['tokens_per_second']:,.0f} tokens/s (eager: engine-samples)"
    starts = f"start {own['cold_start_seconds']:.0f} s, again {own['warm_start_seconds']:.0f} s"
    gaps = f"{moved['to_right']:.1e} from the trainer's, {moved['to_wrong']:.1e} from the old ones"
    return f"{rate}; {starts}; log-probs after an update {gaps}{only_with(job)}"
