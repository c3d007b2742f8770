"""A policy's pass rate on each prompt, measured before training and kept in a file, and the filter by it.
Each line has the fingerprint of a policy, with how it was sampled and scored, so one file serves several
policies."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.user_files import policy_digest, record_lines
from megatron_ibpo.config import Config
from megatron_ibpo.data.sources import NOT_MEASURED, PASS_RATE
from megatron_ibpo.data.tokenizer import DataError


@dataclass(frozen=True)
class Rate:
    """The pass rate of one prompt."""

    correct: int
    scored: int


@dataclass(frozen=True)
class PassRates:
    """The filter of --filter-pass-rate."""

    low: float
    high: float
    rates: Mapping[str, Rate]

    def refusal(self, prompt: Prompt) -> str | None:
        """Return why the prompt is left out; None if it is used."""
        rate = self.rates.get(prompt_fingerprint(prompt))
        if rate is None or not rate.scored:
            return NOT_MEASURED
        return None if self.low <= rate.correct / rate.scored <= self.high else PASS_RATE


def open_pass_rates(config: Config) -> PassRates | None:
    """Open the filter that the configuration asks for. Raises DataError if the file is damaged, or has no
    rates of this policy."""
    bounds, path = config.data.filter_pass_rate, config.data.pass_rates
    if bounds is None or path is None:
        return None
    rates = read_pass_rates(path, policy_fingerprint(config))
    if not rates:
        raise DataError(
            f"--pass-rates {path}: nothing was measured with this policy and these settings of sampling and "
            "scoring; run `ibpo pass-rates` with this run's flags"
        )
    return PassRates(*bounds, rates)


def read_pass_rates(path: Path, policy: str) -> dict[str, Rate]:
    """Return {fingerprint of a prompt: rate} for one policy; empty if there is no file. Raises DataError if a
    line is damaged."""
    rates: dict[str, Rate] = {}
    for location, line in record_lines(path) if path.exists() else ():
        try:
            row = read_json(line)
            if row["policy"] == policy:
                rates[str(row["prompt"])] = Rate(int(row["correct"]), int(row["scored"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{location}: no line of `ibpo pass-rates` ({error})") from error
    return rates


def rate_record(policy: str, prompt: Prompt, rate: Rate) -> dict[str, Any]:
    """Return the content of one line of the file."""
    return {"policy": policy, "prompt": prompt_fingerprint(prompt), **asdict(rate)}


def prompt_fingerprint(prompt: Prompt) -> str:
    """Return a fingerprint of the prompt as the policy sees it and of its grading."""
    digest = hashlib.blake2b(prompt.token_ids.astype("<i4").tobytes(), digest_size=12)
    digest.update(prompt.label.encode())
    return digest.hexdigest()


def policy_fingerprint(config: Config) -> str:
    """Return a fingerprint of the weights of --hf-checkpoint, and of everything else that affects its pass
    rates."""
    rollout, data = config.rollout, config.data
    settings = [
        policy_digest(config.model.hf_dir),
        rollout.rollout_temperature,
        rollout.rollout_top_p,
        rollout.rollout_top_k,
        rollout.rollout_max_response_len,
        data.rm_type,
        data.reward_threshold,
    ]
    return hashlib.blake2b(json.dumps(settings).encode(), digest_size=12).hexdigest()
