"""A trainer's process: what its libraries find when they are imported, and what stands in for CUDA."""

import hashlib
import importlib.util
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_ibpo.cluster.trainers import Trainers
from megatron_ibpo.config import Config
from megatron_ibpo.models.backends import _delta_net_kernels
from megatron_ibpo.policy import cpu
from megatron_ibpo.policy.process_start import hide_tilelang, set_environment, trainer_rank


def test_on_hopper_a_trainers_delta_net_runs_on_triton_unless_the_user_says_otherwise(monkeypatch):
    theirs = "tilelang where they can, else Triton kernels"
    tilelang = SimpleNamespace(backend_type="tilelang", is_available=lambda: True)
    tilelang.is_enabled = lambda: os.environ.get("FLA_TILELANG", "1") != "0"
    registries = {"common": SimpleNamespace(_get_sorted_backends=lambda: [tilelang])}
    monkeypatch.setitem(sys.modules, "fla.backends", SimpleNamespace(_operation_registries=registries))
    for chosen, served, is_found in (({}, "Triton kernels", False), ({"FLA_TILELANG": "1"}, theirs, True)):
        with mock.patch.dict(os.environ, chosen, clear=True), mock.patch.dict(sys.modules, tilelang=tilelang):
            set_environment(os.environ, colocate=True)
            del sys.modules["tilelang"]
            hide_tilelang()
            assert _delta_net_kernels() == served
            assert ("tilelang" not in sys.modules) == is_found


def test_what_the_user_chose_stays_and_reaches_the_trainers_of_every_node(monkeypatch):
    before = {"FLA_TILELANG": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "NVIDIA_TF32_OVERRIDE": "1"}
    before["NVRTC_HOME"] = "/own"
    environ = {**before}
    assert set_environment(environ, colocate=True, in_float32=True) == ()
    assert environ.items() >= before.items()
    monkeypatch.setenv("FLA_TILELANG", "1")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(Trainers, "_launched", lambda self: [])
    sent = Trainers(None, None)._environment
    assert sent["FLA_TILELANG"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in sent  # each node has its own, or our default


def test_float32_is_multiplied_as_such_and_transformer_engine_led_to_the_pinned_libraries(tmp_path):
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


def test_a_trainer_reports_it_with_what_it_says_of_its_checkpoint(monkeypatch):
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


ROOMS = (
    "dist_checkpointing", "distributed/param_and_grad_buffer.py", "distributed/distributed_data_parallel.py",
    "distributed/finalize_model_grads.py", "models/common", "models/gpt", "optimizer",
    "pipeline_parallel/p2p_communication.py", "pipeline_parallel/schedules.py", "ssm/gated_delta_net",
    "tensor_parallel", "transformer/attention.py", "transformer/mlp.py", "transformer/moe",
    "transformer/transformer_block.py", "transformer/transformer_layer.py", "transformer/utils.py",
    "utils.py",
)  # fmt: skip
"""Parts of megatron.core that a trainer executes."""


def sources():
    root = Path(importlib.util.find_spec("megatron.core").origin).parent
    for room in ROOMS:
        path = root / room
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield file.relative_to(root).as_posix(), file.read_text()


def test_the_cuda_sites_of_megatron_are_those_that_are_known():
    """Fails when megatron-core is upgraded: read the new lines, see that cpu.py answers those that a
    trainer executes, then pin them here: how many name a CUDA device, type or function, and their hash."""
    lines = [
        f"{file}: {code}"
        for file, text in sources()
        for code in map(str.strip, text.splitlines())
        if re.search(r"torch\.cuda\.|[\"']cuda[\"']", code) and not code.startswith("#")
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    assert (version("megatron-core"), len(lines), digest) == ("0.19.2", 277, "fc2e76ea")


def test_modules_that_name_the_device_as_text_are_listed():
    def modules_with(literal):
        files = [file for file, text in sources() if re.search(literal, text)]
        return {"megatron.core." + file.removesuffix(".py").replace("/", ".") for file in files}

    not_executed = {
        "megatron.core.distributed.param_and_grad_buffer",  # nccl_ub only
        "megatron.core.optimizer.grad_scaler",  # float16 only
        "megatron.core.optimizer.layer_wise_optimizer",
        "megatron.core.transformer.moe.moe_layer",  # overlapped dispatch only
        "megatron.core.transformer.moe.paged_stash",
        "megatron.core.transformer.moe.token_dispatcher",  # paged stash only
    }
    devices = modules_with(r"""device ?= ?["']cuda["']|init_data\(["']cuda["']\)""")
    assert devices - not_executed == set(cpu.CUDA_LITERALS)
    assert modules_with(r"""["']torch\.cuda\.\w+Tensor["']""") == set(cpu.CUDA_TYPE_NAMES)


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
