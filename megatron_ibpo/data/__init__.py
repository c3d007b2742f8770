"""Prompts and tokenizers: everything between files (or generated tasks) and token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

from megatron_ibpo.config import DataConfig
from megatron_ibpo.data.errors import DataError
from megatron_ibpo.data.generated import SCHEME, GeneratedSource
from megatron_ibpo.data.jsonl import RowSource, read_jsonl
from megatron_ibpo.data.own_rows import OWN_SCHEME, own_rows
from megatron_ibpo.data.perturbation import PromptSuffixes
from megatron_ibpo.data.templates import CorrectionTemplate
from megatron_ibpo.data.tiny_tokenizer import make_tiny_tokenizer
from megatron_ibpo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_ibpo.data.vocabulary import thinking_marks, token_texts
from megatron_ibpo.data.worked_solutions import worked_solution
from megatron_ibpo.records import Prompt

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


class PromptSource(Protocol):
    """Prompts in a fixed endless order."""

    def __len__(self) -> int:
        """How many prompts there are before they repeat; 0 when they never end."""
        ...

    def batch(self, step: int, n: int) -> list[Prompt]:
        """Prompts step·n to step·n + n - 1 of the stream: a pure function, so resuming needs no state."""
        ...


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
        return GeneratedSource(
            spec,
            tokenizer,
            split=split,
            data_seed=data.data_seed,
            apply_chat_template=data.apply_chat_template,
            max_prompt_len=max_prompt_len,
        )
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
    return RowSource(
        rows,
        tokenizer,
        spec=spec,
        input_key=data.input_key,
        label_key=data.label_key,
        apply_chat_template=data.apply_chat_template,
        shuffle_seed=data.data_seed if split == "train" else None,
        max_prompt_len=max_prompt_len,
    )
