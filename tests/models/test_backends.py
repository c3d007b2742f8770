import json
import types
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_ibpo.config import Config, ModelConfig, RolloutConfig, eval_sampling
from megatron_ibpo.credit.operator import NoOperator
from megatron_ibpo.engines.registry import check_model, on_device, sampling_precision
from megatron_ibpo.engines.vllm.settings import HEAD_DIMS, engine_settings
from megatron_ibpo.evaluate import EvalSet, set_settings
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.backends import FAST, LOCAL, BackendError, Backends, find_backends, served_by
from megatron_ibpo.models.fusion import ATTENTION, FUSIONS
from megatron_ibpo.report.display import run_sizes
from megatron_ibpo.run.settings import parse_config

TE, FLA = "Transformer Engine", "flash-linear-attention"


@pytest.fixture
def machine(monkeypatch):
    def act(*packages, capability=(9, 0), triton="3.7.1", cudnn=92500):
        def find(name):
            if name.partition(".")[0] not in packages:
                raise ImportError(f"{name}: built for another torch")
            return types.SimpleNamespace(__version__=triton)

        monkeypatch.setattr("megatron_ibpo.models.backends.import_module", find)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)

    return act


def test_missing_gpu_libraries_are_refused_unless_plain_torch_is_accepted(shapes, machine):
    for model, packages, missing in (
        ("next", "triton", [TE, FLA]),
        ("next", "fla triton", [TE]),
        ("next", "transformer_engine triton", [FLA]),
        ("dense", "", [TE]),
        ("next", "transformer_engine fla triton", []),
        ("dense", "transformer_engine", []),
    ):
        machine(*packages.split())
        accepted = find_backends(shapes[model], on_gpu=True, allow_local=True)
        fused = FUSIONS if TE in missing else frozenset()
        assert accepted == Backends(TE not in missing, FLA not in missing, fused)
        if fused:  # flash attention has no float32
            in_float32 = find_backends(shapes[model], on_gpu=True, allow_local=True, bf16=False)
            assert in_float32.fused == FUSIONS - {ATTENTION}, (model, packages, missing)
        served = {part: by for part, (by, _) in served_by(shapes[model], accepted, bf16=True).items()}
        assert served["attention"] == ("torch" if TE in missing else TE)
        assert model == "dense" or served["delta net"] == ("torch" if FLA in missing else FLA)
        if missing:
            with pytest.raises(BackendError, match=r"ImportError.*built for another torch") as refused:
                find_backends(shapes[model], on_gpu=True, allow_local=False)
            said = str(refused.value)
            assert [name for name in (TE, FLA) if f"{name} (" in said] == missing
            assert "tools/bootstrap.sh" in said, (model, packages, missing)
        else:
            assert find_backends(shapes[model], on_gpu=True, allow_local=False) == accepted
    machine()
    assert find_backends(shapes["next"], on_gpu=False, allow_local=False) == LOCAL, "CPUs need nothing"


def test_tritons_that_compile_wrong_gradients_are_refused(shapes, machine):
    for capability, triton, is_refused in (
        ((9, 0), "3.6.0", True), ((9, 0), "3.7.1", False), ((9, 0), "3.3.1", False), ((8, 0), "3.6.0", False),
    ):  # fmt: skip
        machine("transformer_engine", "fla", "triton", "flash_attn", capability=capability, triton=triton)
        if is_refused:
            with pytest.raises(BackendError, match=r"flash-linear-attention \(Triton 3\.6\.0 compiles"):
                find_backends(shapes["next"], on_gpu=True, allow_local=False)
        found = find_backends(shapes["next"], on_gpu=True, allow_local=True)
        assert found.flash_linear_attention != is_refused
        assert find_backends(shapes["dense"], on_gpu=True, allow_local=False) == FAST, "needs none"


def test_a_gpu_for_which_attention_would_be_quadratic_is_refused(shapes, machine):
    for capability, head_dim, cudnn, packages, why in (
        ((9, 0), 256, 92000, (), None),
        ((10, 0), 128, 92000, (), None),
        ((10, 0), 256, 92000, (), "for heads of 256 .* from 9.25 on, and this one is 9.20"),
        ((10, 0), 256, 92500, (), None),
        ((8, 0), 128, 92500, (), "compute capability 9.0 on, and this GPU has 8.0"),
        ((8, 0), 128, 92500, ("flash_attn",), None),
    ):
        machine("transformer_engine", *packages, capability=capability, cudnn=cudnn)
        shape = replace(shapes["dense"], head_dim=head_dim)
        if why is not None:
            with pytest.raises(BackendError, match=f"{why}.* Install flash-attn"):
                find_backends(shape, on_gpu=True, allow_local=False)
        assert find_backends(shape, on_gpu=True, allow_local=why is not None).transformer_engine
        assert find_backends(shape, on_gpu=True, allow_local=False, bf16=False).transformer_engine, (
            capability,
            head_dim,
            cudnn,
            packages,
            why,
        )


def test_a_trainer_refuses_before_it_meets_the_others(models):
    from megatron_ibpo.policy.rank import TrainerRank

    config = Config(model=ModelConfig(hf_checkpoint=models["next"]))
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch("megatron_ibpo.policy.rank.start_world", side_effect=AssertionError("met them")),
        pytest.raises(BackendError, match="Transformer Engine"),
    ):
        TrainerRank(config, None)


def test_the_default_precision_suits_the_device(models):
    for flags, device, family, dtype, bf16 in (
        ([], "cpu", "dense", "float32", False),
        ([], "cpu", "next", "bfloat16", False),
        ([], "gpu", "next", "bfloat16", True),
        (["--bf16"], "cpu", "dense", "float32", True),
        (["--bf16", "None"], "gpu", "dense", "bfloat16", True),
        (["--no-bf16"], "gpu", "next", "float32", False),
        (["--vllm-arg", "quantization=fp8_per_channel"], "cpu", "dense", "bfloat16", False),
        (["--vllm-dtype", "bfloat16"], "cpu", "dense", "bfloat16", False),
        (["--vllm-dtype", "float32"], "gpu", "dense", "float32", True),
    ):
        config = parse_config([*flags, "--rollout-max-context-len", "128"])
        assert sampling_precision(config.rollout).dtype == (flags[1] if "--vllm-dtype" in flags else "auto")
        on_gpu, shape = device == "gpu", read_hf_config(models[family])
        config = on_device(config, shape, on_gpu=on_gpu)
        assert (sampling_precision(config.rollout).dtype, config.model.bf16) == (dtype, bf16)
        settings = engine_settings(
            config.rollout, models[family], read_hf_config(models[family]), "gloo", gpus=(), num_threads=1
        )
        assert settings.dtype == dtype
        (engines,) = [
            size for size in run_sizes(config, 1, corrections=0, engines=1) if size.name == "engines"
        ]
        assert engines.meaning == f"vllm, TP1, {dtype}"
        held_out = EvalSet("sums", False, [], eval_sampling(config), None)
        assert set_settings(held_out, config, NoOperator(), "policy")["precision"] == dtype


def test_a_model_that_vllm_cannot_compute_on_cpus_is_refused(models, tmp_path):
    for family, changes, dtype, says in (
        ("next", {}, "float32", "--vllm-dtype float32: vLLM's CPU kernels for the delta nets"),
        ("next", {"linear_value_head_dim": 48}, "bfloat16", "linear_key_head_dim .* need equal sizes"),
        ("next", {"head_dim": 24}, "bfloat16", "head_dim 24 in config.json: vLLM's attention on CPUs"),
        ("dense", {"head_dim": 16}, "float32", "head_dim 16 in config.json: vLLM's attention on CPUs"),
    ):
        content = json.loads((models[family] / "config.json").read_text(encoding="utf-8"))
        (tmp_path / "config.json").write_text(json.dumps(content | changes))
        shape, rollout = read_hf_config(tmp_path), RolloutConfig(parameters={"vllm_dtype": dtype})
        with pytest.raises(ValueError, match=says):
            check_model(rollout, shape, on_gpu=False)
        check_model(rollout, shape, on_gpu=True)
        (tmp_path / "mine.py").write_text("class Engine:\n    pass\n")
        check_model(replace(rollout, rollout_backend=f"{tmp_path}/mine.py:Engine"), shape, on_gpu=False)


@pytest.mark.skipif(find_spec("vllm") is None, reason="compares with the installed vLLM")
def test_the_head_sizes_are_those_of_the_installed_vllm():
    source = Path(find_spec("vllm").origin).parent / "v1/attention/backends/cpu_attn.py"
    assert f"return {[*HEAD_DIMS]}" in source.read_text().partition("def get_supported_head_sizes")[2]
