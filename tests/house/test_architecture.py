"""The house: a room is a folder, imports run down the list of rooms, heavy libraries stay in theirs."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_ibpo
from support.paths import TESTS

pytestmark = pytest.mark.lint

PACKAGE = Path(megatron_ibpo.__file__).parent

ROOMS = [
    "commands", "study", "run", "plan", "report", "evaluate", "sampling", "cluster", "engines", "policy",
    "weights", "journal", "credit", "loss", "kernels", "models", "environments", "data",
    "rewards", "edit_distance", "config", "basics",
]  # fmt: skip
"""From the top floor down: a room imports only from rooms below it, inside functions too."""

LIBRARIES = {
    "megatron": {"policy", "models", "weights", "plan"},
    "vllm": {"engines", "weights"},
    "ray": {"cluster"},
    "transformers": {"data", "weights"},  # tokenizers; what knows the names in GGUF files
    "triton": {"kernels"},
    "scipy": {"study", "plan"},  # statistics; the fit of a calibration
    "pyarrow": {"data", "evaluate"},
    "huggingface_hub": {"data"},
    "msgpack": {"journal"},
    "starlette": {"report"},
    "uvicorn": {"report"},
    "aiohttp": {"rewards"},
    "renderers": {"environments"},
}
"""Library → rooms that may import it."""

MOST_ARROWS = 120

MORE_FOLDERS_OF_TESTS = {"examples", "gpu", "house", "interpreted", "tools"}


def room_of(path):
    return path.relative_to(PACKAGE).parts[0]


def imports(path):
    """Return the dotted names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "megatron_ibpo":
                yield from (f"megatron_ibpo.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


FILES = sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")} - {PACKAGE / "__init__.py"})
"""kernels/ is a link, which rglob does not follow."""


def arrows():
    """Return (room, room it imports, what stands in which file) of every import between two rooms."""
    return [
        (room_of(path), target, f"{path.relative_to(PACKAGE)} imports {name}")
        for path in FILES
        for name in imports(path)
        if name.startswith("megatron_ibpo.") and (target := name.split(".")[1]) in ROOMS
        if target != room_of(path)
    ]


def test_every_file_lies_in_a_room():
    assert {room_of(path) for path in FILES} == set(ROOMS)


def test_imports_run_down():
    assert [text for room, target, text in arrows() if ROOMS.index(target) < ROOMS.index(room)] == []


def test_rooms_know_few_others():
    assert len({(room, target) for room, target, _ in arrows()}) <= MOST_ARROWS


def test_tests_are_in_folders_named_as_the_rooms_and_import_no_test_file():
    files = sorted(TESTS.rglob("test_*.py"))
    assert {path.relative_to(TESTS).parts[0] for path in files} - {*ROOMS, *MORE_FOLDERS_OF_TESTS} == set()
    assert [(path.name, name) for path in files for name in imports(path) if "test_" in name] == []


def test_the_kernels_know_nothing_of_the_package():
    assert [text for room, _, text in arrows() if room == "kernels"] == []


def test_heavy_libraries_stay_in_their_rooms():
    strays = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in FILES
        for name in imports(path)
        if (owners := LIBRARIES.get(name.split(".")[0])) is not None and room_of(path) not in owners
    ]
    assert strays == []


def test_public_names_are_those_of_their_rooms_and_importing_the_package_loads_none():
    program = "import sys, megatron_ibpo; print([name for name in sys.modules if 'megatron_ibpo.' in name])"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
    for name in megatron_ibpo.__all__:
        assert getattr(megatron_ibpo, name).__name__ == name
    assert megatron_ibpo.distance([1, 2, 3], [1, 3]) == 1 / 3


def test_modules_that_docs_named_are_found_under_their_old_names_too():
    from megatron_ibpo.basics import records, seeds

    assert importlib.import_module("megatron_ibpo.records") is records
    assert importlib.import_module("megatron_ibpo.seeds") is seeds
