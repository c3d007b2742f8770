"""Inputs that a seed makes wrong, read by the package: each is taken or refused in a line, none with NaN in
it. (Through the commands, and more of them: test_fuzz.py.)"""

import dataclasses
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.config import Config, DataConfig, ParallelConfig, config_yaml, named_values
from megatron_ibpo.config.all_fields import ENTRIES
from megatron_ibpo.config.config_error import ConfigError
from megatron_ibpo.config.recipes import read_recipe
from megatron_ibpo.data import DataError, open_source
from megatron_ibpo.models import ModelConfigError, read_hf_config
from megatron_ibpo.report.page.static import build_page
from megatron_ibpo.run.checks import check_settings
from megatron_ibpo.run.cost import Spent
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.weights.formats.convert import hf_to_megatron, megatron_to_hf, model_entries
from megatron_ibpo.weights.formats.hugging_face import Checkpoint
from megatron_ibpo.weights.formats.integrity import check_integrity
from megatron_ibpo.weights.formats.run_state import load_run_state, read_layout
from megatron_ibpo.weights.weight_errors import CheckpointError
from support.bad_inputs.families import wrong_flags, wrong_recipe
from support.bad_inputs.mutations import mutated_bytes, mutated_json
from support.run_pages import TOKENIZER, record_run
from support.tiny_models import make_qwen3

SEED = 13
LONGEST_S = 20.0
"""That one input may take on a busy machine."""
LONGEST_LINE = 12_000
"""A path is named whole, and one of the values is ten thousand letters."""

TASK = "reasoning_gym://chain_sum"
ALONE = World(0, 1, torch.device("cpu"), None)


class Place:
    """The valid files of every kind that are damaged, made once."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.hf = make_qwen3(directory / "hf", 1)
        hf_to_megatron(self.hf, directory / "stored", ParallelConfig(), ALONE)
        self.stored = directory / "stored"
        (self.stored / "run_state.json").write_text(json.dumps({"step": 1, "spent": {"tokens": 3.0}}))
        names = dict.fromkeys(Checkpoint(self.hf).file_of, "model.safetensors")
        index = {"metadata": {"total_size": 1}, "weight_map": names}
        (self.hf / "model.safetensors.index.json").write_text(json.dumps(index))
        self.run = record_run(directory)
        summary = {"status": "finished", "accuracy_end": 0.5, "steps": 2}
        (self.run / "summary.json").write_text(json.dumps(summary))

    @contextmanager
    def damaged(self, path: Path, data: bytes) -> Iterator[None]:
        """`path` with other content."""
        before = path.read_bytes()
        path.write_bytes(data)
        try:
            yield
        finally:
            path.write_bytes(before)


def flags(rng: random.Random, place: Place) -> None:
    line = ["--hf-checkpoint", str(place.hf), "--prompt-data", TASK, "--eval-prompt-data", TASK]
    line += wrong_flags(rng)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        _take(parse_config(line))


def recipes(rng: random.Random, place: Place) -> None:
    path = place.directory / "recipe.yaml"
    path.write_bytes(wrong_recipe(rng))
    config = Config()
    config.model.hf_checkpoint = place.hf
    config.data.prompt_data, config.data.eval_prompt_data = (TASK,), TASK
    for name, value in read_recipe(path)[0].items():
        ENTRIES[name].put(config, value)
    _take(config)


def _take(config: Config) -> None:
    """Check a configuration as a run does; what is accepted holds no number that is none."""
    check_settings(config)
    for section in dataclasses.asdict(config).values():
        for name, value in section.items():
            for one in value if isinstance(value, tuple) else (value,):
                assert not isinstance(one, float) or math.isfinite(one), (name, value)
                assert not isinstance(one, int) or -(2**63) <= one < 2**63, (name, value)
            if name in ENTRIES and ENTRIES[name].has_names:
                for text in named_values(value).values():
                    assert text.lower().lstrip("+-") not in ("nan", "inf", "infinity"), (name, value)
    config_yaml(config).encode()


def prompts(rng: random.Random, place: Place) -> None:
    row = {"prompt": "1+2", "label": "3", "task": "sums", "metadata": {"level": [1, 2.5, {"deep": "text"}]}}
    path = place.directory / "rows.jsonl"
    path.write_bytes(b"\n".join(mutated_json(rng, row) for _ in range(rng.randint(1, 3))))
    source = open_source(str(path), TOKENIZER, DataConfig(), split="train", max_prompt_len=50)
    for prompt in source.batch(0, len(source)):
        assert all(word not in json.dumps([prompt.label, prompt.metadata]) for word in ("NaN", "Infinity"))
        prompt.text.encode()


def checkpoint_json(rng: random.Random, place: Place) -> None:
    hf, stored = place.hf, place.stored
    reading: dict[Path, Callable[[], Any]] = {
        hf / "config.json": lambda: read_hf_config(hf),
        hf / "model.safetensors.index.json": lambda: _read_all(hf),
        stored / "run_state.json": lambda: Spent.read(load_run_state(stored).get("spent", {})),
        stored / "layout.json": lambda: read_layout(stored),
        stored / "integrity.json": lambda: check_integrity(stored),
        stored / "metadata.json": lambda: _convert(place),
        stored / "hf" / "config.json": lambda: _convert(place),
    }
    path = rng.choice(list(reading))
    with place.damaged(path, mutated_json(rng, json.loads(path.read_bytes()))):
        found = reading[path]()
    is_record = dataclasses.is_dataclass(found) and not isinstance(found, type)
    text = json.dumps(dataclasses.asdict(found) if is_record else found, default=str)
    assert "NaN" not in text, text
    assert "Infinity" not in text, text


def checkpoint_bytes(rng: random.Random, place: Place) -> None:
    if rng.random() < 0.3:
        path = place.hf / "model.safetensors"
        reading: Callable[[], Any] = partial(_read_all, place.hf)
        header = rng.random() < 0.7
    else:
        path = rng.choice([place.stored / ".metadata", *place.stored.glob("*.distcp")])
        reading = partial(_convert, place)
        header = False
    data = path.read_bytes()
    cut = min(len(data), 3000) if header else len(data)
    with place.damaged(path, mutated_bytes(rng, data[:cut]) + data[cut:]):
        reading()


def _read_all(hf: Path) -> None:
    """Everything that a trainer reads of a checkpoint."""
    checkpoint, shape = Checkpoint(hf), read_hf_config(hf)
    entries = model_entries(shape, checkpoint)
    checkpoint.check(shape, entries)
    for entry in entries:
        for piece in entry.pieces:
            checkpoint.read(piece)


def _convert(place: Place) -> None:
    target = place.directory / "out"
    try:
        megatron_to_hf(place.stored, target, ALONE)
    finally:
        shutil.rmtree(target, ignore_errors=True)
    assert not target.with_name(".out.partial").exists()


def run_files(rng: random.Random, place: Place) -> None:
    run = place.run
    path = rng.choice(
        [run / "config.yaml", run / "summary.json", run / "metrics.jsonl", run / "rollouts/step_000001.json"]
    )
    data = path.read_bytes()
    if path.name == "metrics.jsonl":
        lines = data.splitlines()
        lines[rng.randrange(len(lines))] = mutated_json(rng, json.loads(rng.choice(lines)))
        data = b"\n".join(lines) + b"\n"
    else:
        data = mutated_json(rng, json.loads(data))
    with place.damaged(path, data):
        page = build_page([run], tokenizer=TOKENIZER)
    shown = page.partition('id="data">')[2].partition("</script>")[0]
    json.loads(shown, parse_constant=lambda word: pytest.fail(f"{word} on the page"))


@dataclasses.dataclass(frozen=True)
class Kind:
    """Inputs of one kind."""

    make: Callable[[random.Random, Place], None]
    """Makes an input, and takes it."""
    refusals: tuple[type[BaseException], ...]
    """Errors that it may be refused with, which commands turn into a line."""
    count: int


KINDS = {
    "flags": Kind(flags, (ConfigError, SystemExit), 6),
    "recipes": Kind(recipes, (ConfigError,), 30),
    "prompts": Kind(prompts, (DataError,), 30),
    "checkpoint JSON": Kind(checkpoint_json, (CheckpointError, ModelConfigError, ValueError), 34),
    "checkpoint bytes": Kind(checkpoint_bytes, (CheckpointError, ModelConfigError), 10),
    "run files": Kind(run_files, (ValueError,), 10),
}


def tried(kind: str, number: int, place: Place) -> bool:
    """Return whether input `number` of a kind was refused; fail with how to see it again where it went
    wrong."""
    started, again = time.monotonic(), f"{kind} {number} of seed {SEED}"
    refused = False
    try:
        KINDS[kind].make(random.Random(f"{SEED} {kind} {number}"), place)
    except KINDS[kind].refusals as error:
        said, refused = str(error), True
        # Python's own errors of these kinds come from a fault of ours, but for those of a malformed number
        assert said, again
        assert "Traceback" not in said, f"{again}: {said}"
        assert max(map(len, said.splitlines())) < LONGEST_LINE, f"{again}: {said[:500]}"
    except BaseException as error:
        raise AssertionError(f"{again}: {type(error).__name__}: {str(error)[:500]}") from error
    assert time.monotonic() - started < LONGEST_S, again
    return refused


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_input_ends_in_one_line(place, kind):
    refused = sum(tried(kind, number, place) for number in range(KINDS[kind].count))
    assert refused > 0
