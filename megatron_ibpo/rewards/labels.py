"""The check at the start that labels can be graded."""

from collections.abc import Iterable, Sequence
from typing import Any

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.reward_errors import LabelError
from megatron_ibpo.basics.text import counted, shown
from megatron_ibpo.config import DataConfig, load_module
from megatron_ibpo.rewards.verifier import Pool, functions_of, rm_type_of

CHECKED_AT_START = 64
"""Prompts per source whose labels are checked before the run starts."""
_MOST_SHOWN = 5


def named_rm_types(prompts: Iterable[Prompt], data: DataConfig) -> list[str]:
    """Return the verifiers of these prompts, each once."""
    return list(dict.fromkeys(rm_type_of(prompt, data) for prompt in prompts))


def check_labels(pool: Pool, prompts: Sequence[Prompt], data: DataConfig) -> None:
    """Ask the verifiers of these prompts whether they can grade the labels.

    A verifier's module may define `label_problem(label, metadata) -> str | None` for that.

    Raises:
        LabelError: some labels cannot be graded; names the first with their reasons.
    """
    asked = [
        (prompt, pool.submit(f"{__name__}:problem", (target, prompt.label, prompt.metadata)))
        for prompt in prompts
        for target in functions_of(prompt, data)
    ]
    problems = [(prompt, error) for prompt, call in asked if (error := call.result().error) is not None]
    if not problems:
        return
    lines = [
        f"{prompt.task}, prompt {prompt.index}, label {shown(prompt.label)}: {error}"
        for prompt, error in problems[:_MOST_SHOWN]
    ]
    raise LabelError(
        "\n  ".join(
            [f"{counted(len(problems), 'label')} of the first {len(prompts)} cannot be graded:", *lines]
        )
    )


def problem(target: str, label: str, metadata: dict[str, Any]) -> float:
    """Check one label, in a worker, since this check may hang as a reward function may.

    Raises:
        LabelError: the module of `target` refuses the label.
    """
    module = load_module("--rm-type", target)
    ask = getattr(module, "label_problem", None)
    if ask is not None and (why := ask(label, metadata)) is not None:
        raise LabelError(why)
    return 0.0
