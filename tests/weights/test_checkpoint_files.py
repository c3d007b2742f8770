"""What lies beside a checkpoint's tensors: checksums, layout, state of the run; and which ones are kept."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_ibpo.config import Config
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.run.cost import Spent
from megatron_ibpo.weights.formats import directories, retention
from megatron_ibpo.weights.formats.directories import publish
from megatron_ibpo.weights.formats.integrity import changed_files, check_integrity, write_integrity
from megatron_ibpo.weights.formats.load import check_finite, is_finite
from megatron_ibpo.weights.formats.retention import Keep
from megatron_ibpo.weights.formats.run_state import load_run_state, read_layout
from megatron_ibpo.weights.weight_errors import CheckpointError
from support import planned
from support.checkpoint_bytes import tensors_of, with_weights
from support.layouts import layout
from support.tiny_models import make_qwen3
from support.train_sequences import sequences
from support.trainers import config_for, open_trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_no_number_is_found_wherever_it_is(dtype):
    limits = torch.finfo(dtype)
    assert is_finite(torch.tensor([limits.max, limits.min, limits.tiny], dtype=dtype))
    assert is_finite(torch.ones(0, dtype=dtype))
    for value in (math.nan, math.inf, -math.inf):
        for place in (0, 500, 999):
            tensor = torch.linspace(-1, 1, 1000).to(dtype)
            tensor[place] = value
            with pytest.raises(CheckpointError, match=r"/where: some.weight holds NaN or infinity"):
                check_finite(tensor.view(10, 100), Path("/where"), "some.weight")


def test_a_run_state_and_a_layout_are_read_and_malformed_ones_refused(tmp_path):
    def refused(read, name, text, words=""):
        (tmp_path / name).write_text(text)
        with pytest.raises(CheckpointError, match=rf"{name} cannot be read: .*{words}.*take another copy"):
            read(tmp_path)

    (tmp_path / "run_state.json").write_text('{"step": 7, "spent": {"tokens": 1.5}}')
    state = load_run_state(tmp_path)
    assert (state["step"], Spent.read(state["spent"]).tokens) == (7, 1.5)
    for text in ("{", "[]", "{}", '{"step": -1}', '{"step": true}', '{"step": 9223372036854775808}'):
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
        ({"parallel": parallel | {"context_parallel_size": "1"}}, "context_parallel_size must be"),
        ({"parallel": parallel | {"use_distributed_optimizer": 1}}, "use_distributed_optimizer must be true"),
        ({"virtual_stages": "2"}, "virtual_stages must be a whole number"),
    ):
        refused(read_layout, "layout.json", json.dumps(whole | changes), words)


def test_what_is_not_as_it_was_written_is_named(tmp_path):
    names, manifest = ("a.distcp", "b.distcp", "critic/c.distcp"), tmp_path / "integrity.json"
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(os.urandom(10_000))
    write_integrity(tmp_path)
    check_integrity(tmp_path)
    for name in names:
        whole = (tmp_path / name).read_bytes()
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
    for words in ("b.distcp is a pipe", "c.distcp: Too many levels of symbolic links", "000,000,000 bytes"):
        assert words in str(refused.value)


def test_all_of_a_directory_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
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
@pytest.mark.slow  # for its trainer; each check by itself is tested here and in test_convert_faults.py
def test_training_does_not_go_on_from_what_is_damaged(world, tmp_path):
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint
    from megatron_ibpo.weights.formats.load import load_hf

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


def test_the_newest_stay_and_every_so_many():
    for keep, last, gone in (
        (Keep(1), 10, [2, 4, 6, 8]),
        (Keep(9), 10, []),
        (Keep(2, every=4), 10, [2, 6]),
        (Keep(1), 6, [2, 4]),  # what a run wrote before it went back is left alone
    ):
        assert retention.superseded([10, 2, 8, 4, 6], last, keep) == gone


def test_removing_leaves_what_is_no_checkpoint_and_what_is_hidden(tmp_path):
    names = {"step_000001", "step_000002", "step_000003", "step_final", ".step_000004.partial"}
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("1")
    retention.remove_superseded(tmp_path, 3, Keep(1))
    assert {path.name for path in tmp_path.iterdir()} == names - {"step_000001", "step_000002"}
    retention.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step_000003", "step_final"}


def test_the_disk_holds_what_is_kept_and_one_that_is_being_written():
    """The run takes 100 steps, and keeps the newest two unless a case says otherwise."""
    for changes, kept in (
        ({"save_interval_minutes": None}, (1, 1)),
        ({"save_interval_minutes": None, "save_interval": 60}, (2, 1)),
        ({"save_interval_minutes": None, "save_interval": 10, "keep_checkpoints": 100}, (10, 1)),
        ({}, (3, 1)),
        ({"num_rollout": 1}, (1, 1)),
        ({"keep_checkpoint_every": 25}, (7, 1)),
        ({"export_interval": 25}, (3, 5)),
    ):
        run = replace(Config().run, **{"num_rollout": 100, "keep_checkpoints": 2, **changes})
        assert retention.kept_at_once(Config(run=run)) == kept
