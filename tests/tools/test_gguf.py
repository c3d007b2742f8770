"""GGUF files to Hugging Face checkpoints: a sound one is read, a damaged one is refused in a line."""

import random
import shutil
import struct

import pytest
from convert_gguf_to_hf import Arguments, main

from megatron_ibpo.basics.entry_point import BAD_INPUT, DONE, command
from support.tiny_gguf import tiny_gguf


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.fixture
def converted(tmp_path, capfd):
    """(exit status, stderr) of the tool, given a file's bytes."""

    def convert(data):
        path = tmp_path / "damaged.gguf"
        path.write_bytes(data)
        status = command(main)(Arguments(tmp_path / "out", path))
        return status, capfd.readouterr().err

    return convert


def test_a_sound_file_is_converted(converted, sound, tmp_path):
    status, said = converted(sound)
    assert status == DONE, said
    assert (tmp_path / "out/model.safetensors").is_file()
    assert (tmp_path / "out/tokenizer.json").is_file()


def number_after(data, key, value, form="<I"):
    """The file with the number of a key replaced."""
    at = data.index(key.encode()) + len(key) + 4  # the type comes first
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


def dimension_of(data, tensor, value):
    at = data.index(tensor.encode()) + len(tensor) + 4
    return data[:at] + struct.pack("<Q", value) + data[at + 8 :]


DAMAGE = {
    "empty": (lambda data: b"", "not a GGUF file"),
    "another format": (lambda data: b"PK\3\4" + data[4:], "not a GGUF file"),
    "version": (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "version 9"),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "version 50331648"),
    "cut in the header": (lambda data: data[:100], "cut off"),
    "cut in the weights": (lambda data: data[:-2000], "beyond the end of the file"),
    "tensor count": (lambda data: data[:8] + struct.pack("<Q", 2**62) + data[16:], "cut off"),
    "one tensor less": (lambda data: data[:8] + struct.pack("<Q", 20) + data[16:], "missing"),
    "field count": (lambda data: data[:16] + struct.pack("<Q", 2**63) + data[24:], "cut off"),
    "a key's length": (lambda data: data[:24] + struct.pack("<Q", 2**40) + data[32:], "cut off"),
    "a key that is no text": (lambda data: data.replace(b"llama.block_count", b"\xff" * 17), "utf-8"),
    "an unknown type": (
        lambda data: data.replace(b"llama.block_count" + b"\4", b"llama.block_count" + b"\x63"),
        "type 99",
    ),
    "layers": (lambda data: number_after(data, "llama.block_count", 10**9), "1000000000 layers"),
    "width": (
        lambda data: number_after(data, "llama.embedding_length", 2**31 - 4),
        "cannot be read; it is damaged",
    ),
    "heads of nothing": (
        lambda data: number_after(data, "llama.attention.head_count", 0),
        "cannot be read; it is damaged",
    ),
    "vocabulary": (lambda data: number_after(data, "llama.vocab_size", 2**31 - 1), "vocab_size"),
    "a tensor's size": (
        lambda data: dimension_of(data, "token_embd.weight", 2**50),
        "beyond the end of the file",
    ),
    "a tensor's sizes that overflow": (
        lambda data: dimension_of(data, "token_embd.weight", 2**63),
        "beyond the end of the file",
    ),
    "merges": (lambda data: data.replace(b"! !", b"! ?"), "merge '! ?'"),
    "another model": (lambda data: data.replace(b"llama", b"lambo"), "cannot be read; it is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_in_one_line_before_memory_is_taken(converted, sound, tmp_path, damage):
    change, says = DAMAGE[damage]
    status, said = converted(change(sound))
    assert status == BAD_INPUT, said
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert str(tmp_path / "damaged.gguf") in line
    assert says in line
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_no_byte_of_the_header_can_be_changed_so_that_a_traceback_comes(converted, sound, tmp_path):
    draw, out = random.Random(0), tmp_path / "out"
    for _ in range(25):
        at = draw.randrange(2_000)
        status, said = converted(sound[:at] + draw.randbytes(1) + sound[at + 1 :])
        assert status in (DONE, BAD_INPUT), said
        assert "Traceback" not in said
        if out.exists():
            shutil.rmtree(out)
