"""Prompts and tokenizers: everything between files (or generated tasks) and token ids."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from megatron_ibpo.config import DataConfig, EnvironmentConfig
from megatron_ibpo.data.file_prompts import file_prompts
from megatron_ibpo.data.generated import SCHEME, generated_prompts
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
        specs: files or directories, `reasoning_gym://TASK?parameter=value…` or
            `import://package.module:function`.
        split: training prompts come in an order drawn by `data.data_seed`; a file's evaluation prompts come
            in the file's order. Generated splits never share a question; for files that is up to the user.
        max_prompt_len: tokens that a prompt may have, so that a response still fits the context.
        rates: pass rates for --filter-pass-rate.
        reader_type: what rows of files and functions hold: prompts, or demonstrations.
        holds_out: both splits are opened from these sources, so rows of a file that names no part for
            evaluation are divided between them.
        environment: names the environment of all rows that name none, and those that rows may name.

    Raises:
        DataError: a source or one of its prompts cannot be used.
    """
    environment = environment or EnvironmentConfig()
    opened, weights = list[PromptSource](), list[Fraction]()
    for source in [read_spec(spec) for spec in specs]:
        if len(specs) > 1 and source.location.startswith(SCHEME) and source.rm_type is None:
            source = replace(source, rm_type="reasoning_gym")
        settings = tokenizer, data, source, Tally(source.location), max_prompt_len, rates
        reader = reader_type(*settings, environment=environment, split=split)
        opened.append(_opened(reader, holds_out=holds_out))
        weights.append(source.weight)
    return in_environment(opened[0] if len(opened) == 1 else mixed(opened, weights), environment.environment)


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
