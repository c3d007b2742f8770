"""Bad input through the trainer's own door: refused before work starts, with what, where and what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from support.paths import ROOT

DENSE = ROOT / "examples/tiny_qwen3"
RECIPE = ROOT / "examples/recipes/tiny_qwen3_next_ibpo.yaml"
BAD_INPUT = 2


ANSWER = """
import contextlib, io, json, sys
from megatron_ibpo.commands.train import main
found = []
for command in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            status = main(command)
        except SystemExit as ended:
            status = ended.code
    found.append((status, said.getvalue()))
json.dump(found, open(sys.argv[1], "w"))
"""


def answers(commands, out):
    """(exit status, what was printed to stderr) of each command line, in one process."""
    program = [sys.executable, "-c", ANSWER, str(out)]
    subprocess.run(program, input=json.dumps(commands), text=True, cwd=ROOT, check=True, timeout=280)
    return json.loads(out.read_text())


def checkpoint(directory, **changes):
    """A copy of the dense tiny checkpoint with some of its configuration changed."""
    shutil.copytree(DENSE, directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(directory)


def single(**flags):
    """The tiny recipe on one rank, with some flags of its own."""
    words = [
        "--num-trainers",
        "1",
        "--config",
        str(RECIPE),
        "--tensor-model-parallel-size",
        "1",
        "--expert-model-parallel-size",
        "1",
    ]
    for name, value in flags.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    return words


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the trainer answers to each bad input, by name."""
    place = tmp_path_factory.mktemp("faults")
    # bad data are found while Ray starts, which takes 4 s; in one process none does
    alone = partial(single, rollout_backend="lean", hf_checkpoint=DENSE)

    def written(name, text):
        (place / name).write_text(text)
        return place / name

    malformed = Path(checkpoint(place / "malformed"))
    (malformed / "config.json").write_text("{")
    truncated = Path(checkpoint(place / "truncated"))
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    bad_row = written("bad.jsonl", '{"prompt": "1+1", "label": "2"}\n{"prompt": "1+2"}\n')
    long_row = written("long.jsonl", json.dumps({"prompt": "1+" * 300, "label": "2"}) + "\n")
    commands = {
        "missing checkpoint": single(hf_checkpoint=place / "nowhere"),
        "malformed config": single(hf_checkpoint=malformed),
        "unknown model": single(hf_checkpoint=checkpoint(place / "unknown", model_type="gemma3")),
        "layout": [*single(), "--tensor-model-parallel-size", "3"],
        "truncated weights": alone(hf_checkpoint=truncated, run_dir=place / "run1", eval_num_prompts=0),
        "missing prompts": alone(prompt_data=place / "nowhere.jsonl"),
        "empty prompts": alone(prompt_data=written("empty.jsonl", "")),
        "bad row": alone(prompt_data=bad_row),
        "long prompt": alone(prompt_data=long_row),
        "unknown flag": [*single(), "--num-rolout", "3"],
        "unknown key": ["--config", str(written("bad.yaml", "num-rolout: 3\n"))],
        "bonus too large": single(ibpo_lambda=2.0),
        "context parallel": single(context_parallel_size=2),
        "context too long": single(rollout_max_context_len=4096),
        "no checkpoint to load": single(load=place),
        "reward function": alone(rm_type="no_such_module:score", run_dir=place / "run2"),
        "run directory": alone(run_dir="/proc/run"),
    }
    found = answers([list(map(str, command)) for command in commands.values()], place / "answers.json")
    return dict(zip(commands, found, strict=True))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing checkpoint", ["--hf-checkpoint", "nowhere is not a directory"]),
        ("malformed config", ["malformed/config.json", "not valid JSON"]),
        ("unknown model", ["model_type 'gemma3'", "qwen3_next"]),
        ("layout", ["--tensor-model-parallel-size=3 does not divide the attention heads (4)"]),
        ("truncated weights", ["truncated/model.safetensors"]),
        ("missing prompts", ["nowhere.jsonl"]),
        ("empty prompts", ["empty.jsonl", "no prompts"]),
        ("bad row", ["bad.jsonl", "line 2", "label"]),
        ("long prompt", ["long.jsonl", "line 1", "tokens"]),
        ("unknown flag", ["--num-rolout", "--num-rollout"]),
        ("unknown key", ["bad.yaml", "num-rolout", "num-rollout"]),
        ("bonus too large", ["λΔ must stay below 1"]),
        ("context parallel", ["--context-parallel-size"]),
        ("context too long", ["--rollout-max-context-len 4096", "512"]),
        ("no checkpoint to load", ["--load", "there is no step_N"]),
        ("reward function", ["no_such_module"]),
        ("run directory", ["--run-dir", "/proc/run"]),
    ],
)
def test_bad_input_is_refused_with_what_where_and_what_to_do(said, fault, words):
    status, text = said[fault]
    assert status == BAD_INPUT, text
    assert "Traceback" not in text
    for word in words:
        assert word in text, text
