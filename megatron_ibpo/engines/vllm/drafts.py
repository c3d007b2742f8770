"""Drafts of corrections from their prompts (speculative decoding by n-grams).

A correction rewrites a text that stands in its own prompt. vLLM looks up the last tokens that were written,
proposes what followed them there, and computes all proposals in one step. Its rejection sampling leaves the
distribution of every token as it is. On CPUs only requests that are marked are drafted (`fixes`); vLLM's
second model runner, on GPUs, drafts for all.
"""

from typing import Any

FLAG = "--ibpo-draft-from-prompt"
SPECULATION: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
"""vLLM's speculative_config."""
MARK = "drafted"
"""Name of a truth value in `SamplingParams.extra_args`."""
