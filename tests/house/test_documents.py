"""The rules of the house: a fresh clone can run what documents say, and imports run down the rooms."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
import tyro
import yaml

import megatron_ibpo
from megatron_ibpo import __version__
from megatron_ibpo.commands.choose_recipe import Devices, choose
from megatron_ibpo.commands.evaluate import Comparison
from megatron_ibpo.commands.main import python_words
from megatron_ibpo.config import PRESETS
from megatron_ibpo.run.settings import parse_config
from support.documented_modules import write_modules
from support.paths import ROOT, TESTS

sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import conductor

pytestmark = pytest.mark.lint
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])
TAKES_ANYTHING = {"tests/run.sh", "tests/native.sh", "tests/chaos.sh", "tests/soak.sh", ".ci/run", ".ci/lint"}


def commands_of(document):
    """Shell commands of a document's ```sh blocks, comments and line continuations taken away."""
    blocks = re.findall(r"```sh\n(.*?)```", document.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for raw in lines if (line := re.sub(r"(^|\s)#.*", "", raw).strip())]


def check(command):
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in takewhile(re.compile("[A-Z_]+=").match, words))
    words = words[len(variables) :]  # the program and its arguments
    if words[0] == "$(bash tools/bootstrap.sh)":
        script = next((word for word in words if word.endswith(".py")), None)
        if "PYTHONPATH" in variables:
            script = f"{variables['PYTHONPATH']}/{words[2].replace('.', '/')}.py"
        assert (ROOT / script).is_file(), script
    elif words[:2] == ["pip", "install"]:
        assert all((ROOT / file).is_file() for option, file in pairwise(words) if option == "-r")
    elif words[0] == "python3.12":  # of a machine that makes a wheel for GPUs
        assert (ROOT / words[1]).is_file(), words[1]
    elif words != ["make"]:
        assert words[0] == "bash", f"{words[0]} is not there in a fresh clone"
        assert (ROOT / words[1]).is_file(), words[1]
        if words[1] == "tools/ibpo.sh":
            check_ibpo(words[2:])
        elif words[1].startswith("examples/"):
            check_training(variables, words[1], words[2:])
        elif words[1] == "tests/gpu.sh":
            conductor.parse(words[2:])
        else:
            assert words[1] in TAKES_ANYTHING, f"{words[1]}: the test does not know it"


def check_ibpo(words):
    if words in (["--help"], ["--version"]):
        return
    length = 2 if words[0] == "convert" else 1
    python = python_words(" ".join(words[:length]))
    flags = words[length + (words[0] == "evaluate" and not words[1].startswith("-")) :]  # after a policy
    if words[:2] == ["evaluate", "compare"]:
        tyro.cli(Comparison, args=flags)
    elif python[1].endswith(".verify"):
        parse_config(importlib.import_module(python[1]).split_flags(flags)[1])
    elif hasattr(module := importlib.import_module(python[1]), "Arguments"):
        tyro.cli(module.Arguments, args=[*python[2:], *flags])
    else:
        parse_config([*python[2:], *flags])


def check_training(variables, script, flags):
    text = (ROOT / script).read_text() + (ROOT / "examples/run.sh").read_text()
    for name in variables:
        assert re.search(rf"\b{name}=\$", text), f"{script} reads no {name}"
    if {"--help", "--help-all", "--print-config"} & set(flags):
        return
    tiny = ROOT / "examples" / ("tiny_qwen3_next" if "next" in script else "tiny_qwen3")
    choice = choose(tiny, Devices(1, 0, 80.0))
    flags = [flag for flag in flags if flag != "--verify"]
    parse_config(["--config", str(choice.recipe), "--hf-checkpoint", str(tiny), *flags])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_commands_are_understood(monkeypatch, tmp_path, document):
    write_modules(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    for command in commands_of(document):
        try:
            check(command)
        except BaseException as error:
            pytest.fail(f"{command}: {error!r}")


def test_a_command_shows_its_help_from_any_directory(tmp_path):
    command = ["bash", str(ROOT / "tools/ibpo.sh"), "convert", "to-hf", "--help"]
    environment = os.environ | {"IBPO_PYTHON": sys.executable}
    assert b"--help" in subprocess.check_output(command, cwd=tmp_path, env=environment, timeout=120)


def test_every_link_between_documents_leads_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
            assert target.startswith("http") or (document.parent / target).exists(), (document, target)


def test_every_page_is_indexed_and_every_algorithm_documented():
    assert "docs/README.md" in (ROOT / "README.md").read_text()
    index = ROOT / "docs/README.md"
    for found in {*index.parent.glob("*.md")} - {index}:
        assert f"({found.name})" in index.read_text(), found.name
        assert found.read_text().split("\n\n")[1].startswith("Read this "), found.name
    algorithms = (ROOT / "docs/algorithms.md").read_text()
    for name in [*PRESETS, *(path.stem for path in ROOT.glob("examples/algorithms/*.yaml"))]:
        assert f"`{name.replace('-', '_')}`" in algorithms


def test_package_changelog_citation_and_hooks_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.search(r"^## (\d\S*) \((\S+)\)$", changes, re.MULTILINE).groups()
    assert (__version__, __version__, date) == (version, citation["version"], str(citation["date-released"]))
    assert citation["preferred-citation"]["title"] in (ROOT / "README.md").read_text().replace("\n", " ")
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entry = repository["hooks"][0]["entry"]
    assert entry in (ROOT / ".ci/run").read_text(), "the same checks as in CI"
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["ibpo"]
    assert script == "megatron_ibpo.commands.main:main"


PACKAGE = Path(megatron_ibpo.__file__).parent

ROOMS = [
    "commands", "study", "verify", "run", "plan", "report", "evaluate", "sampling", "cluster", "engines",
    "policy", "weights", "journal", "credit", "loss", "kernels", "models", "environments", "data",
    "rewards", "edit_distance", "config", "basics",
]  # fmt: skip
"""From the top floor down: a room imports only from rooms below it, inside functions too."""


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "megatron_ibpo":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_run_down_and_heavy_libraries_stay_in_their_rooms():
    may_import = {
        "megatron": {"policy", "models", "weights", "plan"}, "vllm": {"engines"},
        # a faster import; tokenizers; names in GGUF files; logits beside ours; an engine; TRL's schemas
        "transformers": {"basics", "data", "weights", "policy", "engines", "verify", "environments"},
        "ray": {"cluster"},
        "triton": {"kernels"}, "scipy": {"study", "credit"},
        "pyarrow": {"data", "evaluate"}, "huggingface_hub": {"data"}, "msgpack": {"journal"},
        "starlette": {"report"}, "uvicorn": {"report"}, "renderers": {"environments"},
        "aiohttp": {"rewards", "environments"}, "verifiers": {"environments"},
    }  # fmt: skip
    apart = {
        "torch",
        "torchvision",
        "triton",
        "megatron",
        "vllm",
        "gguf",
        "wandb",
        "verifiers",
    }  # or optional
    apart |= {"transformer_engine", "apex", "fla", "yaml", "megatron_ibpo"}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w-]+", dependency)[0].lower().replace("-", "_") for dependency in declared}
    known = names | apart | sys.stdlib_module_names
    arrows, wrong, rooms = set(), [], set()
    # kernels/ is a link, which rglob does not follow
    for path in {*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")} - {PACKAGE / "__init__.py"}:
        room, *_ = path.relative_to(PACKAGE).parts
        rooms.add(room)
        for name in imports(path):
            first, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if first == "megatron_ibpo" and target in ROOMS and target != room:
                arrows.add((room, target))
                if ROOMS.index(target) < ROOMS.index(room) or room == "kernels":
                    wrong.append((path, name))
            elif room not in may_import.get(first, rooms) or first not in known:
                wrong.append((path, name))
    assert wrong == []
    assert rooms == {*ROOMS}
    assert len(arrows) <= 128


def test_vllm_is_behind_one_door():
    """Its own folder knows it; of the rest, the registry of engines and their room's door know this
    folder."""
    own, doors = PACKAGE / "engines/vllm", {PACKAGE / "engines/registry.py", PACKAGE / "engines/__init__.py"}
    outside = [path for path in PACKAGE.rglob("*.py") if own not in path.parents]
    assert len(outside) > 200
    for path in outside:
        first = {name.partition(".")[0] for name in imports(path)}
        ours = [name for name in imports(path) if name.startswith("megatron_ibpo.engines.vllm")]
        assert "vllm" not in first, path
        assert path in doors or not ours, path
        text = path.read_text()
        assert path in doors or "megatron_ibpo.engines.vllm" not in text, path
        assert '"vllm.' not in text, f"{path}: a module of vLLM by its name as text"


def test_tests_stand_in_room_folders_and_import_no_test_file():
    files, more = sorted(TESTS.rglob("test_*.py")), {"examples", "gpu", "house", "interpreted", "tools"}
    assert {path.relative_to(TESTS).parts[0] for path in files} - {*ROOMS} - more == set()
    assert [(path.name, name) for path in files for name in imports(path) if "test_" in name] == []


def test_public_names_are_lazy_and_those_of_their_rooms():
    program = "import sys, megatron_ibpo; print([name for name in sys.modules if 'megatron_ibpo.' in name])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60) == "[]\n"
    for name in megatron_ibpo.__all__:
        assert getattr(megatron_ibpo, name).__name__ == name
    assert megatron_ibpo.distance([1, 2, 3], [1, 3]) == 1 / 3
