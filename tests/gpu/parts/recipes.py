"""One step of several recipes on this device and without a GPU, from the same samples."""

import os
from concurrent.futures import ThreadPoolExecutor

import yaml
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


def run(job):
    check_extension()
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    cases = {}
    for name in ALGORITHMS:
        settings = yaml.safe_load((ROOT / f"examples/algorithms/{name}.yaml").read_text())
        cases[name] = {key.replace("-", "_"): value for key, value in settings.items()}
    cases |= OTHERS
    if not job.on_gpu:
        cases = {name: cases[name] for name in ("ppo", "fused")}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // THREADS)) as pool:
        found, work = {name: {} for name in cases}, {}
        for name, own in cases.items():
            for place, gpus in (("cpu", ""), ("here", None)):
                directory = job.scratch / f"{name}{gpus}"
                work[name, place] = pool.submit(apart, train, directory, gpus, **SETTINGS, **own)
        for (name, place), future in work.items():
            found[name][place] = future.result()["steps"][0]
            job.note(recipes=found)
    differences = {name: compare_steps(own["here"], own["cpu"]) for name, own in found.items()}
    worst = {part: max(own[part] for own in differences.values()) for part in ("loss", "grad_norm")}
    to = f"{worst['loss']:.0e} (loss) and {worst['grad_norm']:.0e} (gradient)"
    job.note(differences=differences, summary=f"{len(cases)} recipes: a step as on the CPU to {to}")
    for name, own in differences.items():
        check_equal(name, own)
