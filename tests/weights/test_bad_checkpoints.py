"""Bad checkpoints are refused by file and tensor, and what fails leaves nothing behind; what is kept."""

import argparse
import errno
import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorProperties

from megatron_ibpo.config import Config
from megatron_ibpo.models import ModelConfigError, read_hf_config
from megatron_ibpo.run.cost import Spent
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats import directories, run_state
from megatron_ibpo.weights.formats.checkpoint_files import changed_files, check_integrity, write_integrity
from megatron_ibpo.weights.formats.convert import differing_tensors, hf_to_megatron, megatron_to_hf
from megatron_ibpo.weights.formats.directories import DiskSpaceError, publish
from megatron_ibpo.weights.formats.hf_models import check_finite
from megatron_ibpo.weights.formats.hugging_face import Checkpoint
from megatron_ibpo.weights.formats.mapped_tensors import MappedFiles
from megatron_ibpo.weights.formats.run_state import Keep, find_stored, load_run_state, read_layout
from megatron_ibpo.weights.formats.torch_dist import Block, DistcpFile, StoredCheckpoint, read_metadata
from support import planned
from support.checkpoint_bytes import as_bytes, cut_in_half, shard_by_hand, tensors_of, with_weights
from support.layouts import layout
from support.model_passes import ALONE, edit_json
from support.ranks import RankFailed, run_ranks
from support.tiny_models import make_qwen3, make_qwen3_next
from support.train_sequences import sequences
from support.trainers import config_for, open_trainer

NORM = "model.layers.1.input_layernorm.weight"
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
HUGE = 10**15


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("models") / "dense", 1)


@pytest.fixture(scope="module")
def converted(origin, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "stored"
    hf_to_megatron(origin, target, layout(tp=2), ALONE)
    return target


@pytest.fixture
def stored(tmp_path, converted):
    return shutil.copytree(converted, tmp_path / "stored")


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out" / "new"


def convert(source, target, **options):
    if (source / "config.json").exists():
        hf_to_megatron(source, target, layout(), ALONE, **options)
    else:
        megatron_to_hf(source, target, ALONE, **options)


def refuse(source, target, error, *words, **options):
    """The conversion fails with all the words; nothing is left and the source is as it was."""

    def contents():
        return {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}

    before = contents()
    with pytest.raises(error) as caught:
        convert(source, target, **options)
    for word in words:
        assert word in str(caught.value)
    assert not target.parent.exists() or list(target.parent.iterdir()) == []
    assert contents() == before


def test_an_incomplete_or_foreign_hugging_face_checkpoint_is_refused(tmp_path, origin, target):
    index, keys = "model.safetensors.index.json", "model.layers.1.self_attn.k_proj.weight"
    weights = tensors_of(origin)

    def tensors(**changes):
        def change(source):
            held = {name: tensor for name, tensor in (weights | changes).items() if tensor is not None}
            shutil.rmtree(source)
            shard_by_hand(origin, source, held)

        return change

    def config(**changes):
        return lambda source: edit_json(source / "config.json", **changes)

    def files(edit):
        """Other file names by tensor, or text in place of the index."""

        def change(source):
            known = json.loads((source / index).read_text())["weight_map"]
            text = edit if isinstance(edit, str) else json.dumps({"weight_map": edit(known)})
            (source / index).write_text(text)

        return change

    def header(dtype, shape, *offsets):
        text = json.dumps({NORM: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
        return struct.pack("<Q", len(text)) + text + bytes(384)

    outside = "pytorch_model.bin", "/etc/passwd", "x/../../other/a.safetensors", "a\0.safetensors", 3
    for number, (damage, words) in enumerate((
        (lambda source: cut_in_half(source / "b.safetensors"), "b.safetensors|truncated"),
        (lambda source: (source / "a.safetensors").unlink(), f"a.safetensors named in {index}"),
        (files(lambda known: dict.fromkeys(known, "a.safetensors")), "missing, although the index names"),
        (tensors(**{NORM: None}), f"missing {NORM}"),
        (tensors(**{"model.layers.9.weird": torch.ones(2)}), "no place for: model.layers.9.weird"),
        (tensors(**{NORM: torch.ones(7)}), f"{NORM} has shape (7,), config.json asks for (96,)"),
        (tensors(**{NORM: torch.ones(96, dtype=torch.int64)}), f"{NORM} is I64; weights must be one of BF"),
        (tensors(**{keys: torch.ones(64, 96).half()}), f"{keys} is torch.float16 and"),
        (tensors(**{"lm_head.weight": None}), "missing lm_head.weight|says tie_word_embeddings=false"),
        (config(num_hidden_layers=3), "missing model.layers.2."),
        (config(tie_word_embeddings=True), "lm_head.weight is not model.embed_tokens.weight"),
        (files('{"weight_map": NaN}'), f"{index} is malformed"),
        *((files(lambda known, file=file: known | {NORM: file}), f"{index}|{NORM} should be in {file!r}")
          for file in outside),
        *((lambda source, content=content: (source / "a.safetensors").write_bytes(content),
           "a.safetensors cannot be read") for content in (
            b"", struct.pack("<Q", HUGE) + b"{}", struct.pack("<Q", 2) + b"[]",
            header("F32", [HUGE], 0, 4 * HUGE), header("F32", [HUGE, HUGE], 0, 384),
            header("F32", [96], HUGE, HUGE + 384), header("F32", [-96], 0, 384), header("F99", [96], 0, 384),
        )),
    )):  # fmt: skip
        source = shard_by_hand(origin, tmp_path / str(number) / "hf", weights)
        (source.parent / "other").mkdir()
        shutil.copy(source / "a.safetensors", source.parent / "other")
        damage(source)
        torch.save({NORM: torch.ones(96)}, source / "pytorch_model.bin")
        for allow_pickle in (False, True):  # which is about checkpoints that hold nothing else
            errors = CheckpointError, ModelConfigError
            refuse(source, target, errors, *words.split("|"), allow_pickle=allow_pickle)


def test_a_head_equal_to_tied_embeddings_is_accepted(tmp_path, origin, target):
    held = tensors_of(origin)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    source = with_weights(origin, tmp_path / "hf", held)
    edit_json(source / "config.json", tie_word_embeddings=True)
    convert(source, target)
    assert "output_layer.weight" not in StoredCheckpoint(target).tensors


def test_nan_is_converted_and_named(origin, caplog, tmp_path, target):
    broken = torch.ones(96)
    broken[17], broken[18] = torch.nan, -torch.nan
    source = with_weights(origin, tmp_path / "hf", tensors_of(origin) | {NORM: broken})
    convert(source, target)
    assert [record.message for record in caplog.records] == [f"{source}: {NORM} holds NaN"]
    caplog.clear()
    convert(target, tmp_path / "back")
    (message,) = [record.message for record in caplog.records]
    assert NORM in message
    assert torch.equal(as_bytes(tensors_of(tmp_path / "back")[NORM]), as_bytes(broken))


def test_a_layout_that_cannot_hold_the_model(origin, target):
    for parallel, virtual_stages, words in (
        (layout(tp=3), 1, r"does not divide the attention heads \(4\)"),
        (layout(first=1), 1, "need --pipeline-model-parallel-size > 1"),
        (layout(pp=2, first=2), 1, "would hold 0 layers"),
        (layout(pp=2), 2, "not a positive multiple of its 2 virtual stages"),
    ):
        with pytest.raises(ValueError, match=f"(?s)this layout cannot hold the model.*{words}"):
            hf_to_megatron(origin, target, parallel, ALONE, virtual_stages=virtual_stages)
    assert not target.parent.exists()


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_are_refused_unless_asked_for_and_never_run_code(tmp_path, origin, target):
    source, held = tmp_path / "hf", tensors_of(origin)
    source.mkdir()
    shutil.copy(origin / "config.json", source)
    torch.save(held, source / "pytorch_model.bin")
    refuse(source, target, CheckpointError, "pytorch_model.bin", "--allow-pickle")
    convert(source, tmp_path / "allowed", allow_pickle=True)
    assert differing_tensors(origin, tmp_path / "allowed", ALONE) == []
    for content in ({**held, "x": RunsCode(tmp_path / "ran")}, [torch.ones(3)], {"a": {"b": torch.ones(3)}}):
        torch.save(content, source / "pytorch_model.bin")
        refuse(source, target, CheckpointError, "pytorch_model.bin", allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def with_metadata(stored, edit):
    metadata = read_metadata(stored)
    edit(metadata)
    (stored / ".metadata").write_bytes(pickle.dumps(metadata))


def test_an_incomplete_or_foreign_megatron_checkpoint_is_refused(converted, tmp_path, target):
    parts_of = {
        "all": lambda metadata: [metadata],
        "tensor": lambda metadata: [metadata.state_dict_metadata[QKV]],
        "piece": lambda metadata: metadata.state_dict_metadata[QKV].chunks[:1],
        "places": lambda metadata: [own for key, own in metadata.storage_data.items() if key.fqn == QKV],
    }

    def edited(parts, **values):
        def edit(metadata):
            for part in parts_of[parts](metadata):
                vars(part).update(values)  # some of these classes are frozen

        return lambda stored: with_metadata(stored, edit)

    def config(**changes):
        return lambda stored: edit_json(stored / "hf/config.json", **changes)

    def cut_off(stored):
        cut_in_half(stored / parts_of["places"](read_metadata(stored))[0].relative_path)

    def compress(stored):
        file = stored / "bomb.distcp"
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", bytes(10**7))
        edited("places", relative_path=file.name, offset=0, length=file.stat().st_size)(stored)

    for number, (damage, words) in enumerate((
        (lambda stored: (stored / "__0_1.distcp").unlink(), "__0_1.distcp named in .metadata but not there"),
        (lambda stored: shutil.rmtree(stored / "hf"), "give --origin-hf-checkpoint"),
        (cut_off, ".distcp cannot be read, the file is damaged"),
        (edited("places", length=100), f".distcp|{QKV}|not a saved tensor: BadZipFile"),
        (compress, f"bomb.distcp|{QKV}|compressed"),
        (config(intermediate_size=128), "linear_fc1.weight has shape (384, 96)|asks for (256, 96)"),
        (config(num_hidden_layers=1), "no place for: decoder.layers.1."),
        (config(num_hidden_layers=3), "missing decoder.layers.2."),
        (edited("tensor", chunks=[]), f"no place for parts of|{QKV}"),
        (edited("tensor", properties=TensorProperties(torch.int8)), f"{QKV}|int8"),
        (edited("tensor", size=torch.Size([HUGE, 96])), f"{QKV}|asks for"),
        *((edited(parts, **values), "take another copy") for parts, values in (
            ("tensor", {"size": "many"}), ("tensor", {"chunks": [3]}), ("all", {"state_dict_metadata": None}),
            ("all", {"state_dict_metadata": {QKV: 3}}), ("piece", {"sizes": torch.Size([HUGE, 96])}),
            ("piece", {"offsets": torch.Size([HUGE, 0])}), ("places", {"length": HUGE}),
            ("places", {"length": "all"}), ("places", {"offset": HUGE}), ("places", {"offset": -1}),
            ("places", {"relative_path": "../outside.distcp"}), ("places", {"relative_path": "/etc/passwd"}),
            ("places", {"relative_path": 3}),
        )),
    )):  # fmt: skip
        stored = shutil.copytree(converted, tmp_path / str(number))
        (tmp_path / "outside.distcp").write_bytes(bytes(10**6))
        damage(stored)
        refuse(stored, target, CheckpointError, *words.split("|"))


def test_other_formats_are_named(tmp_path, stored, target):
    with pytest.raises(CheckpointError, match="is no directory"):
        find_stored(tmp_path / "nowhere")
    (tmp_path / "old/mp_rank_00").mkdir(parents=True)
    said = "Megatron's old format, pickles"
    refuse(tmp_path / "old", target, CheckpointError, said, origin=stored / "hf")
    edit_json(stored / "metadata.json", sharded_backend="zarr")
    refuse(stored, target, CheckpointError, "format 'zarr' is not supported")


def test_a_tensor_takes_no_byte_from_beyond_its_place(tmp_path):
    """Of several in one file, one says, in the directory at its archive's end, that it is longer."""
    torch.save(torch.ones(4), tmp_path / "alone")
    data = bytearray((tmp_path / "alone").read_bytes())
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"/data/0"))
    data[entry + 20 : entry + 28] = (5000).to_bytes(4, "little") * 2
    (tmp_path / "several").write_bytes(data + bytes(5000))
    assert MappedFiles(tmp_path).tensor("alone", 0, len(data)).tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="beyond its place"):
        MappedFiles(tmp_path).tensor("several", 0, len(data))


def save_entry(stored, name, data, transforms=None):
    file = stored / f"{name.replace('/', '_')}.distcp"

    def edit(metadata):
        file.write_bytes(b"before" + data)
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        kept = {index: place for index, place in metadata.storage_data.items() if index.fqn != name}
        own = _StorageInfo(file.name, 6, len(data), transforms)
        metadata.storage_data = kept | {MetadataIndex(name): own}

    with_metadata(stored, edit)


def saved_bytes(content, **options):
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def test_nothing_executable_or_unchecked_is_read(stored, target):
    """Training and conversion refuse, and whatever else opens the checkpoint; nothing has run."""
    from megatron_ibpo.policy.checkpoint import load_weights

    def refused(*words):
        for read in (lambda: load_weights([], stored, 64), lambda: StoredCheckpoint(stored)):
            with pytest.raises(CheckpointError) as caught:
                read()
            assert all(word in str(caught.value) for word in words), read
        refuse(stored, target, CheckpointError, *words)
        assert not (stored.parent / "ran").exists()
        (stored / ".metadata").write_bytes(whole)

    whole, planted = (stored / ".metadata").read_bytes(), RunsCode(stored.parent / "ran")
    content = [{"args": argparse.Namespace(seed=1), "x": planted}]
    unsafe = (
        "it asks for getattr",
        "damaged or unsafe, and was not read",
        "take another copy of the checkpoint",
    )
    (stored / ".metadata").write_bytes(pickle.dumps(planted))
    refused(".metadata is damaged or unsafe", "pathlib")
    rng = "rng_state/shard_0_1"
    for name in (
        "common_state/shard_0_1", "decoder.layers.0.self_attention.linear_qkv._extra_state/shard_0_2",
        "optimizer.state.param_groups/shard_0_1", rng, QKV,
    ):  # fmt: skip
        for form in (
            saved_bytes(content),
            saved_bytes(content, _use_new_zipfile_serialization=False),
            saved_bytes(argparse.Namespace(inner=[io.BytesIO(b""), content])),  # behind what is allowed
        ):
            save_entry(stored, name, form)
            refused(".distcp", name, *unsafe)
    save_entry(stored, rng, pickle.dumps(planted, protocol=4))
    refused("rng_state_shard_0_1.distcp", rng, "not a pickle of plain data", *unsafe[1:])
    save_entry(stored, rng, saved_bytes([1]), ("zstd",))  # unpacked it is not the bytes that were checked
    refused(f"{rng} is stored through the transforms zstd")
    torch.save({"args": planted}, stored / "common.pt")
    refused("common.pt: the common state", *unsafe)


def test_states_stored_by_megatron_lm_are_read(stored, tmp_path):
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.rerun_state_machine import RerunMode
    from megatron.core.transformer.enums import AttnBackend

    states = {
        "random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {"a": torch.get_rng_state()},
    }  # fmt: skip
    arguments = argparse.Namespace(
        load=Path("here"), dtype=torch.bfloat16, backend=AttnBackend.auto, model=ModelType.encoder_or_decoder,
        optimizer=OptimizerConfig(), signal=signal.SIGTERM, mode=RerunMode.DISABLED, betas=(0.9, 0.95),
    )  # fmt: skip
    save_entry(stored, "common_state/shard_0_1", saved_bytes([{"args": arguments, "iteration": 3}]))
    convert(stored, tmp_path / "back")
    torch.save({"args": arguments, "iteration": 4}, stored / "common.pt")
    StoredCheckpoint(stored)
    assert load_common_state_dict(str(stored)) == {"args": arguments, "iteration": 4}
    for content in ([[states]], [io.BytesIO(b"state")], [torch.zeros(5, dtype=torch.uint8)], [None]):
        save_entry(stored, "rng_state/shard_0_1", saved_bytes(content))
        StoredCheckpoint(stored)


def test_existing_files_stay_and_a_small_disk_is_refused(origin, stored, target, monkeypatch):
    target.mkdir(parents=True)
    (target / "mine").write_text("precious")
    for place in (target, origin):
        with pytest.raises(FileExistsError, match="nothing is overwritten"):
            convert(origin, place)
    assert (target / "mine").read_text() == "precious"
    shutil.rmtree(target)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    for source in (origin, stored):
        refuse(source, target, DiskSpaceError, "does not fit")


def convert_until_the_disk_is_full(world, source, target, is_killed):
    """No file gets longer than 200 kB: the system refuses to write on in the middle of one."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if is_killed:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores, so that it is an error
    with pytest.raises(DiskSpaceError, match="no room after"):
        convert(source, target)


@pytest.mark.world
@pytest.mark.parametrize("way", ["there", "back"])
def test_no_full_disk_or_kill_leaves_an_apparent_checkpoint(origin, converted, target, way):
    source, reader = (origin, StoredCheckpoint) if way == "there" else (converted, Checkpoint)
    run_ranks(convert_until_the_disk_is_full, 1, source, target, False)
    assert list(target.parent.iterdir()) == []
    with pytest.raises(RankFailed, match="died without a word"):
        run_ranks(convert_until_the_disk_is_full, 1, source, target, True)
    (left,) = target.parent.iterdir()
    assert left.name == ".new.partial"
    with pytest.raises(ValueError, match=r"no Megatron checkpoint|cannot be read"):
        reader(left)
    convert(source, target)
    assert [path.name for path in target.parent.iterdir()] == ["new"]
    assert changed_files(target) == []


def test_a_disk_filling_within_a_tensor_has_its_own_error(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file, weight = DistcpFile(tmp_path / "part.distcp"), torch.zeros(3_000_000)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskSpaceError, match=r"part\.distcp: no room after 0 bytes"):
        file.add(Block("weight", weight.shape, (0,), weight.shape), weight)


def test_inspection_lists_present_and_missing_weights(tmp_path, stored, capsys):
    from megatron_ibpo.commands.inspect_checkpoint import main

    source, whole = make_qwen3_next(tmp_path / "next", 3), tmp_path / "whole"
    hf_to_megatron(source, whole, layout(tp=2, pp=2, ep=2), ALONE)
    edit_json(stored / "hf/config.json", num_hidden_layers=3)
    for directory, status, words in (
        (whole, 0, ("4 layers of 96, 4 experts", "TP 2, PP 2, EP 2, ETP 1\n", "files as written")),
        (source, 0, (f"{sum(tensor.numel() for tensor in tensors_of(source).values()):,} parameters",)),
        (stored, 1, ("missing decoder.layers.2.",)),
    ):
        flags = ["--checksums"] if directory == whole else []
        assert main([str(directory), *flags]) == status
        said = capsys.readouterr().out
        assert all(word in said for word in words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_non_finite_value_is_found_anywhere(dtype):
    limits = torch.finfo(dtype)
    check_finite(
        torch.tensor([limits.max, limits.min, limits.tiny], dtype=dtype), Path("/where"), "some.weight"
    )
    check_finite(torch.ones(0, dtype=dtype), Path("/where"), "some.weight")
    for value in (math.nan, math.inf, -math.inf):
        for place in (0, 500, 999):
            tensor = torch.linspace(-1, 1, 1000).to(dtype)
            tensor[place] = value
            with pytest.raises(CheckpointError, match=r"/where: some.weight holds NaN or infinity"):
                check_finite(tensor.view(10, 100), Path("/where"), "some.weight")


def test_malformed_run_states_and_layouts_are_refused(tmp_path):
    def refused(read, name, text, words=""):
        (tmp_path / name).write_text(text)
        with pytest.raises(CheckpointError, match=rf"{name} cannot be read: .*{words}.*take another copy"):
            read(tmp_path)

    (tmp_path / "run_state.json").write_text('{"step": 7, "spent": {"tokens": 1.5}}')
    state = load_run_state(tmp_path)
    assert (state["step"], Spent.read(state["spent"]).tokens) == (7, 1.5)
    for text in ("{", "[]", '{"step": -1}', '{"step": true}', '{"step": 9223372036854775808}'):
        refused(load_run_state, "run_state.json", text)
    for spent in (3, {"gold": 1.0}, {"tokens": "many"}, {"tokens": -1}, {"flops": math.nan}):
        with pytest.raises(ValueError, match="spent"):
            Spent.read(spent)
    assert read_layout(tmp_path) == {}
    parallel = {f"{axis}_model_parallel_size": 2 for axis in ("tensor", "pipeline", "expert")}
    parallel["use_distributed_optimizer"] = False
    whole = {"optimizer": True, "parallel": parallel}
    (tmp_path / "layout.json").write_text(json.dumps(whole))
    assert read_layout(tmp_path) == whole
    for changes, words in (
        ({"optimizer": "yes"}, "optimizer must be true or false"),
        ({"parallel": [1]}, "parallel must be an object"),
        ({"parallel": {}}, "_model_parallel_size must be a whole number"),
        ({"virtual_stages": "2"}, "virtual_stages must be a whole number"),
    ):
        refused(read_layout, "layout.json", json.dumps(whole | changes), words)


def test_files_changed_since_writing_are_named(tmp_path):
    whole, manifest = os.urandom(10_000), tmp_path / "integrity.json"
    (tmp_path / "critic").mkdir()
    for name in ("a.distcp", "b.distcp", "critic/c.distcp"):
        (tmp_path / name).write_bytes(whole)
    write_integrity(tmp_path)
    for name in ("a.distcp", "critic/c.distcp"):
        for place in (0, 4999, 9999):
            (tmp_path / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CheckpointError, match=f"{name} is not what was written: .*take another copy"):
                check_integrity(tmp_path)
        (tmp_path / name).write_bytes(whole)
    check_integrity(tmp_path)
    (tmp_path / "b.distcp").unlink()
    found = [changed_files(tmp_path, part, 3) for part in range(3)]
    assert sorted(map(len, found)) == [0, 0, 1], "each of several processes takes its part"
    assert "b.distcp is missing" in str(found)
    files = [f'{{"algorithm": "sha256", "files": {names}}}' for names in ("3", '{"a": 3}', '{"../x": "x"}')]
    for text in ("[]", "{}", '{"algorithm": "md5", "files": {}}', *files):
        manifest.write_text(text)
        with pytest.raises(CheckpointError, match=r"integrity.json.*take another copy"):
            check_integrity(tmp_path)
    manifest.unlink()
    check_integrity(tmp_path)  # nothing is known of it


def test_files_of_the_wrong_kind_are_named_without_reading(tmp_path):
    """No digest of a terabyte is computed, and nothing is waited for."""
    for name in ("config.json", "b.distcp", "c.distcp"):
        (tmp_path / name).write_text("{}")
    write_integrity(tmp_path)
    os.truncate(tmp_path / "config.json", 10**12)
    (tmp_path / "b.distcp").unlink()
    os.mkfifo(tmp_path / "b.distcp")
    (tmp_path / "c.distcp").unlink()
    (tmp_path / "c.distcp").symlink_to("c.distcp")
    with pytest.raises(CheckpointError) as refused:
        check_integrity(tmp_path)
    for words in ("b.distcp is a pipe", "c.distcp: Too many levels of symbolic links", "000,000,000 bytes"):
        assert words in str(refused.value)


def test_a_directory_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    partial, final = tmp_path / ".new.partial", tmp_path / "new"
    for file in (partial / "a", partial / "inner/b", final / "old"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("content")
    flushed = []

    def fsync(descriptor, real=os.fsync):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append((path.relative_to(tmp_path).as_posix(), (final / "a").exists()))
        real(descriptor)

    monkeypatch.setattr(directories.os, "fsync", fsync)
    publish(partial, final)
    parts = [(f".new.partial{name}", False) for name in ("", "/a", "/inner", "/inner/b")]
    assert sorted(flushed) == sorted([*parts, (".", True)])
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert left == {"new", "new/a", "new/inner", "new/inner/b"}


@pytest.mark.world(1)
@pytest.mark.slow  # for its trainer; each check by itself is tested without
def test_training_never_resumes_from_damaged_checkpoints(world, tmp_path):
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint
    from megatron_ibpo.weights.formats.hf_models import load_hf

    def refused(checkpoint, words):
        with pytest.raises(CheckpointError, match=f"^[^\n]*({words})[^\n]*$"):
            load_checkpoint(trainer, checkpoint)

    hf_dir = make_qwen3(tmp_path / "hf", 3)
    trainer, _, _ = open_trainer(world, hf_dir, config_for(layout()))
    planned.update(trainer, sequences(6))
    saved = save_checkpoint(trainer, tmp_path / "checkpoints", 1, {})
    whole = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    largest = max(saved.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data, half = whole[largest], len(whole[largest]) // 2
    load_checkpoint(trainer, saved)
    largest.write_bytes(data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :])
    refused(saved, "its checksum differs")
    (saved / "integrity.json").unlink()
    largest.write_bytes(data[:-1000])
    refused(saved, "the file is damaged: it ends at byte")
    for path in saved.glob("__*"):
        path.write_bytes(bytes(len(whole[path])))
    refused(saved, "cannot be loaded into this model|was not read")
    means = next(iter(trainer.optimizer.optimizer.state.values()))
    for step, tensor, words in (
        (2, means["exp_avg_sq"], "the optimizer's exp_avg_sq holds NaN or infinity"),
        (3, next(trainer.chunks[0].parameters()), "holds NaN or infinity"),
    ):
        with torch.no_grad():
            tensor.view(-1)[5] = math.nan
        refused(save_checkpoint(trainer, tmp_path / "checkpoints", step, {}), words)
    weights = tensors_of(hf_dir)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = math.inf
    bad = with_weights(hf_dir, tmp_path / "bad", weights)
    with pytest.raises(CheckpointError, match=r"1\.mlp\.up_proj\.weight holds NaN or infinity"):
        load_hf([chunk.module for chunk in trainer.chunks], read_hf_config(bad), bad)


def test_retention_keeps_the_newest_and_regular_checkpoints_only(tmp_path):
    for keep, last, gone in (
        (Keep(1), 10, [2, 4, 6, 8]),
        (Keep(9), 10, []),
        (Keep(2, every=4), 10, [2, 6]),
        (Keep(1), 6, [2, 4]),  # what a run wrote before it went back is left alone
    ):
        assert run_state.superseded([10, 2, 8, 4, 6], last, keep) == gone
    names = {"step_000001", "step_000002", "step_000003", "step_final", ".step_000004.partial"}
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("1")
    run_state.remove_superseded(tmp_path, 3, Keep(1))
    assert {path.name for path in tmp_path.iterdir()} == names - {"step_000001", "step_000002"}
    run_state.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step_000003", "step_final"}


def test_the_disk_holds_retained_checkpoints_and_the_next_one():
    never = {"save_interval_minutes": None}
    for changes, kept in (
        (never | {"save_interval": 60}, (2, 1)),
        (never | {"save_interval": 10, "keep_checkpoints": 100}, (10, 1)),
        ({}, (3, 1)),
        ({"keep_checkpoint_every": 25}, (7, 1)),
        ({"export_interval": 25}, (3, 5)),
    ):
        run = replace(Config().run, **{"num_rollout": 100, "keep_checkpoints": 2, **changes})
        assert run_state.kept_at_once(run) == kept
