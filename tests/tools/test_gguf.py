import random
import shutil
import struct

from convert_gguf_to_hf import Arguments, main

from megatron_ibpo.basics.entry_point import BAD_INPUT, DONE, command
from support.tiny_gguf import tiny_gguf


def test_a_sound_file_is_converted_and_a_damaged_one_refused_before_memory_is_taken(tmp_path, capfd):
    path, out, draw = tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "out", random.Random(0)
    sound = path.read_bytes()

    def convert(data):
        path.write_bytes(data)
        status, said = command(main)(Arguments(out, path)), capfd.readouterr().err
        assert "Traceback" not in said
        return status, said

    assert convert(sound)[0] == DONE
    for file in ("model.safetensors", "tokenizer.json"):
        assert (out / file).is_file()
    for at in (draw.randrange(2_000) for _ in range(25)):  # of the header
        assert convert(sound[:at] + draw.randbytes(1) + sound[at + 1 :])[0] in (DONE, BAD_INPUT)
        shutil.rmtree(out, ignore_errors=True)

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
        status, said = convert(data)
        assert status == BAD_INPUT, says
        (line,) = (line for line in said.splitlines() if line.startswith("error: "))
        assert str(path) in line
        assert says in line
        assert not out.exists()
