"""The whole loop without Ray and vLLM, and one step of several recipes; the first step on a CPU too."""

import importlib
import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from job import Skipped, apart, check

ROOT = Path(__file__).resolve().parents[3]
LOSS_BOUND, NORM_BOUND = 1e-5, 1e-3  # of the first step in float32: absolute, relative
GAIN = 0.1  # by which greedy accuracy must rise
KEPT = (
    "reward", "accuracy", "shaped_reward", "correction_success", "bonus_rate", "loss", "grad_norm",
    "clip_fraction", "logprob_diff_abs_mean", "logprob_diff_abs_max", "updates_skipped", "reward_errors",
    "seconds",
)  # fmt: skip
ALGORITHMS = (  # files of examples/algorithms
    "gspo", "grpo", "dapo", "ppo", "maxrl", "ibpo_mask", "ibpo_signed_mask", "ibpo_on_ppo", "critique_grpo",
    "cipo", "ciw", "divergence_window", "self_teacher", "wrong_weight",
)  # fmt: skip
TINY = str(ROOT / "examples/tiny_qwen3")
OTHERS = {"adapters": {"lora_rank": 8}, "fused": {"fuse_lm_head": True}}  # settings beside IBPO's
OTHERS["kl"] = {"kl_coef": 0.01, "ref_load": TINY}
THREADS = 2


def run(job):
    if importlib.util.find_spec("megatron_ibpo._edit_distance") is None:
        raise Skipped("the C++ extension is not built; `python3 setup.py build_ext --inplace` builds it")
    (recipes if job.variant == "recipes" else whole_loop)(job)


def whole_loop(job):
    found = {"cpu": apart(train, job.scratch / "cpu", "", num_rollout=1, eval_num_prompts=0)}
    for name in ("float32", "bfloat16") if job.on_gpu else ("float32",):
        settings = {"num_rollout": 20 if job.on_gpu else 2, "bf16": name == "bfloat16"}
        found[name] = apart(train, job.scratch / name, None, eval_num_prompts=256, **settings)
        job.note(**found)
    differences = compare_steps(found["float32"]["steps"][0], found["cpu"]["steps"][0])
    gains = {name: own["greedy"] for name, own in found.items() if name != "cpu"}
    rise = ", ".join(f"{first:.3f} to {last:.3f} in {name}" for name, (first, last) in gains.items())
    job.note(first_step=differences, summary=f"{summary([differences])}; greedy accuracy {rise}")
    check_equal("the first step", differences)
    for name, (first, last) in gains.items():
        check(not job.on_gpu or last >= first + GAIN, f"{name}: greedy accuracy from {first} to {last}")


def recipes(job):
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    cases = {}
    for name in ALGORITHMS:
        settings = yaml.safe_load((ROOT / f"examples/algorithms/{name}.yaml").read_text())
        cases[name] = {key.replace("-", "_"): value for key, value in settings.items()}
    cases |= OTHERS
    if not job.on_gpu:
        cases = {name: cases[name] for name in ("ppo", "fused")}
    short = {"num_rollout": 1, "eval_num_prompts": 0, "rollout_batch_size": 8}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // THREADS)) as pool:
        found, work = {name: {} for name in cases}, {}
        for name, own in cases.items():
            for place, gpus in (("cpu", ""), ("here", None)):
                directory = job.scratch / f"{name}{gpus}"
                work[name, place] = pool.submit(apart, train, directory, gpus, **short, **own)
        for (name, place), future in work.items():
            found[name][place] = future.result()["steps"][0]
            job.note(recipes=found)
    differences = {name: compare_steps(own["here"], own["cpu"]) for name, own in found.items()}
    job.note(differences=differences, summary=f"{len(cases)} recipes: {summary(differences.values())}")
    for name, own in differences.items():
        check_equal(name, own)


def summary(differences):
    loss, norm = (max(own[part] for own in differences) for part in ("loss", "grad_norm"))
    return f"first step as on the CPU to {loss:.0e} (loss) and {norm:.0e} (gradient)"


def compare_steps(ours, theirs):
    """A step's differences from the same one on the CPU: absolute, but relative of the gradient."""
    names = ("reward", "shaped_reward", "loss", "grad_norm")
    differences = {name: abs(ours[name] - theirs[name]) for name in names if name in ours}
    return differences | {"grad_norm": differences["grad_norm"] / max(1e-9, theirs["grad_norm"])}


def check_equal(what, differences):
    """Samples are the same, and so are rewards; sums are taken in another order."""
    rewards = differences["reward"] + differences.get("shaped_reward", 0.0)
    check(rewards == 0.0, f"{what}: rewards are not those of the CPU, {differences}")
    close = differences["loss"] <= LOSS_BOUND and differences["grad_norm"] <= NORM_BOUND
    check(close, f"{what} differs from the CPU's: {differences}")


def train(run_dir, gpus, **settings):
    """Train in this process; the steps, and the greedy accuracy of each evaluation."""
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    importlib.import_module("training")  # gives torch 2.11 the names of later versions

    import megatron_ibpo
    from megatron_ibpo.run import steps as run_steps

    run_steps.check_installed = lambda: None  # a machine with WHEELS has no engines, servers or graders
    sums = ROOT / "tests/gpu/sums.py"
    config = megatron_ibpo.load_recipe(
        ROOT / "examples/recipes/small_cpu.yaml", hf_checkpoint=TINY,
        rollout_backend="lean", allow_local_modules=True, prompt_data=[f"import://{sums}:rows"],
        eval_prompt_data=[f"import://{sums}:rows"], rm_type=f"{sums}:score", run_dir=str(run_dir), **settings,
    )  # fmt: skip
    with megatron_ibpo.open_run(config) as run:
        steps = [{name: step.metrics[name] for name in KEPT if name in step.metrics} for step in run]
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {"steps": steps, "greedy": [row["greedy_accuracy"] for row in rows if "greedy_accuracy" in row]}
