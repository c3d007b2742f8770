"""Tokenizers of bytes, and those of model families, whose tokens for chats and templates they have."""

from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer

_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALLS = ("<tool_call>", "</tool_call>")
_QWEN_TAGS = (*_CALLS, "<tool_response>", "</tool_response>", "<think>", "</think>")
_ENDS = ("<|im_end|>", "<|endoftext|>")
_IMAGES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


class Family(NamedTuple):
    special: tuple  # special tokens, which decoding leaves out
    tags: tuple  # tokens that decoding shows
    ends: tuple  # tokens that end a turn, as in generation_config.json; the first is the tokenizer's


FAMILIES = {
    "qwen2_5": Family(_QWEN, _CALLS, _ENDS),
    "qwen3": Family(_QWEN, _QWEN_TAGS, _ENDS),
    "qwen3_instruct_2507": Family(_QWEN, _QWEN_TAGS, _ENDS),
    "qwen3_5": Family((*_QWEN, *_IMAGES), _QWEN_TAGS, _ENDS),
    "glm4_5": Family(
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_QWEN_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "llama3_2": Family(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
         "<|eot_id|>"),
        (), ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    ),
    "gpt_oss": Family(
        ("<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>",
         "<|call|>"),
        (), ("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
}  # fmt: skip


def byte_level(template=None, merges=()):
    return tagged_bytes(template, ("<|im_end|>", "<|im_start|>"), end="<|im_end|>", merges=merges)


def tagged_bytes(template, special, tags=(), *, end, merges=()):
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    bytes_only = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bytes_only.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags])
    bos = "<|begin_of_text|>" if "<|begin_of_text|>" in special else None
    library = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=end, bos_token=bos)
    library.chat_template = template
    return HuggingFaceTokenizer(library)


def family_tokenizer(name):
    family, template = FAMILIES[name], Path(__file__).parent / f"chat_templates/{name}.jinja"
    return tagged_bytes(template.read_text(), family.special, family.tags, end=family.ends[0])


def end_ids(name, tokenizer):
    return [tokenizer.encode(end)[0] for end in FAMILIES[name].ends]
