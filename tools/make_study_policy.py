"""Make the policies that only studies start from; their weights are not in the repository.

    "$(bash tools/bootstrap.sh)" tools/make_study_policy.py examples/tiny_qwen3_pairs

`warm_start.json` in each directory holds the flags of tools/make_tiny_checkpoint.py, and the SHA-256 of the
weights with which the published results were made. These weights are in the history of the repository: a
clone that has it takes them from there in a second. Elsewhere the policy is trained, in five to ten minutes
of one core, after the policy that it is trained from. Training again gives the same bits on like machines
only: other processors add floats in another order, and the difference grows. Such a policy is another of the
same skill, and is reported as such.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from megatron_ibpo.basics.entry_point import run_tool

ROOT = Path(__file__).resolve().parents[1]
LAST_COMMIT = "aa8cfb6bbcfe8fdd854ef17126bc34e4e88ed057"
"""Last commit with the weights."""
WEIGHTS, RECIPE = "model.safetensors", "warm_start.json"
NOT_FLAGS = {"seconds", "weights_sha256", "make"}
"""Keys of the recipe that are no flags of tools/make_tiny_checkpoint.py."""
GIT_SECONDS, TRAINING_SECONDS = 60, 3600


@dataclass
class Arguments:
    policies: tyro.conf.Positional[tuple[Path, ...]]
    """Directories with a warm_start.json, such as examples/tiny_qwen3_hard."""
    train: bool = False
    """Train also those whose weights are in the history."""


def main(arguments: Arguments) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the training ends with this program
    if not arguments.policies:
        raise ValueError(f"name a policy; there are {', '.join(policies())}")
    for path in arguments.policies:
        make(relative_name(path), train=arguments.train)


def policies() -> list[str]:
    """Return the directories whose weights are made."""
    recipes = sorted((ROOT / "examples").rglob(RECIPE))
    return [relative_name(path.parent) for path in recipes if "weights_sha256" in path.read_text()]


def relative_name(path: Path) -> str:
    """Return the path from the root of the repository. A relative one counts from the working directory, or
    from that root if nothing is there."""
    return os.path.relpath(path.resolve() if path.exists() else ROOT / path, ROOT)


def make(policy: str, *, train: bool) -> None:
    """Write the weights of a policy, and first those of the policy that it is trained from."""
    if policy not in policies():
        raise ValueError(f"{policy}: no policy whose weights are made; there are {', '.join(policies())}")
    target = ROOT / policy / WEIGHTS
    if target.exists():
        print(f"{policy}: exists already ({origin(policy, target.read_bytes())})")
        return
    weights = None if train else weights_in_history(policy)
    if weights is None:
        weights = train_policy(policy, train=train)
    partial = target.with_suffix(".partial")
    partial.write_bytes(weights)
    partial.replace(target)
    print(f"{policy}: made ({origin(policy, weights)})")


def recipe_of(policy: str) -> dict[str, Any]:
    recipe: dict[str, Any] = json.loads((ROOT / policy / RECIPE).read_text(encoding="utf-8"))
    return recipe


def origin(policy: str, weights: bytes) -> str:
    """Return in words whether these are the weights of the published results."""
    if hashlib.sha256(weights).hexdigest() == recipe_of(policy)["weights_sha256"]:
        return "the weights of the published results"
    return "another policy by the recipe of the published results; float sums differ between processors"


def weights_in_history(policy: str) -> bytes | None:
    """Return the weights from the history of this clone; None if it does not have them."""
    command = ["git", "-C", str(ROOT), "show", f"{LAST_COMMIT}:{policy}/{WEIGHTS}"]
    try:
        weights = subprocess.run(command, capture_output=True, timeout=GIT_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    is_published = hashlib.sha256(weights).hexdigest() == recipe_of(policy)["weights_sha256"]
    return weights if is_published else None


def flags(policy: str) -> list[str]:
    """Return the flags of tools/make_tiny_checkpoint.py for this policy."""
    recipe = recipe_of(policy)
    values = {key: value for key, value in recipe.items() if key not in NOT_FLAGS and value is not None}
    if "://" in values["task"]:
        del values["task"]  # the default
    return [word for key, value in values.items() for word in ("--" + key.replace("_", "-"), str(value))]


def train_policy(policy: str, *, train: bool) -> bytes:
    """Return the weights of the policy after training."""
    recipe = recipe_of(policy)
    source = recipe.get("from_checkpoint")
    if source in policies():
        make(source, train=train)
    reason = "as --train asks" if train else "since this copy's history lacks the published weights"
    print(
        f"{policy}: training {recipe['steps']} steps, five to ten minutes of one core, {reason}", flush=True
    )
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
            *("tools/make_tiny_checkpoint.py", *flags(policy), "--save", directory),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            status = subprocess.run(command, cwd=ROOT, env=environment, timeout=TRAINING_SECONDS).returncode
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{policy}: training took more than {TRAINING_SECONDS} s") from error
        if status != 0:
            raise ValueError(f"{policy}: training ended with exit status {status}; its output is above")
        return (Path(directory) / WEIGHTS).read_bytes()


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
