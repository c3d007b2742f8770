"""Tokenizers of the tiny policies: characters of arithmetic, or the words of some texts, and whole
instructions as single tokens.

They are real Hugging Face tokenizers: they save, load and work in vLLM like any other. Every row of the
embedding can be shown: an id that a model should never produce is visible in the decoded text, where a
verifier sees it, instead of vanishing.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_ibpo.data.prompts import candidate_heading, correction_instruction

TINY_VOCAB_SIZE = 64
"""Number of ids of the tokenizer, and of rows of the tiny model's embedding."""

CHAIN_SUM_HEAD = "State the final answer to the following arithmetic problem: "
"""Text before the expression in reasoning_gym's chain_sum."""

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_CHARACTERS = "0123456789+-=#?|*/()., \n"
_INSTRUCTIONS = (
    candidate_heading(1),
    candidate_heading(2),
    correction_instruction(2),
    correction_instruction(1),
)
_WORDS = r" ?[A-Za-z]+|\d|."
"""A word with the space before it, a digit, or any other character."""


def make_tiny_tokenizer(phrases: Sequence[str] = ()) -> Any:
    """Return a `PreTrainedTokenizerFast` with ids 0..63: `<pad> <bos> <eos> <unk>`, characters, phrases,
    unused.

    Args:
        phrases: phrases of another task, in place of unused ids.

    `<bos>` is put before every prompt. Any text made of its characters and phrases comes back exactly.
    """
    return _word_level(_CHARACTERS, (CHAIN_SUM_HEAD, *_INSTRUCTIONS, *phrases), r".|\n", TINY_VOCAB_SIZE)


def make_word_tokenizer(texts: Iterable[str]) -> Any:
    """Return a `PreTrainedTokenizerFast` that knows the words of `texts`, digits and marks. The number of ids
    is the next multiple of 64. `<bos>` is put before every prompt."""
    words = {piece for text in texts for piece in re.findall(_WORDS, text)}
    pieces = sorted(words | set(_CHARACTERS))
    needed = len(_SPECIAL) + len(pieces) + len(_INSTRUCTIONS)
    return _word_level(pieces, _INSTRUCTIONS, _WORDS + r"|\n", -(-needed // 64) * 64)


def _word_level(words: Sequence[str], phrases: Sequence[str], split: str, size: int) -> Any:
    """Return a tokenizer that looks up words and phrases.

    Args:
        phrases: texts that are one token each, wherever they occur.
        split: regular expression of the pieces that are looked up.
        size: number of ids; unused ones get names without meaning.
    """
    from tokenizers import AddedToken, Regex, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers.decoders import Fuse
    from transformers import PreTrainedTokenizerFast

    pieces = [*_SPECIAL, *words, *phrases]
    pieces += [f"<unused{index}>" for index in range(len(pieces), size)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = RustTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(split), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
