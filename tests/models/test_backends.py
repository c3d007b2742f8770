import json
import re
import types
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_ibpo.config import Config, ModelConfig, RolloutConfig, eval_sampling, on_device
from megatron_ibpo.engines.registry import check_model
from megatron_ibpo.engines.vllm.needs import HEAD_DIMS
from megatron_ibpo.engines.vllm.settings import engine_settings
from megatron_ibpo.evaluate import EvalSet, set_settings
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.backends import FAST, LOCAL, BackendError, Backends, find_backends, served_by
from megatron_ibpo.report.sizes import run_sizes
from megatron_ibpo.run.settings import parse_config
from support.paths import ROOT


def installed(monkeypatch, *packages, capability=None, cudnn=None, **versions):
    """Act as if these were installed, and neither Transformer Engine nor flash-linear-attention otherwise."""

    def find(name):
        if name.partition(".")[0] not in packages:
            raise ImportError(f"{name}: built for another torch")
        return types.SimpleNamespace(__version__=versions.get(name))

    monkeypatch.setattr("megatron_ibpo.models.backends.import_module", find)
    if capability is not None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)


def test_cpus_need_nothing_and_a_dense_model_no_flash_linear_attention(shapes, monkeypatch):
    installed(monkeypatch, "transformer_engine")
    assert find_backends(shapes["dense"], on_gpu=True, allow_local=False).transformer_engine
    monkeypatch.setattr("megatron_ibpo.models.backends.import_module", None)
    assert find_backends(shapes["next"], on_gpu=False, allow_local=False) == LOCAL


@pytest.mark.parametrize(
    ("model", "there", "missing"),
    [
        ("next", (), ["Transformer Engine", "flash-linear-attention"]),
        ("next", ("fla",), ["Transformer Engine"]),
        ("next", ("transformer_engine",), ["flash-linear-attention"]),
        ("dense", (), ["Transformer Engine"]),
    ],
)
def test_a_gpu_run_without_its_libraries_says_what_to_do(shapes, monkeypatch, model, there, missing):
    installed(monkeypatch, *there)
    with pytest.raises(BackendError) as refused:
        find_backends(shapes[model], on_gpu=True, allow_local=False)
    said = str(refused.value)
    named = [name for name in ("Transformer Engine", "flash-linear-attention") if f"{name} (" in said]
    assert named == missing
    for words in ("ImportError", "built for another torch", "tools/bootstrap.sh", "--allow-local-modules"):
        assert words in said
    accepted = find_backends(shapes[model], on_gpu=True, allow_local=True)
    assert accepted.transformer_engine == ("Transformer Engine" not in missing)
    assert accepted.flash_linear_attention == ("flash-linear-attention" not in missing)


@pytest.mark.parametrize(
    ("capability", "triton", "is_refused"),
    [((9, 0), "3.6.0", True), ((9, 0), "3.7.1", False), ((9, 0), "3.3.1", False), ((8, 0), "3.6.0", False)],
)
def test_tritons_with_wrong_gradients_are_refused(shapes, monkeypatch, capability, triton, is_refused):
    there = "transformer_engine", "fla", "flash_attn", "triton"
    installed(monkeypatch, *there, capability=capability, triton=triton)
    if is_refused:
        with pytest.raises(BackendError, match=r"flash-linear-attention \(Triton 3\.6\.0 compiles"):
            find_backends(shapes["next"], on_gpu=True, allow_local=False)
    found = find_backends(shapes["next"], on_gpu=True, allow_local=True)
    assert found.flash_linear_attention != is_refused
    assert find_backends(shapes["dense"], on_gpu=True, allow_local=False) == FAST, "it asks for none of it"


@pytest.mark.parametrize(
    ("capability", "head_dim", "cudnn", "flash", "why"),
    [
        ((9, 0), 256, 92000, False, None),
        ((10, 0), 128, 92000, False, None),
        ((10, 0), 256, 92000, False, "for heads of 256 .* from 9.25 on, and this one is 9.20"),
        ((10, 0), 256, 92500, False, None),
        ((8, 0), 128, 92500, False, "compute capability 9.0 on, and this GPU has 8.0"),
        ((8, 0), 128, 92500, True, None),
    ],
)
def test_quadratic_attention_is_refused(shapes, monkeypatch, capability, head_dim, cudnn, flash, why):
    packages = ["transformer_engine", "flash_attn"] if flash else ["transformer_engine"]
    installed(monkeypatch, *packages, capability=capability, cudnn=cudnn)
    shape = replace(shapes["dense"], head_dim=head_dim)
    if why is not None:
        with pytest.raises(BackendError, match=f"{why}.* Install flash-attn"):
            find_backends(shape, on_gpu=True, allow_local=False)
    assert find_backends(shape, on_gpu=True, allow_local=why is not None).transformer_engine
    assert find_backends(shape, on_gpu=True, allow_local=False, bf16=False).transformer_engine


def test_a_trainer_refuses_before_it_meets_the_others(models):
    from megatron_ibpo.policy.rank import TrainerRank

    config = Config(model=ModelConfig(hf_checkpoint=models["next"]))
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch("megatron_ibpo.policy.rank.start_world", side_effect=AssertionError("met them")),
        pytest.raises(BackendError, match="Transformer Engine"),
    ):
        TrainerRank(config, None)


def test_the_table_says_what_computes_each_part(shapes):
    def rows(model, libraries, *, bf16):
        layers = served_by(shapes[model], libraries, bf16=bf16)
        sizes = run_sizes(Config(model=ModelConfig(bf16=bf16)), 1, layers=layers)
        return {size.name: (size.value, size.meaning) for size in sizes}

    fast = rows("next", FAST, bf16=True)
    assert [fast[part][0] for part in ("attention", "norms", "experts")] == ["Transformer Engine"] * 3
    assert (fast["delta net"][0], fast["precision"][0]) == ("flash-linear-attention", "bfloat16")
    slow = rows("next", Backends(True, False), bf16=False)
    assert (slow["delta net"][0], slow["precision"][0]) == ("torch", "float32")
    assert "unfused" in slow["attention"][1]
    dense = rows("dense", LOCAL, bf16=False)
    assert dense["attention"][0] == "torch"
    assert not dense.keys() & {"experts", "delta net"}


@pytest.mark.parametrize(
    ("flags", "device", "family", "dtype", "bf16"),
    [
        ([], "cpu", "dense", "float32", False),
        ([], "cpu", "next", "bfloat16", False),
        ([], "gpu", "dense", "bfloat16", True),
        ([], "gpu", "next", "bfloat16", True),
        (["--bf16"], "cpu", "dense", "float32", True),
        (["--bf16", "None"], "gpu", "dense", "bfloat16", True),
        (["--no-bf16"], "cpu", "next", "bfloat16", False),
        (["--no-bf16"], "gpu", "next", "float32", False),
        (["--vllm-arg", "quantization=fp8_per_channel"], "cpu", "dense", "bfloat16", False),
        (["--vllm-dtype", "bfloat16"], "cpu", "dense", "bfloat16", False),
        (["--vllm-dtype", "float32"], "gpu", "dense", "float32", True),
    ],
)
def test_precision_is_what_serves_on_the_device_unless_it_is_said(models, flags, device, family, dtype, bf16):
    """The engine's settings, the table of sizes and the identity of an evaluation all have that word."""
    config = parse_config([*flags, "--rollout-max-context-len", "128"])
    assert config.rollout.vllm_dtype == (flags[1] if "--vllm-dtype" in flags else "auto")
    on_gpu, shape = device == "gpu", read_hf_config(models[family])
    config = on_device(config, on_gpu=on_gpu, has_delta_nets=shape.is_recurrent)
    assert (config.rollout.vllm_dtype, config.model.bf16) == (dtype, bf16)
    settings = engine_settings(config.rollout, models[family], "gloo", gpus=(), num_threads=1)
    assert settings.dtype == dtype
    (engines,) = [size for size in run_sizes(config, 1, engines=1) if size.name == "engines"]
    assert (engines.value, engines.meaning) == (1, f"vLLM, TP1, {dtype}")
    held_out = EvalSet("sums", False, [], eval_sampling(config), None)
    assert set_settings(held_out, config, "policy")["--vllm-dtype"] == dtype


@pytest.mark.lint
def test_recipes_and_scripts_leave_the_precision_of_sampling_to_the_device():
    for file in (*ROOT.glob("examples/recipes/*.yaml"), *ROOT.glob("examples/*.sh")):
        assert "vllm-dtype" not in file.read_text(), file


@pytest.mark.parametrize(
    ("family", "changes", "dtype", "says"),
    [
        ("next", {}, "float32", "--vllm-dtype float32: vLLM's CPU kernels for the delta nets"),
        ("next", {"linear_value_head_dim": 48}, "bfloat16", "linear_key_head_dim .* need equal sizes"),
        ("next", {"head_dim": 24}, "bfloat16", "head_dim 24 in config.json: vLLM's attention on CPUs"),
        ("dense", {"head_dim": 16}, "float32", "head_dim 16 in config.json: vLLM's attention on CPUs"),
    ],
)
def test_what_vllm_cannot_compute_on_cpus_is_refused(models, tmp_path, family, changes, dtype, says):
    content = json.loads((models[family] / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(content | changes))
    shape, rollout = read_hf_config(tmp_path), RolloutConfig(vllm_dtype=dtype)
    with pytest.raises(ValueError, match=says):
        check_model(rollout, shape, on_gpu=False)
    check_model(rollout, shape, on_gpu=True)
    check_model(replace(rollout, rollout_backend="mine:Engine"), shape, on_gpu=False)


@pytest.mark.skipif(find_spec("vllm") is None, reason="compares with the installed vLLM")
def test_the_head_sizes_are_those_of_the_installed_vllm():
    source = Path(find_spec("vllm").origin).parent / "v1/attention/backends/cpu_attn.py"
    sizes = re.search(r"def get_supported_head_sizes.*?return (\[.*?\])", source.read_text(), re.DOTALL)[1]
    assert tuple(json.loads(sizes)) == HEAD_DIMS
