import random
import shutil
import struct

import gguf
import numpy as np
import pytest
from convert_gguf_to_hf import Arguments, main

from megatron_ibpo.basics.entry_point import BAD_INPUT, DONE, command

HIDDEN, FEED_FORWARD, VOCABULARY, LAYERS = 32, 64, 40, 2
NUMBERS = {
    "block_count": LAYERS, "context_length": 64, "embedding_length": HIDDEN, "vocab_size": VOCABULARY,
    "feed_forward_length": FEED_FORWARD, "attention.head_count": 4, "attention.head_count_kv": 2,
}  # fmt: skip


def tiny_gguf(path):
    writer, draw = gguf.GGUFWriter(str(path), "llama"), np.random.default_rng(0)
    for name, number in NUMBERS.items():
        writer.add_uint32(f"llama.{name}", number)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["!!", *(chr(ord("!") + number) for number in range(VOCABULARY - 1))])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        own = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN)}
        own |= {"attn_k": (HIDDEN // 2, HIDDEN), "attn_v": (HIDDEN // 2, HIDDEN)}
        own |= {"attn_output": (HIDDEN, HIDDEN), "ffn_down": (HIDDEN, FEED_FORWARD)}
        own |= {"ffn_gate": (FEED_FORWARD, HIDDEN), "ffn_up": (FEED_FORWARD, HIDDEN)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
def test_sound_gguf_files_convert_and_damaged_ones_are_refused(tmp_path, capfd):
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

    layers, damaged = "llama.block_count", "it is damaged"
    for data, says in (
        (b"", "empty file"),
        (b"PK\3\4" + sound[4:], "GGUF magic invalid"),
        (put(4, "<I", 9), "version 9"),
        (sound[:100], "cut off"),
        (sound[:-2000], "cut off"),
        (put(8, "<Q", 2**62), "cut off"),  # tensors
        (put(8, "<Q", 20), "missing"),
        (put(16, "<Q", 2**63), "cut off"),  # fields
        (put(24, "<Q", 2**40), "cut off"),  # length of a key
        (sound.replace(layers.encode(), b"\xff" * len(layers)), "utf-8"),
        (sound.replace(layers.encode() + b"\4", layers.encode() + b"\x63"), "is not a valid GGUFValueType"),
        (put(layers, "<I", 10**9), "1000000000 layers"),
        (put("llama.embedding_length", "<I", 2**31 - 4), damaged),
        (put("llama.vocab_size", "<I", 2**31 - 1), "vocab_size"),
        (put("token_embd.weight", "<Q", 2**50), "cut off"),
        (put("token_embd.weight", "<Q", 2**63), damaged),  # its size overflows
        (sound.replace(b"! !", b"! ?"), "merge '! ?'"),
        (sound.replace(b"llama", b"lambo"), damaged),
    ):
        status, said = convert(data)
        assert status == BAD_INPUT, says
        (line,) = (line for line in said.splitlines() if line.startswith("error: "))
        assert str(path) in line, (data, says)
        assert says in line
        assert not out.exists(), (data, says)
