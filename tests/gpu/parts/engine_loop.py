"""The product itself: `bash examples/run.sh` on one device, trainer and engine on it together, on Ray."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from job import apart, check
from vllm_engine import WAYS, make_model
from words import write_tokenizer

from megatron_ibpo.basics.versions import missing
from megatron_ibpo.models import read_hf_config

ROOT = Path(__file__).resolve().parents[3]
CONDUCTORS = {ROOT, ROOT / "tests", ROOT / "tools", ROOT / "tests/gpu"}  # what it adds to PYTHONPATH
SUMS, WORDS = ROOT / "tests/gpu/sums.py", ROOT / "tests/gpu/words.py"
OPTIONAL = {"reasoning-gym", "math-verify", "renderers", "uvicorn", "websockets", "sentencepiece"}
"""Packages that neither these tasks nor the loop import: a machine may lack them."""
WITHOUT_FLA = "flash-linear-attention is hidden: tuning its kernels takes longer than a part may"
RUN_S = 600.0  # a run may take; its part is ended earlier
TINY_STEPS, STEPS = 10, 3
IN_GPU_MEMORY = ("--no-optimizer-cpu-offload", "--no-use-precision-aware-optimizer")  # the models are small
NUMBERS = (
    "reward", "shaped_reward", "loss", "grad_norm", "updates_skipped", "logprob_diff_abs_mean",
    "logprob_diff_abs_max", "weight_update_seconds", "tokens_responses", "tokens_corrections",
    "tokens_trained", "corrections", "skipped_pairs", "response_errors", "reward_errors", "engine_deaths",
    "trainer_restarts", "seconds",
)  # fmt: skip


def run(job):
    job.note(product=can_run())
    if not job.found["product"]:
        without_ray(job)
        return
    found = {"tiny": train_sums(job)}
    job.note(**found)
    found["qwen3"] = train_random(job, "qwen3")
    job.note(**found, summary="; ".join(f"{name}: {told(own)}" for name, own in found.items()))


def can_run():
    return all(importlib.util.find_spec(name) is not None for name in ("ray", "vllm"))


def without_ray(job):
    """The same loop in one process with an engine on the CPU. It is not what users run."""
    from parts.loop import train

    job.note(summary="NOT THE PRODUCT: without Ray or vLLM the loop ran in one process with the lean engine")
    steps = TINY_STEPS if job.on_gpu else 1
    job.note(tiny=apart(train, job.scratch / "lean", None, num_rollout=steps, eval_num_prompts=0))


def train_sums(job):
    """Train the tiny dense model of the examples on sums."""
    steps = TINY_STEPS if job.on_gpu else 2
    return train(job, "tiny", steps, *task_of(SUMS), model=ROOT / "examples/tiny_qwen3")


def task_of(file):
    """Return flags for the prompts and the reward of a file."""
    prompts = f"import://{file}:rows"
    return "--prompt-data", prompts, "--eval-prompt-data", prompts, "--rm-type", f"{file}:score"


def train_random(job, family):
    """Train a random model, of whose responses half are right."""
    path = make_model(job, family, f"{family}-loop")
    config = json.loads((path / "config.json").read_text())
    write_tokenizer(path, read_hf_config(path).vocab_size, config["eos_token_id"])
    prompts, responses, context = (32, 256, 2048) if job.on_gpu else (4, 16, 512)
    sizes = ("--rollout-batch-size", prompts, "--rollout-max-response-len", responses)
    sizes += ("--rollout-max-context-len", context, "--operator-skill-prompts", 0, "--no-apply-chat-template")
    return train(job, family, STEPS if job.on_gpu else 2, *task_of(WORDS), *sizes, *IN_GPU_MEMORY, model=path)


def train(job, name, steps, *flags, model):
    """Run the script to its end; return what its metrics say."""
    run_dir = job.scratch / f"run-{name}"
    way, environment = WAYS.get(os.environ.get("IBPO_ENGINE_WAY", ""), ((), {}))
    command = ["bash", "examples/run.sh", "--colocate", "--allow-local-modules", "--num-rollout", steps]
    command += ["--eval-num-prompts", 0, "--reward-threshold", 1, "--vllm-enforce-eager", "--no-save", *flags]
    command += [word for argument in way for word in ("--vllm-arg", argument)]
    if job.on_gpu:
        command += ["--bf16", "--vllm-gpu-memory-utilization", 0.3, "--vllm-kv-cache-bytes", 12 * 2**30]
    environment = users_environment(job) | environment
    environment |= {"RUN_DIR": str(run_dir), "HF_CHECKPOINT": str(model)}
    started = time.perf_counter()
    run_to_its_end([str(word) for word in command], environment, job.scratch / f"{name}.log")
    seconds = time.perf_counter() - started
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    taken = [row for row in rows if row["kind"] == "step"]
    check(len(taken) == steps, f"{len(taken)} of {steps} steps were taken")
    stages = json.loads((run_dir / "summary.json").read_text())["seconds_by_stage"]
    return speeds(taken) | {
        "script_seconds": seconds, "seconds_by_stage": stages,
        "steps": [{number: row[number] for number in NUMBERS if number in row} for row in taken],
        "vllm_eager": True, "stand_ins": stand_ins(job)[1],
    }  # fmt: skip


def speeds(steps):
    """Return tokens per second of sampling and of training, and the difference of log-probs, after the first
    step, which builds what is built at first use."""
    later = steps[1:] or steps

    def per_second(names, stage):
        seconds = sum(row["seconds"][stage] for row in later)
        return sum(row.get(name, 0.0) for row in later for name in names) / max(seconds, 1e-9)

    return {
        "sampled_tokens_per_second": per_second(("tokens_responses", "tokens_corrections"), "sample"),
        "trained_tokens_per_second": per_second(("tokens_trained",), "train"),
        "logprob_difference": max(row["logprob_diff_abs_mean"] for row in steps),
    }


def told(own):
    sampled, trained = own["sampled_tokens_per_second"], own["trained_tokens_per_second"]
    rates = f"{sampled:,.0f} tokens/s sampled, {trained:,.0f} trained"
    return f"{len(own['steps'])} steps, {rates}, log-probs differ by {own['logprob_difference']:.1e}"


def users_environment(job):
    """Return the environment of a user who runs the script with this Python and its packages."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = [path for path in paths if Path(path) not in CONDUCTORS]
    environment = os.environ | {"IBPO_PYTHON": sys.executable}
    if job.on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return environment | {"PYTHONPATH": os.pathsep.join([str(stand_ins(job)[0]), *own])}


def stand_ins(job):
    """Return a directory that declares packages as installed that this machine lacks and the run does not
    import, and their names. The script refuses to start without them, as it should for users."""
    directory = job.scratch / "stand-ins"
    directory.mkdir(exist_ok=True)
    (directory / "fla.py").write_text(f"raise ImportError({WITHOUT_FLA!r})\n")
    lacking = [name for name in missing() if name in OPTIONAL]
    for name in lacking:
        place = directory / f"{name.replace('-', '_')}-0.dist-info"
        place.mkdir(exist_ok=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    return directory, lacking


def run_to_its_end(command, environment, log):
    """Run a script; its processes end with it."""
    with log.open("wb") as output:
        status = subprocess.run(
            command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, timeout=RUN_S,
        ).returncode  # fmt: skip
    lines = log.read_text(errors="replace").splitlines() or [""]
    print(*lines[-80:], sep="\n", flush=True)
    check(status == 0, f"{' '.join(command[:2])} ended with {status}: {lines[-1][:300]}")
