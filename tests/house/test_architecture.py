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
    "megatron": {"policy", "models", "weights", "plan"}, "vllm": {"engines", "weights"}, "ray": {"cluster"},
    "transformers": {"data", "weights"},  # tokenizers; what knows the names in GGUF files
    "triton": {"kernels"}, "scipy": {"study", "plan"},  # statistics; the fit of a calibration
    "pyarrow": {"data", "evaluate"}, "huggingface_hub": {"data"}, "msgpack": {"journal"},
    "starlette": {"report"}, "uvicorn": {"report"}, "aiohttp": {"rewards"}, "renderers": {"environments"},
}  # fmt: skip
"""Library → rooms that may import it."""

FILES = sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")} - {PACKAGE / "__init__.py"})
"""kernels/ is a link, which rglob does not follow."""


def imports(path):
    """Return the dotted names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "megatron_ibpo":
            yield from (f"megatron_ibpo.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_run_down_rooms_know_few_others_and_heavy_libraries_stay_in_theirs():
    arrows, wrong, rooms = set(), [], set()
    for path in FILES:
        room, *_ = path.relative_to(PACKAGE).parts
        rooms.add(room)
        for name in imports(path):
            first, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if first == "megatron_ibpo" and target in ROOMS and target != room:
                arrows.add((room, target))
                if ROOMS.index(target) < ROOMS.index(room) or room == "kernels":
                    wrong.append((path, name))
            elif room not in LIBRARIES.get(first, rooms):
                wrong.append((path, name))
    assert wrong == []
    assert rooms == {*ROOMS}
    assert len(arrows) <= 120


def test_tests_are_in_folders_named_as_the_rooms_and_import_no_test_file():
    files, more = sorted(TESTS.rglob("test_*.py")), {"examples", "gpu", "house", "interpreted", "tools"}
    assert {path.relative_to(TESTS).parts[0] for path in files} - {*ROOMS} - more == set()
    assert [(path.name, name) for path in files for name in imports(path) if "test_" in name] == []


def test_public_names_are_those_of_their_rooms_and_importing_the_package_loads_none():
    program = "import sys, megatron_ibpo; print([name for name in sys.modules if 'megatron_ibpo.' in name])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60) == "[]\n"
    for name in megatron_ibpo.__all__:
        assert getattr(megatron_ibpo, name).__name__ == name
    assert megatron_ibpo.distance([1, 2, 3], [1, 3]) == 1 / 3


def test_modules_that_docs_named_are_found_under_their_old_names_too():
    from megatron_ibpo.basics import records, seeds

    assert importlib.import_module("megatron_ibpo.records") is records
    assert importlib.import_module("megatron_ibpo.seeds") is seeds
