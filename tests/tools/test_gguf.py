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
        said = capfd.readouterr().err
        assert status in (DONE, BAD_INPUT), said
        assert "Traceback" not in said
        return status, said

    return convert


def test_a_sound_file_is_converted(converted, sound, tmp_path):
    status, said = converted(sound)
    assert status == DONE, said
    assert (tmp_path / "out/model.safetensors").is_file()
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_a_damaged_file_is_refused_in_one_line_before_memory_is_taken(converted, sound, tmp_path):
    def put(where, form, value):
        """The number of a key comes after its type, that of a tensor after the count of its dimensions."""
        at = where if isinstance(where, int) else sound.index(where.encode()) + len(where) + 4
        return sound[:at] + struct.pack(form, value) + sound[at + struct.calcsize(form) :]

    layers, beyond, damaged = "llama.block_count", "beyond the end of the file", "it is damaged"
    for data, says in (
        (b"", "not a GGUF file"),
        (b"PK\3\4" + sound[4:], "not a GGUF file"),
        (put(4, "<I", 9), "version 9"),
        (sound[:100], "cut off"),
        (sound[:-2000], beyond),
        (put(8, "<Q", 2**62), "cut off"),  # tensors
        (put(8, "<Q", 20), "missing"),
        (put(16, "<Q", 2**63), "cut off"),  # fields
        (put(24, "<Q", 2**40), "cut off"),  # length of a key
        (sound.replace(layers.encode(), b"\xff" * len(layers)), "utf-8"),
        (sound.replace(layers.encode() + b"\4", layers.encode() + b"\x63"), "type 99"),
        (put(layers, "<I", 10**9), "1000000000 layers"),
        (put("llama.embedding_length", "<I", 2**31 - 4), damaged),
        (put("llama.vocab_size", "<I", 2**31 - 1), "vocab_size"),
        (put("token_embd.weight", "<Q", 2**50), beyond),
        (put("token_embd.weight", "<Q", 2**63), beyond),  # its size overflows
        (sound.replace(b"! !", b"! ?"), "merge '! ?'"),
        (sound.replace(b"llama", b"lambo"), damaged),
    ):
        status, said = converted(data)
        assert status == BAD_INPUT, says
        (line,) = (line for line in said.splitlines() if line.startswith("error: "))
        assert str(tmp_path / "damaged.gguf") in line
        assert says in line
        assert not (tmp_path / "out").exists()


def test_no_byte_of_the_header_can_be_changed_so_that_a_traceback_comes(converted, sound, tmp_path):
    draw = random.Random(0)
    for _ in range(25):
        at = draw.randrange(2_000)
        converted(sound[:at] + draw.randbytes(1) + sound[at + 1 :])
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
