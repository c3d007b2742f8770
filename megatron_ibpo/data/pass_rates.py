"""How often a policy solves each prompt, measured before training and kept in a file, and the filter by it.

A line of the file: {"policy": fingerprint, "prompt": fingerprint, "correct": k, "scored": n}. The policy's
fingerprint covers its weights and how it was sampled and scored, so that one file serves several of them, and
rates of another policy are never taken for this one's.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_ibpo.basics.policy_digest import policy_digest
from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.user_files import RECORD_BYTES, read_user_file
from megatron_ibpo.config import Config
from megatron_ibpo.data.left_out import NOT_MEASURED, PASS_RATE
from megatron_ibpo.data.tokenizer import DataError


@dataclass(frozen=True)
class Rate:
    """What was measured of one prompt."""

    correct: int
    scored: int


@dataclass(frozen=True)
class PassRates:
    """The filter of --filter-pass-rate."""

    low: float
    high: float
    rates: Mapping[str, Rate]

    def refusal(self, prompt: Prompt) -> str | None:
        """Why the prompt is left out; None where it is taken."""
        rate = self.rates.get(prompt_fingerprint(prompt))
        if rate is None or not rate.scored:
            return NOT_MEASURED
        return None if self.low <= rate.correct / rate.scored <= self.high else PASS_RATE


def open_pass_rates(config: Config) -> PassRates | None:
    """The filter that the configuration asks for.

    Raises:
        DataError: the file is damaged, or has nothing of this policy.
    """
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
    """{fingerprint of a prompt: rate} of one policy; empty where there is no file. A last line that was cut
    off is left out, since whoever wrote it may have been stopped.

    Raises:
        DataError: another line is damaged.
    """
    content = read_user_file(path, RECORD_BYTES).decode() if path.exists() else ""
    found = {}
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        try:
            row = read_json(line)
            if row["policy"] == policy:
                found[str(row["prompt"])] = Rate(int(row["correct"]), int(row["scored"]))
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith("\n"):
                break
            raise DataError(f"{path}, line {number}: no line of `ibpo pass-rates` ({error})") from error
    return found


def open_for_more(path: Path) -> IO[str]:
    """The file, to append lines to; without a last line that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
    return path.open("a", encoding="utf-8")


def rate_line(policy: str, prompt: Prompt, rate: Rate) -> str:
    """A line of the file."""
    row = {
        "policy": policy,
        "prompt": prompt_fingerprint(prompt),
        "correct": rate.correct,
        "scored": rate.scored,
    }
    return json.dumps(row) + "\n"


def prompt_fingerprint(prompt: Prompt) -> str:
    """Of what the policy sees and what it is graded by."""
    digest = hashlib.blake2b(prompt.token_ids.astype("<i4").tobytes(), digest_size=12)
    digest.update(prompt.label.encode())
    return digest.hexdigest()


def policy_fingerprint(config: Config) -> str:
    """Of the weights of --hf-checkpoint, and of what else its pass rates depend on."""
    hf_dir, rollout, data = config.model.hf_checkpoint, config.rollout, config.data
    assert hf_dir is not None  # checked before
    settings = [
        rollout.rollout_temperature,
        rollout.rollout_top_p,
        rollout.rollout_top_k,
        rollout.rollout_max_response_len,
        data.rm_type,
        data.reward_threshold,
    ]
    return hashlib.blake2b(
        json.dumps([policy_digest(hf_dir), *settings]).encode(), digest_size=12
    ).hexdigest()
