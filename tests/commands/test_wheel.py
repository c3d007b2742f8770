"""A wheel works outside the clone: it is built, installed into a bare directory and used from another one."""

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from megatron_ibpo.commands.main import COMMANDS
from support.paths import ROOT

EXTENSION = f"megatron_ibpo/_edit_distance{sysconfig.get_config_var('EXT_SUFFIX')}"
FROM_PYTHON = """
import math, sys
from pathlib import Path
import torch
sys.modules |= {"megatron": None, "vllm": None, "ray": None}  # as where they are not installed
import megatron_ibpo as mi
from megatron_ibpo.commands import loss as loss_command

clone, site = map(Path, sys.argv[1:])
assert mi.batch_distance([[1, 2, 3], [4]], None, [[1, 3], [4]], None, normalized=False).tolist() == [1, 0]

logits_NV = torch.randn(3, 8, requires_grad=True)
rows = mi.LossRows(
    targets_N=torch.tensor([1, 5, 2]), response_mask_N=torch.ones(3),
    cu_seqlens=torch.tensor([0, 3], dtype=torch.int32), advantages=torch.ones(1),
)
loss, _ = mi.policy_loss(logits_NV, rows, mi.make_objective("ppo-clip"))
loss.backward()
assert math.isfinite(loss.item()) and logits_NV.grad.abs().sum() > 0
assert loss_command.main(["gspo"]) == 0

assert mi.load_recipe("tiny_qwen3_next_ibpo", num_rollout=3).run.num_rollout == 3

files = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
assert any(file.is_relative_to(site) for file in files)
assert not [file for file in files if file.is_relative_to(clone / "megatron_ibpo")], "of the clone"
"""
HELPS = """
import os, runpy, sys
import megatron_ibpo.run.settings  # most commands take a second to import it; forked ones share it
from megatron_ibpo.commands.main import COMMANDS, python_words

for name in COMMANDS:
    print("==", name, flush=True)
    if (child := os.fork()) == 0:
        try:
            _, module, *words = python_words(name)
            sys.argv = [module, *words, "--help"]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            assert not ended.code, (name, ended.code)
        finally:
            sys.stdout.flush()
            os._exit(sys.exc_info()[0] is not None)
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Directory with the wheel's content and nothing else."""
    clone, site = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("site")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    needed = ("megatron_ibpo", "kernels", "csrc", "examples/recipes", "setup.py", "pyproject.toml")
    needed += ("README.md", "LICENSE")
    for name in filter(None, listed.stdout.split("\0")):
        if name.startswith(needed):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name, follow_symlinks=False)
    # the extension that the bootstrap compiled, from the same sources by the same setup.py, in a minute
    built = clone / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / EXTENSION
    built.parent.mkdir(parents=True)
    shutil.copy(ROOT / EXTENSION, built)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", clone, clone]
    install = ["install", "--no-deps", "--no-index", "--no-compile", "--find-links", clone]
    install += ["--target", site, "megatron_ibpo"]
    for words in (build, install):
        done = subprocess.run([*pip, *words], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    return site


@pytest.fixture(scope="module")
def python(site, tmp_path_factory):
    """Runs Python with the wheel first on its path, in an empty directory."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    environment = os.environ | {"PYTHONPATH": str(site)}

    def run(*words):
        command = [sys.executable, *map(str, words)]
        return subprocess.run(
            command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=240
        )

    return run


@pytest.mark.slow
def test_every_command_of_a_wheel_shows_its_help(python):
    done = python("-c", HELPS)
    assert done.returncode == 0, done.stderr
    helped = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    assert helped.keys() == COMMANDS.keys(), done.stderr
    for name, said in helped.items():
        assert "usage:" in said, (name, said, done.stderr)
        assert "|{" not in said, (name, "a type as the parser writes it", said)


def test_a_wheel_holds_loss_edit_distance_kernels_and_types(python, site):
    done = python("-c", FROM_PYTHON, ROOT, site)
    assert done.returncode == 0, done.stderr
    assert "tl.exp" in done.stdout, "ibpo loss shows the code for GPUs"
    assert (site / "megatron_ibpo/py.typed").exists()
    assert (site / "megatron_ibpo/_edit_distance.pyi").exists()
    command = ["git", "ls-files", "megatron_ibpo/*.py", "kernels/*.py"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).split()
    places = [name if name.startswith("megatron_ibpo/") else f"megatron_ibpo/{name}" for name in listed]
    assert len(places) > 300
    assert [place for place in places if not (site / place).exists()] == []


def test_files_of_the_clone_alone_are_asked_for(python):
    done = python("-m", "megatron_ibpo.commands.main", "skill", "nowhere")
    assert done.returncode == 2
    assert done.stderr == "error: --config: required, the recipe with the task and its sampling\n"
