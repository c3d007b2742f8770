"""Evaluate a policy on held-out prompts, without training: only engines and verifiers run.

    bash tools/ibpo.sh evaluate POLICY FLAGS…  a run's directory or a checkpoint
    bash tools/ibpo.sh evaluate FLAGS…         the policy of --hf-checkpoint
    bash tools/ibpo.sh evaluate compare A B    two evaluations, by problem, from their directories

The policy of a run is evaluated with the settings of the run. A checkpoint is in Hugging Face format, or
Megatron's, which is converted first. The flags are those of `train`; flags for training alone have no effect.
An interrupted evaluation resumes when the same command is given again.
"""

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from megatron_ibpo.basics.entry_point import DONE, command, guarded, parsed
from megatron_ibpo.basics.text import counted
from megatron_ibpo.config import Config, ConfigError, path_of_user
from megatron_ibpo.data.hub import with_local_copies
from megatron_ibpo.run.settings import check_evaluation, check_installed, parse_config, with_engine
from megatron_ibpo.weights.formats.run_state import CONFIG, HF_FILES, find_stored, newest_step

if TYPE_CHECKING:
    from megatron_ibpo.run.on_cluster import OpenEvaluation

_BAR = (TextColumn("{task.description}"), BarColumn())
FLAGS = (
    "hf_checkpoint", "eval_prompt_data", "rm_type", "apply_chat_template", "eval_num_prompts", "eval_preset",
    "n_samples_per_eval_prompt", "eval_temperature", "eval_top_p", "eval_top_k", "eval_max_response_len",
    "eval_compare_and_correct", "rollout_num_gpus", "rollout_num_gpus_per_engine", "run_dir", "seed",
)  # fmt: skip
"""Fields that --help shows."""
OF_TRAINING = {"--load", "--load-debug-rollout-data", "--dry-run"}


@dataclass(frozen=True)
class Policy:
    """The policy to evaluate."""

    config: Config
    """Configuration whose --hf-checkpoint is the policy, or has the configuration and tokenizer of a Megatron
    checkpoint."""
    stored: Path | None = None
    """Megatron checkpoint with the weights; None: --hf-checkpoint has them."""

    @property
    def name(self) -> str:
        return str(self.stored or self.config.model.hf_checkpoint)


@dataclass
class Comparison:
    """Compare two evaluations problem by problem."""

    first: Annotated[Path, tyro.conf.Positional]
    """Directory of the evaluation to compare with (--run-dir)."""
    second: Annotated[Path, tyro.conf.Positional]
    """Directory of another evaluation of the same problems."""
    measure: str = "accuracy"
    """Measure to compare, by its name in results.json: accuracy, greedy_accuracy, majority_accuracy, …"""


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate as the flags say. Return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["compare"]:
        compare(parsed(Comparison, None, words[1:], program=f"ibpo evaluate {words[0]}"))
        return DONE
    policy = policy_of(words)
    check_evaluation(policy.config)
    policy = replace(policy, config=with_local_copies(policy.config))
    logs = policy.config.run.run_dir / "logs"
    return guarded(
        lambda: evaluate_policy(policy), logs=logs, stopped="stopped; the same command resumes from here"
    )


def compare(comparison: Comparison) -> None:
    """Show the differences between two evaluations."""
    from megatron_ibpo.report.display import open_console
    from megatron_ibpo.study.paired_evaluations import compare_evaluations, comparison_notes, comparison_table

    first, second = path_of_user(comparison.first), path_of_user(comparison.second)
    compared = compare_evaluations(first, second, comparison.measure)
    console = open_console()
    title = f"{comparison.measure}, first: {comparison.first}, second: {comparison.second}"
    for text in (title, *comparison_notes(compared)):
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(comparison_table(compared))


def evaluate_policy(policy: Policy) -> None:
    """Run the whole evaluation."""
    check_installed()
    # imported late, so that wrong flags are reported at once
    from megatron_ibpo.report import Stages
    from megatron_ibpo.report.run_report import report_evaluation
    from megatron_ibpo.run.on_cluster import open_evaluation

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # ends it as Ctrl-C does
    stages = Stages()
    with ExitStack() as stack:
        with stages("convert"):
            config = stack.enter_context(_with_weights(policy))
        with stages("start"):
            opened = stack.enter_context(open_evaluation(config, policy.name))
        print(opened.placement_note, flush=True)
        for note in opened.data.notes:
            print(note, flush=True)
        assert opened.stored_samples is not None  # the policy has a name
        if num_stored := opened.stored_samples.num_found:
            print(f"{counted(num_stored, 'sample')} of an earlier start are reused", flush=True)
        with stages("evaluate"), _progress(opened, config) as meanwhile:
            evaluated = opened.rollouts.evaluation(opened.data, meanwhile, opened.stored_samples)
        report_evaluation(
            config.run.run_dir,
            policy.name,
            evaluated,
            seconds=stages.take(),
            counts={
                "engine_restarts": opened.engines.restarts,
                "verifier_deaths": opened.verifiers.deaths,
            },
        )


def policy_of(words: Sequence[str]) -> Policy:
    """Return the policy and configuration for a command line. Raises ConfigError if there is no such policy,
    or as `parse_config`."""
    flags, of_policy, stored = list(words), list[str](), None
    if flags and not flags[0].startswith("-"):
        of_policy, stored = _named_policy(flags.pop(0))
    if strays := OF_TRAINING & {word.partition("=")[0] for word in flags}:
        raise ConfigError(f"{', '.join(sorted(strays))}: only for training; leave it out")
    config = with_engine(
        parse_config([*of_policy, *flags], program="ibpo evaluate", description=str(__doc__), common=FLAGS)
    )
    config = replace(
        config,
        run=replace(config.run, load=None, load_debug_rollout_data=None, dry_run=False),
        rollout=replace(config.rollout, colocate=False),  # there is no trainer to share with
    )
    names_another = of_policy and any(word.startswith("--hf-checkpoint") for word in flags)
    is_run = "--config" in of_policy
    return Policy(config, None if is_run and names_another else stored)


def _named_policy(name: str) -> tuple[list[str], Path | None]:
    """Return (the flags that select a policy, the Megatron checkpoint with its weights if it is one). The
    user's flags override these."""
    path = path_of_user(name)
    if (path / "config.yaml").is_file():
        return _of_run(path)
    if (path / "config.json").is_file():
        return ["--hf-checkpoint", str(path)], None
    stored = find_stored(path) if path.is_dir() else path
    if not (stored / CONFIG).is_file():
        raise ConfigError(
            f"{path} is not a policy: a run's directory has a config.yaml, a Hugging Face checkpoint a "
            "config.json, a Megatron checkpoint a metadata.json or latest_checkpointed_iteration.txt"
        )
    has_hf_files = (stored / HF_FILES).is_dir()
    return ["--hf-checkpoint", str(stored / HF_FILES)] if has_hf_files else [], stored


def _of_run(run_dir: Path) -> tuple[list[str], Path | None]:
    """Return the flags for evaluating a run's policy: the exported one, or that of its newest checkpoint."""
    exported, stored = run_dir / "hf", None
    if not exported.is_dir():
        stored = newest_step(run_dir)
        if stored is None:
            raise ConfigError(
                f"{exported}: not found. A run exports its policy when it ends, except with --no-save, "
                "and this run has no checkpoint either"
            )
        exported = stored / HF_FILES
    settings = {
        "--config": run_dir / "config.yaml",
        "--hf-checkpoint": exported,
        "--run-dir": run_dir / "evaluate",
        "--ray-address": None,  # the run's own Ray may be gone
    }
    return [word for flag, value in settings.items() for word in (flag, str(value))], stored


@contextmanager
def _with_weights(policy: Policy) -> Iterator[Config]:
    """Yield the configuration with a Hugging Face checkpoint of the policy. A Megatron checkpoint is
    converted into a temporary directory."""
    config = policy.config
    if policy.stored is None:
        yield config
        return
    import torch

    from megatron_ibpo.basics.distributed import World
    from megatron_ibpo.weights.formats.convert import megatron_to_hf

    config.run.run_dir.mkdir(parents=True, exist_ok=True)
    # beside the results, not in the system's temporary directory: engines on other nodes read it too
    with tempfile.TemporaryDirectory(prefix="policy-", dir=config.run.run_dir) as scratch:
        target = Path(scratch) / "hf"
        print(
            f"converting {policy.stored} to Hugging Face format in {target}, which is removed at the end",
            flush=True,
        )
        with Progress(*_BAR, DownloadColumn(), disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("converting", total=None)
            megatron_to_hf(
                policy.stored,
                target,
                World(0, 1, torch.device("cpu"), None),
                origin=config.model.hf_checkpoint,
                report=lambda now, total: bar.update(task, advance=now, total=total),
            )
        yield replace(config, model=replace(config.model, hf_checkpoint=target))


@contextmanager
def _progress(opened: "OpenEvaluation", config: Config) -> Iterator[Callable[[], None]]:
    """Yield a function to call while the evaluation runs. It lets restarted engines join, and shows the
    number of samples on a terminal."""
    stored_samples = opened.stored_samples
    assert stored_samples is not None  # the policy has a name
    ways = 2 if config.run.eval_compare_and_correct else 1
    total = sum(
        len(eval_set.prompts) * (ways * eval_set.sampling.samples + 1) for eval_set in opened.data.eval_sets
    )
    with Progress(*_BAR, MofNCompleteColumn(), TimeRemainingColumn(), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("samples", total=total)

        def meanwhile() -> None:
            opened.engines.admit()
            bar.update(task, completed=stored_samples.num_found + stored_samples.num_added)

        yield meanwhile


if __name__ == "__main__":
    sys.exit(main())
