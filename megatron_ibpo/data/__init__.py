"""Prompts and tokenizers: everything between files (or generated tasks) and token ids."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from megatron_ibpo.config import DataConfig, EnvironmentConfig
from megatron_ibpo.data.generated import SCHEME, generated_prompts
from megatron_ibpo.data.held_out import file_prompts
from megatron_ibpo.data.order import mixed
from megatron_ibpo.data.pass_rates import PassRates, open_pass_rates
from megatron_ibpo.data.prompts import (
    CorrectionTemplate,
    PromptSource,
    PromptSuffixes,
    ResponseText,
    in_environment,
)
from megatron_ibpo.data.row_prompts import OWN_SCHEME, Reader, own_rows, prompts_of_rows, read_prompts
from megatron_ibpo.data.sources import Tally, read_spec
from megatron_ibpo.data.tokenizer import DataError, Tokenizer, TokenTexts, load_tokenizer

__all__ = [
    "CorrectionTemplate",
    "DataError",
    "PassRates",
    "PromptSource",
    "PromptSuffixes",
    "ResponseText",
    "TokenTexts",
    "Tokenizer",
    "load_tokenizer",
    "open_pass_rates",
    "open_source",
    "open_sources",
    "prompts_of_rows",
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
    holds_out: bool = False,
    environment: EnvironmentConfig | None = None,
) -> PromptSource:
    """Open all sources as one, mixed in proportion to their weights. In a mixture, a generated task whose
    settings name no verifier is graded by reasoning_gym.

    Args:
        reader_type: what rows of files and functions hold: prompts, or demonstrations.
        environment: names the environment of all rows that name none, and those that rows may name.

    Raises:
        DataError: see `open_source`.
    """
    environment = environment or EnvironmentConfig()
    sources = [read_spec(spec) for spec in specs]
    if len(sources) > 1:
        sources = [
            replace(source, rm_type="reasoning_gym")
            if source.location.startswith(SCHEME) and source.rm_type is None
            else source
            for source in sources
        ]
    readers = [
        reader_type(
            tokenizer,
            data,
            source,
            Tally(source.location),
            max_prompt_len,
            rates,
            environment=environment,
            split=split,
        )
        for source in sources
    ]
    opened = [_opened(reader, holds_out=holds_out) for reader in readers]
    source = opened[0] if len(opened) == 1 else mixed(opened, [source.weight for source in sources])
    return in_environment(source, environment.environment)


def open_source(
    spec: str,
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    split: Literal["train", "eval"],
    max_prompt_len: int | None = None,
    rates: PassRates | None = None,
    holds_out: bool = False,
    environment: EnvironmentConfig | None = None,
) -> PromptSource:
    """Open a file or directory, `reasoning_gym://TASK?parameter=value…` or
    `import://package.module:function`.

    Args:
        split: training prompts come in an order drawn by `data.data_seed`; a file's evaluation prompts come
            in the file's order. Generated splits never share a question; for files that is up to the user.
        max_prompt_len: tokens that a prompt may have, so that a response still fits the context.
        rates: pass rates for --filter-pass-rate.
        holds_out: both splits are opened from this source, so rows of a file that names no part for
            evaluation are divided between them.
        environment: as in `open_sources`.

    Raises:
        DataError: the source or one of its prompts cannot be used.
    """
    return open_sources(
        (spec,),
        tokenizer,
        data,
        split=split,
        max_prompt_len=max_prompt_len,
        rates=rates,
        holds_out=holds_out,
        environment=environment,
    )


def _opened(reader: Reader, *, holds_out: bool) -> PromptSource:
    location = reader.source.location
    if location.startswith(SCHEME):
        opened, held_out = generated_prompts(reader), "other items of the same task"
    elif location.startswith(OWN_SCHEME):
        opened = read_prompts(own_rows(location, reader.split), reader)
        held_out = 'its rows for "eval"'
    elif "://" in location:
        raise DataError(
            f"prompts {location!r}: expected a file or directory, {SCHEME}TASK?parameter=value or "
            f"{OWN_SCHEME}package.module:function"
        )
    else:
        opened, held_out = file_prompts(reader, holds_out=holds_out)
    if not holds_out or reader.split == "train":
        return opened
    note = f"{location}: no --eval-prompt-data is given, so evaluation is on {held_out}"
    return replace(opened, notes=(*opened.notes, note))
