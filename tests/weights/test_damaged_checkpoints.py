"""Damaged checkpoints are refused in one line that names the file, before anything is taken from them."""

import json
import math
import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.run.cost import Spent
from megatron_ibpo.weights.formats import directories
from megatron_ibpo.weights.formats.directories import publish
from megatron_ibpo.weights.formats.integrity import check_integrity, is_inside, write_integrity
from megatron_ibpo.weights.formats.load import check_finite, is_finite
from megatron_ibpo.weights.formats.mapped_tensors import MappedFiles
from megatron_ibpo.weights.formats.run_state import load_run_state, read_layout
from megatron_ibpo.weights.formats.torch_dist import StoredCheckpoint
from megatron_ibpo.weights.weight_errors import CheckpointError
from support.conversions import QKV, edit_json, refuse, refuse_back, with_metadata
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
            source, target, CheckpointError, INDEX, f"{NAME} should be in {file!r}", allow_pickle=allow_pickle
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


def with_header(header):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(384)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", HUGE) + b"{}",
        with_header({NAME: {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}}),
        with_header({NAME: {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 384]}}),
        with_header({NAME: {"dtype": "F32", "shape": [96], "data_offsets": [HUGE, HUGE + 384]}}),
        with_header({NAME: {"dtype": "F32", "shape": [-96], "data_offsets": [0, 384]}}),
        with_header({NAME: {"dtype": "F99", "shape": [96], "data_offsets": [0, 384]}}),
        with_header({NAME: 3}),
        with_header([]),
    ],
)
def test_a_header_that_ends_early_or_has_sizes_that_no_memory_holds(here, content):
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


def place_of(stored):
    return next(place for index, place in StoredCheckpoint(stored).places.items() if index.fqn == QKV)


def tensor(**values):
    return lambda metadata: vars(metadata.state_dict_metadata[QKV]).update(values)


def piece(**values):
    """Values of a dataclass that is frozen."""
    return lambda metadata: vars(metadata.state_dict_metadata[QKV].chunks[0]).update(values)


def place(**values):
    def edit(metadata):
        for index, own in metadata.storage_data.items():
            if index.fqn == QKV:
                vars(own).update(values)

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        pytest.param(tensor(size=torch.Size([HUGE, 96])), (QKV, "asks for"), id="10^17 elements"),
        *(
            pytest.param(edit, ("take another copy",), id=name)
            for name, edit in {
                "a piece of 10^17 elements": piece(sizes=torch.Size([HUGE, 96])),
                "a piece beyond its tensor": piece(offsets=torch.Size([HUGE, 0])),
                "a size that is text": tensor(size="many"),
                "no tensors": lambda metadata: setattr(metadata, "state_dict_metadata", None),
                "pieces that are numbers": tensor(chunks=[3]),
                "a tensor that is a number": lambda metadata: metadata.state_dict_metadata.update({QKV: 3}),
                "10^15 bytes": place(length=HUGE),
                "from byte 10^15": place(offset=HUGE),
                "from byte -1": place(offset=-1),
                "a length that is text": place(length="all"),
                "another directory": place(relative_path="../../outside.distcp"),
                "an absolute file": place(relative_path="/etc/passwd"),
                "a file that is a number": place(relative_path=3),
            }.items()
        ),
    ],
)
def test_metadata_that_describes_what_is_not_there(stored, tmp_path, edit, words):
    (tmp_path.parent / "outside.distcp").write_bytes(bytes(10**6))
    with_metadata(stored, edit)
    refuse_back(stored, tmp_path / "out" / "back", CheckpointError, str(stored), *words)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_distcp_file_is_named(stored, tmp_path, share):
    file = stored / place_of(stored).relative_path
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    refuse_back(
        stored, tmp_path / "out" / "back", CheckpointError, f"{file} cannot be read, the file is damaged"
    )


def test_a_compressed_tensor_is_not_unpacked(stored, tmp_path):
    """A thousand bytes would become a gigabyte."""
    file = stored / "bomb.distcp"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))
    with_metadata(stored, place(relative_path=file.name, offset=0, length=file.stat().st_size))
    refuse_back(stored, tmp_path / "out" / "back", CheckpointError, "bomb.distcp", QKV, "compressed")


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
    assert "config.json has 1,000,000,000,000 bytes; such a file may have at most" in str(refused.value)


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

    monkeypatch.setattr(directories.os, "fsync", fsync)
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
    """Return what loading says of a checkpoint that training saved: as it was, and damaged in several
    ways."""
    from megatron_ibpo.config import ParallelConfig
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint
    from megatron_ibpo.weights.formats.load import load_hf
    from support import planned
    from support.train_sequences import sequences
    from support.trainers import config_for, open_trainer

    hf_dir = make_qwen3(directory / "hf", 3)
    trainer, _, _ = open_trainer(world, hf_dir, config_for(ParallelConfig()))
    planned.update(trainer, sequences(6))

    def save(step):
        return save_checkpoint(trainer, directory / "checkpoints", step, {})

    def said(load, *arguments):
        try:
            load(*arguments)
            return ""
        except CheckpointError as error:
            return str(error)

    saved = save(1)
    whole = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    largest = max(saved.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = whole[largest]
    half = len(data) // 2
    answers = [said(load_checkpoint, trainer, saved)]
    for without_checksums, damage in (
        (False, {largest: data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]}),
        (True, {path: bytes(path.stat().st_size) for path in saved.glob("__*.distcp")}),
        (True, {largest: data[:-1000]}),
    ):
        for path, content in (whole | damage).items():
            path.write_bytes(content)
        if without_checksums:
            (saved / "integrity.json").unlink()
        answers.append(said(load_checkpoint, trainer, saved))

    means = next(iter(trainer.optimizer.optimizer.state.values()))
    for step, tensor in ((2, means["exp_avg_sq"]), (3, next(trainer.chunks[0].parameters()))):
        with torch.no_grad():
            tensor.view(-1)[5] = math.nan
        answers.append(said(load_checkpoint, trainer, save(step)))
    weights = load_file(hf_dir / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = math.inf
    save_file(weights, hf_dir / "model.safetensors", {"format": "pt"})
    modules = [chunk.module for chunk in trainer.chunks]
    answers.append(said(load_hf, modules, read_hf_config(hf_dir), hf_dir))
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
