"""How well a policy does on held-out prompts, without training: engines and verifiers alone.

    bash tools/ibpo.sh evaluate RUN FLAGS…      the policy that a run exported, with the run's settings
    bash tools/ibpo.sh evaluate FLAGS…          that of --hf-checkpoint, on --eval-prompt-data

The flags are those of `train`; what concerns training alone has no effect.
"""

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from megatron_ibpo.checks import check_evaluation
from megatron_ibpo.config import Config, ConfigError, parse_config, path_of_user
from megatron_ibpo.train import DONE, INTERRUPTED, lacking, refuse

OF_TRAINING = {"--load", "--load-debug-rollout-data", "--dry-run"}


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate as the flags say. Returns the exit status: 0 done, 2 bad input, 130 interrupted; raises when
    the evaluation fails."""
    try:
        config = evaluation_config(sys.argv[1:] if argv is None else argv)
        check_evaluation(config)
        return evaluate_policy(config)
    except ConfigError as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        return INTERRUPTED


def evaluate_policy(config: Config) -> int:
    """The whole evaluation."""
    if lacks := lacking():
        return refuse(lacks)
    # imported late, so that wrong flags are answered at once
    from megatron_ibpo.report import Stages
    from megatron_ibpo.report.evaluated import report_evaluation
    from megatron_ibpo.startup import START_ERRORS, open_evaluation

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # ends it as Ctrl-C does
    stages = Stages()
    with ExitStack() as stack:
        try:
            with stages("start"):
                opened = stack.enter_context(open_evaluation(config))
        except START_ERRORS as error:
            return refuse(error)
        print(opened.where, flush=True)
        with stages("evaluate"):
            evaluation, outcomes = opened.rollouts.evaluation(opened.task, opened.engines.admit)
        assert config.model.hf_checkpoint is not None  # check_evaluation saw to it
        report_evaluation(
            config.run.run_dir,
            config.model.hf_checkpoint,
            evaluation,
            outcomes,
            seconds=stages.take(),
            counts={
                "engine_restarts": opened.engines.restarts,
                "verifier_deaths": opened.verifiers.deaths,
            },
        )
    return DONE


def evaluation_config(words: Sequence[str]) -> Config:
    """The configuration that a command line means.

    Raises:
        ConfigError: no such run, a run without a policy, or what `parse_config` refuses.
    """
    of_run, flags = [], list(words)
    if flags and not flags[0].startswith("-"):
        of_run = _flags_of_run(flags.pop(0))
    if strays := OF_TRAINING & {word.partition("=")[0] for word in flags}:
        raise ConfigError(f"{', '.join(sorted(strays))}: only training has it")
    config = parse_config(
        [*of_run, *flags], program="megatron_ibpo.evaluate_policy", description=str(__doc__)
    )
    hf_dir = config.model.hf_checkpoint
    if of_run and hf_dir is not None and not hf_dir.is_dir():
        raise ConfigError(
            f"{hf_dir}: there is no policy; a run exports its own when it ends, unless --no-save. `ibpo "
            "convert to-hf` makes one of a checkpoint, for --hf-checkpoint"
        )
    return replace(
        config,
        run=replace(config.run, load=None, load_debug_rollout_data=None, dry_run=False),
        rollout=replace(config.rollout, colocate=False),  # there is no trainer to share with
    )


def _flags_of_run(name: str) -> list[str]:
    """What a run of training sets for the evaluation of its policy; later flags win."""
    run_dir = path_of_user(name)
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} holds no config.yaml: is it the directory of a run?")
    settings = {
        "--config": run_dir / "config.yaml",
        "--hf-checkpoint": run_dir / "hf",
        "--run-dir": run_dir / "evaluate",
        "--ray-address": None,  # that of the run may be gone
    }
    return [word for flag, value in settings.items() for word in (flag, str(value))]


if __name__ == "__main__":
    sys.exit(main())
