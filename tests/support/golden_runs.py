"""Training on the recordings of `tests/golden`. Imports nothing of the package: other commits can be run."""

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from support.paths import ROOT, TESTS

GOLDEN = TESTS / "golden"
TIMEOUT_S = 300  # of one run, which takes about 15 s alone on two cores


class Layout(NamedTuple):
    model: str  # names its YAML and its recordings
    trainers: int
    watched: tuple[str, ...]  # tensors of which some elements are kept as golden numbers


_DENSE = (
    "embedding.word_embeddings.weight", "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.2.mlp.linear_fc1.weight", "decoder.layers.3.mlp.linear_fc2.weight",
    "decoder.final_layernorm.weight",
)  # fmt: skip
_NEXT = (
    "embedding.word_embeddings.weight", "decoder.layers.0.self_attention.in_proj.weight.query",
    "decoder.layers.1.self_attention.conv1d.weight.value",
    "decoder.layers.2.mlp.experts.experts.linear_fc1.weight",
    "decoder.layers.3.self_attention.linear_qkv.weight", "decoder.layers.3.mlp.router.weight",
    "decoder.final_layernorm.weight",
)  # fmt: skip
LAYOUTS = {"dense": Layout("dense", 1, _DENSE), "dense-dp2": Layout("dense", 2, _DENSE)}
LAYOUTS["next-tp2-ep2"] = Layout("next", 2, _NEXT)
_GSPO = "--eps-clip 3e-3 --eps-clip-high 3e-3"
_SCHEDULE = "--lr-decay-style cosine --lr-warmup-fraction 0.3 --weight-decay 0.1 --rollout-temperature 0.7"
ALGORITHMS = {
    "ibpo": _GSPO, "ibpo-mask": _GSPO, "gspo": _GSPO, "dapo": "--eps-clip 0.2 --eps-clip-high 0.28",
    "ppo": "--eps-clip 0.2 --eps-clip-high 0.2", "ibpo scheduled": f"{_GSPO} {_SCHEDULE}",
}  # fmt: skip
"""Preset, and what else is said of a case → flags that say what it leaves to a recipe or loss variant."""


def recordings(name, directory, temperature="1.0"):
    """Unpack the recording into `directory`, and return that. It was sampled at temperature 1.0."""
    directory.mkdir(parents=True)
    for packed in sorted((GOLDEN / "rollouts" / name).glob("*.gz")):
        text = gzip.decompress(packed.read_bytes()).decode()
        text = text.replace('"temperature": 1.0', f'"temperature": {temperature}')
        (directory / packed.stem).write_text(text)
    return directory


def train_recorded(repository, layout, algorithm, directory, steps=None):
    """Train on the recordings with the code in `repository`, in the new `directory`: rows of metrics.jsonl
    and checkpoints, one per step."""
    flags = ALGORITHMS[algorithm].split()
    temperature = flags[-1] if "--rollout-temperature" in flags else "1.0"
    run_dir, recorded = directory / "run", recordings(layout.model, directory / "rollouts", temperature)
    command = [
        *(sys.executable, "-m", "megatron_ibpo.commands.train", "--num-trainers", layout.trainers),
        *("--config", GOLDEN / f"{layout.model}.yaml", "--run-dir", run_dir),
        *("--load-debug-rollout-data", recorded, "--save-interval", "1", "--keep-checkpoints", "1000"),
        *("--reward-workers", "1"),
        *("--advantage-estimator", algorithm.split()[0], *flags),
        *(() if steps is None else ("--num-rollout", steps)),
    ]
    own = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": str(repository)}
    command = ["timeout", "--kill-after=5", *map(str, (TIMEOUT_S, *command))]  # ends all that was started
    said: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=repository, env=os.environ | own, **said)
    if done.returncode != 0:
        raise RuntimeError(f"{algorithm} in {repository}: {done.returncode}\n{done.stdout[-5000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    checkpoints = sorted((run_dir / "checkpoints").glob("step_*"))
    return SimpleNamespace(rows=[row for row in rows if row["kind"] == "step"], checkpoints=checkpoints)


def weights(checkpoint):
    """All weights of a training checkpoint by Megatron's names, the critic's after "critic/"."""
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in stored.items()
        if isinstance(meta, TensorStorageMetadata) and not name.startswith(("optimizer.", "chained_"))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this is one process
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    critic = checkpoint / "critic"
    of_critic = weights(critic) if critic.is_dir() else {}
    return tensors | {f"critic/{name}": tensor for name, tensor in of_critic.items()}


def watched_weights(layout, checkpoint):
    held = weights(checkpoint)
    watched = [*layout.watched, *("critic/" + name for name in layout.watched)]
    flat = {name: held[name].flatten() for name in watched if name in held}
    return {name: [own[own.numel() * part // 5].item() for part in range(1, 5)] for name, own in flat.items()}


def main(algorithms):
    path = GOLDEN / "trained.json"
    numbers = json.loads(path.read_text()) if algorithms else {}
    for name, layout in LAYOUTS.items():
        for algorithm in algorithms or ALGORITHMS:
            with tempfile.TemporaryDirectory() as directory:
                trained = train_recorded(ROOT, layout, algorithm, Path(directory))
                numbers.setdefault(name, {})[algorithm] = {
                    **{key: [row[key] for row in trained.rows] for key in ("step", "loss", "grad_norm")},
                    "weights": [watched_weights(layout, checkpoint) for checkpoint in trained.checkpoints],
                }
            print(f"{name}, {algorithm}", flush=True)
    in_lines = json.dumps(numbers, indent=1)  # a list of numbers on one of them
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", in_lines)
    path.write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
