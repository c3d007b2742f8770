"""The environment of a trainer's process: what its libraries find before they are imported."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_ibpo.cluster.trainers import Trainers
from megatron_ibpo.config import Config
from megatron_ibpo.policy import cpu
from megatron_ibpo.policy.process_start import set_environment, trainer_rank

FLA_BACKENDS = """
import os

class TileLang:  # on Hopper
    backend_type = "tilelang"

    def is_available(self):
        return True

    def is_enabled(self):
        return os.environ.get("FLA_TILELANG", "1") != "0"

class Registry:
    def _get_sorted_backends(self):
        return [TileLang()]

_operation_registries = dict(common=Registry())
"""
"""Names that flash-linear-attention 0.6 has there, as far as we look."""

SERVED = """
import json, os, sys
from importlib.util import find_spec
from megatron_ibpo.policy.process_start import set_environment
from megatron_ibpo.policy.process_start import hide_tilelang
if "--as-trainers" in sys.argv:
    set_environment(os.environ, colocate=True)
    hide_tilelang()
import fla.backends
from megatron_ibpo.models.backends import _delta_net_kernels
print(json.dumps([_delta_net_kernels(), find_spec("tilelang") is not None]))
"""


def delta_net_kernels(packages, *arguments, **environment):
    """Return what a process says of its delta net, and whether it finds TileLang. `packages` come before
    others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLA_")}
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", SERVED, *arguments],
        env=kept | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def hopper(tmp_path):
    """A directory with these packages."""
    for package in ("fla", "tilelang"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "fla/backends.py").write_text(FLA_BACKENDS)
    return tmp_path


@pytest.mark.slow
def test_on_hopper_a_trainers_delta_net_runs_on_triton_unless_the_user_says_otherwise(hopper):
    assert delta_net_kernels(hopper, "--as-trainers") == ["Triton kernels", False]
    theirs = ["tilelang where they can, else Triton kernels", True]
    assert delta_net_kernels(hopper) == theirs
    assert delta_net_kernels(hopper, "--as-trainers", FLA_TILELANG="1") == theirs


def test_what_the_user_chose_stays_and_reaches_the_trainers_of_every_node(monkeypatch):
    environ = {"FLA_TILELANG": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "NVRTC_HOME": "/own"}
    before = dict(environ)
    assert set_environment(environ, colocate=True) == ()
    assert environ.items() >= before.items()
    monkeypatch.setenv("FLA_TILELANG", "1")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(Trainers, "_launched", lambda self: [])
    sent = Trainers(None, None)._environment
    assert sent["FLA_TILELANG"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in sent  # each node has its own, or our default


def test_training_in_float32_multiplies_in_float32_unless_the_user_said_otherwise():
    in_float32, in_bfloat16, users = {}, {}, {"NVIDIA_TF32_OVERRIDE": "1"}
    for environ, is_float32 in ((in_float32, True), (in_bfloat16, False), (users, True)):
        set_environment(environ, colocate=False, in_float32=is_float32)
    assert [one.get("NVIDIA_TF32_OVERRIDE") for one in (in_float32, in_bfloat16, users)] == ["0", None, "1"]


def test_transformer_engine_is_led_to_the_pinned_nvrtc_and_curand_where_they_are(tmp_path):
    environ: dict[str, str] = {"CUDA_HOME": "/usr/local/cuda-12"}
    set_environment(environ, colocate=False, wheels=tmp_path)
    assert not environ.keys() & {"NVRTC_HOME", "CURAND_HOME"}
    (tmp_path / "lib").mkdir()
    for name in ("libnvrtc.so.13", "libcurand.so.10"):
        (tmp_path / "lib" / name).touch()
    set_environment(environ, colocate=False, wheels=tmp_path)
    assert environ["NVRTC_HOME"] == environ["CURAND_HOME"] == str(tmp_path)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ("expandable_segments:True", None),
        ("expandable_segments:True,max_split_size_mb:512", "max_split_size_mb:512"),
        (
            "max_split_size_mb:512, Expandable_Segments : true ,roundup_power2_divisions:[256:1,>:8]",
            "max_split_size_mb:512,roundup_power2_divisions:[256:1,>:8]",
        ),
        ("garbage_collection_threshold:0.6,expandable_segments:True", "garbage_collection_threshold:0.6"),
        ("expandable_segments:False", "expandable_segments:False"),
        ("max_split_size_mb:512", "max_split_size_mb:512"),
    ],
)
def test_beside_colocated_engines_expandable_segments_are_dropped_and_said(name, found, kept):
    environ = {name: found}
    notes = set_environment(environ, colocate=True)
    assert environ.get(name) == kept
    assert len(notes) == (kept != found)
    assert all(name in note and "--colocate" in note for note in notes)
    alone = {name: found}
    assert set_environment(alone, colocate=False) == ()
    assert alone[name] == found


def test_a_trainer_reports_it_with_what_it_says_of_its_checkpoint(monkeypatch):
    """A stand-in for the trainer must find its environment set."""

    class Rank:
        def __init__(self, config, checkpoint):
            self.notes = (f"{checkpoint} with {os.environ.get('PYTORCH_ALLOC_CONF')}",)

    monkeypatch.setitem(sys.modules, "megatron_ibpo.policy.rank", SimpleNamespace(TrainerRank=Rank))
    monkeypatch.setitem(sys.modules, "tilelang", None)
    monkeypatch.setattr(cpu, "activate", lambda: None)
    with mock.patch.dict(os.environ, PYTORCH_ALLOC_CONF="expandable_segments:True,max_split_size_mb:64"):
        first, second = trainer_rank(Config(), "a checkpoint").notes
    assert first.startswith("PYTORCH_ALLOC_CONF: trainers run without expandable_segments")
    assert second == "a checkpoint with max_split_size_mb:64"
