"""Inputs that a seed makes wrong are taken or refused in a line."""

import copy
import dataclasses
import gzip
import importlib
import json
import math
import os
import random
import re
import runpy
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megatron_ibpo.basics.entry_point import BAD_INPUT, DONE, guarded
from megatron_ibpo.config import Config, DataConfig, ParallelConfig, config_yaml, named_values
from megatron_ibpo.config.config import ENTRIES, flag
from megatron_ibpo.config.recipes import read_recipe
from megatron_ibpo.data import load_tokenizer, open_sources
from megatron_ibpo.evaluate.stored_samples import read_results
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.report.page.html import build_page
from megatron_ibpo.run.cost import Spent
from megatron_ibpo.run.settings import check_settings, parse_config
from megatron_ibpo.study.findings import read_findings
from megatron_ibpo.study.study_files import read_study
from megatron_ibpo.weights.formats.checkpoint_files import check_integrity
from megatron_ibpo.weights.formats.convert import hf_to_megatron, megatron_to_hf
from megatron_ibpo.weights.formats.hugging_face import Checkpoint, model_entries
from megatron_ibpo.weights.formats.run_state import load_run_state, read_layout
from support.model_passes import ALONE
from support.paths import ROOT
from support.run_pages import TOKENIZER, record_run
from support.tiny_models import make_qwen3

WORDS = [
    "nan", "NaN", "-nan", "inf", "-inf", "Infinity", "1e999", "-1e999", "99999999999999999999", "-1", "0", "",
    "--", "-", "=", "None", "true", "1e308", "5e-324", "9" * 5000, "0x10", "1_000", "x", "\x00", "\n", "é",
    "🙂" * 50, "a=b", "a=nan", "=", "a=inf", "adaptive", "../../etc/passwd", "/", "~", "a:b", ":",
    "import://x:y", "%s", "{}", "a" * 300, "2**63", "9223372036854775807", "9223372036854775808",
    "4611686018427387904", ".5", "1.", "+1", "1000000000000", "2147483648",
]  # fmt: skip
VALUES = [
    math.nan, math.inf, -math.inf, 10**20, -1, 0, 1, 1.5, "", "x", None, True, False, [], {}, [math.nan],
    {"a": math.inf}, [[]], "nan", "1e999", 10**400, 2**63, -(2**63) - 1, "\ud800", "a" * 10_000, {"": None},
    [1, "a", None], 1e308, "\x00", "../x", "/etc/passwd", "x.bin", 10**9, 2**31, 10**12,
]  # fmt: skip
TEXTS = [
    "{", "[" * 20_000, '{"a":' * 20_000, "&a [*a]", "!!python/object/apply:os.system [exit 1]", "? [a]\n: b",
    "\t", "%", "lr: &x [1]\nseed: *x", "2001-99-99", "!!map x", "!!int x", "!!float x", "<<: 3", "a: b: c",
    "- - -", "\x00", "\ufeff", "lr: .nan", "lr: .inf", "- 1", "lr: 1e-3\nlr: 2", "seed: 0o", "seed: 1:30",
    "seed: 0b", "!!binary x", "...", "---\n---",
]  # fmt: skip
TASK = "reasoning_gym://chain_sum"
LAUGHS = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghij")
)  # nine levels of nine references each: hundreds of millions when written out


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The valid files of every kind that are damaged."""
    directory = tmp_path_factory.mktemp("fuzz")
    hf, stored, run = make_qwen3(directory / "hf", 1), directory / "stored", record_run(directory)
    hf_to_megatron(hf, stored, ParallelConfig(), ALONE)
    names = dict.fromkeys(Checkpoint(hf).file_of, "model.safetensors")
    findings = gzip.decompress((ROOT / "docs/studies/ahead.json.gz").read_bytes())
    for path, content in {
        stored / "run_state.json": {"step": 1, "spent": {"tokens": 3.0}},
        hf / "model.safetensors.index.json": {"metadata": {"total_size": 1}, "weight_map": names},
        directory / "study.yaml": yaml.safe_load((ROOT / "examples/studies/mini.yaml").read_text()),
        directory / "findings.json": json.loads(findings),
        directory / "results.json": {"sets": {"a": {"settings": {}}}},
        run / "summary.json": {"status": "finished", "accuracy_end": 0.5, "steps": 2},
    }.items():
        path.write_text(json.dumps(content))
    return SimpleNamespace(directory=directory, hf=hf, stored=stored, run=run)


@contextmanager
def damaged(path, data):
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def mutated_json(rng, document):
    document = json.loads(json.dumps(document))
    for _ in range(rng.randint(1, 2)):
        places = list(_places(document))
        container, key = rng.choice(places) if places else (None, None)
        if container is None or rng.random() < 0.05:
            document = copy.deepcopy(rng.choice(VALUES))
        elif rng.random() < 0.2:
            del container[key]
        else:
            container[key] = copy.deepcopy(rng.choice(VALUES))
    data = json.dumps(document).encode()
    return mutated_bytes(rng, data) if rng.random() < 0.25 else data


def _places(value):
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


def mutated_bytes(rng, data):
    at = rng.randrange(len(data)) if data else 0
    return rng.choice([
        lambda: data[:at],
        lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if data else b"\0",
        lambda: data[:at] + rng.randbytes(8) + data[at + 8 :],
        lambda: data[:at] + b"\xff" * 8 + data[at + 8 :],
        lambda: data[:at] + data[at : at + 50] * 2 + data[at + 50 :],
        lambda: rng.choice(TEXTS).encode(errors="surrogatepass"),
        lambda: rng.randbytes(40),
    ])()  # fmt: skip


def flags(rng, place):
    line = ["--hf-checkpoint", str(place.hf), "--prompt-data", TASK, "--eval-prompt-data", TASK]
    for name in rng.sample(sorted(ENTRIES), rng.randint(1, 3)):
        word, value = flag(name), rng.choice(WORDS).replace("\0", "")
        line += rng.choice([[word, value], [f"{word}={value}"], [word, value, value], [word]])
    try:
        take(parse_config(line))
    except SystemExit as ended:  # of the parser
        return ended.code


def recipes(rng, place):
    """Of four keys one or two have another value, or the file is damaged."""
    known = {name.replace("_", "-"): entry.get(Config()) for name, entry in ENTRIES.items()}
    chosen = {name: known[name] for name in rng.sample(sorted(known), 4)}
    for name in rng.sample(sorted(chosen), rng.randint(1, 2)):
        chosen[name] = rng.choice([*VALUES, *WORDS])
    for name, value in chosen.items():
        if isinstance(value, tuple | Path):
            chosen[name] = list(value) if isinstance(value, tuple) else str(value)
    data, kind = yaml.safe_dump(chosen, allow_unicode=False).encode(errors="surrogatepass"), rng.random()
    if kind < 0.35:
        data = mutated_bytes(rng, data) if kind < 0.25 else (LAUGHS + "lr: *j\n").encode()
    path = place.directory / "recipe.yaml"
    path.write_bytes(data)
    config = Config()
    config.model.hf_checkpoint = place.hf
    config.data.prompt_data, config.data.eval_prompt_data = (TASK,), TASK
    for name, value in read_recipe(path)[-1].fields.items():
        ENTRIES[name].put(config, value)
    take(config)


def take(config):
    """Check a configuration as a run does; no value by name is a number that is none."""
    check_settings(config)
    for entry in ENTRIES.values():
        texts = named_values(entry.get(config)).values() if entry.has_names else ()
        assert not any(text.lower().lstrip("+-") in ("nan", "inf", "infinity") for text in texts), entry
    config_yaml(config).encode()


ROWS = {
    "": {"prompt": "1+2", "label": "3", "task": "sums", "metadata": {"level": [1, 2.5, {"deep": "text"}]}},
    "math500://": {"problem": "1+2", "answer": "3", "unique_id": "a"},
    "humaneval://": {"task_id": "h/0", "prompt": "a", "test": "def check(f): pass", "entry_point": "f"},
    "mbpp://": {"task_id": 11, "text": "write f", "test_list": ["assert f()"]},
}


def prompts(rng, place):
    kind, path = rng.choice(sorted(ROWS)), place.directory / "rows.jsonl"
    path.write_bytes(b"\n".join(mutated_json(rng, ROWS[kind]) for _ in range(rng.randint(1, 3))))
    url = f"{kind}{path}"
    if rng.random() < 0.2:
        word = rng.choice([*WORDS, "[1]", "{}", "99999999"])
        url = rng.choice(
            [f"reasoning_gym://{word}", f"{TASK}?min_terms={word}", f"{TASK}?size=2&weight={word}"]
        )
    source = open_sources([url], TOKENIZER, DataConfig(), split="eval", max_prompt_len=400)
    for prompt in source.batch(0, min(len(source), 3)):
        assert all(word not in json.dumps([prompt.label, prompt.metadata]) for word in ("NaN", "Infinity"))
        prompt.text.encode()


def json_files(rng, place):
    hf, stored, directory, tokenizer = place.hf, place.stored, place.directory, place.run / "tokenizer"
    study, findings = directory / "study.yaml", directory / "findings.json"
    path, read = rng.choice([
        (hf / "config.json", lambda: read_hf_config(hf)),
        (hf / "model.safetensors.index.json", lambda: read_all(place)),
        (stored / "run_state.json", lambda: Spent.read(load_run_state(stored).get("spent", {}))),
        (stored / "layout.json", lambda: read_layout(stored)),
        (stored / "integrity.json", lambda: check_integrity(stored)),
        (stored / "metadata.json", lambda: convert(place)),
        (stored / "hf" / "config.json", lambda: convert(place)),
        (study, lambda: bool(read_study([study]))),
        (findings, lambda: bool(read_findings(findings))),
        (directory / "results.json", lambda: read_results(directory)),
        (tokenizer / "tokenizer.json", lambda: bool(load_tokenizer(tokenizer))),
    ])  # fmt: skip
    with damaged(path, mutated_json(rng, json.loads(path.read_bytes()))):
        found = read()
    text = json.dumps(dataclasses.asdict(found) if dataclasses.is_dataclass(found) else found, default=str)
    assert not re.search("NaN|Infinity", text), text


def checkpoint_bytes(rng, place):
    if rng.random() < 0.3:
        path, read, header = place.hf / "model.safetensors", read_all, rng.random() < 0.7
    else:
        path = rng.choice([place.stored / ".metadata", *place.stored.glob("*.distcp")])
        read, header = convert, False
    data = path.read_bytes()
    cut = min(len(data), 3000) if header else len(data)
    with damaged(path, mutated_bytes(rng, data[:cut]) + data[cut:]):
        read(place)


def read_all(place):
    """Everything that a trainer reads of a checkpoint."""
    checkpoint, shape = Checkpoint(place.hf), read_hf_config(place.hf)
    entries = model_entries(shape, checkpoint)
    checkpoint.check(shape, entries)
    for entry in entries:
        for piece in entry.pieces:
            checkpoint.read(piece)


def convert(place):
    target = place.directory / "out"
    try:
        megatron_to_hf(place.stored, target, ALONE)
    finally:
        shutil.rmtree(target, ignore_errors=True)
    assert not target.with_name(".out.partial").exists()


def run_files(rng, place):
    names = ["config.yaml", "summary.json", "metrics.jsonl", "rollouts/step_000001.json"]
    path = place.run / rng.choice(names)
    data = path.read_bytes()
    if path.name == "metrics.jsonl":
        lines = data.splitlines()
        lines[rng.randrange(len(lines))] = mutated_json(rng, json.loads(rng.choice(lines)))
        data = b"\n".join(lines) + b"\n"
    else:
        data = mutated_json(rng, json.loads(data))
    with damaged(path, data):
        page = build_page([place.run], tokenizer=TOKENIZER)
    shown = page.partition('id="data">')[2].partition("</script>")[0]
    json.loads(shown, parse_constant=lambda word: pytest.fail(f"{word} on the page"))


@pytest.mark.parametrize(
    ("make", "count"),
    [(flags, 30), (recipes, 60), (prompts, 80), (json_files, 150), (checkpoint_bytes, 40), (run_files, 20)],
)
def test_wrong_input_is_taken_or_refused_in_one_line(place, make, count, capsys, monkeypatch, tmp_path):
    """At the top of a command, where an error that Python or a library raised is a fault of ours."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for tracebacks
    refused = 0
    for number in range(count):
        started, again = time.monotonic(), f"13 {make.__name__} {number}"
        status = guarded(partial(make, random.Random(again), place))
        said = capsys.readouterr().err
        assert status in (DONE, BAD_INPUT), f"{again}: {said[-500:]}"
        assert "Traceback" not in said, again
        # a path is named whole, and one of the values is ten thousand letters
        assert max(map(len, said.splitlines()), default=0) < 12_000, f"{again}: {said[:500]}"
        assert time.monotonic() - started < 20, again  # on a busy machine
        refused += status == BAD_INPUT
    assert refused > 0


def test_a_command_refuses_pipes_and_malformed_files_in_one_line(place, tmp_path, monkeypatch, capsys):
    hf, stored = (shutil.copytree(own, tmp_path / own.name) for own in (place.hf, place.stored))
    rows, results, study = (tmp_path / name for name in ("rows.jsonl", "results.json", "study.yaml"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    wrong: list = []

    def pipe(path):
        path.unlink()
        os.mkfifo(path)

    a_run = ["--hf-checkpoint", hf, "--prompt-data", TASK, "--run-dir", "new", "--rollout-backend", "lean"]
    data, save = ["--hf-checkpoint", ROOT / "examples/tiny_qwen3", "--prompt-data", rows], ["--save", "out"]
    for program, words, path in (
        ("train", [*a_run, "--config", study], study),
        ("train", [*a_run[4:], *data], rows),
        ("evaluate", ["compare", tmp_path, tmp_path], results),
        ("tools/convert_hf_to_megatron.py", ["--hf-checkpoint", hf, *save], hf / "config.json"),
        ("tools/convert_megatron_to_hf.py", ["--load", stored, *save], stored / "metadata.json"),
        ("tools/compare_methods.py", [study, *save], study),
    ):
        before = path.read_bytes() if path.exists() else b""
        for damage in (lambda path: path.write_bytes(b"\xff[{"), pipe):
            damage(path)
            monkeypatch.setattr(sys, "argv", [program, *map(str, words)])
            try:
                if program.endswith(".py"):
                    runpy.run_path(str(ROOT / program), run_name="__main__")
                status = importlib.import_module(f"megatron_ibpo.commands.{program}").main(sys.argv[1:])
            except SystemExit as ended:
                status = ended.code
            said = capsys.readouterr().err
            names_it = path.name in said or str(path.parent) in said
            if (status, said.count("error: "), names_it, "Traceback" in said) != (BAD_INPUT, 1, True, False):
                wrong.append(f"{program} {path.name} {status} {said[:100]}")
        path.unlink()
        path.write_bytes(before)
    assert wrong == []
