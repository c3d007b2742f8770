"""Prompts and tokenizers: everything between files (or generated tasks) and token ids."""

from pathlib import Path
from typing import Literal

from megatron_ibpo.config import DataConfig
from megatron_ibpo.data.generated import SCHEME, generated_prompts
from megatron_ibpo.data.prompts import PromptSource
from megatron_ibpo.data.rows import OWN_SCHEME, own_rows, prompts_of_rows, read_jsonl
from megatron_ibpo.data.templates import CorrectionTemplate, PromptSuffixes
from megatron_ibpo.data.tiny_tokenizer import make_tiny_tokenizer
from megatron_ibpo.data.tokenizer import DataError, Tokenizer, load_tokenizer, thinking_marks, token_texts
from megatron_ibpo.data.worked_solutions import worked_solution

__all__ = [
    "CorrectionTemplate",
    "DataError",
    "PromptSource",
    "PromptSuffixes",
    "Tokenizer",
    "load_tokenizer",
    "make_tiny_tokenizer",
    "open_source",
    "thinking_marks",
    "token_texts",
    "worked_solution",
]


def open_source(
    spec: str,
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    split: Literal["train", "eval"],
    max_prompt_len: int | None = None,
) -> PromptSource:
    """Open `PATH.jsonl`, `reasoning_gym://TASK?parameter=value…` or `import://package.module:function`.

    Args:
        split: training prompts come in an order drawn by `data.data_seed`; a file's evaluation prompts in
            the file's order. Generated splits never share a question; that two files do not is theirs to
            see to.
        max_prompt_len: tokens that a prompt may have, so that a response still fits the context.

    Raises:
        DataError: the source or one of its prompts cannot be used.
    """
    if spec.startswith(SCHEME):
        return generated_prompts(spec, tokenizer, data, split=split, max_prompt_len=max_prompt_len)
    path = Path(spec)
    if spec.startswith(OWN_SCHEME):
        rows = own_rows(spec, split)
    elif path.suffix == ".jsonl":
        rows = read_jsonl(path)
    else:
        raise DataError(
            f"prompts {spec!r}: expected PATH.jsonl, {SCHEME}TASK?parameter=value or "
            f"{OWN_SCHEME}package.module:function"
        )
    return prompts_of_rows(
        rows, tokenizer, data, spec=spec, shuffled=split == "train", max_prompt_len=max_prompt_len
    )
