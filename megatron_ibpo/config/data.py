"""Prompts and rewards; and the verifier and environment that a row of a data set may name. Rows are as
untrusted as a model's text, so an import path or a server in a row is used only if the user allowed it by
name."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl

from megatron_ibpo.basics.records import ENVIRONMENT
from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.algorithm import AlgorithmConfig
from megatron_ibpo.config.config_error import ConfigError, broken
from megatron_ibpo.config.hooks import is_import_path
from megatron_ibpo.config.paths import Kind, as_specs, searched
from megatron_ibpo.config.rollout import EnvironmentConfig
from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.config.values import (
    EVAL_SETS,
    IMPORT_PATHS,
    JSON_OBJECT,
    NAMED_VALUES,
    SECONDS,
    SEED,
    SHARES,
    SOURCES,
    within,
)


@dataclass
class DataConfig:
    """Sources of prompts, and the verifiers that score responses."""

    prompt_data: Annotated[tuple[str, ...], Kind.FILE_OR_URL, SOURCES] = ()
    """Sources of prompts: files, directories, data sets of the Hugging Face Hub, generated tasks or
    functions. A file or directory holds JSONL, parquet or a Hugging Face data set. A data set of the Hub is
    owner/name, owner/name/folder or owner/name@revision/folder, such as openai/gsm8k. A generated task is,
    for example, reasoning_gym://chain_sum?min_terms=5&max_terms=7&min_digits=1&max_digits=1. A function of
    your own is import://package.module:function. Several sources are mixed. Settings of one source follow it
    as ?weight=2&suffix=…; in a recipe a source may be a mapping (docs/data.md). Required."""
    eval_prompt_data: Annotated[str | tuple[str, ...] | None, Kind.FILE_OR_URL, EVAL_SETS] = None
    """Held-out prompts, in the same forms, or a benchmark's published file, such as aime25://DIR/aime25.jsonl
    (see docs/evaluation.md). For several sets give NAME=SPEC NAME=SPEC …, or repeat the flag; metrics are
    then eval/NAME/…. A generated task is drawn with its own seed, disjoint from training's. None: the
    held-out part of the data set of --prompt-data, other items of its task, or else a small share of its
    prompts, which are then not trained on. Other --prompt-data than a recipe's replaces the recipe's held-out
    prompts too."""
    input_key: str = "prompt"
    """Field of a row with the question: text, or a list of chat messages. prompt, with --label-key label:
    rows without these fields may also have the layout of a known data set (docs/data.md)."""
    label_key: str = "label"
    """Field of a row with the ground truth."""
    apply_chat_template: bool = False
    """Wrap questions with the tokenizer's chat template."""
    apply_chat_template_kwargs: Annotated[str | None, JSON_OBJECT] = None
    """Further arguments of the chat template, as a JSON object, such as {"enable_thinking": false}; in a
    recipe also a mapping."""
    system_prompt: str | None = None
    """System message for chats without one; needs --apply-chat-template."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used, count them and show the first few, instead of stopping with an
    error. Off: a bad row usually means that the whole file is not what was intended."""
    drop_long_prompts: bool = False
    """Leave out and count prompts that do not fit the context next to --rollout-max-response-len, instead of
    stopping with an error."""
    deduplicate: bool = False
    """Leave out and count rows whose question equals an earlier one of the same source up to white space.
    This reads through the whole file before the first step."""
    filter_pass_rate: Annotated[tuple[float, float] | None, SHARES] = None
    """LOW HIGH: leave out and count prompts with a pass rate, as recorded in --pass-rates, below LOW or above
    HIGH. None: all prompts."""
    pass_rates: Path | None = None
    """File written by `ibpo pass-rates`, for --filter-pass-rate."""
    rm_type: str = "reasoning_gym"
    """Verifier: reasoning_gym, math, code, http_judge, http_score, composite, or an import path
    package.module:function. A prompt whose metadata has an rm_type is scored by that verifier instead."""
    allowed_rm_types: Annotated[tuple[str, ...], IMPORT_PATHS] = ()
    """Import paths that an rm_type in a row may name, besides those of --rm-type, --reward-part and ?rm_type=
    of a source. They are loaded at the start. None: rows may choose among the built-in verifiers only, since
    a data set that names any function would run code of its author's choice."""
    reward_part: Annotated[tuple[str, ...], NAMED_VALUES] = ()
    """One verifier of --rm-type composite and its weight, such as math=0.9; in a recipe also a mapping. The
    reward is the weighted sum, within 0 and 1. The first verifier is the main one: the others together must
    stay below --reward-threshold."""
    reward_threshold: float = 1.0
    """A response is correct when its reward is at least this."""
    reward_timeout: Annotated[float, SECONDS] = 10.0
    """Seconds that a verifier may take for one response before it is killed and counted as an error. A
    timed-out response is not scored again, because it would take as long once more; a response whose verifier
    died is."""
    reward_workers: Annotated[int | None, within(1, 1024)] = None
    """Verifier processes per node. None: half the node's processors, at least 2; the other half is for
    trainers and engines."""
    rm_url: str | None = None
    """Server that scores responses (docs/http_rewards.md). For http_judge the base URL of OpenAI's protocol,
    such as http://HOST:8000/v1; for http_score the URL that takes the POST. A key is taken from the
    environment, IBPO_RM_API_KEY."""
    rm_template: Path | None = None
    """File with the prompt of http_judge: text with {{question}}, {{response}} and {{label}}."""
    rm_model: str | None = None
    """Model that the server of http_judge is asked for. None: none is named, for servers with one model."""
    rm_score: str | None = None
    """Place of the score in the judge's text: the name of a field of a JSON object, or a regular expression
    with one group around the number. The last match counts. None: `Score: 0.8` or `"score": 0.8`."""
    rm_batch_size: Annotated[int, within(1, 1024)] = 1
    """Most responses in one request of http_score. Above 1 its body is a list, and so is the answer."""
    rm_concurrency: Annotated[int, within(1, 4096)] = 64
    """Requests at one time to --rm-url from the whole run. 64: a vLLM server is busy with fewer, and has room
    for more."""
    rm_timeout: Annotated[float, SECONDS] = 120.0
    """Seconds that all requests for one response may take, with the waits between them; one may take half of
    that. Then the response has no reward. --reward-timeout does not apply. 120: a judge that writes 1,000
    tokens while it is busy, twice."""
    code_timeout: Annotated[float, SECONDS] = 6.0
    """Seconds that a program may take for one test of a code problem. All tests of a response must fit into
    --reward-timeout. 6 as in LiveCodeBench."""
    code_memory_mb: Annotated[int, within(64, 2**24)] = 1024
    """MiB of address space per program of a code problem. 1024: the limit of most judges."""
    code_float_tolerance: Annotated[float, within(0, 0.1)] = 0.0
    """Difference, absolute or relative, up to which a real number that a program gives equals the expected
    one. A label's own `float_tolerance` comes first. 0: exactly, as in LiveCodeBench; contests often say
    1e-6."""
    code_executor: str | None = None
    """Server that runs the programs of code problems, http://HOST:PORT, by SandboxFusion's protocol. None:
    programs run in sandboxes on the nodes of the run."""
    unsafe_code_execution: bool = False
    """Run programs that a model wrote WITHOUT a sandbox, with your rights: they can read and delete your
    files and use the network. Only for a machine that may be lost."""
    data_seed: Annotated[int, SEED] = 0
    """Seed for the order of prompts and for generated tasks."""

    @property
    def reward_weights(self) -> dict[str, str]:
        """The verifiers of --reward-part by name, each with the text of its weight."""
        # an import path may have dashes of its own, and its directory an equals sign
        pairs = (part.rpartition("=") for part in self.reward_part)
        names = ((name.strip(), weight.strip()) for name, _, weight in pairs)
        return {name if is_import_path(name) else name.replace("-", "_"): weight for name, weight in names}

    def problems(self, algorithm: AlgorithmConfig, run: RunConfig) -> list[str]:
        """Return the problems, one line each."""
        passes_over = algorithm.dynamic_sampling or algorithm.group_filter is not None
        problems = broken(
            {
                "--system-prompt: only a chat template uses it; add --apply-chat-template": (
                    self.system_prompt is not None and not self.apply_chat_template
                ),
                "--apply-chat-template-kwargs: only a chat template uses it; add --apply-chat-template": (
                    self.apply_chat_template_kwargs is not None and not self.apply_chat_template
                ),
                "--filter-pass-rate (bounds) and --pass-rates (measured rates) need each other; give "
                "both or neither": ((self.filter_pass_rate is None) != (self.pass_rates is None)),
                "--num-epoch: --dynamic-sampling and --group-filter skip prompts, so the number of steps "
                "of an epoch is not known; use --num-rollout": (run.num_epoch is not None and passes_over),
            }
        )
        if self.pass_rates is not None and not os.path.isfile(self.pass_rates):
            problems.append(
                f"--pass-rates: {self.pass_rates} is not a file{searched(self.pass_rates)}; `ibpo "
                "pass-rates` writes one"
            )
        return problems

    def missing(self, run: RunConfig, *, trains: bool) -> list[str]:
        """Return an error for each source of prompts that the run needs but lacks; a dry run needs none."""
        if run.dry_run or run.load_debug_rollout_data is not None:
            return []
        turned_off = "; --eval-num-prompts 0 turns evaluation off" if trains else ""
        return broken(
            {
                "--prompt-data: required, a file or directory, a generated task such as "
                "reasoning_gym://chain_sum, or import://package.module:function": (
                    trains and not self.prompt_data
                ),
                f"--eval-prompt-data: required for evaluation{turned_off}": (
                    run.eval_num_prompts > 0 and not self.eval_prompt_data and not self.prompt_data
                ),
                "--eval-num-prompts: must be at least 1 for an evaluation, is 0": (
                    not trains and run.eval_num_prompts == 0
                ),
            }
        )


RM_TYPE = "rm_type"
"""Key of a row's metadata that names its verifier; the other rows use --rm-type."""


def rm_type_in(metadata: Mapping[str, Any], data: DataConfig) -> str:
    """Return the name of a row's verifier: the row's own, or --rm-type. Raises ConfigError if the row names
    an import path that the user did not."""
    named = metadata.get(RM_TYPE)
    name = data.rm_type if named is None else str(named)
    if name != data.rm_type and is_import_path(name):
        _check_allowed(RM_TYPE, name, _rewards_of_user(data), "--allowed-rm-types")
    return name


def environment_in(metadata: Mapping[str, Any], settings: EnvironmentConfig) -> str | None:
    """Return the environment that a row names, or --environment; None if its responses are of one turn.
    Raises ConfigError if the row names an environment that the user did not."""
    named = metadata.get(ENVIRONMENT)
    if named is None:
        return settings.environment
    allowed = {settings.environment, *settings.allowed_environments}
    _check_allowed(ENVIRONMENT, str(named), allowed, "--allowed-environments")
    return str(named)


def _rewards_of_user(data: DataConfig) -> set[str]:
    """Return the verifiers that flags and recipes name."""
    specs = [*data.prompt_data, *(named.spec for named in as_specs(data.eval_prompt_data))]
    settings = [setting for spec in specs for setting in parse_qsl(spec.partition("?")[2])]
    of_sources = [value for name, value in settings if name == RM_TYPE]
    return {data.rm_type, *data.allowed_rm_types, *data.reward_weights, *of_sources}


def _check_allowed(key: str, name: str, allowed: Collection[str | None], flag: str) -> None:
    if name not in allowed:
        raise ConfigError(
            f"{key} {shown(name)}: a row may not choose code to run or a server to ask; if you trust this "
            f"one, allow it by name: {flag}"
        )
