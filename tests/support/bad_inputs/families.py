"""The families of bad inputs: each makes one from a seed, and gives the command that is to read it."""

import gzip
import json
import shutil
from dataclasses import fields
from pathlib import Path

import yaml

from megatron_ibpo.config import Config
from megatron_ibpo.config.all_fields import ENTRIES, flag
from support.bad_inputs.mutations import LAUGHS, VALUES, WORDS, mutated, mutated_bytes, mutated_json, spoiled
from support.bad_inputs.place import BENCHMARKS, EVALUATED, ROWS, SMALL, STUDY, TASK
from support.paths import ROOT
from support.tiny_gguf import FLOATS, NUMBERS

HF, PROMPTS, SAVE = "--hf-checkpoint", "--prompt-data", "--save"
SHORT = ["--rollout-max-response-len", "4"]


def wrong_recipe(rng, more=None):
    """Return a recipe of four keys, and `more`, of which one or two have another value; or damage to it."""
    known = {name.replace("_", "-"): entry.get(Config()) for name, entry in ENTRIES.items()}
    chosen = {name: known[name] for name in rng.sample(sorted(known), 4)} | (more or {})
    for name in rng.sample(sorted(chosen), rng.randint(1, 2)):
        chosen[name] = rng.choice([*VALUES, *WORDS])
    for name, value in chosen.items():
        chosen[name] = (
            list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
        )
    data = yaml.safe_dump(chosen, allow_unicode=False).encode(errors="surrogatepass")
    kind = rng.random()
    if kind < 0.25:
        return mutated_bytes(rng, data)
    return (LAUGHS + "lr: *i\n").encode() if kind < 0.35 else data


def wrong_flags(rng):
    """Return one to three flags with words that few of them take."""
    line = []
    for name in rng.sample(sorted(ENTRIES), rng.randint(1, 3)):
        word, value = flag(name), rng.choice(WORDS).replace("\0", "")
        line += rng.choice([[word, value], [f"{word}={value}"], [word, value, value], [word]])
    return [*line, rng.choice(WORDS).replace("\0", "")] if rng.random() < 0.1 else line


def _search(hf, recipe):
    return ["search", "--gpus", "8", "--hardware", "h100", "--config", recipe, HF, hf]


def _train(place, here, *more, steps="1"):
    return ["train", *place.flags(here / "run"), *more, "--num-rollout", steps]


def _damage(rng, path, share=0.2):
    """Another kind of file, or values or bytes that are wrong."""
    if not spoiled(rng, path, share):
        data = path.read_bytes()
        is_json = path.suffix == ".json"
        path.write_bytes(mutated_json(rng, json.loads(data)) if is_json else mutated_bytes(rng, data))


def _lines(rng, rows):
    """One to three lines, a damaged row each."""
    return b"\n".join(mutated_json(rng, rng.choice(rows)) for _ in range(rng.randint(1, 3)))


def recipes(rng, place, here):
    path = here / "recipe.yaml"
    path.write_bytes(wrong_recipe(rng, SMALL))
    spoiled(rng, path)
    return rng.choice([
        ["plan", "--config", path, *SHORT, HF, place.hf],
        ["evaluate", place.hf, "--config", path, "--eval-prompt-data", TASK, "--print-config"],
        ["pass-rates", "--config", path, "--print-config"],
        _search(place.hf, path),
        ["skill", place.hf, "--prompts", "0", "--config", path],
    ])  # fmt: skip


COUNTS = {name for name, entry in ENTRIES.items() if entry.type in (int, int | None)}
ENDLESS = {"num_rollout", "num_epoch"}  # a large number of these is a long run


def flags(rng, place, here):
    word, out = rng.choice(WORDS), [SAVE, here / "out"]
    if rng.random() < 0.3:  # a huge number of something, in a run
        name = rng.choice(sorted(COUNTS - ENDLESS))
        count = rng.choice(["1000000000000", "2147483648", "999999999", "4611686018427387903"])
        return [*_train(place, here), flag(name), count]
    if rng.random() < 0.3:
        return rng.choice([
            ["inspect", word],
            ["page", word],
            ["compare", word, *out, "--runs-at-most", "0"],
            ["compare", ROOT / "examples/studies/mini.yaml", *out, "--seeds", word],
            ["convert to-megatron", HF, word, *out],
            ["convert to-megatron", HF, place.hf, *out, "--tensor-model-parallel-size", word],
            ["convert to-hf", "--load", word, *out],
            ["convert-gguf", "--gguf", word, *out],
            ["data", HF, place.hf, PROMPTS, word],
            ["data", HF, word, PROMPTS, TASK],
            ["data", HF, place.hf, PROMPTS, TASK, "--most-rows", word],
            ["evaluate", word],
            ["evaluate", "compare", word, word],
            [*_search(place.hf, place.recipe), "--gpus", word],
            [*_search(place.hf, place.recipe), "--hardware", word],
            ["choice", HF, place.hf, "--nodes", word],
            ["audit", word],
            ["skill", word, "--prompts", "1"],
            ["train", *place.flags(here / "run"), "--load", word],
        ])  # fmt: skip
    return ["plan", *SHORT, HF, place.hf, PROMPTS, TASK, *wrong_flags(rng)]


def data_files(rng, place, here):
    data = here / "data"
    shutil.copytree(place.data, data)
    path = data / rng.choice(
        ["rows.jsonl", "rows.jsonl", "rows.jsonl.gz", "rows.parquet", "saved/state.json",
         "saved/data-00000-of-00001.arrow"]
    )  # fmt: skip
    if path.name not in ("rows.jsonl", "rows.jsonl.gz"):
        _damage(rng, path)
    elif not spoiled(rng, path):
        if path.suffix == ".jsonl":
            path.write_bytes(_lines(rng, ROWS))
        elif rng.random() < 0.3:  # 4 GB of nothing in 4 MB
            path.write_bytes(gzip.compress(b"\0" * 2**26) * 64)
        else:
            path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    named = path.parent if path.parent.name == "saved" else path
    if rng.random() < 0.25:
        return _train(place, here, PROMPTS, named)
    return ["data", HF, place.hf, PROMPTS, named]


ODD_FIELDS = {
    "rms_norm_eps": [0, -1, "x", None, 1e308],
    "rope_theta": [0, -1, 1e-300, "x"],
    "rope_parameters": [{"rope_type": "new"}, {"rope_type": "default", "rope_theta": 0}, [], 1],
    "rope_scaling": [{"type": "dynamic", "factor": 2.0}, {"rope_type": "longrope"}, "x", {"type": []}],
    "quantization_config": [{"quant_method": "fp8"}, {"quant_method": "awq", "bits": 4}, "x", [], {}],
    "head_dim": [10**9, 2**31 - 2, 0, 33], "vocab_size": [10**9, 2**31 - 1, 1, 0],
    "hidden_size": [10**9, 7, 0], "num_hidden_layers": [10**5, 10**9, 0], "num_experts": [10**5, 0],
    "num_attention_heads": [10**9, 3], "intermediate_size": [10**9],
    "max_position_embeddings": [2**31 - 1, 0, 1], "initializer_range": [-1, 0],
    "eos_token_id": [2**31, -1, [], "x"], "auto_map": [{"AutoTokenizer": "x.Y"}],
}  # fmt: skip


def hf_checkpoints(rng, place, here):
    hf = here / "hf"
    shutil.copytree(rng.choice([place.hf, place.hf, place.next]), hf)
    path = hf / rng.choice(
        ["config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
         "generation_config.json", "model.safetensors.index.json"]
    )  # fmt: skip
    if path.name.endswith("index.json"):
        path.write_text(json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}}))
    if not spoiled(rng, path, 0.15):
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            path.write_bytes(mutated_bytes(rng, data[:3000]) + data[3000:])
        elif path.name == "config.json" and rng.random() < 0.7:
            name = rng.choice(sorted(ODD_FIELDS))
            path.write_text(json.dumps(json.loads(data) | {name: rng.choice(ODD_FIELDS[name])}))
        elif path.name == "tokenizer.json" and rng.random() < 0.6:
            path.write_text(json.dumps(_with_odd_ids(rng, json.loads(data))))
        else:
            path.write_bytes(mutated_json(rng, json.loads(data)))
    return rng.choice([
        ["inspect", hf],
        ["plan", *SHORT, HF, hf],
        ["data", HF, hf, PROMPTS, TASK],
        ["convert to-megatron", HF, hf, SAVE, here / "out"],
        _search(hf, place.recipe),
        ["choice", HF, hf],
        _train(place, here, HF, hf),
    ])  # fmt: skip


def _with_odd_ids(rng, content):
    odd = rng.choice([2**31, 2**31 - 1, 10**9, -1, 2**40, "x"])  # gaps of billions
    if content.get("added_tokens") and rng.random() < 0.5:
        content["added_tokens"][0]["id"] = odd
    else:
        vocab = content["model"]["vocab"]
        vocab[rng.choice(sorted(vocab))] = odd
    return content


def megatron_checkpoints(rng, place, here):
    saved = rng.random() < 0.5
    stored = here / "checkpoints/step_000001"
    shutil.copytree(next(place.replayed.glob("checkpoints/step_*")) if saved else place.stored, stored)
    _damage(rng, rng.choice(sorted(path for path in stored.rglob("*") if path.is_file())), 0.15)
    doors = [["inspect", stored], ["convert to-hf", "--load", stored, SAVE, here / "o"]]
    return rng.choice([*doors, _train(place, here, "--load", here, steps="2")] if saved else doors)


def gguf_files(rng, place, here):
    path, data = here / "model.gguf", place.gguf.read_bytes()
    if rng.random() < 0.4:  # another number for one of its fields
        name = rng.choice([*NUMBERS, *FLOATS]).encode()
        at = data.index(name) + len(name) + 4
        value = rng.choice([0, 1, 2**31 - 1, 10**9, 2**32 - 1, rng.randrange(2**32)])
        data = data[:at] + value.to_bytes(4, "little") + data[at + 4 :]
    else:
        most = rng.choice([24, 300, 3000])
        data = mutated_bytes(rng, data[:most]) + data[most:]
    path.write_bytes(data)
    spoiled(rng, path, 0.15)
    return ["convert-gguf", "--gguf", path, SAVE, here / "out"]


def journals(rng, place, here):
    run = here / "run"
    shutil.copytree(place.run, run)
    _damage(rng, rng.choice(sorted((run / "journal").glob("*.journal"))), 0.25)
    return _train(place, here, "--load", run, steps="2")


def recordings(rng, place, here):
    run = here / "run"
    shutil.copytree(place.run, run)
    replays = rng.random() < 0.15
    path = rng.choice(sorted(run.glob("rollouts/*.json")))
    if rng.random() < 0.2 and not replays:
        path = run / rng.choice(["metrics.jsonl", "summary.json", "config.yaml"])
    if path.name != "metrics.jsonl":
        _damage(rng, path)
    elif not spoiled(rng, path):
        lines = path.read_bytes().splitlines()
        lines[rng.randrange(len(lines))] = mutated_json(rng, json.loads(rng.choice(lines)))
        path.write_bytes(b"\n".join(lines) + b"\n")
    if not replays:
        return ["page", run, SAVE, here / "page.html"]
    backend = ["--rollout-backend", "vllm", "--load-debug-rollout-data", run / "rollouts"]
    return _train(place, here / "again", *backend, steps="2")


def benchmark_files(rng, place, here):
    if rng.random() < 0.3:
        again = here / "again"
        shutil.copytree(place.results, again)
        _damage(rng, again / "results.json")
        return ["evaluate", "compare", place.results, again]
    name, suffix = rng.choice(sorted(BENCHMARKS)), rng.choice([".jsonl", ".json", ".jsonl.gz"])
    path = here / f"file{suffix}"
    if not spoiled(rng, path):
        lines = _lines(rng, BENCHMARKS[name]) + b"\n"
        whole = mutated_json(rng, BENCHMARKS[name]) if suffix == ".json" else lines
        if suffix == ".jsonl.gz":
            whole = gzip.compress(whole) if rng.random() < 0.5 else mutated_bytes(rng, gzip.compress(whole))
        path.write_bytes(whole)
    return _train(place, here, *EVALUATED, "--eval-prompt-data", f"{name}://{path}")


def studies(rng, place, here):
    if rng.random() < 0.2:
        path, kept = here / "results.json", (ROOT / "docs/studies").glob("*.json")
        kept = sorted(one for one in kept if not one.stem.startswith("audit"))
        shutil.copy(min(kept, key=lambda one: one.stat().st_size), path)
        _damage(rng, path)
    else:
        path = here / "study.yaml"
        data = yaml.safe_dump(mutated(rng, STUDY)).encode(errors="surrogatepass")
        path.write_bytes(mutated_bytes(rng, data) if rng.random() < 0.2 else data)
        spoiled(rng, path)
    return ["compare", path, SAVE, here / "out", "--runs-at-most", "0"]


def task_urls(rng, place, here):
    from reasoning_gym.factory import DATASETS

    name = rng.choice(TASKS)
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    parameters = rng.sample(known, min(2, len(known)))
    values = [*WORDS, "[1]", "[]", "{}", "99999999", "-5", '["x"]', "1e9", "1000000"]
    query = "&".join(f"{parameter}={rng.choice(values)}" for parameter in parameters)
    url = f"reasoning_gym://{name}?{query}"
    if rng.random() < 0.2:
        url = rng.choice([
            f"reasoning_gym://{rng.choice(WORDS)}",
            f"{url}&level={rng.choice(WORDS)}&over=1",
            f"{url}&weight={rng.choice(WORDS)}",
            "import://os:getcwd", "import://x:y", "s3://bucket/x", "import://time:sleep",
        ])  # fmt: skip
    if rng.random() < 0.2:
        return _train(place, here, PROMPTS, url)
    split = rng.choice(["train", "eval"])
    return ["data", HF, place.hf, PROMPTS, url, "--split", split, "--most-rows", "20"]


TASKS = [
    "chain_sum", "acre", "word_ladder", "sudoku", "knights_knaves", "zebra_puzzles", "countdown", "maze",
    "number_sorting", "prime_factorization", "largest_island", "game_of_life", "palindrome_generation",
    "family_relationships", "n_queens", "tower_of_hanoi", "rush_hour", "gcd", "polynomial_equations",
    "caesar_cipher", "letter_counting", "graph_color", "shortest_path", "boxnet", "arc_1d", "futoshiki",
]  # fmt: skip
FAMILIES = {
    "recipes": (recipes, 50), "flags": (flags, 60), "data files": (data_files, 50),
    "HF checkpoints": (hf_checkpoints, 60), "Megatron checkpoints": (megatron_checkpoints, 50),
    "GGUF": (gguf_files, 50), "journals": (journals, 30), "recordings": (recordings, 40),
    "benchmark files": (benchmark_files, 30), "studies": (studies, 40), "task URLs": (task_urls, 40),
}  # fmt: skip
"""Family → what makes an input, and how many of five hundred are of it."""
