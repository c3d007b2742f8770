"""Every function of the user is called once on one row before engines start, so that a fault in it costs a
second and not the start of a cluster."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import Config
from megatron_ibpo.config.hooks import is_import_path
from megatron_ibpo.credit import CreditContext
from megatron_ibpo.credit.trial import credit_functions, try_credit
from megatron_ibpo.data.generated import SCHEME
from megatron_ibpo.data.row_prompts import OWN_SCHEME
from megatron_ibpo.data.sources import read_spec
from megatron_ibpo.data.tokenizer import TOKENIZER_FILES
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.environments.trial import try_environment
from megatron_ibpo.rewards import Pool, WorkerPool, check_labels, named_rm_types, reward_functions
from megatron_ibpo.rewards.trial import try_rewards
from megatron_ibpo.run.resolve import read_foundation
from megatron_ibpo.run.run_data import RunData, environments_of, open_run_data, scored_by_verifiers

_MADE_UP = Prompt(0, token_ids([0]), 1, "1", "made up", "1")
"""Prompt of a run that has none, such as a replay."""


def try_user_code(
    config: Config,
    max_context: int,
    data: RunData,
    pool: Pool,
    environments: EnvironmentPool | None,
    *,
    trains: bool,
    logs: Path | None,
) -> None:
    """Call the user's reward functions, environments and, for training, credit functions once. Nothing of it
    is counted or recorded.

    Args:
        environments: processes for episodes; None: no prompt names an environment, or none is to be tried.
        logs: folder for tracebacks; None: they are not kept.

    Raises:
        ConfigError: one of them fails; names its line and the prompt.
    """
    prompts = data.first_prompts
    details = try_rewards(pool, scored_by_verifiers(prompts), config.data, logs)
    if environments is not None:
        for target, prompt in environments_of(prompts, config.environment).items():
            place = f"{prompt.task}, prompt {prompt.index}"
            details |= try_environment(
                environments, target, prompt.text, prompt.label, prompt.metadata, place
            )
    if trains:
        first = prompts[0] if prompts else _MADE_UP
        try_credit(first, _first_context(config, max_context, data), details)


def check_user_code(config: Config) -> str | None:
    """Check the labels of a plan's prompts, and call the user's functions, as the start of the run would do.
    If the prompts or the tokenizer are not on this machine, nothing is checked.

    Returns:
        a line to print if something could not be checked for that reason.

    Raises:
        ValueError, OSError: what the start of the run would raise for them.
    """
    sources = [read_spec(spec).location for spec in config.data.prompt_data]
    files = [source for source in sources if not source.startswith((SCHEME, OWN_SCHEME))]
    hf_dir = config.model.hf_dir
    if not (files or _has_user_code(config)):
        return None
    has_tokenizer = any((hf_dir / name).exists() for name in TOKENIZER_FILES)
    if not sources or not has_tokenizer or not all(Path(file).exists() for file in files):
        return "Labels and your functions are not checked: prompts or tokenizer are not on this machine."
    foundation = read_foundation(config)
    data = open_run_data(replace(config, run=replace(config.run, eval_num_prompts=0)), foundation)
    prompts = data.first_prompts
    verified = scored_by_verifiers(prompts)
    with ExitStack() as stack:
        # no `open_pool`: a plan may be made where no sandbox for programs can be had
        targets = reward_functions(config.data, named_rm_types(verified, config.data))
        pool = stack.enter_context(WorkerPool(targets, size=1, timeout=config.data.reward_timeout))
        check_labels(pool, verified, config.data)
        environments = None
        if environments_of(prompts, config.environment):
            environments = stack.enter_context(EnvironmentPool(config.environment))
        try_user_code(config, foundation.max_context, data, pool, environments, trains=True, logs=None)
    return None


def _has_user_code(config: Config) -> bool:
    rewards = [config.data.rm_type, *config.data.reward_weights]
    return (
        any(map(is_import_path, rewards))
        or config.environment.environment is not None
        or bool(credit_functions(config.algorithm))
    )


def _first_context(config: Config, max_context: int, data: RunData) -> CreditContext:
    """Return the context of the first step's credit, without what a running policy lends."""
    return CreditContext(
        config.algorithm,
        config.rollout,
        data.vocabulary,
        max_context,
        config.run.seed,
        step=0,
        reward_threshold=config.data.reward_threshold,
    )
