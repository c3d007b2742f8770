"""Prompts and tokenizers: everything between files (or generated tasks) and token ids."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megatron_ibpo.config import DataConfig
from megatron_ibpo.data.files import chosen_files, open_table, small_rows
from megatron_ibpo.data.generated import SCHEME, generated_prompts
from megatron_ibpo.data.large_files import prompts_of_table
from megatron_ibpo.data.left_out import Tally
from megatron_ibpo.data.mixture import mixed
from megatron_ibpo.data.pass_rates import PassRates, open_pass_rates
from megatron_ibpo.data.prompts import PromptSource
from megatron_ibpo.data.row_prompts import OWN_SCHEME, Reader, Rows, own_rows, prompts_of_rows
from megatron_ibpo.data.sources import SourceSpec, read_spec
from megatron_ibpo.data.templates import CorrectionTemplate, PromptSuffixes
from megatron_ibpo.data.tokenizer import DataError, Tokenizer, load_tokenizer, thinking_marks, token_texts

__all__ = [
    "CorrectionTemplate",
    "DataError",
    "PassRates",
    "PromptSource",
    "PromptSuffixes",
    "Tokenizer",
    "load_tokenizer",
    "open_pass_rates",
    "open_source",
    "open_sources",
    "prompts_of_rows",
    "thinking_marks",
    "token_texts",
]


def open_sources(
    specs: Sequence[str],
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    split: Literal["train", "eval"],
    max_prompt_len: int | None = None,
    rates: PassRates | None = None,
    reader_type: type[Reader] = Reader,
) -> PromptSource:
    """Open all sources as one, mixed in proportion to their weights. In a mixture, a generated task whose
    settings name no verifier is graded by reasoning_gym.

    Args:
        reader_type: what rows of files and functions hold: prompts, or demonstrations.

    Raises:
        DataError: see `open_source`.
    """
    sources = [read_spec(spec) for spec in specs]
    if len(sources) > 1:
        sources = [
            replace(source, rm_type="reasoning_gym")
            if source.location.startswith(SCHEME) and source.rm_type is None
            else source
            for source in sources
        ]
    opened = [
        _opened(
            source,
            tokenizer,
            data,
            split=split,
            max_prompt_len=max_prompt_len,
            rates=rates,
            reader_type=reader_type,
        )
        for source in sources
    ]
    return opened[0] if len(opened) == 1 else mixed(opened, [source.weight for source in sources])


def open_source(
    spec: str,
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    split: Literal["train", "eval"],
    max_prompt_len: int | None = None,
    rates: PassRates | None = None,
) -> PromptSource:
    """Open a file or directory, `reasoning_gym://TASK?parameter=value…` or
    `import://package.module:function`.

    Args:
        split: training prompts come in an order drawn by `data.data_seed`; a file's evaluation prompts come
            in the file's order. Generated splits never share a question; for files that is up to the user.
        max_prompt_len: tokens that a prompt may have, so that a response still fits the context.
        rates: pass rates for --filter-pass-rate.

    Raises:
        DataError: the source or one of its prompts cannot be used.
    """
    source = read_spec(spec)
    return _opened(source, tokenizer, data, split=split, max_prompt_len=max_prompt_len, rates=rates)


def _opened(
    source: SourceSpec,
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    split: Literal["train", "eval"],
    max_prompt_len: int | None,
    rates: PassRates | None,
    reader_type: type[Reader] = Reader,
) -> PromptSource:
    location, shuffled = source.location, split == "train"
    rows: Rows
    if location.startswith(SCHEME):
        generated = generated_prompts(source, tokenizer, data, split=split, max_prompt_len=max_prompt_len)
        note = f"{location}: --filter-pass-rate does not act on it, since its prompts never repeat"
        return generated if rates is None else replace(generated, notes=(note,))
    if location.startswith(OWN_SCHEME):
        rows = own_rows(location, split)
    elif "://" in location:
        raise DataError(
            f"prompts {location!r}: expected a file or directory, {SCHEME}TASK?parameter=value or "
            f"{OWN_SCHEME}package.module:function"
        )
    else:
        reader = reader_type(tokenizer, data, source, Tally(location), max_prompt_len, rates)
        files = chosen_files(Path(location), split, source.split)
        small = small_rows(files, reader.columns)
        if small is None:
            return prompts_of_table(open_table(files, reader.columns), reader, shuffled=shuffled)
        rows = small
    return prompts_of_rows(
        rows,
        tokenizer,
        data,
        spec=source,
        shuffled=shuffled,
        max_prompt_len=max_prompt_len,
        rates=rates,
        reader_type=reader_type,
    )
