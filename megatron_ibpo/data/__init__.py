"""Prompts and tokenizers: everything between files (or generated tasks) and token ids."""

from megatron_ibpo.data.mixtures import open_sources
from megatron_ibpo.data.pass_rates import PassRates, open_pass_rates
from megatron_ibpo.data.prompts import CorrectionTemplate, PromptSource, PromptSuffixes, ResponseText
from megatron_ibpo.data.row_prompts import prompts_of_rows
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
