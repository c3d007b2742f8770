import gguf
import numpy as np

HIDDEN, FEED_FORWARD, VOCABULARY, LAYERS = 32, 64, 40, 2
NUMBERS = {
    "llama.block_count": LAYERS, "llama.context_length": 64, "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FEED_FORWARD, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.vocab_size": VOCABULARY,
}  # fmt: skip
FLOATS = {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0}


def tiny_gguf(path):
    writer, draw = gguf.GGUFWriter(str(path), "llama"), np.random.default_rng(0)
    for name, number in NUMBERS.items():
        writer.add_uint32(name, number)
    for name, value in FLOATS.items():
        writer.add_float32(name, value)
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
