"""The data of a run: its tokenizer, its prompts, and the parts of the vocabulary that credit needs."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_ibpo.basics.records import Prompt, TokenIds
from megatron_ibpo.config import Config, EnvironmentConfig, environment_in
from megatron_ibpo.credit import AnswerStart, Operator, ThinkingMarks, Vocabulary
from megatron_ibpo.credit.importance import SpanMasking
from megatron_ibpo.data import (
    CorrectionTemplate,
    PromptSource,
    PromptSuffixes,
    ResponseText,
    Tokenizer,
    TokenTexts,
    load_tokenizer,
    open_pass_rates,
    open_sources,
)
from megatron_ibpo.data.tokenizer import TEMPLATE_DAY, DataError, has_unknown
from megatron_ibpo.evaluate import EvalSet, open_eval_sets
from megatron_ibpo.rewards import (
    CHECKED_AT_START,
    Response,
    answer_extractor,
    answer_place,
    extracted_answer,
    main_rm_type,
)
from megatron_ibpo.run.resolve import Foundation


@dataclass(frozen=True)
class RunData:
    """The data of a run, constant from its start to its end."""

    tokenizer: Tokenizer
    suffixes: PromptSuffixes
    """Prompt suffixes of --rollout-prompt-suffixes."""
    prompts: PromptSource | None
    """Prompts of training; None if recorded rollouts are replayed, or for an evaluation on its own."""
    eval_sets: list[EvalSet]
    """Sets of held-out prompts; empty if recorded rollouts are replayed, or evaluation is off."""
    vocabulary: Vocabulary
    """Properties of tokens that credit uses."""
    template_notes: tuple[str, ...] = ()
    """Lines to show about the chat template."""

    @property
    def first_prompts(self) -> list[Prompt]:
        """Prompts of training and of evaluation whose labels are checked before engines start."""
        held_out = [prompt for eval_set in self.eval_sets for prompt in eval_set.prompts[:CHECKED_AT_START]]
        if self.prompts is None:
            return held_out
        ready = self.prompts.ready
        count = CHECKED_AT_START if ready is None else min(ready, CHECKED_AT_START)
        return self.prompts.batch(0, count) + held_out

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines to show about the sources of prompts: recognised layouts, rows left out."""
        of_training = () if self.prompts is None else self.prompts.notes
        of_evaluation = tuple(note for eval_set in self.eval_sets for note in eval_set.notes)
        # both may read one file
        return tuple(dict.fromkeys(self.template_notes + of_training + of_evaluation))


def open_run_data(config: Config, foundation: Foundation, *, trains: bool = True) -> RunData:
    """Read and check all data that the run will need.

    Args:
        trains: False if only held-out prompts are needed.

    Raises:
        ValueError, OSError: a tokenizer or data that cannot be used; with the reason, the place, and what to
            do.
    """
    tokenizer = load_tokenizer(foundation.hf_dir, embedding_rows=foundation.shape.vocab_size)
    context, operator, texts = foundation.max_context, foundation.method.operator, TokenTexts(tokenizer)
    placeholder = _placeholder(operator, tokenizer)
    answer_start = _answer_start(config, operator, tokenizer, texts)
    marks = thinking_marks(operator, tokenizer)
    template_notes = date_notes(tokenizer) if config.data.apply_chat_template else ()
    suffixes = PromptSuffixes(tokenizer, config.rollout.rollout_prompt_suffixes)
    replays = config.run.load_debug_rollout_data is not None
    return RunData(
        tokenizer,
        suffixes,
        training_prompts(config, tokenizer, context - suffixes.longest) if trains and not replays else None,
        [] if replays else open_eval_sets(config, tokenizer, context, ibpo_k=operator.ibpo_k),
        Vocabulary(CorrectionTemplate(tokenizer, operator.ibpo_k), texts, marks, placeholder, answer_start),
        template_notes,
    )


def environments_of(prompts: Sequence[Prompt], settings: EnvironmentConfig) -> dict[str, Prompt]:
    """Return each environment that a prompt names, with the first such prompt. Raises ConfigError if a row
    names one that the user did not allow."""
    named: dict[str, Prompt] = {}
    for prompt in prompts:
        if (name := environment_in(prompt.metadata, settings)) is not None:
            named.setdefault(name, prompt)
    return named


def scored_by_verifiers(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts that a verifier scores."""
    return [prompt for prompt in prompts if prompt.environment is None]


def training_prompts(config: Config, tokenizer: Tokenizer, max_context: int) -> PromptSource:
    """Open the prompts of --prompt-data.

    Args:
        max_context: limit of tokens in prompt and response, less what perturbation may add to a prompt.

    Raises:
        ValueError, OSError: prompts that cannot be used; with the reason, the place, and what to do.
    """
    data = config.data
    return open_sources(
        data.prompt_data,
        tokenizer,
        data,
        split="train",
        max_prompt_len=max_context - config.rollout.rollout_max_response_len,
        rates=open_pass_rates(config),
        holds_out=config.holds_out,
        environment=config.environment,
    )


def _answer_start(
    config: Config, operator: Operator, tokenizer: Tokenizer, texts: Callable[[TokenIds], list[str]]
) -> AnswerStart | None:
    """Return the function that finds answers. None if nothing is corrected, if the verifier of --rm-type does
    not define answers, or if an environment scores."""
    if config.environment.environment is not None:
        return None
    if operator.ibpo_corrections == 0 or answer_extractor(main_rm_type(config.data)) is None:
        return None
    thinking = ResponseText(tokenizer)

    def start(prompt: Prompt, ids: TokenIds) -> int | None:
        pieces = texts(ids)
        text = "".join(pieces)
        # with --ibpo-strip-thinking the ids are what is left without thinking
        mark = "" if operator.ibpo_strip_thinking else thinking.open_mark(prompt, prompt.token_ids)
        answer = extracted_answer(prompt, Response(text, mark + text), config.data)
        place = None if answer is None else answer_place(text, answer)
        return None if place is None else bisect_right(list(accumulate(map(len, pieces))), place)

    return start


def thinking_marks(operator: Operator, tokenizer: Tokenizer) -> ThinkingMarks | None:
    """Return the ids of <think> and of </think>; None without --ibpo-strip-thinking. Raises DataError if the
    tokenizer cannot express them."""
    if not operator.ibpo_strip_thinking:
        return None
    opening, closing = (tuple(tokenizer.encode(mark)) for mark in ("<think>", "</think>"))
    if has_unknown(tokenizer, (*opening, *closing)):
        raise DataError(
            "--ibpo-strip-thinking: the tokenizer has no tokens for <think> and </think>; drop the flag"
        )
    return ThinkingMarks(opening, closing)


def date_notes(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the line to print if the chat template writes a date."""
    template = getattr(getattr(tokenizer, "library", None), "chat_template", None)
    if "strftime_now" not in str(template):
        return ()
    return (
        f"the chat template writes today's date; prompts have {TEMPLATE_DAY:%d %b %Y} on every day, so that "
        "a run that resumes has the same",
    )


def _placeholder(operator: Operator, tokenizer: Tokenizer) -> int | None:
    if not isinstance(operator, SpanMasking) or operator.ciw_placeholder == "pad":
        return tokenizer.pad_id
    if tokenizer.unk_id is None:
        raise ValueError("--ciw-placeholder unk: the tokenizer has no unknown token; use pad")
    return tokenizer.unk_id
