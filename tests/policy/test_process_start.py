"""A trainer's process: what its libraries find when they are imported, and what stands in for CUDA."""

import os
import sys
from importlib.metadata import version
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_ibpo.cluster.trainers import Trainers
from megatron_ibpo.config import Config
from megatron_ibpo.policy import cpu
from megatron_ibpo.policy.process_start import hide_tilelang, set_environment, trainer_rank


def test_delta_nets_on_hopper_use_triton_unless_the_user_chooses():
    for chosen, is_found in (({}, False), ({"FLA_TILELANG": "1"}, True)):
        with mock.patch.dict(os.environ, chosen, clear=True), mock.patch.dict(sys.modules, tilelang=None):
            set_environment(os.environ, colocate=True)
            del sys.modules["tilelang"]
            hide_tilelang()
            assert ("tilelang" not in sys.modules) == is_found


def test_the_users_environment_stays_and_reaches_trainers_on_every_node(monkeypatch):
    names = ("FLA_TILELANG", "CUDA_DEVICE_MAX_CONNECTIONS", "NVIDIA_TF32_OVERRIDE", "NVRTC_HOME")
    before = dict.fromkeys(names, "8")
    environ = {**before}
    assert set_environment(environ, colocate=True, in_float32=True) == ()
    assert environ.items() >= before.items()
    monkeypatch.setenv("FLA_TILELANG", "1")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(Trainers, "_launched", lambda self: [])
    sent = Trainers(None, None)._environment
    assert sent["FLA_TILELANG"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in sent  # each node has its own, or our default


def test_float32_avoids_tf32_and_transformer_engine_finds_pinned_libraries(tmp_path):
    environ = {"CUDA_HOME": "/usr/local/cuda-12"}
    set_environment(environ, colocate=False, wheels=tmp_path)
    assert not environ.keys() & {"NVRTC_HOME", "CURAND_HOME", "NVIDIA_TF32_OVERRIDE"}
    (tmp_path / "lib").mkdir()
    for name in ("libnvrtc.so.13", "libcurand.so.10"):
        (tmp_path / "lib" / name).touch()
    set_environment(environ, colocate=False, wheels=tmp_path, in_float32=True)
    assert environ["NVRTC_HOME"] == environ["CURAND_HOME"] == str(tmp_path)
    assert environ["NVIDIA_TF32_OVERRIDE"] == "0"


def test_beside_colocated_engines_expandable_segments_are_dropped_and_said():
    others = "max_split_size_mb:512,roundup_power2_divisions:[256:1,>:8]"
    for found, kept in {
        "expandable_segments:True": None,
        others.replace(",", ", Expandable_Segments : true ,", 1): others,
        "max_split_size_mb:512,expandable_segments:False": "max_split_size_mb:512,expandable_segments:False",
    }.items():
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            environ, alone = {name: found}, {name: found}
            notes = set_environment(environ, colocate=True)
            assert (environ.get(name), len(notes)) == (kept, kept != found)
            assert all(name in note and "--colocate" in note for note in notes)
            assert (set_environment(alone, colocate=False), alone[name]) == ((), found)


def test_a_trainer_reports_environment_changes_before_checkpoint_notes(monkeypatch):
    """A stand-in for the trainer must find its environment set."""

    def rank(config, checkpoint):
        return SimpleNamespace(notes=(f"{checkpoint} with {os.environ.get('PYTORCH_ALLOC_CONF')}",))

    monkeypatch.setitem(sys.modules, "megatron_ibpo.policy.rank", SimpleNamespace(TrainerRank=rank))
    monkeypatch.setitem(sys.modules, "tilelang", None)
    monkeypatch.setattr(cpu, "activate", lambda: None)
    with mock.patch.dict(os.environ, PYTORCH_ALLOC_CONF="expandable_segments:True,max_split_size_mb:64"):
        first, second = trainer_rank(Config(), "a checkpoint").notes
    assert first.startswith("PYTORCH_ALLOC_CONF: trainers run without expandable_segments")
    assert second == "a checkpoint with max_split_size_mb:64"


def test_an_upgrade_of_megatron_is_noticed():
    """Read its new lines that name a CUDA device, type or function, see that cpu.py answers those that a
    trainer executes, and put the version here."""
    assert version("megatron-core") == "0.19.2"


@pytest.mark.world(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_without_cuda_the_cpu_answers_once_it_is_asked_to(world):
    """Importing the package changes nothing; and Megatron may have been imported before."""
    assert torch.cuda.Stream.__module__ == "torch.cuda.streams"
    cpu.activate()
    cpu.activate()  # a second time changes nothing
    from megatron.core.fusions.fused_bias_swiglu import swiglu
    from megatron.core.optimizer import clip_grads

    assert not torch.cuda.is_available()
    here = torch.device("cpu")
    assert torch.cuda.current_device() == clip_grads.torch.zeros(1, device="cuda").device == here
    assert torch.ones(2).cuda().device == here
    assert torch.zeros(1).type() == "torch.FloatTensor"
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.cuda.manual_seed(3)
    assert torch.rand(1) == drawn
    assert torch.cuda.current_stream() is torch.cuda.Stream()
    assert swiglu(torch.ones(2, 4)).shape == (2, 2)
    assert torch.compile(len) is torch.compile(dynamic=False)(len) is len
