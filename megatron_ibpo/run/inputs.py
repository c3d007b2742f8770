"""Inputs of a run, read before its processes start: the checkpoint that it resumes from, data, the journal;
and the processes that score."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ibpo.config import Config
from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.data.row_prompts import template_settings
from megatron_ibpo.engines.registry import PARAMETERS as ENGINES
from megatron_ibpo.environments.chat import PlainChat, TemplateChat, open_chat
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.journal import Journal, Recovered, read_journal
from megatron_ibpo.models.lora import TrainedWeights, adapter_entries
from megatron_ibpo.report import load_groups, rollout_path
from megatron_ibpo.report.run_dir import CONFIG_FILE, holds_work
from megatron_ibpo.rewards import Pool, named_rm_types, open_pool
from megatron_ibpo.run.cost import Spent
from megatron_ibpo.run.resolve import Foundation, settle
from megatron_ibpo.run.run_data import RunData, environments_of, open_run_data, scored_by_verifiers
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats.run_state import RUN_STATE, find_checkpoint, load_run_state

JOURNAL = "journal"
"""Name of the folder in a run's directory."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run, read."""

    foundation: Foundation
    config: Config
    """The configuration with everything filled in that does not depend on devices (`settle`)."""
    data: RunData
    weights: TrainedWeights
    """Empty for an evaluation."""
    rm_types: list[str]
    """Verifiers that a prompt names."""
    targets: list[str]
    """Environments that a prompt names or may name."""
    trains: bool
    """False for an evaluation on its own."""


@dataclass(frozen=True)
class Judges:
    """The processes of this machine that score, and the chat format between policy and environments."""

    pool: Pool
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
    for group in load_groups(path)[1]:
        for response in group.responses:
            if any(not 0 <= number < vocab_size for number in response.token_ids.tolist()):
                raise ValueError(
                    f"recorded rollouts {path}: token ids beyond the model's vocabulary of "
                    f"{vocab_size}; replay with the model of the recording"
                )


def open_inputs(config: Config, foundation: Foundation, *, trains: bool = True) -> Inputs:
    """Read data and headers of the weights, which takes seconds. `preflight.check_inputs` checks what was
    read.

    Args:
        trains: False for an evaluation on its own, which needs held-out prompts only.

    Raises:
        ValueError, OSError: an input cannot be used; says which, where, and what to do.
    """
    from megatron_ibpo.weights.formats.hugging_face import trained_elements  # imports torch: a second

    hf_dir, shape = foundation.hf_dir, foundation.shape
    data = open_run_data(config, foundation, trains=trains)
    weights = TrainedWeights({})
    if trains:
        weights = TrainedWeights(trained_elements(hf_dir, shape), adapter_entries(config.model, shape))
    config = settle(config, foundation, data.prompts)
    first = data.first_prompts
    rm_types = named_rm_types(scored_by_verifiers(first), config.data)
    allowed = config.environment.allowed_environments if first else ()
    targets = list(dict.fromkeys([*environments_of(first, config.environment), *allowed]))
    return Inputs(foundation, config, data, weights, rm_types, targets, trains)


def open_judges(inputs: Inputs, stack: ExitStack) -> Judges:
    """Start the processes of this machine that score. `preflight.check_judges` tries them.

    Args:
        stack: ends them.

    Raises:
        ValueError: a function cannot be loaded, there is no sandbox for running programs, or conversations
            in the model's chat format cannot be extended.
    """
    config, environments, chat = inputs.config, None, None
    pool = stack.enter_context(open_pool(config.data, inputs.rm_types))
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
