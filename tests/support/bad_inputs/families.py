"""The families of bad inputs: each makes one from a seed, and says which command is to read it."""

import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from megatron_ibpo.config import Config
from megatron_ibpo.config.all_fields import ENTRIES, flag
from support.bad_inputs.mutations import (
    LAUGHS,
    VALUES,
    WORDS,
    mutated,
    mutated_bytes,
    mutated_head,
    mutated_json,
    spoiled_sometimes,
)
from support.bad_inputs.place import BENCHMARKS, EVALUATED, ROWS, SMALL, STUDY, TASK, Place
from support.paths import ROOT
from support.tiny_gguf import FLOATS, NUMBERS

Words = list[str]  # a command of `children.DOORS` and its arguments
Maker = Callable[[random.Random, Place, Path], Words]


SHORT = ["--rollout-max-response-len", "4"]
MINI = ROOT / "examples/studies/mini.yaml"


def _search(hf: Path, recipe: Path) -> Words:
    flags = ["--gpus", "8", "--hardware", "h100", "--config", str(recipe)]
    return ["search", *flags, "--hf-checkpoint", str(hf)]


def wrong_recipe(rng: random.Random, more: dict[str, Any] | None = None) -> bytes:
    known = {name.replace("_", "-"): entry.get(Config()) for name, entry in ENTRIES.items()}
    chosen = {name: known[name] for name in rng.sample(sorted(known), 4)} | (more or {})
    for name in rng.sample(sorted(chosen), rng.randint(1, 2)):
        chosen[name] = rng.choice([*VALUES, *WORDS])
    plain = {
        name: list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
        for name, value in chosen.items()
    }
    data = yaml.safe_dump(plain, allow_unicode=False).encode(errors="surrogatepass")
    kind = rng.random()
    if kind < 0.25:
        return mutated_bytes(rng, data)
    return (LAUGHS + "lr: *i\n").encode() if kind < 0.35 else data


def wrong_flags(rng: random.Random) -> Words:
    line: Words = []
    for name in rng.sample(sorted(ENTRIES), rng.randint(1, 3)):
        value = rng.choice(WORDS).replace("\0", "")
        line += rng.choice(
            [[flag(name), value], [f"{flag(name)}={value}"], [flag(name), value, value], [flag(name)]]
        )
    return [*line, rng.choice(WORDS).replace("\0", "")] if rng.random() < 0.1 else line


def recipes(rng: random.Random, place: Place, here: Path) -> Words:
    path = here / "recipe.yaml"
    data = wrong_recipe(rng, SMALL)
    path.write_bytes(data)
    spoiled_sometimes(rng, path)
    return rng.choice([
        ["plan", "--config", str(path), *SHORT, "--hf-checkpoint", str(place.hf)],
        ["evaluate", str(place.hf), "--config", str(path), "--eval-prompt-data", TASK, "--print-config"],
        ["pass-rates", "--config", str(path), "--print-config"],
        _search(place.hf, path),
        ["skill", str(place.hf), "--prompts", "0", "--config", str(path)],
    ])  # fmt: skip


COUNTS = sorted(name for name, entry in ENTRIES.items() if entry.type in (int, int | None))
"""Fields with a number of something."""
ENDLESS = {"num_rollout", "num_epoch"}  # a large number of these is a long run


def flags(rng: random.Random, place: Place, here: Path) -> Words:
    word = rng.choice(WORDS).replace("\0", "")
    if rng.random() < 0.3:  # a huge number of something, in a run
        name = rng.choice(sorted(set(COUNTS) - ENDLESS))
        count = rng.choice(["1000000000000", "2147483648", "999999999", "4611686018427387903"])
        return ["train", *place.flags(here / "run"), "--num-rollout", "1", flag(name), count]
    if rng.random() < 0.3:
        return rng.choice([
            ["inspect", word],
            ["page", word],
            ["compare", word, "--save", str(here / "out"), "--runs-at-most", "0"],
            ["compare", str(MINI), "--save", str(here / "out"), "--seeds", word],
            ["convert to-megatron", "--hf-checkpoint", word, "--save", str(here / "out")],
            ["convert to-megatron", "--hf-checkpoint", str(place.hf), "--save", str(here / "out"),
             "--tensor-model-parallel-size", word],
            ["convert to-hf", "--load", word, "--save", str(here / "out")],
            ["convert-gguf", "--gguf", word, "--save", str(here / "out")],
            ["data", "--hf-checkpoint", str(place.hf), "--prompt-data", word],
            ["data", "--hf-checkpoint", word, "--prompt-data", TASK],
            ["data", "--hf-checkpoint", str(place.hf), "--prompt-data", TASK, "--most-rows", word],
            ["evaluate", word],
            ["evaluate", "compare", word, word],
            [*_search(place.hf, place.recipe), "--gpus", word],
            [*_search(place.hf, place.recipe), "--hardware", word],
            ["choice", "--hf-checkpoint", str(place.hf), "--nodes", word],
            ["audit", word],
            ["skill", word, "--prompts", "1"],
            ["train", *place.flags(here / "run"), "--load", word],
        ])  # fmt: skip
    plan = ["plan", *SHORT, "--hf-checkpoint", str(place.hf), "--prompt-data", TASK]
    return [*plan, *wrong_flags(rng)]


def data_files(rng: random.Random, place: Place, here: Path) -> Words:
    data = here / "data"
    shutil.copytree(place.data, data)
    path = data / rng.choice(
        ["rows.jsonl", "rows.jsonl", "rows.jsonl.gz", "rows.parquet", "saved/state.json",
         "saved/data-00000-of-00001.arrow"]
    )  # fmt: skip
    if not spoiled_sometimes(rng, path):
        if path.name == "rows.jsonl":
            path.write_bytes(
                b"\n".join(mutated_json(rng, rng.choice(ROWS)) for _ in range(rng.randint(1, 3)))
            )
        elif path.suffix == ".gz" and rng.random() < 0.3:  # 4 GB of nothing in 4 MB
            path.write_bytes(gzip.compress(b"\0" * 2**26) * 64)
        elif path.suffix == ".json":
            path.write_bytes(mutated_json(rng, json.loads(path.read_bytes())))
        else:
            path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    named = str(path.parent if path.parent.name == "saved" else path)
    if rng.random() < 0.25:
        return ["train", *place.flags(here / "run"), "--prompt-data", named, "--num-rollout", "1"]
    return ["data", "--hf-checkpoint", str(place.hf), "--prompt-data", named]


ODD_FIELDS: dict[str, list[Any]] = {
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


def hf_checkpoints(rng: random.Random, place: Place, here: Path) -> Words:
    hf = here / "hf"
    shutil.copytree(rng.choice([place.hf, place.hf, place.next]), hf)
    path = hf / rng.choice(
        ["config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
         "generation_config.json", "model.safetensors.index.json"]
    )  # fmt: skip
    if path.name.endswith("index.json"):
        path.write_text(json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}}))
    if not spoiled_sometimes(rng, path, 0.15):
        if path.suffix == ".safetensors":
            path.write_bytes(mutated_head(rng, path.read_bytes()))
        elif path.name == "config.json" and rng.random() < 0.7:
            content = json.loads(path.read_bytes())
            name = rng.choice(sorted(ODD_FIELDS))
            path.write_text(json.dumps(content | {name: rng.choice(ODD_FIELDS[name])}))
        elif path.name == "tokenizer.json" and rng.random() < 0.6:
            path.write_text(json.dumps(_with_odd_ids(rng, json.loads(path.read_bytes()))))
        else:
            path.write_bytes(mutated_json(rng, json.loads(path.read_bytes())))
    return _reading(rng, hf, place, here)


def _with_odd_ids(rng: random.Random, content: dict[str, Any]) -> dict[str, Any]:
    odd = rng.choice([2**31, 2**31 - 1, 10**9, -1, 2**40, "x"])
    added = content.get("added_tokens")
    if added and rng.random() < 0.5:
        added[0]["id"] = odd
    else:
        vocab = content["model"]["vocab"]
        vocab[rng.choice(sorted(vocab))] = odd
    return content


def _reading(rng: random.Random, hf: Path, place: Place, here: Path) -> Words:
    return rng.choice([
        ["inspect", str(hf)], ["plan", *SHORT, "--hf-checkpoint", str(hf)],
        ["data", "--hf-checkpoint", str(hf), "--prompt-data", TASK],
        ["convert to-megatron", "--hf-checkpoint", str(hf), "--save", str(here / "out")],
        _search(hf, place.recipe), ["choice", "--hf-checkpoint", str(hf)],
        ["train", *place.flags(here / "run"), "--hf-checkpoint", str(hf), "--num-rollout", "1"],
    ])  # fmt: skip


def megatron_checkpoints(rng: random.Random, place: Place, here: Path) -> Words:
    saved = rng.random() < 0.5
    source = next(place.replayed.glob("checkpoints/step_*")) if saved else place.stored
    stored = here / "checkpoints/step_000001"
    shutil.copytree(source, stored)
    path = rng.choice(sorted(path for path in stored.rglob("*") if path.is_file()))
    if not spoiled_sometimes(rng, path, 0.15):
        if path.suffix == ".json":
            path.write_bytes(mutated_json(rng, json.loads(path.read_bytes())))
        else:
            path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    doors: list[Words] = [
        ["inspect", str(stored)],
        ["convert to-hf", "--load", str(stored), "--save", str(here / "o")],
    ]
    if saved:
        doors.append(["train", *place.flags(here / "run"), "--load", str(here), "--num-rollout", "2"])
    return rng.choice(doors)


def gguf_files(rng: random.Random, place: Place, here: Path) -> Words:
    path = here / "model.gguf"
    data = place.gguf.read_bytes()
    if rng.random() < 0.4:  # another number for one of its fields
        name = rng.choice([*NUMBERS, *FLOATS]).encode()
        at = data.index(name) + len(name) + 4
        value = rng.choice([0, 1, 2**31 - 1, 10**9, 2**32 - 1, rng.randrange(2**32)])
        data = data[:at] + value.to_bytes(4, "little") + data[at + 4 :]
    else:
        data = mutated_head(rng, data, most=rng.choice([24, 300, 3000]))
    path.write_bytes(data)
    spoiled_sometimes(rng, path, 0.15)
    return ["convert-gguf", "--gguf", str(path), "--save", str(here / "out")]


def journals(rng: random.Random, place: Place, here: Path) -> Words:
    run = here / "run"
    shutil.copytree(place.run, run)
    path = rng.choice(sorted((run / "journal").glob("*.journal")))
    if not spoiled_sometimes(rng, path, 0.25):
        path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    return ["train", *place.flags(run), "--load", str(run), "--num-rollout", "2"]


def recordings(rng: random.Random, place: Place, here: Path) -> Words:
    run = here / "run"
    shutil.copytree(place.run, run)
    replays = rng.random() < 0.15
    path = rng.choice(sorted(run.glob("rollouts/*.json")))
    if rng.random() < 0.2 and not replays:
        path = run / rng.choice(["metrics.jsonl", "summary.json", "config.yaml"])
    if not spoiled_sometimes(rng, path):
        data = path.read_bytes()
        if path.name == "metrics.jsonl":
            lines = data.splitlines()
            lines[rng.randrange(len(lines))] = mutated_json(rng, json.loads(rng.choice(lines)))
            path.write_bytes(b"\n".join(lines) + b"\n")
        else:
            path.write_bytes(
                mutated_bytes(rng, data) if path.suffix == ".yaml" else mutated_json(rng, json.loads(data))
            )
    if not replays:
        return ["page", str(run), "--save", str(here / "page.html")]
    backend = ["--rollout-backend", "vllm", "--num-rollout", "2", "--load-debug-rollout-data"]
    return ["train", *place.flags(here / "again"), *backend, str(run / "rollouts")]


def benchmark_files(rng: random.Random, place: Place, here: Path) -> Words:
    if rng.random() < 0.3:
        again = here / "again"
        shutil.copytree(place.results, again)
        path = again / "results.json"
        if not spoiled_sometimes(rng, path):
            path.write_bytes(mutated_json(rng, json.loads(path.read_bytes())))
        return ["evaluate", "compare", str(place.results), str(again)]
    name, suffix = rng.choice(sorted(BENCHMARKS)), rng.choice([".jsonl", ".json", ".jsonl.gz"])
    path = here / f"file{suffix}"
    rows = BENCHMARKS[name]
    if not spoiled_sometimes(rng, path):
        lines = [mutated_json(rng, rng.choice(rows)) for _ in range(rng.randint(1, 3))]
        whole = mutated_json(rng, rows) if suffix == ".json" else b"\n".join(lines) + b"\n"
        if suffix == ".jsonl.gz":
            whole = gzip.compress(whole) if rng.random() < 0.5 else mutated_bytes(rng, gzip.compress(whole))
        path.write_bytes(whole)
    flags = [*EVALUATED, "--eval-prompt-data", f"{name}://{path}", "--num-rollout", "1"]
    return ["train", *place.flags(here / "run"), *flags]


KEPT = sorted(path for path in (ROOT / "docs/studies").glob("*.json") if not path.stem.startswith("audit"))


def studies(rng: random.Random, place: Place, here: Path) -> Words:
    if rng.random() < 0.2:
        path = here / "results.json"
        smallest = min(KEPT, key=lambda kept: kept.stat().st_size)
        if not spoiled_sometimes(rng, path):
            path.write_bytes(mutated_json(rng, json.loads(smallest.read_bytes())))
    else:
        path = here / "study.yaml"
        data = yaml.safe_dump(mutated(rng, STUDY)).encode(errors="surrogatepass")
        path.write_bytes(mutated_bytes(rng, data) if rng.random() < 0.2 else data)
        spoiled_sometimes(rng, path)
    return ["compare", str(path), "--save", str(here / "out"), "--runs-at-most", "0"]


def task_urls(rng: random.Random, place: Place, here: Path) -> Words:
    name = rng.choice(TASKS)
    parameters = rng.sample(_parameters(name), min(2, len(_parameters(name))))
    values = [*WORDS, "[1]", "[]", "{}", "99999999", "-5", '["x"]', "1e9", "1000000"]
    query = "&".join(f"{parameter}={rng.choice(values)}" for parameter in parameters)
    url = f"reasoning_gym://{name}?{query}".replace("\0", "")
    if rng.random() < 0.2:
        url = rng.choice([
            f"reasoning_gym://{rng.choice(WORDS)}".replace("\0", ""),
            f"{url}&level={rng.choice(WORDS)}&over=1".replace("\0", ""),
            f"{url}&weight={rng.choice(WORDS)}".replace("\0", ""),
            "import://os:getcwd", "import://x:y", "s3://bucket/x", "import://time:sleep",
        ])  # fmt: skip
    if rng.random() < 0.2:
        return ["train", *place.flags(here / "run"), "--prompt-data", url, "--num-rollout", "1"]
    asked = ["--prompt-data", url, "--split", rng.choice(["train", "eval"]), "--most-rows", "20"]
    return ["data", "--hf-checkpoint", str(place.hf), *asked]


TASKS = [
    "chain_sum", "acre", "word_ladder", "sudoku", "knights_knaves", "zebra_puzzles", "countdown", "maze",
    "number_sorting", "prime_factorization", "largest_island", "game_of_life", "palindrome_generation",
    "family_relationships", "n_queens", "tower_of_hanoi", "rush_hour", "gcd", "polynomial_equations",
    "caesar_cipher", "letter_counting", "graph_color", "shortest_path", "boxnet", "arc_1d", "futoshiki",
]  # fmt: skip


def _parameters(name: str) -> list[str]:
    import dataclasses

    from reasoning_gym.factory import DATASETS

    return [
        field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")
    ]


FAMILIES: dict[str, tuple[Maker, int]] = {
    "recipes": (recipes, 50), "flags": (flags, 60), "data files": (data_files, 50),
    "HF checkpoints": (hf_checkpoints, 60),
    "Megatron checkpoints": (megatron_checkpoints, 50),
    "GGUF": (gguf_files, 50), "journals": (journals, 30), "recordings": (recordings, 40),
    "benchmark files": (benchmark_files, 30), "studies": (studies, 40), "task URLs": (task_urls, 40),
}  # fmt: skip
"""Family → what makes an input, and how many of five hundred are of it."""
