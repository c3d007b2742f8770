"""Bad checkpoints are refused by file and tensor, when they are converted, and leave nothing behind."""

import argparse
import errno
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.models import ModelConfigError
from megatron_ibpo.weights.formats.convert import differing_tensors, hf_to_megatron, megatron_to_hf
from megatron_ibpo.weights.formats.directories import DiskSpaceError
from megatron_ibpo.weights.formats.hugging_face import Checkpoint
from megatron_ibpo.weights.formats.integrity import changed_files
from megatron_ibpo.weights.formats.run_state import find_stored
from megatron_ibpo.weights.formats.torch_dist import Block, DistcpFile, StoredCheckpoint
from megatron_ibpo.weights.weight_errors import CheckpointError
from support.checkpoint_bytes import as_bytes, cut_in_half, shard_by_hand
from support.conversions import ALONE, QKV, edit_json, refuse, refuse_back, with_metadata
from support.layouts import layout
from support.ranks import RankFailed, run_ranks
from support.tiny_models import make_qwen3_next

NORM = "model.layers.1.input_layernorm.weight"
INDEX = "model.safetensors.index.json"


def rewritten(origin, path, tensors, **changes):
    shutil.rmtree(path)
    changed = {**tensors, **changes}
    return shard_by_hand(origin, path, {n: t for n, t in changed.items() if t is not None})


# ---------------------------------------------------------------------------------------- Hugging Face


def swap_file_of_norm(source):
    index = json.loads((source / INDEX).read_text())["weight_map"]
    edit_json(
        source / INDEX, weight_map={**index, NORM: {"a": "b", "b": "a"}[index[NORM][0]] + ".safetensors"}
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda source: cut_in_half(source / "b.safetensors"), ("b.safetensors", "truncated")),
        (lambda source: (source / "a.safetensors").unlink(), ("a.safetensors named in " + INDEX,)),
        (swap_file_of_norm, (f".safetensors: {NORM} is missing, although the index names it",)),
    ],
    ids=["truncated", "absent", "wrong file"],
)
def test_shards_that_are_not_what_the_index_says(here, damage, words):
    source, target = here
    damage(source)
    refuse(source, target, CheckpointError, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({NORM: None}, f"missing {NORM}"),
        ({"model.layers.9.weird": torch.ones(2)}, "no place for: model.layers.9.weird"),
        ({NORM: torch.ones(7)}, f"{NORM} has shape (7,), config.json asks for (96,)"),
        ({NORM: torch.ones(96, dtype=torch.int64)}, f"{NORM} is I64; weights must be one of BF16, F16, F32"),
        (
            {"model.layers.1.self_attn.k_proj.weight": torch.ones(64, 96, dtype=torch.float16)},
            "model.layers.1.self_attn.k_proj.weight is torch.float16 and",
        ),
        ({"lm_head.weight": None}, "missing lm_head.weight; config.json says tie_word_embeddings=false"),
    ],
    ids=["missing", "unknown", "shape", "integers", "two dtypes in one parameter", "tied or not"],
)
def test_tensors_that_are_not_the_models(here, origin, tensors, changes, words):
    source, target = here
    rewritten(origin, source, tensors, **changes)
    refuse(source, target, CheckpointError, words)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"num_hidden_layers": 3}, CheckpointError, "missing model.layers.2."),
        ({"num_hidden_layers": 1}, CheckpointError, "no place for: model.layers.1."),
        ({"hidden_size": 128}, CheckpointError, "config.json asks for (64, 128)"),
        ({"tie_word_embeddings": True}, CheckpointError, "lm_head.weight is not model.embed_tokens.weight"),
        ({"model_type": "gemma3"}, ModelConfigError, "model_type 'gemma3' is unknown"),
    ],
)
def test_a_config_that_contradicts_the_weights(here, changes, error, words):
    source, target = here
    edit_json(source / "config.json", **changes)
    refuse(source, target, error, words)


def test_a_copy_of_tied_embeddings_as_the_head_is_no_contradiction(here, origin, tensors, tmp_path):
    source, target = here
    rewritten(origin, source, tensors, **{"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    edit_json(source / "config.json", tie_word_embeddings=True)
    hf_to_megatron(source, target, ParallelConfig(), ALONE)
    assert "output_layer.weight" not in StoredCheckpoint(target).tensors


@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
def test_nan_is_converted_and_named(here, origin, tensors, caplog, tmp_path, nan):
    source, target = here
    broken = tensors[NORM].clone()
    broken[17] = nan
    rewritten(origin, source, tensors, **{NORM: broken})
    hf_to_megatron(source, target, ParallelConfig(), ALONE)
    assert [record.message for record in caplog.records] == [f"{source}: {NORM} holds NaN"]
    caplog.clear()
    megatron_to_hf(target, tmp_path / "back", ALONE)
    (message,) = [record.message for record in caplog.records]
    assert NORM in message
    assert torch.equal(as_bytes(load_file(tmp_path / "back" / "model.safetensors")[NORM]), as_bytes(broken))


@pytest.mark.parametrize(
    ("parallel", "virtual_stages", "words"),
    [
        (layout(tp=3), 1, "does not divide the attention heads (4)"),
        (layout(pp=3), 1, "does not divide the layers (2)"),
        (layout(ep=2), 1, "has no experts"),
        (layout(first=1), 1, "need --pipeline-model-parallel-size > 1"),
        (layout(pp=2, first=2), 1, "would hold 0 layers"),
        (layout(pp=2), 2, "not a positive multiple of its 2 virtual stages"),
        (layout(tp=0), 1, "must be at least 1"),
    ],
)
def test_a_layout_that_cannot_hold_the_model(here, parallel, virtual_stages, words):
    source, target = here
    with pytest.raises(ValueError, match="this layout cannot hold the model") as caught:
        hf_to_megatron(source, target, parallel, ALONE, virtual_stages=virtual_stages)
    assert words in str(caught.value)
    assert not target.parent.exists()


def test_pickles_are_refused_unless_asked_for_and_never_run_code(tmp_path, origin, tensors):
    source, target = tmp_path / "hf", tmp_path / "out" / "stored"
    source.mkdir()
    shutil.copy(origin / "config.json", source)
    torch.save(tensors, source / "pytorch_model.bin")
    refuse(source, target, CheckpointError, "pytorch_model.bin", "--allow-pickle")
    hf_to_megatron(source, tmp_path / "allowed", ParallelConfig(), ALONE, allow_pickle=True)
    assert differing_tensors(origin, tmp_path / "allowed", ALONE) == []
    torch.save({**tensors, "x": RunsCode(tmp_path / "ran")}, source / "pytorch_model.bin")
    refuse(source, target, CheckpointError, "pytorch_model.bin cannot be read", allow_pickle=True)
    assert not (tmp_path / "ran").exists()


class RunsCode:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


# --------------------------------------------------------------------------------------------- Megatron


def zero_bytes(stored):
    place = next(p for index, p in StoredCheckpoint(stored).places.items() if index.fqn == QKV)
    data = bytearray((stored / place.relative_path).read_bytes())
    data[place.offset : place.offset + 200] = b"\0" * 200
    (stored / place.relative_path).write_bytes(data)


def other_shape(**changes):
    return lambda stored: edit_json(stored / "hf" / "config.json", **changes)


def qkv(edit):
    return lambda stored: with_metadata(stored, lambda metadata: edit(metadata.state_dict_metadata[QKV]))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda stored: (stored / "__0_1.distcp").unlink(),
            ("__0_1.distcp named in .metadata but not there",),
        ),
        (zero_bytes, (".distcp", QKV)),
        (
            other_shape(intermediate_size=128),
            ("mlp.linear_fc1.weight has shape (384, 96)", "asks for (256, 96)"),
        ),
        (other_shape(num_hidden_layers=1), ("no place for: decoder.layers.1.",)),
        (other_shape(num_hidden_layers=3), ("missing decoder.layers.2.",)),
        (qkv(lambda tensor: tensor.chunks.pop()), ("names no place for parts of", QKV)),
        (qkv(lambda tensor: setattr(tensor.properties, "dtype", torch.int8)), (QKV, "int8")),
        (lambda stored: shutil.rmtree(stored / "hf"), ("give --origin-hf-checkpoint",)),
    ],
    ids=["no file", "no tensor", "shape", "fewer layers", "more layers", "no piece", "integers", "no config"],
)
def test_a_megatron_checkpoint_that_is_not_whole_or_of_another_model(stored, tmp_path, damage, words):
    damage(stored)
    refuse_back(stored, tmp_path / "out" / "back", CheckpointError, *words)


def test_metadata_that_would_run_code_is_not_read(stored, tmp_path):
    from megatron_ibpo.policy.checkpoint import load_weights

    (stored / ".metadata").write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    words = ".metadata is damaged or unsafe", "pathlib"
    refuse_back(stored, tmp_path / "out" / "back", CheckpointError, *words)
    with pytest.raises(CheckpointError, match=words[0]):
        load_weights([], stored, 64)
    assert not (tmp_path / "ran").exists()


def test_other_formats_are_named(tmp_path, stored):
    target = tmp_path / "out" / "back"
    with pytest.raises(CheckpointError, match="is no directory"):
        find_stored(tmp_path / "nowhere")
    old = tmp_path / "old"
    (old / "mp_rank_00").mkdir(parents=True)
    refuse_back(old, target, CheckpointError, "Megatron's old format, pickles", origin=stored / "hf")
    edit_json(stored / "metadata.json", sharded_backend="zarr")
    refuse_back(stored, target, CheckpointError, "format 'zarr' is not supported")


def save_entry(stored, name, data):
    """Put bytes into a checkpoint under a name, as an entry that is no tensor."""
    file = stored / f"{name.replace('/', '_')}.distcp"

    def edit(metadata):
        file.write_bytes(b"before" + data)
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data = {
            index: place for index, place in metadata.storage_data.items() if index.fqn != name
        }
        metadata.storage_data[MetadataIndex(name)] = _StorageInfo(file.name, 6, len(data))

    with_metadata(stored, edit)


def saved_bytes(content, **options):
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def refuse_to_read(stored, ran, *words):
    """Training and conversion refuse, and whatever else opens the checkpoint; nothing has run."""
    from megatron_ibpo.policy.checkpoint import load_weights

    with pytest.raises(CheckpointError) as caught:
        load_weights([], stored, 64)
    for word in (*words, "damaged or unsafe, and was not read", "take another copy of the checkpoint"):
        assert word in str(caught.value)
    refuse_back(stored, stored.parent / "out" / "back", CheckpointError, *words)
    with pytest.raises(CheckpointError):
        StoredCheckpoint(stored)
    assert not ran.exists()


PLANTED = {
    "the common state": "common_state/shard_0_1",
    "Transformer Engine's state": "decoder.layers.0.self_attention.linear_qkv._extra_state/shard_0_2",
    "optimizer": "optimizer.state.param_groups/shard_0_1",
    "random state": "rng_state/shard_0_1",
    "a weight that is declared to be bytes": QKV,
}


@pytest.mark.parametrize("name", PLANTED.values(), ids=PLANTED)
@pytest.mark.parametrize("form", ["plain", "old format", "behind what is allowed"])
def test_entries_that_would_run_code_are_not_read(stored, tmp_path, name, form):
    ran = tmp_path / "ran"
    content = [{"args": argparse.Namespace(seed=1), "x": RunsCode(ran)}]
    if form == "behind what is allowed":
        content = argparse.Namespace(inner=[io.BytesIO(b""), content])
    save_entry(stored, name, saved_bytes(content, _use_new_zipfile_serialization=form != "old format"))
    refuse_to_read(stored, ran, ".distcp", name, "it asks for getattr")


def test_a_common_file_that_would_run_code_is_not_read(stored, tmp_path):
    torch.save({"args": RunsCode(tmp_path / "ran")}, stored / "common.pt")
    refuse_to_read(stored, tmp_path / "ran", "common.pt: the common state", "it asks for getattr")


def test_an_entry_that_is_no_pickle_of_torch(stored, tmp_path):
    save_entry(stored, "rng_state/shard_0_1", pickle.dumps(RunsCode(tmp_path / "ran"), protocol=4))
    refuse_to_read(
        stored,
        tmp_path / "ran",
        "rng_state_shard_0_1.distcp",
        "rng_state/shard_0_1",
        "not a pickle of plain data",
    )


def test_an_entry_behind_a_transform_is_refused(stored):
    """It would be unpacked to other bytes than those that were checked."""
    save_entry(stored, "rng_state/shard_0_1", saved_bytes([1]))

    def edit(metadata):
        place = _StorageInfo("rng_state_shard_0_1.distcp", 6, 100, ("zstd",))
        metadata.storage_data[MetadataIndex("rng_state/shard_0_1")] = place

    with_metadata(stored, edit)
    with pytest.raises(CheckpointError, match="rng_state/shard_0_1 is stored through the transforms zstd"):
        StoredCheckpoint(stored)


def test_what_megatron_lm_stores_alongside_weights_is_read(stored, tmp_path):
    """Arguments, random states, an iteration, Transformer Engine's state in both of its forms."""
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.rerun_state_machine import RerunMode
    from megatron.core.transformer.enums import AttnBackend

    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }
    arguments = argparse.Namespace(
        load=Path("here"), dtype=torch.bfloat16, backend=AttnBackend.auto, model=ModelType.encoder_or_decoder,
        optimizer=OptimizerConfig(), signal=signal.SIGTERM, mode=RerunMode.DISABLED, betas=(0.9, 0.95),
    )  # fmt: skip
    save_entry(stored, "common_state/shard_0_1", saved_bytes([{"args": arguments, "iteration": 3}]))
    megatron_to_hf(stored, tmp_path / "back", ALONE)
    torch.save({"args": arguments, "iteration": 4}, stored / "common.pt")
    StoredCheckpoint(stored)
    assert load_common_state_dict(str(stored)) == {"args": arguments, "iteration": 4}
    for content in ([[states]], [io.BytesIO(b"state")], [torch.zeros(5, dtype=torch.uint8)], [None]):
        save_entry(stored, "rng_state/shard_0_1", saved_bytes(content))
        StoredCheckpoint(stored)


def test_a_changed_file_is_found_by_its_checksum(stored):
    assert changed_files(stored) == []
    data = bytearray((stored / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (stored / "__0_0.distcp").write_bytes(data)
    (stored / "common_state.distcp").unlink()
    assert sorted(problem.split("stored/")[1] for problem in changed_files(stored)) == [
        "__0_0.distcp is not what was written: its checksum differs",
        "common_state.distcp is missing",
    ]


# ------------------------------------------------------------------------------------------- the disk


def test_what_is_there_is_not_overwritten(here):
    source, target = here
    target.mkdir(parents=True)
    (target / "mine").write_text("precious")
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        hf_to_megatron(source, target, ParallelConfig(), ALONE)
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        hf_to_megatron(source, source, ParallelConfig(), ALONE)
    assert (target / "mine").read_text() == "precious"


def test_a_disk_too_small_is_refused_before_anything_is_written(here, stored, tmp_path, monkeypatch):
    source, target = here
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    refuse(source, target, DiskSpaceError, "does not fit")
    refuse_back(stored, tmp_path / "other" / "back", DiskSpaceError, "does not fit")


def convert(source, target):
    if (source / ".metadata").exists():
        megatron_to_hf(source, target, ALONE)
    else:
        hf_to_megatron(source, target, ParallelConfig(), ALONE)


@contextmanager
def short_files():
    """No file gets longer than 200 kB: the system refuses to write on in the middle of one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(params=["there", "back"])
def ends(request, here, converted, tmp_path):
    """Return source and target of a conversion, in either direction."""
    return here[0] if request.param == "there" else converted, tmp_path / "out" / "new"


def test_a_disk_that_fills_up_leaves_nothing(ends):
    """Python has the signal of it ignored, so that it is an error."""
    with pytest.raises(DiskSpaceError, match="no room after"), short_files():
        convert(*ends)
    assert list(ends[1].parent.iterdir()) == []


def test_a_disk_that_fills_up_within_a_tensor_is_no_error_of_torch(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file, weight = DistcpFile(tmp_path / "part.distcp"), torch.zeros(3_000_000)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskSpaceError, match=r"part\.distcp: no room after 0 bytes"):
        file.add(Block("weight", weight.shape, (0,), weight.shape), weight)


def killed_in_the_middle(world, source, target):
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    with short_files():
        convert(source, target)


@pytest.mark.world
def test_a_kill_in_the_middle_leaves_nothing_that_looks_whole(ends):
    source, target = ends
    with pytest.raises(RankFailed, match="died without a word"):
        run_ranks(killed_in_the_middle, 1, source, target)
    (left,) = target.parent.iterdir()
    assert left.name == ".new.partial"
    with pytest.raises(ValueError, match=r"no Megatron checkpoint|cannot be read"):
        (Checkpoint if (source / ".metadata").exists() else StoredCheckpoint)(left)
    convert(source, target)
    assert [path.name for path in target.parent.iterdir()] == ["new"]
    assert changed_files(target) == []


# ------------------------------------------------------------------------------------------ inspecting


def test_inspection_lists_what_is_there_and_what_is_missing(tmp_path, stored, capsys):
    from inspect_checkpoint import Arguments, main

    def inspect(directory, **options):
        status = main(Arguments(directory, **options))
        return status, capsys.readouterr().out

    source = make_qwen3_next(tmp_path / "next", 3)
    hf_to_megatron(source, tmp_path / "whole", layout(tp=2, pp=2, ep=2), ALONE)
    status, said = inspect(tmp_path / "whole", checksums=True)
    assert status == 0
    for words in ("qwen3_next, 4 layers of 96, 4 experts", "TP 2, PP 2, EP 2, ETP 1\n", "weights only"):
        assert words in said
    assert "all files as written" in said
    (tmp_path / "whole" / "layout.json").unlink()
    assert "TP 2, PP 2, EP 2, ETP 1, as its pieces suggest" in inspect(tmp_path / "whole")[1]
    edit_json(stored / "hf" / "config.json", num_hidden_layers=3)
    status, said = inspect(stored)
    assert status == 1
    assert "missing decoder.layers.2." in said
    status, said = inspect(source)
    assert status == 0
    numbers = [tensor.numel() for tensor in load_file(source / "model.safetensors").values()]
    assert f"{len(numbers)} tensors, {sum(numbers):,} parameters" in said
    with pytest.raises(CheckpointError, match="holds no Megatron checkpoint"):
        inspect(tmp_path)
