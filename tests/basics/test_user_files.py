"""Files that a user may name and no program should read: pipes, devices, files of 10 GB, impossible sizes."""

import gzip
import json
import os
import re
import shutil

import pytest

from megatron_ibpo.basics import user_files
from megatron_ibpo.basics.user_files import UserFileError, read_user_file
from megatron_ibpo.commands import train
from megatron_ibpo.commands.search import main as search
from megatron_ibpo.config import DataConfig, read_yaml
from megatron_ibpo.data import DataError, load_tokenizer, open_sources, tables
from megatron_ibpo.evaluate.benchmarks import benchmark_rows
from megatron_ibpo.evaluate.stored_samples import read_results
from megatron_ibpo.journal.entries import records
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.report.metrics_log import read_rows
from megatron_ibpo.report.rollout_data import load_step
from megatron_ibpo.study.findings import read_findings
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats.checkpoint_files import check_integrity
from megatron_ibpo.weights.formats.gguf import gguf_to_hf
from megatron_ibpo.weights.formats.hugging_face import check_checkpoint
from megatron_ibpo.weights.formats.run_state import load_run_state
from support.paths import ROOT

TINY = ROOT / "examples/tiny_qwen3"


def put_ten_gigabytes(path):
    path.touch()
    os.truncate(path, 10**10)  # which take no room on the disk


def test_a_file_of_the_wrong_kind_is_refused_before_reading(tmp_path, monkeypatch):
    def rows(path):
        return open_sources([str(path)], tokenizer, DataConfig(), split="train")

    tokenizer = load_tokenizer(TINY)
    monkeypatch.setattr(user_files, "LINE_BYTES", 2**20)
    monkeypatch.setattr(tables, "LONGEST_LINE", 2**20)
    kinds = (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), put_ten_gigabytes)
    for name, read in {
        "recipe.yaml": lambda path: read_yaml(path, str(path)),
        "config.json": lambda path: read_hf_config(path.parent),
        "tokenizer.json": lambda path: load_tokenizer(path.parent),
        "tokenizer.model": load_tokenizer,
        "rows.jsonl": rows,
        "rows.parquet": rows,
        "aime.json": lambda path: list(benchmark_rows(str(path))),
        "results.json": lambda path: read_results(path.parent),
        "study.json": read_findings,
        "step_000001.json": load_step,
        "metrics.jsonl": read_rows,
        "run_state.json": lambda path: load_run_state(path.parent),
        "integrity.json": lambda path: check_integrity(path.parent),
        "model.gguf": lambda path: gguf_to_hf(path, path.with_name("out")),
    }.items():
        for number, put in enumerate(kinds):
            path = tmp_path / f"{number} {name}" / name
            path.parent.mkdir()
            put(path)
            with pytest.raises(ValueError, match=re.escape(name)):
                read(path)
    for name, read, why in (  # more bombs are in tests/data/test_bombs.py
        ("rows.jsonl.gz", rows, "not JSON"),
        ("aime.jsonl.gz", lambda path: [*benchmark_rows(str(path))], "longer than 1 MiB"),
    ):
        path = tmp_path / name
        path.write_bytes(gzip.compress(bytes(2**22)))
        with pytest.raises(ValueError, match=f"{name}.*{why}"):
            read(path)


def test_oversized_files_and_pipes_are_refused(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_user_file(path, 5) == b"12345"
    with pytest.raises(UserFileError, match="has 5 bytes; such a file may have at most 4"):
        read_user_file(path, 4)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserFileError, match="a is a pipe; expected a regular file"):
        next(records(path))


def changed(directory, name, **fields):
    """A copy of the tiny checkpoint with other fields in one of its files."""
    shutil.copytree(TINY, directory)
    path = directory / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return directory


def test_ids_of_a_tokenizer_are_bounded(tmp_path):
    for number in (2**31, 2**31 - 1, -1, 1.5, "x"):
        content = json.loads((TINY / "tokenizer.json").read_text())
        content["added_tokens"][0]["id"] = number
        hf = changed(tmp_path / f"hf {number}", "tokenizer.json", **content)
        with pytest.raises(DataError, match=r"tokenizer\.json: .* has the id .*; it must be a whole"):
            load_tokenizer(hf)


def test_plans_and_runs_refuse_a_model_with_an_impossible_setting(tmp_path, capfd):
    says = "rms_norm_eps must be above 0 and below 1, is 0"
    named = ["--hf-checkpoint", str(changed(tmp_path / "hf", "config.json", rms_norm_eps=0))]
    assert search(["--gpus", "8", "--hardware", "h100", *named]) == 2
    assert says in capfd.readouterr().err
    assert train.main(["--dry-run", *named]) == 2
    found = capfd.readouterr()
    assert says in found.out + found.err


def test_shapes_are_compared_with_the_files_before_memory_is_taken(tmp_path):
    hf = changed(tmp_path / "hf", "config.json", head_dim=10**9)
    with pytest.raises(CheckpointError, match=r"\(128, 96\), config\.json asks for \(4000000000, 96\)"):
        check_checkpoint(hf, read_hf_config(hf))
