"""The tokenizer of the tiny agents: the marks of Qwen3's chat format, characters, and the texts of the two
environments as single tokens.

It is a real Hugging Face tokenizer with Qwen3's chat template (chat_template.jinja, without thinking). Any
ASCII text comes back exactly, so an environment can say what it likes.
"""

import json
from pathlib import Path
from typing import Any

from agent_prompts import GAME, QUESTION_TEXT
from guess_number import HIGHER, LOWER, NO_NUMBER
from use_calculator import CALCULATE, CANNOT_COMPUTE, UNREADABLE

from megatron_ibpo.data.prompts import candidate_heading, correction_instruction

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
"""Padding, the marks of a message, and what has no token of its own."""
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Marks that a decoded text shows."""
HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call>"
)
"""The template's text around the tools."""
CALL = ('{"name": "', CALCULATE["name"], '", "arguments": {"', "expression", '": "', '"}}')
"""Pieces of a call."""
FINAL_ANSWER = "The answer is "
PHRASES = (
    "system", "user", "assistant", HEADER, json.dumps(CALCULATE), '{"type": "function", "function": ', FOOTER,
    *CALL, *QUESTION_TEXT, *GAME, FINAL_ANSWER, UNREADABLE, CANNOT_COMPUTE, HIGHER, LOWER, NO_NUMBER,
    candidate_heading(1), candidate_heading(2), correction_instruction(1), correction_instruction(2),
)  # fmt: skip
"""Texts that are one token wherever they occur."""
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
MULTIPLE = 64
"""The number of ids is a multiple of it."""


def make_agent_tokenizer() -> Any:
    """Return the tokenizer as a `PreTrainedTokenizerFast`."""
    from tokenizers import AddedToken, Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers.decoders import Fuse
    from transformers import PreTrainedTokenizerFast

    pieces = [*SPECIAL, *MARKS, *PHRASES, *CHARACTERS]
    pieces += [f"<unused{number}>" for number in range(-len(pieces) % MULTIPLE)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = RustTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r".|\n"), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*MARKS, *PHRASES)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        unk_token=SPECIAL[3],
        additional_special_tokens=[SPECIAL[1]],
        chat_template=(Path(__file__).parent / "chat_template.jinja").read_text(),
        clean_up_tokenization_spaces=False,
    )
