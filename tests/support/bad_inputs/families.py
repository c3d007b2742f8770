"""The families of bad inputs: each makes one from a seed, and gives the command that is to read it."""

import gzip
import json
from dataclasses import fields
from pathlib import Path

import yaml

from megatron_ibpo.config import Config
from megatron_ibpo.config.all_fields import ENTRIES, flag
from support.bad_inputs.mutations import LAUGHS, VALUES, WORDS, mutated_bytes, mutated_json, spoiled
from support.bad_inputs.place import BENCHMARK, PLAN, SEARCH, SMALL, TRAIN, copied, filled
from support.tiny_gguf import FLOATS, NUMBERS


def wrong_recipe(rng, more=None):
    """Return a recipe of four keys, and `more`, of which one or two have another value; or damage to it."""
    known = {name.replace("_", "-"): entry.get(Config()) for name, entry in ENTRIES.items()}
    chosen = {name: known[name] for name in rng.sample(sorted(known), 4)} | (more or {})
    for name in rng.sample(sorted(chosen), rng.randint(1, 2)):
        chosen[name] = rng.choice([*VALUES, *WORDS])
    for name, value in chosen.items():
        if isinstance(value, tuple | Path):
            chosen[name] = str(value) if isinstance(value, Path) else list(value)
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


COUNTS = {name for name, entry in ENTRIES.items() if entry.type in (int, int | None)}
ENDLESS = {"num_rollout", "num_epoch"}  # a large number of these is a long run
WITH_A_WORD = (
    "inspect {word}", "page {word}", "compare {word} --save out --runs-at-most 0",
    "compare {valid}/study.yaml --save out --seeds {word}", "convert to-hf --load {word} --save out",
    "convert to-megatron --hf-checkpoint {word} --save out", "convert-gguf --gguf {word} --save out",
    "convert to-megatron --hf-checkpoint {valid}/hf --save out --tensor-model-parallel-size {word}",
    "data --hf-checkpoint {valid}/hf --prompt-data {word}", "evaluate {word}",
    "data --hf-checkpoint {word} --prompt-data {task}", "evaluate compare {word} {word}",
    "data --hf-checkpoint {valid}/hf --prompt-data {task} --most-rows {word}", f"{SEARCH} --gpus {{word}}",
    f"{SEARCH} --hardware {{word}}", "choice --hf-checkpoint {valid}/hf --nodes {word}", "audit {word}",
    "skill {word} --prompts 1", f"{TRAIN} --load {{word}}",
)  # fmt: skip


def flags(rng, valid):
    kind, word = rng.random(), rng.choice(WORDS)
    if kind < 0.3:  # a huge number of something, in a run
        count = rng.choice(["1000000000000", "2147483648", "999999999", "4611686018427387903"])
        return [*filled(TRAIN, valid), flag(rng.choice(sorted(COUNTS - ENDLESS))), count]
    if kind < 0.5:
        return filled(rng.choice(WITH_A_WORD), valid, word=word)
    return [*filled(f"{PLAN} --prompt-data {{task}}", valid), *wrong_flags(rng)]


TASKS = (
    "chain_sum", "word_ladder", "sudoku", "zebra_puzzles", "countdown", "largest_island", "game_of_life",
    "family_relationships", "n_queens", "tower_of_hanoi", "polynomial_equations", "graph_color", "arc_1d",
)  # fmt: skip


def task_urls(rng, valid):
    from reasoning_gym.factory import DATASETS

    name = rng.choice(TASKS)
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    values = [*WORDS, "[1]", "[]", "{}", "99999999", "-5", '["x"]', "1e9", "1000000"]
    query = "&".join(f"{one}={rng.choice(values)}" for one in rng.sample(known, min(2, len(known))))
    url = f"reasoning_gym://{name}?{query}"
    if rng.random() < 0.2:
        word = rng.choice(WORDS)
        others = [f"reasoning_gym://{word}", f"{url}&level={word}&over=1", f"{url}&weight={word}"]
        url = rng.choice(
            [*others, "import://os:getcwd", "import://x:y", "s3://bucket/x", "import://time:sleep"]
        )
    if rng.random() < 0.2:
        return [*filled(TRAIN, valid), "--prompt-data", url]
    reads = f"data --hf-checkpoint {{valid}}/hf --split {rng.choice(['train', 'eval'])} --most-rows 20"
    return [*filled(reads, valid), "--prompt-data", url]


FILES = {
    "recipes": ("small.yaml", "", (
        f"{PLAN} --config {{file}}", f"{SEARCH} --config {{file}}",
        "pass-rates --config {file} --print-config",
        "evaluate {valid}/hf --config {file} --eval-prompt-data {task} --print-config",
        "skill {valid}/hf --prompts 0 --config {file}",
    )),
    "data files": ("data", "rows.* saved_data/*", (
        "data --hf-checkpoint {valid}/hf --prompt-data {file}", f"{TRAIN} --prompt-data {{file}}",
    )),
    "HF checkpoints": ("hf", "*", (
        "inspect {here}/hf", f"{PLAN} --hf-checkpoint {{here}}/hf", f"{SEARCH} --hf-checkpoint {{here}}/hf",
        "data --hf-checkpoint {here}/hf --prompt-data {task}", f"{TRAIN} --hf-checkpoint {{here}}/hf",
        "convert to-megatron --hf-checkpoint {here}/hf --save out", "choice --hf-checkpoint {here}/hf",
    )),
    "Megatron checkpoints": ("saved", "checkpoints/step_*/**/*", (
        "inspect {here}/saved/checkpoints/step_000001",
        "convert to-hf --load {here}/saved/checkpoints/step_000001 --save out",
        f"{TRAIN} --load {{here}}/saved --num-rollout 2",
    )),
    "GGUF": ("model.gguf", "", ("convert-gguf --gguf {file} --save out",)),
    "journals": ("run", "journal/*.journal", (f"{TRAIN} --load {{here}}/run --num-rollout 2",)),
    "recordings": ("run", "rollouts/*.json metrics.jsonl summary.json config.yaml", (
        "page {here}/run --save page.html", "page {here}/run --save page.html",
        f"{TRAIN} --rollout-backend vllm --load-debug-rollout-data {{here}}/run/rollouts --num-rollout 2",
    )),
    "benchmark files": ("benchmarks", "*", (BENCHMARK,)),
    "evaluations": ("results", "*", ("evaluate compare {valid}/results {here}/results",)),
    "studies": ("study.yaml", "", ("compare {file} --save out --runs-at-most 0",)),
    "findings": ("findings.json", "", ("compare {file} --save out --runs-at-most 0",)),
}  # fmt: skip
"""Family → a valid file or folder, which of its files are damaged, and the commands that read them."""
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


def damaged(rng, path):
    """What a valid file of this name becomes."""
    data = path.read_bytes()
    if path.name == "small.yaml":
        return wrong_recipe(rng, SMALL)
    if path.name == "config.json" and rng.random() < 0.6:
        name = rng.choice(sorted(ODD_FIELDS))
        return json.dumps(json.loads(data) | {name: rng.choice(ODD_FIELDS[name])}).encode()
    if path.name == "tokenizer.json" and rng.random() < 0.6:
        content, odd = json.loads(data), rng.choice([2**31, 2**31 - 1, 10**9, -1, 2**40, "x"])
        if rng.random() < 0.5:
            content["added_tokens"][0]["id"] = odd
        else:
            content["model"]["vocab"][rng.choice(sorted(content["model"]["vocab"]))] = odd
        return json.dumps(content).encode()
    if path.name == "rows.jsonl.gz" and rng.random() < 0.3:  # 4 GB of nothing in 4 MB
        return gzip.compress(b"\0" * 2**26) * 64
    if path.suffix == ".gguf" and rng.random() < 0.5:  # another number for one of its fields
        name = rng.choice([*NUMBERS, *FLOATS]).encode()
        at, value = data.index(name) + len(name) + 4, rng.choice([0, 1, 2**31 - 1, 10**9, 2**32 - 1])
        return data[:at] + value.to_bytes(4, "little") + data[at + 4 :]
    if path.suffix in (".json", ".yaml"):  # JSON is YAML
        return mutated_json(rng, json.loads(data))
    if path.suffix == ".jsonl":
        lines = data.splitlines()
        lines[rng.randrange(len(lines))] = mutated_json(rng, json.loads(rng.choice(lines)))
        return b"\n".join(lines) + b"\n"
    header = rng.choice([300, 3000, len(data)])
    return mutated_bytes(rng, data[:header]) + data[header:]


def files_of(root, which):
    return sorted(path for one in which.split() for path in root.glob(one) if path.is_file()) or [root]


def from_files(name):
    tree, which, commands = FILES[name]

    def make(rng, valid):
        path = rng.choice(files_of(copied(valid, tree), which))
        if not spoiled(rng, path):
            path.write_bytes(damaged(rng, path))
        return filled(rng.choice(commands), valid, file=path)

    return make


FAMILIES = {"flags": (flags, 60), "task URLs": (task_urls, 40)}
FAMILIES |= {name: (from_files(name), 60 if name.startswith("HF") else 40) for name in FILES}
"""Family → what makes an input, and how many of five hundred are of it."""
