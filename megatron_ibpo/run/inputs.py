"""Inputs of a run, read before its processes start: its tokenizer and prompts, the parts of the vocabulary
that credit needs, the checkpoint that it resumes from, the journal; and the processes that score."""

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.records import Prompt, TokenIds
from megatron_ibpo.config import Config, EnvironmentConfig, environment_in
from megatron_ibpo.config.run import RunConfig
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
from megatron_ibpo.data.row_prompts import template_settings
from megatron_ibpo.data.tokenizer import TEMPLATE_DAY, DataError, has_unknown
from megatron_ibpo.engines.registry import PARAMETERS as ENGINES
from megatron_ibpo.environments.chat import PlainChat, TemplateChat, open_chat
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.evaluate import EvalSet, open_eval_sets
from megatron_ibpo.journal import Journal, Recovered, read_journal
from megatron_ibpo.report import load_step, rollout_path
from megatron_ibpo.report.run_dir import CONFIG_FILE, holds_work
from megatron_ibpo.rewards import (
    CHECKED_AT_START,
    Response,
    WorkerPool,
    answer_extractor,
    answer_place,
    extracted_answer,
    main_rm_type,
    named_rm_types,
    start_pool,
)
from megatron_ibpo.run.cost import Spent
from megatron_ibpo.run.resolve import Foundation, settle
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats.run_state import RUN_STATE, find_checkpoint, load_run_state


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


JOURNAL = "journal"
"""Name of the folder in a run's directory."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run, read."""

    foundation: Foundation
    config: Config
    """The configuration with everything filled in that does not depend on devices (`settle`)."""
    data: RunData
    rm_types: list[str]
    """Verifiers that a prompt names."""
    targets: list[str]
    """Environments that a prompt names or may name."""
    trains: bool
    """False for an evaluation on its own."""


@dataclass(frozen=True)
class Judges:
    """The processes of this machine that score, and the chat format between policy and environments."""

    pool: WorkerPool
    """Verifiers."""
    environments: EnvironmentPool | None
    """Places for episodes; None if no prompt names an environment."""
    chat: TemplateChat | PlainChat | None
    """The model's chat format, for episodes; None as well."""


@dataclass(frozen=True)
class ResumePoint:
    """The state that a run starts from."""

    checkpoint: Path | None
    """Checkpoint to resume from; None for a new run."""
    state: dict[str, Any]
    """State of the run at that checkpoint; {"step": 0} for a new one."""
    spent: Spent
    """Budget used before resuming."""
    step: int
    """Number of completed steps."""
    remembered: Mapping[int, Mapping[str, Any]]
    """Step → state that the credit of the next step needs from it, as in `Progress`."""
    notes: tuple[str, ...]
    """A line for the user that says where a resumed run starts."""


def read_resume_point(run: RunConfig, vocab_size: int) -> ResumePoint:
    """Read the state of the checkpoint in --load.

    Args:
        vocab_size: of the model, for recorded rollouts.

    Raises:
        ValueError, CheckpointError: a file is missing, cannot be read, or does not fit the model.
    """
    _check_recording(run.load_debug_rollout_data, vocab_size)
    checkpoint = _chosen_checkpoint(run.load)
    state: dict[str, Any] = {"step": 0} if checkpoint is None else load_run_state(checkpoint)
    try:
        spent = Spent.read(state.get("spent", {}))
    except ValueError as error:
        raise ValueError(f"--load {checkpoint}: {RUN_STATE}: {error}") from None
    remembered = state.get("remembered", {})
    if not isinstance(remembered, dict):
        raise ValueError(f"--load {checkpoint}: {RUN_STATE}: remembered must be an object")
    step, notes = int(state["step"]), tuple[str, ...]()
    if checkpoint is not None:
        notes = (f"resumes after step {step}, from {checkpoint}",)
    elif run.load is not None:
        notes = (f"--load {run.load}: no checkpoint was saved there; the run starts at step 0",)
    return ResumePoint(checkpoint, state, spent, step, {step: remembered} if remembered else {}, notes)


def _chosen_checkpoint(load: Path | None) -> Path | None:
    """Return the checkpoint of --load. None for a new run, for one that died before its first checkpoint and
    left a journal, and for one whose start failed."""
    if load is None:
        return None
    start_failed = (load / CONFIG_FILE).is_file() and not holds_work(load)
    may_lack_one = start_failed or (load / JOURNAL).is_dir()
    try:
        return find_checkpoint(load)
    except CheckpointError:
        if may_lack_one:
            return None
        raise


def _check_recording(directory: Path | None, vocab_size: int) -> None:
    """Read the first recorded step, so that a wrong directory is noticed before any process starts. Raises
    ValueError if there is no recording, or its token ids are beyond the model's vocabulary."""
    if directory is None:
        return
    path = min(directory.glob("step_*.json"), default=rollout_path(directory, 1))
    for group in load_step(path).groups:
        for response in group.responses:
            if any(not 0 <= number < vocab_size for number in response.token_ids.tolist()):
                raise ValueError(
                    f"recorded rollouts {path}: token ids beyond the model's vocabulary of "
                    f"{vocab_size}; replay with the model of the recording"
                )


def open_inputs(config: Config, foundation: Foundation, *, trains: bool = True) -> Inputs:
    """Read the data, which takes seconds. `preflight.check_inputs` checks what was read.

    Args:
        trains: False for an evaluation on its own, which needs held-out prompts only.

    Raises:
        ValueError, OSError: an input cannot be used; says which, where, and what to do.
    """
    data = open_run_data(config, foundation, trains=trains)
    config = settle(config, foundation, data.prompts)
    first = data.first_prompts
    rm_types = named_rm_types(scored_by_verifiers(first), config.data)
    allowed = config.environment.allowed_environments if first else ()
    targets = list(dict.fromkeys([*environments_of(first, config.environment), *allowed]))
    return Inputs(foundation, config, data, rm_types, targets, trains)


def open_judges(inputs: Inputs, stack: ExitStack) -> Judges:
    """Start the processes of this machine that score. `preflight.check_judges` waits for them and tries them.

    Args:
        stack: ends them.

    Raises:
        ValueError: a function's settings cannot be used, or conversations in the model's chat format cannot
            be extended.
    """
    config, environments, chat = inputs.config, None, None
    pool = stack.enter_context(start_pool(config.data, inputs.rm_types))
    if inputs.targets:
        chat = open_chat(
            inputs.data.tokenizer,
            inputs.foundation.eos_token_ids,
            applies_template=config.data.apply_chat_template,
            settings=template_settings(config.data),
        )
        environments = stack.enter_context(EnvironmentPool(config.environment))
    return Judges(pool, environments, chat)


def open_journal(config: Config, step: int, stack: ExitStack) -> tuple[Journal, Recovered]:
    """Open the run's journal and read its records of steps after `step`. Raises JournalError if another
    version of the program wrote it."""
    directory, settings = config.run.run_dir / JOURNAL, sampling_settings(config)
    recovered = read_journal(directory, step)
    journal = stack.enter_context(
        Journal(directory, round(config.run.journal_keep * 1024**3), settings, step)
    )
    if recovered.settings is not None and recovered.settings != settings:
        because = _changed(recovered.settings, settings)
        note = f"{directory}: what was sampled after step {step} is not used, since {because}"
        recovered = Recovered(settings, (), {}, step, is_whole=False, notes=(note,))
    journal.follow(recovered)
    return journal, recovered


def sampling_settings(config: Config) -> str:
    """Return all settings that samples and their credit depend on, as text. A journal serves only runs with
    equal settings."""
    sampling = asdict(config.rollout)
    sampling["rollout_backend"] = ENGINES.name_of(config.rollout.rollout_backend)
    sampling |= sampling.pop("parameters")
    rollout = {name: value for name, value in sampling.items() if not name.endswith("_timeout")}
    # what a row may name changes no sample of a row that names something else
    data = {name: value for name, value in asdict(config.data).items() if name != "allowed_rm_types"}
    of_run = {"seed": config.run.seed} | ({"prompts_held_out": True} if config.holds_out else {})
    sections = [asdict(config.algorithm), data, rollout, of_run | config.environment.of_samples()]
    return json.dumps(sections, default=str, sort_keys=True)


def _changed(old_text: str, new_text: str) -> str:
    """Return the differences between two texts of `sampling_settings`, for a message."""
    old, new = (
        {name: value for section in json.loads(text) for name, value in section.items()}
        for text in (old_text, new_text)
    )
    if unknown := old.keys() ^ new.keys():
        return f"another version of the program wrote it, with other settings ({', '.join(sorted(unknown))})"
    names = [name for name in new if old[name] != new[name]]
    return f"{', '.join(names)} changed"
