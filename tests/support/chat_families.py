"""Tokenizers with the chat template and special tokens of published families: one token a byte."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer

_TEMPLATES = Path(__file__).parent / "chat_templates"
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALLS = ("<tool_call>", "</tool_call>")
_THOUGHTS = ("<think>", "</think>")
_ANSWERS = ("<tool_response>", "</tool_response>")
_IMAGES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@dataclass(frozen=True)
class Family:
    special: tuple[str, ...]  # special tokens, which decoding leaves out
    tags: tuple[str, ...]  # tokens that decoding shows
    ends: tuple[str, ...]
    """Tokens that end a turn, as in generation_config.json; the first is the tokenizer's."""


_QWEN_TAGS = (*_CALLS, *_ANSWERS, *_THOUGHTS)

FAMILIES = {
    "qwen2_5": Family(_QWEN, _CALLS, ("<|im_end|>", "<|endoftext|>")),
    "qwen3": Family(_QWEN, _QWEN_TAGS, ("<|im_end|>", "<|endoftext|>")),
    "qwen3_instruct_2507": Family(_QWEN, _QWEN_TAGS, ("<|im_end|>", "<|endoftext|>")),
    "qwen3_5": Family((*_QWEN, *_IMAGES), _QWEN_TAGS, ("<|im_end|>", "<|endoftext|>")),
    "glm4_5": Family(
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_QWEN_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "llama3_2": Family(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
         "<|eot_id|>"),
        (),
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    ),
    "gpt_oss": Family(
        ("<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>",
         "<|call|>"),
        (),
        ("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
}  # fmt: skip
"""Template's file → tokens."""


def family_tokenizer(name: str) -> HuggingFaceTokenizer:
    family = FAMILIES[name]
    return tagged_bytes(
        (_TEMPLATES / f"{name}.jinja").read_text(), family.special, family.tags, end=family.ends[0]
    )


def tagged_bytes(template, special, tags=(), *, end) -> HuggingFaceTokenizer:
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bytes_only.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags])
    bos = "<|begin_of_text|>" if "<|begin_of_text|>" in special else None
    library = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=end, bos_token=bos)
    library.chat_template = template
    return HuggingFaceTokenizer(library)


def end_ids(name: str, tokenizer: HuggingFaceTokenizer) -> list[int]:
    return [tokenizer.encode(end)[0] for end in FAMILIES[name].ends]
