"""Weights go to Megatron's ranks and back to Hugging Face files bit for bit; bad files are named."""

import json
import shutil
from collections import Counter, namedtuple
from typing import Any

import pytest
import torch

from megatron_ibpo.config import Config
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.weight_map import global_name, weight_map
from megatron_ibpo.weights.formats import save as save_module
from support.checkpoint_bytes import (
    assert_same_bytes,
    shard_by_hand,
    tensors_of,
    with_fused_experts,
    with_random_bits,
)
from support.conversions import loaded, round_trip
from support.layouts import layout
from support.ranks import run_ranks
from support.tiny_models import (
    make_glm4_moe,
    make_gpt_oss,
    make_llama,
    make_qwen2,
    make_qwen3,
    make_qwen3_moe,
    make_qwen3_next,
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directories whose weights are arbitrary finite bit patterns, in float32 and bfloat16."""
    directory = tmp_path_factory.mktemp("models")
    plain = {
        "dense": make_qwen3(directory / "dense", 5),
        "tied": make_qwen3(directory / "tied", 6, tie=True),
        "next": make_qwen3_next(directory / "next", 7, value_heads=4),
        "moe": make_qwen3_moe(directory / "moe", 11),
        "glm": make_glm4_moe(directory / "glm", 12),
        "oss": make_gpt_oss(directory / "oss", 13),
        "llama": make_llama(directory / "llama", 9, biased=True),
        "qwen2": make_qwen2(directory / "qwen2", 10),
        "odd": make_qwen3(directory / "odd", 8, kv_heads=4, vocabulary=211),  # no TP divides it
    }
    return {
        (name, dtype): with_random_bits(path, directory / f"{name}-{dtype}", dtype)
        for name, path in plain.items()
        for dtype in (torch.float32, torch.bfloat16)
    }


# -------------------------------------------------------------------------------------------- the map


FAMILIES = ["dense", "tied", "next", "moe", "glm", "oss", "llama", "qwen2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_checkpoint_tensor_is_in_the_map_once_and_nothing_else(checkpoints, name):
    path = checkpoints[name, torch.float32]
    entries = weight_map(read_hf_config(path)).values()
    pieces = [piece for entry in entries for piece in entry.pieces]
    stored = [piece.stored for piece in pieces if piece.ends_stored]
    uses = Counter(used for used, _ in stored)
    shapes = dict(stored)
    files = {name: tuple(tensor.shape) for name, tensor in tensors_of(path).items()}
    assert shapes == files
    twice = {"model.embed_tokens.weight"} if name == "tied" else set()
    assert {used for used, count in uses.items() if count > 1} == twice
    in_one = Counter(piece.stored for piece in pieces if piece.stored[0] not in (piece.name, *twice))
    assert all(count == size[0] for (_, size), count in in_one.items()), "each expert's part of a tensor once"
    assert bool(in_one) == (name == "oss")


def parameter_shapes(world, paths):
    """Megatron's own names and shapes, of the whole model."""
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.model import build_model

    parallel.initialize(layout(), world, seed=0)
    models = [build_model(read_hf_config(path), Config())[0] for path in paths]
    return [
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if tensor is not None}
        for model in models
    ]


@pytest.mark.world
def test_every_megatron_parameter_is_in_the_map_once_and_nothing_else(checkpoints):
    """So is every buffer that Megatron stores."""
    paths = [checkpoints[name, torch.float32] for name in FAMILIES]
    (found,) = run_ranks(parameter_shapes, 1, paths)
    for name, path, parameters in zip(FAMILIES, paths, found, strict=True):
        entries = weight_map(read_hf_config(path))
        if name == "tied":  # one tensor without pipeline stages, so the head is no parameter
            entries.pop("output_layer.weight")
        joined = {
            key: tuple(entry.join([torch.empty(piece.shape) for piece in entry.pieces]).shape)
            for key, entry in entries.items()
        }
        assert joined == parameters


@pytest.mark.parametrize(
    ("local", "first_layer", "first_expert", "name"),
    [
        ("module.decoder.layers.1.mlp.experts.linear_fc1.weight3", 4, 8, "5.mlp.experts.linear_fc1.weight11"),
        ("decoder.layers.0.mlp.experts.linear_fc2.bias1", 0, 2, "0.mlp.experts.linear_fc2.bias3"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", 2, 4, "2.self_attention.linear_qkv.weight"),
    ],
)
def test_global_names_count_layers_and_experts_over_the_whole_model(local, first_layer, first_expert, name):
    assert global_name(local, first_layer, first_expert) == f"decoder.layers.{name}"
    assert global_name("output_layer.weight", first_layer, first_expert) == "output_layer.weight"


def test_ranks_share_a_key_value_head_by_rows_of_its_group(checkpoints):
    """Four ranks, two groups of [two queries | key | value], heads of 32: two ranks hold nothing but
    queries, the others keys and values."""
    entry = weight_map(read_hf_config(checkpoints["llama", torch.float32]))[
        "decoder.layers.1.self_attention.linear_qkv.bias"
    ]
    held = [[entry.ranges(number, rank, 4) for number in range(3)] for rank in range(4)]
    assert held == [
        [[(0, 64)], [], []],
        [[], [(0, 32)], [(0, 32)]],
        [[(64, 64)], [], []],
        [[], [(32, 32)], [(32, 32)]],
    ]
    assert [entry.ranges(0, rank, 2) for rank in range(2)] == [[(0, 64)], [(64, 64)]]


# ------------------------------------------------------------------------------------- there and back

CASES = {
    1: [("dense", layout()), ("tied", layout()), ("next", layout()), ("moe", layout()), ("llama", layout())],
    2: [
        ("tied", layout(pp=2)),
        ("next", layout(ep=2)),
        ("next", layout(tp=2, ep=2)),
        ("next", layout()),  # two replicas
        ("moe", layout(tp=2, etp=2)),
        ("odd", layout(tp=2)),
        ("glm", layout(tp=2, ep=2)),
        ("glm", layout(pp=2, first=1)),
        ("oss", layout(pp=2)),
        ("llama", layout(tp=2)),
    ],
    4: [
        ("llama", layout(tp=4)),  # of two key/value heads, as that of the others
        ("dense", layout(tp=4)),
        ("moe", layout(tp=4, ep=2)),
        ("dense", layout(tp=2, pp=2)),
        ("next", layout(tp=2, pp=2, ep=2)),
        ("next", layout(ep=4)),
        ("oss", layout(tp=2, pp=2, ep=2)),
        ("oss", layout(tp=4, ep=4)),  # and more ranks than key/value heads
        ("odd", layout(tp=4, vocabulary=16)),
    ],
}
MORE_CASES = [
    ("dense", layout(tp=2)),
    ("tied", layout(tp=2)),
    ("next", layout(tp=2)),
    ("next", layout(pp=2)),
    ("moe", layout(tp=2, ep=2)),
    ("oss", layout(tp=2)),
    ("oss", layout(ep=2)),
    ("llama", layout(pp=2)),
    ("qwen2", layout(tp=2)),
]
"""On two ranks: what other layouts of the same families leave little doubt of."""
DTYPES = (torch.float32, torch.bfloat16)


def there_and_back(world, cases):
    """Return, for each case (origin, where to save, layout, bfloat16?): (metadata, tensors or None in
    order)."""
    return [round_trip(world, *case) for case in cases]


@pytest.mark.world
@pytest.mark.parametrize(
    ("size", "of_size", "first"),
    [
        pytest.param(1, CASES[1], 0, id="1"),
        pytest.param(2, CASES[2], 0, id="2"),
        pytest.param(4, CASES[4], 0, id="4", marks=pytest.mark.slow),
        *(
            pytest.param(size, of_size, 1, id=f"{size}, other dtypes", marks=pytest.mark.slow)
            for size, of_size in CASES.items()
        ),
        *(
            pytest.param(2, MORE_CASES, first, id=f"2, more, {DTYPES[first]} first", marks=pytest.mark.slow)
            for first in (0, 1)
        ),
    ],
)
def test_the_round_trip_changes_no_bit_in_any_layout(checkpoints, tmp_path, size, of_size, first):
    """Cases take turns in float32 and bfloat16; those of Qwen3-Next and GLM, which keep some tensors in
    float32 anyway, are of both kinds in one go."""
    cases = []
    for number, (name, parallel) in enumerate(of_size):
        dtype = DTYPES[(number + first) % 2]
        cases.append((checkpoints[name, dtype], tmp_path / str(number), parallel, dtype == torch.bfloat16))
    by_rank = run_ranks(there_and_back, size, cases, timeout=240)
    for number, (origin, saved, _, _) in enumerate(cases):
        expected = tensors_of(origin)
        metadata, tensors = by_rank[0][number]
        assert_same_bytes(dict(tensors), expected)
        assert_same_bytes(tensors_of(saved), expected)
        assert [(m.name, m.dtype, m.shape) for m in metadata] == [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors
        ]
        for results in by_rank[1:]:
            assert [name for name, _ in results[number][1]] == [name for name, _ in tensors]
            assert all(tensor is None for _, tensor in results[number][1])


def read_in_every_form(world, forms):
    """Return what is loaded from each directory, as exported again."""
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.weights.layout.export import HFExport

    exports = []
    for path in forms:
        export = HFExport(*loaded(world, path, layout(ep=2)))
        exports.append({name: None if tensor is None else tensor.clone() for name, tensor in export})
        parallel.destroy()
    return exports if world.is_rank_0 else None


@pytest.mark.world
def test_sharded_files_and_fused_experts_load_like_a_single_file(checkpoints, tmp_path):
    origin = checkpoints["next", torch.float32]
    tensors = tensors_of(origin)
    sharded = shard_by_hand(origin, tmp_path / "sharded", tensors)
    fused = shard_by_hand(origin, tmp_path / "fused", with_fused_experts(tensors))
    exports, _ = run_ranks(read_in_every_form, 2, [sharded, fused])
    for export in exports:
        assert_same_bytes(export, tensors)


# ------------------------------------------------------------------------------------------- saving


def save_twice(world, origin, out_dir, shard_bytes):
    from megatron_ibpo.weights.layout.export import HFExport

    save_module.SHARD_BYTES = shard_bytes
    export = HFExport(*loaded(world, origin, layout(tp=2)))
    save_module.save_hf(export, world, out_dir, origin)
    save_module.save_hf(export, world, out_dir, origin)


@pytest.mark.world
def test_a_saved_checkpoint_is_a_hugging_face_checkpoint(checkpoints, tmp_path):
    """It has several files, replaces one that was there, and has the origin's tokenizer and the trainer's
    dtype."""
    from transformers import AutoModelForCausalLM

    origin = tmp_path / "origin"
    shutil.copytree(checkpoints["dense", torch.bfloat16], origin)
    (origin / "tokenizer.json").write_text("{}")
    out_dir = tmp_path / "runs" / "hf"
    out_dir.mkdir(parents=True)
    (out_dir / "stale.safetensors").write_text("from an older save")
    run_ranks(save_twice, 2, origin, out_dir, 300_000)

    assert sorted(path.name for path in out_dir.parent.iterdir()) == ["hf"]
    written = {path.name for path in out_dir.iterdir()}
    assert {"tokenizer.json", "config.json", "model.safetensors.index.json"} <= written
    assert "stale.safetensors" not in written
    assert sum(name.endswith(".safetensors") for name in written) > 1
    assert json.loads((out_dir / "config.json").read_text())["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(out_dir)
    expected = tensors_of(origin)
    assert_same_bytes(model.state_dict(), {name: tensor.float() for name, tensor in expected.items()})


def save_without_space(world, origin, out_dir):
    from megatron_ibpo.weights.formats.directories import DiskSpaceError

    usage = namedtuple("usage", "total used free")
    full: Any = usage(10**9, 10**9 - 1000, 1000)
    shutil.disk_usage = lambda _: full
    try:
        save_twice(world, origin, out_dir, 10**9)
    except DiskSpaceError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.world
def test_a_full_disk_is_refused_before_anything_is_written(checkpoints, tmp_path):
    out_dir = tmp_path / "hf"
    said = run_ranks(save_without_space, 2, checkpoints["dense", torch.float32], out_dir)
    assert "0.00 GB are free" in said[0]
    assert "RemoteError" in said[1]
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- faults


def load_all(world, origin, paths):
    """The error of loading each directory into the model of `origin`, as text."""
    from megatron_ibpo.weights.formats.load import load_hf
    from megatron_ibpo.weights.weight_errors import CheckpointError

    chunks, shape = loaded(world, origin)
    said = []
    for path in paths:
        try:
            load_hf(chunks, shape, path)
            said.append("loaded")
        except CheckpointError as error:
            said.append(str(error))
    return said


@pytest.mark.world
def test_bad_checkpoints_are_refused_by_name(checkpoints, tmp_path):
    """What damages a file or an index is in test_convert_faults.py and test_damaged_checkpoints.py."""
    origin = checkpoints["dense", torch.float32]
    tensors = tensors_of(origin)
    norm = "model.layers.1.input_layernorm.weight"
    cases = {
        "whole": ({}, "loaded"),
        "lacking": ({norm: None}, f"missing {norm}"),
        "extra": ({"model.layers.7.mlp.up_proj.weight": torch.ones(1)}, "model.layers.7.mlp"),
        "misshapen": ({norm: torch.ones(7)}, f"{norm} has shape (7,)"),
        "mtp": ({"mtp.norm.weight": torch.ones(1)}, "no place for: mtp.norm"),
    }
    for name, (changes, _) in cases.items():
        changed = {n: t for n, t in (tensors | changes).items() if t is not None}
        shard_by_hand(origin, tmp_path / name, changed)
    (tmp_path / "nothing").mkdir()
    paths = [tmp_path / name for name in (*cases, "nothing")]
    (said,) = run_ranks(load_all, 1, origin, paths)
    for name, (_, words), message in zip(cases, cases.values(), said[:-1], strict=True):
        assert words in message, name
    assert "holds neither" in said[-1]
