"""The environment of a trainer's process: what its libraries find before they are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from megatron_ibpo.cluster.trainers import Trainers
from megatron_ibpo.policy.process_environment import set_environment

FLA_BACKENDS = """
import os

HOPPER = {hopper}

class TileLang:
    backend_type = "tilelang"

    def is_available(self):
        return True

    def is_enabled(self):
        return os.environ.get("FLA_TILELANG", str(int(HOPPER))) != "0"

class Registry:
    def _get_sorted_backends(self):
        return [TileLang()]

_operation_registries = dict(common=Registry())
"""
"""What flash-linear-attention 0.6 has there, as far as we look."""

SERVED = """
import json, os, sys
from importlib import import_module
from megatron_ibpo.policy.process_environment import set_environment
if "--as-trainers" in sys.argv:
    set_environment(os.environ, colocate=True)
if "--real" in sys.argv:
    import fla.backends as backends
    import fla.ops.gated_delta_rule
    from fla.ops.common.backends import CommonTileLangBackend
    backends.has_usable_nvcc = lambda: True
    backends.find_spec_cached = lambda name: name == "tilelang" or None
    CommonTileLangBackend.default_enable = True  # as it is on Hopper
else:
    import fla.backends
from megatron_ibpo.models.backends import _delta_net_kernels
print(json.dumps(_delta_net_kernels()))
"""


def delta_net_kernels(stub, *arguments, **environment):
    """What a process says of its delta net, in which `stub` holds the package fla."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLA_")}
    path = os.pathsep.join(filter(None, [stub and str(stub), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", SERVED, *arguments],
        env=kept | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=["stub", "real"])
def fla(request, tmp_path):
    """Arguments of `delta_net_kernels` for a Hopper with TileLang and nvcc."""
    if request.param == "real":
        if find_spec("fla") is None:
            pytest.skip("flash-linear-attention is not installed")
        return None, "--real"
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla/__init__.py").touch()
    (tmp_path / "fla/backends.py").write_text(FLA_BACKENDS.format(hopper=True))
    return (tmp_path,)


def test_on_hopper_a_trainers_delta_net_runs_on_triton_unless_the_user_says_otherwise(fla):
    assert delta_net_kernels(*fla, "--as-trainers") == "Triton kernels"
    assert delta_net_kernels(*fla) == "tilelang where they can, else Triton kernels"
    assert delta_net_kernels(*fla, "--as-trainers", FLA_TILELANG="1").startswith("tilelang")


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
