"""Measure whether a policy's corrections know more than another try: the premise of IBPO.

    bash tools/ibpo.sh skill examples/tiny_qwen3

The policy answers held-out prompts of the recipe's task as in training. Wrong responses are corrected with a
correct reference, with a wrong one and with none, and answered again from the prompt. Prints a table; --save
keeps all figures.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megatron_ibpo.basics.entry_point import command, parsed
from megatron_ibpo.config.paths import REPOSITORY
from megatron_ibpo.report.run_dir import write_whole
from megatron_ibpo.run.operator_skill import premise, skill_json, skill_table
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.study.instruments import skill_of_checkpoint

DEFAULT_RECIPE = REPOSITORY / "examples/recipes/tiny_qwen3_study.yaml"


@dataclass
class Arguments:
    checkpoint: tyro.conf.Positional[Path]
    """Directory of the policy, in Hugging Face format."""
    config: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """Recipe with the task and its sampling; may be repeated. Default: the dense tiny policies'."""
    prompts: int = 256
    """Held-out prompts to answer, each --n-samples-per-prompt times, as in the recipe."""
    targets: int = 8
    """Most wrong responses per prompt that are corrected."""
    seed: int = 0
    save: Path | None = None
    """File for the figures, as JSON."""


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Measure one policy."""
    arguments: Arguments = parsed(Arguments, __doc__, argv, program="ibpo skill")
    if min(arguments.prompts, arguments.targets) < 1:
        raise ValueError("--prompts and --targets must be at least 1")
    if not arguments.config and not DEFAULT_RECIPE.is_file():  # outside a clone
        raise ValueError("--config: required, the recipe with the task and its sampling")
    recipes = arguments.config or (DEFAULT_RECIPE,)
    named = [word for recipe in recipes for word in ("--config", str(recipe))]
    config = parse_config([*named, "--hf-checkpoint", str(arguments.checkpoint)])
    with tempfile.TemporaryDirectory() as scratch:
        skill = skill_of_checkpoint(
            config, Path(scratch), prompts=arguments.prompts, targets=arguments.targets, seed=arguments.seed
        )
    print(skill_table(skill), premise(skill), sep="\n\n")
    if arguments.save is not None:
        settings = {
            "checkpoint": str(arguments.checkpoint),
            "recipes": [str(recipe) for recipe in arguments.config],
            "responses_per_prompt": config.rollout.n_samples_per_prompt,
            "targets": arguments.targets,
            "seed": arguments.seed,
        }
        write_whole(arguments.save, skill_json(skill, settings))
        print(arguments.save)


if __name__ == "__main__":
    sys.exit(main())
