"""One step of several recipes on this device and without a GPU, from the same samples."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import yaml
from job import Job
from parts.loop import ROOT, check_equal, check_extension, compare_steps, train
from processes import apart

ALGORITHMS = (  # files of examples/algorithms
    "gspo", "grpo", "dapo", "ppo", "maxrl", "ibpo_mask", "ibpo_signed_mask", "ibpo_on_ppo", "critique_grpo",
    "cipo", "ciw", "divergence_window", "self_teacher", "wrong_weight",
)  # fmt: skip
OTHERS = {
    "kl": {"kl_coef": 0.01, "ref_load": str(ROOT / "examples/tiny_qwen3")},
    "adapters": {"lora_rank": 8},
    "fused": {"fuse_lm_head": True},
}  # settings beside IBPO's
THREADS = 2
SETTINGS = {"num_rollout": 1, "eval_num_prompts": 0, "rollout_batch_size": 8}


def run(job: Job) -> None:
    check_extension()
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    texts = {name: (ROOT / f"examples/algorithms/{name}.yaml").read_text() for name in ALGORITHMS}
    cases: dict[str, dict[str, Any]] = {}
    for name, text in texts.items():
        cases[name] = {key.replace("-", "_"): value for key, value in yaml.safe_load(text).items()}
    cases |= OTHERS
    if not job.on_gpu:
        cases = {name: cases[name] for name in ("ppo", "fused")}
    jobs = [(name, gpus) for name in cases for gpus in ("", None)]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // THREADS)) as pool:
        work = [
            pool.submit(apart, train, job.scratch / f"{name}{gpus}", gpus, **SETTINGS, **cases[name])
            for name, gpus in jobs
        ]
        found: dict[str, Any] = {}
        for (name, gpus), future in zip(jobs, work, strict=True):
            found.setdefault(name, {})["cpu" if gpus == "" else "here"] = future.result()["steps"][0]
            job.note(recipes=found)
    differences = {name: compare_steps(own["here"], own["cpu"]) for name, own in found.items()}
    worst = {part: max(own[part] for own in differences.values()) for part in ("loss", "grad_norm")}
    to = f"{worst['loss']:.0e} (loss) and {worst['grad_norm']:.0e} (gradient)"
    job.note(differences=differences, summary=f"{len(cases)} recipes: a step as on the CPU to {to}")
    for name, own in differences.items():
        check_equal(name, own)
