"""Weights go to Megatron's ranks and back to Hugging Face files bit for bit; bad files are named."""

import json
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.weight_map import weight_map
from megatron_ibpo.weights.formats.save import save_hf
from megatron_ibpo.weights.weight_errors import CheckpointError
from support import tiny_models
from support.checkpoint_bytes import assert_same_bytes, shard_by_hand, tensors_of, with_random_bits
from support.conversions import round_trip
from support.layouts import layout
from support.model_passes import loaded

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directories whose weights are arbitrary finite bit patterns, in float32 and bfloat16."""
    directory, made = tmp_path_factory.mktemp("models"), {}
    for name, make, seed, how in (
        ("dense", tiny_models.make_qwen3, 5, {}),
        ("tied", tiny_models.make_qwen3, 6, {"tie": True}),
        ("odd", tiny_models.make_qwen3, 8, {"kv_heads": 4, "vocabulary": 211}),  # no TP divides it
        ("next", tiny_models.make_qwen3_next, 7, {"value_heads": 4}),
        ("moe", tiny_models.make_qwen3_moe, 11, {}),
        ("glm", tiny_models.make_glm4_moe, 12, {}),
        ("oss", tiny_models.make_gpt_oss, 13, {}),
        ("llama", tiny_models.make_llama, 9, {"biased": True}),
        ("qwen2", tiny_models.make_qwen2, 10, {}),
    ):
        plain = make(directory / name, seed, **how)
        for dtype in DTYPES:
            made[name, dtype] = with_random_bits(plain, directory / f"{name}-{dtype}", dtype)
    return made


def test_ranks_share_a_key_value_head_by_rows_of_its_group(checkpoints):
    """Four ranks, two groups of [two queries | key | value], heads of 32: two ranks hold nothing but
    queries, the others keys and values."""
    entries = weight_map(read_hf_config(checkpoints["llama", torch.float32]))
    entry = entries["decoder.layers.1.self_attention.linear_qkv.bias"]
    held = [[entry.ranges(number, rank, 4) for number in range(3)] for rank in range(4)]
    assert held == [
        [[(0, 64)], [], []],
        [[], [(0, 32)], [(0, 32)]],
        [[(64, 64)], [], []],
        [[], [(32, 32)], [(32, 32)]],
    ]
    assert [entry.ranges(0, rank, 2) for rank in range(2)] == [[(0, 64)], [(64, 64)]]


@pytest.mark.world
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, [("tied", layout(pp=2)), ("next", layout(ep=2)), ("next", layout(tp=2, ep=2)),
          ("next", layout()),  # two replicas
          ("moe", layout(tp=2, etp=2)), ("odd", layout(tp=2)), ("glm", layout(tp=2, ep=2)),
          ("glm", layout(pp=2, first=1)), ("oss", layout(pp=2)), ("llama", layout(tp=2)),
          ("qwen2", layout(tp=2))]),
     pytest.param(4, [("llama", layout(tp=4)), ("dense", layout(tp=4)),  # of two key/value heads
          ("moe", layout(tp=4, ep=2)), ("dense", layout(tp=2, pp=2)), ("next", layout(tp=2, pp=2, ep=2)),
          ("next", layout(ep=4)), ("oss", layout(tp=2, pp=2, ep=2)), ("oss", layout(tp=4, ep=4)),
          ("odd", layout(tp=4, vocabulary=16))], marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_round_trip_changes_no_bit_in_any_layout(world, checkpoints, tmp_path, ranks, cases):
    """In float32 and bfloat16 by turns; Qwen3-Next and GLM keep some tensors in float32 anyway."""
    for number, (name, parallel) in enumerate(cases):
        dtype = DTYPES[number % 2]
        origin, saved = checkpoints[name, dtype], tmp_path / str(number)
        metadata, tensors = round_trip(world, origin, saved, parallel, dtype == torch.bfloat16)
        expected = tensors_of(origin)
        assert [m.name for m in metadata] == [name for name, _ in tensors]
        assert {m.name: (m.dtype, m.shape) for m in metadata} == {
            name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in expected.items()
        }
        if world.is_rank_0:
            assert_same_bytes(dict(tensors), expected)
            assert_same_bytes(tensors_of(saved), expected)
        else:
            assert all(tensor is None for _, tensor in tensors)


@pytest.mark.world(2)
def test_a_saved_checkpoint_is_a_hugging_face_checkpoint_and_none_is_begun_on_a_full_disk(
    world, checkpoints, tmp_path
):
    """It has several files, replaces one that was there, and has the origin's tokenizer and the trainer's
    dtype."""
    from transformers import AutoModelForCausalLM

    from megatron_ibpo.weights.layout.export import HFExport

    plain, origin, out_dir = checkpoints["dense", torch.bfloat16], tmp_path / "origin", tmp_path / "runs/hf"
    if world.is_rank_0:
        shutil.copytree(plain, origin)
        (origin / "tokenizer.json").write_text("{}")
        out_dir.mkdir(parents=True)
        (out_dir / "stale.safetensors").write_text("from an older save")
    export = HFExport(*loaded(world, plain, layout(tp=2)))
    full = mock.patch("shutil.disk_usage", return_value=SimpleNamespace(free=1000))
    with full, pytest.raises(Exception, match="0.00 GB are free" if world.is_rank_0 else "") as refused:
        save_hf(export, world, tmp_path / "full", plain)
    assert refused.type.__name__ == ("DiskSpaceError" if world.is_rank_0 else "RemoteError")
    assert not list(tmp_path.glob("*full*"))
    with mock.patch("megatron_ibpo.weights.formats.save.SHARD_BYTES", 300_000):
        for _ in range(2):
            save_hf(export, world, out_dir, origin)

    assert [path.name for path in out_dir.parent.iterdir()] == ["hf"]
    written = {path.name for path in out_dir.iterdir()}
    assert {"tokenizer.json", "config.json", "model.safetensors.index.json"} <= written
    assert "stale.safetensors" not in written
    assert sum(name.endswith(".safetensors") for name in written) > 1
    assert json.loads((out_dir / "config.json").read_text())["dtype"] == "float32"
    if world.is_rank_0:
        model = AutoModelForCausalLM.from_pretrained(out_dir)
        assert_same_bytes(model.state_dict(), {name: own.float() for name, own in tensors_of(origin).items()})


@pytest.mark.world(1)
def test_bad_checkpoints_are_refused_by_name(world, checkpoints, tmp_path):
    """What damages a file or an index is in test_convert_faults.py."""
    from megatron_ibpo.weights.formats.load import load_hf

    origin = checkpoints["dense", torch.float32]
    chunks, shape = loaded(world, origin)
    norm = "model.layers.1.input_layernorm.weight"
    whole = tensors_of(origin)
    for number, (changed, words) in enumerate((
        ({n: t for n, t in whole.items() if n != norm}, f"missing {norm}"),
        (whole | {norm: torch.ones(7)}, rf"{norm} has shape \(7,\)"),
        (whole | {"model.layers.7.mlp.up_proj.weight": torch.ones(1)}, "model.layers.7.mlp"),
        (whole | {"mtp.norm.weight": torch.ones(1)}, "no place for: mtp.norm"),
    )):  # fmt: skip
        bad = shard_by_hand(origin, tmp_path / str(number), changed)
        with pytest.raises(CheckpointError, match=words):
            load_hf(chunks, shape, bad)
    load_hf(chunks, shape, shard_by_hand(origin, tmp_path / "whole", whole))
    with pytest.raises(CheckpointError, match="holds neither"):
        load_hf(chunks, shape, tmp_path)
