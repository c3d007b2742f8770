"""Damaged checkpoints are refused in one line that names the file, before anything is taken from them."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ibpo.models import ModelConfigError, read_hf_config
from megatron_ibpo.run.cost import Spent
from megatron_ibpo.weights.formats import publishing
from megatron_ibpo.weights.formats.convert import megatron_to_hf
from megatron_ibpo.weights.formats.finite import check_finite, is_finite
from megatron_ibpo.weights.formats.integrity import check_integrity, is_inside, write_integrity
from megatron_ibpo.weights.formats.publishing import publish
from megatron_ibpo.weights.formats.run_state import load_run_state, read_layout
from megatron_ibpo.weights.weight_errors import CheckpointError
from support.conversions import ALONE, QKV, edit_json, refuse, refuse_back, with_metadata
from support.ranks import run_ranks
from support.tiny_models import make_qwen3

# ------------------------------------------------------------------------------------ Hugging Face's files

INDEX = "model.safetensors.index.json"
NAME = "model.norm.weight"


@pytest.mark.parametrize(
    "file",
    ["pytorch_model.bin", "/etc/passwd", "../other/a.safetensors", "x/../../a.safetensors", "",
     "a\0.safetensors",
     "a.safetensors.bin", 3, None, ["a.safetensors"], {}, True],
)  # fmt: skip
def test_an_index_that_reaches_further_than_its_directory_or_names_no_file(here, file):
    source, target = here
    (source.parent / "other").mkdir()
    index = json.loads((source / INDEX).read_text())["weight_map"]
    (source.parent / "other" / "a.safetensors").write_bytes((source / index[NAME]).read_bytes())
    torch.save({NAME: torch.ones(96)}, source / "pytorch_model.bin")
    edit_json(source / INDEX, weight_map={**index, NAME: file})
    for allow_pickle in (False, True):  # which is about checkpoints that hold nothing else
        refuse(
            source,
            target,
            CheckpointError,
            INDEX,
            f"{NAME} is said to lie in {file!r}",
            allow_pickle=allow_pickle,
        )


@pytest.mark.parametrize("weight_map", [3, None, [], [["a"]], "text", [1, 2], {"a": {}}])
def test_an_index_of_the_wrong_type(here, weight_map):
    source, target = here
    edit_json(source / INDEX, weight_map=weight_map)
    refuse(source, target, CheckpointError, str(source))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"weight_map": NaN}', "[" * 100_000, "\x00"])
def test_an_index_that_is_no_json(here, text):
    source, target = here
    (source / INDEX).write_text(text)
    refuse(source, target, CheckpointError, f"{INDEX} is malformed")


def test_files_within_folders_may_be_named():
    assert is_inside("a.safetensors")
    assert is_inside("folder/a.safetensors")


HUGE = 10**15


@pytest.mark.parametrize(
    "header",
    [
        {NAME: {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}},
        {NAME: {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 384]}},
        {NAME: {"dtype": "F32", "shape": [96], "data_offsets": [HUGE, HUGE + 384]}},
        {NAME: {"dtype": "F32", "shape": [-96], "data_offsets": [0, 384]}},
        {NAME: {"dtype": "F99", "shape": [96], "data_offsets": [0, 384]}},
        {NAME: 3},
        [],
    ],
)
def test_a_header_with_sizes_that_no_memory_holds(here, header):
    source, target = here
    file = json.loads((source / INDEX).read_text())["weight_map"][NAME]
    text = json.dumps(header).encode()
    (source / file).write_bytes(struct.pack("<Q", len(text)) + text + bytes(384))
    refuse(source, target, CheckpointError, f"{file} cannot be read")


@pytest.mark.parametrize(
    "content", [b"", b"x", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", HUGE) + b"{}"]
)
def test_a_file_that_ends_in_its_header(here, content):
    source, target = here
    file = json.loads((source / INDEX).read_text())["weight_map"][NAME]
    (source / file).write_bytes(content)
    refuse(source, target, CheckpointError, f"{file} cannot be read")


@pytest.mark.parametrize("content", [{"a": 3}, [torch.ones(3)], {"a": {"b": torch.ones(3)}}])
def test_pickles_that_hold_no_tensors(tmp_path, origin, content):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_bytes((origin / "config.json").read_bytes())
    torch.save(content, tmp_path / "hf" / "pytorch_model.bin")
    refuse(tmp_path / "hf", tmp_path / "out" / "new", CheckpointError, "pytorch_model.bin", allow_pickle=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": math.nan}, "NaN is no number"),
        ({"rope_theta": math.inf}, "Infinity is no number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number"),
        ({"num_hidden_layers": HUGE}, "num_hidden_layers must be at most 10000,"),
        ({"vocab_size": HUGE}, "vocab_size must be at most 2147483647"),
        ({"hidden_size": 1e15}, "hidden_size must be a positive integer"),
        ({"model_type": ["qwen3"]}, "model_type ['qwen3'] is unknown"),
        ({"rope_scaling": 3}, "rope_scaling must be an object"),
        ({"rope_parameters": {"partial_rotary_factor": 1e9}}, "is not an even number up to that"),
    ],
)
def test_a_configuration_with_numbers_that_are_none(here, changes, words):
    source, target = here
    edit_json(source / "config.json", **changes)
    refuse(source, target, ModelConfigError, "config.json", words)


def test_a_configuration_of_a_hundred_thousand_brackets(here):
    (here[0] / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelConfigError, match=r"config.json is not valid JSON: its brackets nest deeper"):
        read_hf_config(here[0])


# ------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_one_value_that_is_no_number_is_found_wherever_it_is(dtype, value, place):
    tensor = torch.linspace(-1, 1, 1000).to(dtype)
    assert is_finite(tensor)
    tensor[place] = value
    with pytest.raises(CheckpointError, match=r"/where: some.weight holds NaN or infinity"):
        check_finite(tensor.view(10, 100), Path("/where"), "some.weight")


def test_the_largest_numbers_are_finite():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        limits = torch.finfo(dtype)
        assert is_finite(torch.tensor([limits.max, limits.min, limits.tiny], dtype=dtype))
    assert is_finite(torch.ones(0))


# ---------------------------------------------------------------------------------------- Megatron's files


def place_of(stored, key=QKV):
    from megatron_ibpo.weights.formats.torch_dist import StoredCheckpoint

    return next(place for index, place in StoredCheckpoint(stored).places.items() if index.fqn == key)


def changed(what):
    """Edits of `.metadata`."""

    def size(metadata):
        metadata.state_dict_metadata[QKV].size = torch.Size([HUGE, 96])

    def chunk(metadata):
        metadata.state_dict_metadata[QKV].chunks[0].sizes = torch.Size([HUGE, 96])

    def beyond(metadata):
        metadata.state_dict_metadata[QKV].chunks[0].offsets = torch.Size([HUGE, 0])

    def texts(metadata):
        metadata.state_dict_metadata[QKV].size = "many"

    def nothing(metadata):
        metadata.state_dict_metadata = None

    def chunks(metadata):
        metadata.state_dict_metadata[QKV].chunks = [3]

    def entry(metadata):
        metadata.state_dict_metadata[QKV] = 3

    def of_place(**values):
        def edit(metadata):
            for index, place in metadata.storage_data.items():
                if index.fqn == QKV:
                    for name, value in values.items():
                        setattr(place, name, value)

        return edit

    known = {
        "a tensor of 10^17 elements": size,
        "a piece of 10^17 elements": chunk,
        "a piece beyond its tensor": beyond,
        "a size that is text": texts,
        "no tensors": nothing,
        "pieces that are numbers": chunks,
        "a tensor that is a number": entry,
        "10^15 bytes": of_place(length=HUGE),
        "from byte 10^15": of_place(offset=HUGE),
        "from byte -1": of_place(offset=-1),
        "a length that is text": of_place(length="all"),
        "another directory": of_place(relative_path="../../outside.distcp"),
        "an absolute file": of_place(relative_path="/etc/passwd"),
        "a file that is a number": of_place(relative_path=3),
    }
    return known if what is None else known[what]


@pytest.mark.parametrize("what", changed(None))
def test_metadata_that_describes_what_is_not_there(stored, tmp_path, what):
    (tmp_path.parent / "outside.distcp").write_bytes(bytes(10**6))
    with_metadata(stored, changed(what))
    target = tmp_path / "out" / "back"
    if what in ("a tensor of 10^17 elements",):
        refuse_back(stored, target, CheckpointError, QKV, "asks for")
    else:
        refuse_back(stored, target, CheckpointError, str(stored), "take another copy")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_distcp_file_is_named(stored, tmp_path, share):
    file = stored / place_of(stored).relative_path
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    refuse_back(
        stored, tmp_path / "out" / "back", CheckpointError, f"{file} cannot be read, the file is damaged"
    )


def test_a_compressed_tensor_is_not_unpacked(stored, tmp_path):
    """A thousand bytes would become a gigabyte."""
    import zipfile

    file = stored / "bomb.distcp"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))

    def edit(metadata):
        for index, place in metadata.storage_data.items():
            if index.fqn == QKV:
                place.relative_path, place.offset, place.length = file.name, 0, file.stat().st_size

    with_metadata(stored, edit)
    refuse_back(stored, tmp_path / "out" / "back", CheckpointError, "bomb.distcp", QKV, "compressed")


# -------------------------------------------------------------------------------- run_state.json, layout.json


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", "{}", '{"step": -1}', '{"step": 1.0}', '{"step": "1"}', '{"step": true}',
     '{"step": null}', '{"step": 9223372036854775808}', '{"step": NaN}', '{"step": 1, "x": Infinity}',
     "[" * 100_000,
     '{"step": ' + "9" * 5000 + "}", "\x00\xff"],
)  # fmt: skip
def test_a_malformed_run_state(tmp_path, text):
    (tmp_path / "run_state.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"run_state.json cannot be read: .*take another copy"):
        load_run_state(tmp_path)


def test_a_run_state_is_read(tmp_path):
    (tmp_path / "run_state.json").write_text('{"step": 7, "spent": {"tokens": 1.5}}')
    state = load_run_state(tmp_path)
    assert (state["step"], Spent.read(state["spent"]).tokens) == (7, 1.5)


@pytest.mark.parametrize(
    "spent",
    [3, [], None, {"gold": 1.0}, {"tokens": "many"}, {"tokens": -1}, {"flops": math.nan}, {"flops": True}],
)
def test_a_malformed_account_of_what_was_spent(spent):
    with pytest.raises(ValueError, match="spent"):
        Spent.read(spent)


PARALLEL = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "use_distributed_optimizer": False,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "yes"}, "optimizer must be true or false"),
        ({"optimizer": None}, "optimizer must be true or false"),
        ({"parallel": None}, "parallel must be an object"),
        ({"parallel": [1]}, "parallel must be an object"),
        ({"parallel": {}}, "_model_parallel_size must be a whole number"),
        ({"parallel": PARALLEL | {"tensor_model_parallel_size": 1.5}}, "tensor_model_parallel_size must be"),
        ({"parallel": PARALLEL | {"context_parallel_size": "1"}}, "context_parallel_size must be"),
        ({"parallel": PARALLEL | {"use_distributed_optimizer": 1}}, "use_distributed_optimizer must be true"),
        ({"virtual_stages": "2"}, "virtual_stages must be a whole number"),
    ],
)
def test_a_malformed_layout(tmp_path, changes, words):
    (tmp_path / "layout.json").write_text(json.dumps({"optimizer": True, "parallel": PARALLEL} | changes))
    with pytest.raises(CheckpointError, match=rf"layout.json cannot be read: .*{words}"):
        read_layout(tmp_path)


def test_a_layout_is_read_and_none_is_none(tmp_path):
    assert read_layout(tmp_path) == {}
    (tmp_path / "layout.json").write_text(json.dumps(layout := {"optimizer": True, "parallel": PARALLEL}))
    assert read_layout(tmp_path) == layout


# --------------------------------------------------------------------------------------- checksums, names


@pytest.fixture
def written(tmp_path):
    directory = tmp_path / "step"
    (directory / "critic").mkdir(parents=True)
    for name in ("a.distcp", "b.distcp", "critic/a.distcp"):
        (directory / name).write_bytes(os.urandom(10_000))
    write_integrity(directory)
    return directory


def test_what_was_written_is_what_is_there(written):
    check_integrity(written)
    (written / "integrity.json").unlink()
    check_integrity(written)  # nothing is known of it


@pytest.mark.parametrize("name", ["a.distcp", "critic/a.distcp"])
@pytest.mark.parametrize("place", [0, 4999, 9999])
def test_one_bit_is_found(written, name, place):
    data = bytearray((written / name).read_bytes())
    data[place] ^= 1
    (written / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is not what was written: .*take another copy"):
        check_integrity(written)


def test_what_is_no_file_of_its_kind_is_told_without_reading_it(tmp_path):
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
    assert "b.distcp is a pipe" in str(refused.value)
    assert "c.distcp: Too many levels of symbolic links" in str(refused.value)
    assert "config.json has 1,000,000,000,000 bytes, and a file of its kind at most" in str(refused.value)


def test_each_of_several_processes_takes_its_part(written):
    (written / "b.distcp").unlink()
    found = []
    for part in range(3):
        try:
            check_integrity(written, part, 3)
        except CheckpointError as error:
            found.append(str(error))
    assert len(found) == 1
    assert "b.distcp is missing" in found[0]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"files": {}}', '{"algorithm": "md5", "files": {}}',
     '{"algorithm": "sha256", "files": 3}', '{"algorithm": "sha256", "files": {"a": 3}}',
     '{"algorithm": "sha256", "files": {"/etc/passwd": "x"}}',
     '{"algorithm": "sha256", "files": {"../x": "x"}}',
     "[" * 100_000],
)  # fmt: skip
def test_a_malformed_manifest(written, text):
    (written / "integrity.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"integrity.json.*take another copy"):
        check_integrity(written)


def test_a_conversion_writes_checksums_of_its_folders_too(stored):
    check_integrity(stored)
    edit_json(stored / "hf" / "config.json", rope_theta=7.0)
    with pytest.raises(CheckpointError, match=r"hf/config.json is not what was written"):
        check_integrity(stored)


def test_all_of_a_directory_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    partial, final = tmp_path / ".new.partial", tmp_path / "new"
    (partial / "inner").mkdir(parents=True)
    (partial / "a").write_text("a")
    (partial / "inner" / "b").write_text("b")
    final.mkdir()
    (final / "old").write_text("old")
    flushed = []

    def fsync(descriptor, real=os.fsync):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append((path.relative_to(tmp_path).as_posix(), (final / "a").exists()))
        real(descriptor)

    monkeypatch.setattr(publishing.os, "fsync", fsync)
    publish(partial, final)
    assert sorted(flushed) == sorted(
        [(f".new.partial{name}", False) for name in ("", "/a", "/inner", "/inner/b")] + [(".", True)]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
    assert sorted(path.relative_to(final).as_posix() for path in final.rglob("*")) == [
        "a",
        "inner",
        "inner/b",
    ]


# ------------------------------------------------------------------------------------------ --load


def load_what_is_damaged(world, directory):
    """What loading says of a checkpoint that training saved: as it was, and damaged in several ways."""
    from megatron_ibpo.config import ParallelConfig
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint
    from megatron_ibpo.weights.formats.load import load_hf
    from support import planned
    from support.train_sequences import sequences
    from support.trainers import config_for, open_trainer

    hf_dir = make_qwen3(directory / "hf", 3)
    config = config_for(ParallelConfig())
    trainer, _, _ = open_trainer(world, hf_dir, config)
    planned.update(trainer, sequences(6))
    saved = save_checkpoint(trainer, directory / "checkpoints", 1, {})

    def said(damage):
        whole = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
        damage()
        try:
            load_checkpoint(trainer, saved)
            return ""
        except CheckpointError as error:
            return str(error)
        finally:
            for path, data in whole.items():
                path.write_bytes(data)

    largest = max(saved.glob("*.distcp"), key=lambda path: path.stat().st_size)
    manifest = saved / "integrity.json"

    def flip():
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(data)

    def garble_without_checksums():
        manifest.unlink()
        for path in saved.glob("__*.distcp"):
            path.write_bytes(bytes(path.stat().st_size))

    def truncate_without_checksums():
        manifest.unlink()
        largest.write_bytes(largest.read_bytes()[:-1000])

    answers = [
        said(lambda: None),
        said(flip),
        said(garble_without_checksums),
        said(truncate_without_checksums),
    ]

    def said_of_nan_in(tensor, step):
        with torch.no_grad():
            tensor.view(-1)[5] = math.nan
        broken = save_checkpoint(trainer, directory / "checkpoints", step, {})
        try:
            load_checkpoint(trainer, broken)
            return ""
        except CheckpointError as error:
            return str(error)

    means = next(iter(trainer.optimizer.optimizer.state.values()))
    answers.append(said_of_nan_in(means["exp_avg_sq"], 2))
    answers.append(said_of_nan_in(next(trainer.chunks[0].parameters()), 3))
    weights = load_file(hf_dir / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = math.inf
    save_file(weights, hf_dir / "model.safetensors", {"format": "pt"})
    try:
        load_hf([chunk.module for chunk in trainer.chunks], read_hf_config(hf_dir), hf_dir)
        answers.append("")
    except CheckpointError as error:
        answers.append(str(error))
    return answers


@pytest.mark.world
@pytest.mark.slow
def test_training_does_not_go_on_from_what_is_damaged(tmp_path):
    """Slow for its trainer; each check by itself is tested above."""
    (whole, flipped, garbled, truncated, nan_mean, nan, hf) = run_ranks(load_what_is_damaged, 1, tmp_path)[0]
    assert whole == ""
    assert ".distcp is not what was written: its checksum differs" in flipped
    assert "cannot be loaded into this model" in garbled or "was not read" in garbled
    assert "the file is damaged: it ends at byte" in truncated
    assert "holds NaN or infinity" in nan
    assert "the optimizer's exp_avg_sq holds NaN or infinity" in nan_mean
    assert "model.layers.1.mlp.up_proj.weight holds NaN or infinity" in hf
    assert all("\n" not in text for text in (flipped, garbled, truncated, nan, nan_mean, hf))


def test_the_conversion_of_a_whole_checkpoint_still_works(stored, tmp_path):
    megatron_to_hf(stored, tmp_path / "back", ALONE)
    check_integrity(tmp_path / "back")
