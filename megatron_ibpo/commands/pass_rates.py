"""Measure a policy's pass rate on each training prompt, before training, for --filter-pass-rate.

    bash tools/ibpo.sh pass-rates FLAGS…

The flags are those of `train`, with --pass-rates naming the file to write. The policy of --hf-checkpoint
answers every prompt of --prompt-data --n-samples-per-prompt times. Prompts already in the file with this
policy and these settings are not measured again, so a stopped measurement can be resumed.
"""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rich.progress import track

from megatron_ibpo.basics.entry_point import command, guarded
from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.basics.user_files import append_record, open_records
from megatron_ibpo.config import Config, ConfigError
from megatron_ibpo.data import PromptSource, Tokenizer
from megatron_ibpo.data.hub import with_local_copies
from megatron_ibpo.data.pass_rates import (
    Rate,
    policy_fingerprint,
    prompt_fingerprint,
    rate_record,
    read_pass_rates,
)
from megatron_ibpo.run.settings import check_installed, check_settings, parse_config, with_engine

FLAGS = (
    "hf_checkpoint", "prompt_data", "rm_type", "apply_chat_template", "pass_rates", "n_samples_per_prompt",
    "rollout_temperature", "rollout_max_response_len", "rollout_num_gpus", "rollout_num_gpus_per_engine",
    "run_dir", "seed",
)  # fmt: skip
"""Fields that --help shows."""
AT_ONCE = 128
"""Prompts that are sampled, and then written, together."""


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the flags say. Return the exit status."""
    config = parse_config(
        sys.argv[1:] if argv is None else argv,
        program="ibpo pass-rates",
        description=str(__doc__),
        common=FLAGS,
    )
    config, path = settings_of(config)
    check_settings(config)
    config = with_local_copies(config)
    logs = config.run.run_dir / "logs"
    return guarded(
        lambda: measure(config, path), logs=logs, stopped="stopped; the rates measured so far are kept"
    )


def settings_of(config: Config) -> tuple[Config, Path]:
    """Return (the configuration for the engines, the file to write). Raises ConfigError if no file is
    named."""
    path = config.data.pass_rates
    if path is None:
        raise ConfigError("--pass-rates: required, the file to write")
    run = replace(
        config.run,
        run_dir=config.run.run_dir / "pass_rates",
        eval_num_prompts=0,
        load=None,
        load_debug_rollout_data=None,
    )
    data = replace(config.data, pass_rates=None, filter_pass_rate=None)
    rollout = replace(with_engine(config).rollout, colocate=False)  # there is no trainer to share with
    return replace(config, run=run, data=data, rollout=rollout), path


def measure(config: Config, path: Path) -> None:
    """Run the whole measurement."""
    check_installed()
    # imported late, so that wrong flags are reported at once
    from megatron_ibpo.run.on_cluster import open_evaluation
    from megatron_ibpo.run.rollouts import LiveRollouts

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # ends it as Ctrl-C does
    with ExitStack() as stack:
        policy = policy_fingerprint(config)
        rates = read_pass_rates(path, policy)
        opened = stack.enter_context(open_evaluation(config))
        source = _prompts(config, opened.data.tokenizer)
        for note in (*source.notes, opened.placement_note):
            print(note, flush=True)
        assert isinstance(opened.rollouts, LiveRollouts)  # there are engines
        sampler = opened.rollouts.sampler
        sampler.version = opened.engines.version
        file = stack.enter_context(open_records(path))
        num_batches = -(-max(0, source.num_prompts() - len(rates)) // AT_ONCE)
        unknown = _unknown(source, set(rates))
        batches = iter(lambda: list(islice(unknown, AT_ONCE)), [])
        for batch in track(batches, f"{len(rates)} prompts known, measuring", num_batches):
            requests = [(prompt, request) for prompt in batch for request in _requests(prompt, config)]
            samples = sampler.run(sampler.answer_all(requests), opened.engines.admit)
            for prompt, rate in _rates(batch, samples):
                append_record(file, rate_record(policy, prompt, rate))
    print(f"{path}: pass rates of {len(read_pass_rates(path, policy))} prompts with this policy")


def _prompts(config: Config, tokenizer: Tokenizer) -> PromptSource:
    """Return the prompts of training, without the filter."""
    from megatron_ibpo.run.inputs import training_prompts
    from megatron_ibpo.run.resolve import read_foundation

    source = training_prompts(config, tokenizer, read_foundation(config).max_context)
    if not source.num_prompts():
        raise ValueError(
            "--prompt-data: a generated task never repeats, so its prompts cannot be chosen by pass rate"
        )
    return source


def _unknown(source: PromptSource, visited: set[str]) -> Iterator[Prompt]:
    """Yield the unknown prompts, each once."""
    for position in range(source.num_prompts()):
        prompt = source.at(position)
        if (fingerprint := prompt_fingerprint(prompt)) not in visited:
            visited.add(fingerprint)
            yield prompt


def _requests(prompt: Prompt, config: Config) -> list[SampleRequest]:
    rollout = config.rollout
    return [
        SampleRequest(
            prompt.token_ids,
            derive_seed("pass rate", config.run.seed, prompt.index, number),
            rollout.rollout_max_response_len,
            rollout.rollout_temperature,
            rollout.rollout_top_p,
            rollout.rollout_top_k,
        )
        for number in range(rollout.n_samples_per_prompt)
    ]


def _rates(batch: Sequence[Prompt], samples: Sequence[Sample]) -> Iterator[tuple[Prompt, Rate]]:
    """Yield the rate of each prompt from its consecutive samples. Those without a reward do not count."""
    size = len(samples) // len(batch)
    for number, prompt in enumerate(batch):
        scored = [
            sample for sample in samples[number * size : (number + 1) * size] if sample.reward is not None
        ]
        yield prompt, Rate(sum(sample.correct for sample in scored), len(scored))


if __name__ == "__main__":
    sys.exit(main())
