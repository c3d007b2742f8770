"""The house: arrows between rooms run one way, and heavy libraries stay in their own rooms."""

from __future__ import annotations

import ast
from pathlib import Path

import megatron_ibpo

PACKAGE = Path(megatron_ibpo.__file__).parent

ROOMS = [
    "main", "measure_pass_rates", "evaluate.__main__", "plan.__main__", "report.__main__",
    "calibrate", "train", "lean_run", "startup", "opening", "loop", "choice", "study", "plan", "cluster",
    "sampling",
    "report", "checks", "rollout", "task", "evaluate", "rewards", "credit", "data", "policy", "loss",
    "kernels", "edit_distance", "weights", "cost", "models", "world", "journal", "config", "prefixes",
    "records", "seeds", "policy_digest", "versions", "quiet", "interrupts", "words", "environment",
    "strict_json", "rendezvous", "temporary", "user_files", "command",
]  # fmt: skip
"""From the loop down: a room may import only from rooms after it. A command in a room (`python -m
megatron_ibpo.ROOM`) stands above what it runs, apart from its room."""

LIBRARIES = {
    "megatron": {"policy", "models", "weights", "plan"},
    "vllm": {"rollout", "weights"},
    "transformers": {"data", "weights"},  # tokenizers; what knows the names in GGUF files
    "triton": {"kernels"},
    "scipy": {"study", "plan"},  # statistics; the fit of a calibration
    "pyarrow": {"data", "evaluate"},
    "msgpack": {"journal"},
    "starlette": {"report"},
    "uvicorn": {"report"},
}
"""Who may import what, anywhere in its code."""


def room_of(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return f"{room}.__main__" if path.name == "__main__.py" else room


def imports(path):
    """Dotted names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "megatron_ibpo":
                yield from (f"megatron_ibpo.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


FILES = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE]
FILES += [path for path in (PACKAGE / "kernels").glob("*.py") if path not in FILES]  # behind a link


def test_every_room_has_its_place():
    assert {room_of(path) for path in FILES} == set(ROOMS)


def test_arrows_run_one_way():
    upward = []
    for path in FILES:
        for name in imports(path):
            if not name.startswith("megatron_ibpo."):
                continue
            target = name.split(".")[1]
            here = room_of(path)
            if target in ROOMS and target != here and ROOMS.index(target) <= ROOMS.index(here):
                upward.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert upward == []


def test_the_kernels_know_nothing_of_the_package():
    strays = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in FILES
        if room_of(path) == "kernels"
        for name in imports(path)
        if name.startswith("megatron_ibpo") and not name.startswith("megatron_ibpo.kernels")
    ]
    assert strays == []


def test_heavy_libraries_stay_in_their_rooms():
    strays = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in FILES
        for name in imports(path)
        if (owners := LIBRARIES.get(name.split(".")[0])) is not None and room_of(path) not in owners
    ]
    assert strays == []
