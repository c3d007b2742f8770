"""The samples of an evaluation and its files: every sample, and the settings that it was made with.

DIR/results.json has the settings of every set from the start, and the measures at the end;
DIR/SET.samples.jsonl gets a line for every sample as soon as it is scored. An interrupted evaluation reuses
the samples there, as long as the settings are the same.
"""

import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest, token_ids
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.text import changed_settings
from megatron_ibpo.basics.user_files import (
    RECORD_BYTES,
    append_record,
    open_records,
    read_json_file,
    record_lines,
)
from megatron_ibpo.rewards import Response

Kind = Literal["sampled", "greedy", "correction"]
Key = tuple[Kind, int, int]
"""(kind, index of the prompt, number of the sample): identifies a sample within a set."""

_LONGEST_LABEL = 2000
"""Characters. The tests of a code problem may take megabytes, and every sample stores its label."""


@dataclass(frozen=True)
class EvalSample:
    """One sample of the policy, with the verifier's judgement."""

    set: str
    """Name of the set of prompts."""
    id: str
    """Identity of the problem: the data's own id if it has one, otherwise its position."""
    prompt_index: int
    kind: Kind
    """Kind of sample. A correction has the number of the sample that it corrects."""
    number: int
    prompt: str
    """The question."""
    label: str
    """Label that the verifier compares with; truncated if long."""
    text: str
    """The response."""
    answer: str | None
    """Answer that the verifier's module extracts from the response. None has no vote."""
    reward: float | None
    """None where the verifier failed."""
    correct: bool
    error: str | None
    """Error of the verifier, if it failed."""
    finish_reason: Literal["stop", "length"]
    num_tokens: int
    """Number of tokens that the policy wrote."""
    details: dict[str, float]
    """Further numbers from the verifier."""
    mean_logprob: float | None
    """Mean over those tokens; None without any."""
    token_ids: list[int] | None = field(default=None, repr=False)
    """Token ids; stored only if the sample may be corrected."""

    @property
    def key(self) -> Key:
        return self.kind, self.prompt_index, self.number

    def as_candidate(self, prompt: Prompt) -> Sample:
        """Return the sample as input for a correction prompt, without its score."""
        assert self.token_ids is not None  # stored if corrections are requested
        ids = token_ids(self.token_ids)
        return Sample(
            prompt_token_ids=prompt.token_ids,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason=self.finish_reason,
            temperature=1.0,
            versions=((0, 0),),
            loss_mask=np.ones(len(ids), bool),
        )


@dataclass(frozen=True)
class EvalRequest:
    """A sample to be generated."""

    key: Key
    prompt: Prompt
    request: SampleRequest


def problem_id(prompt: Prompt) -> str:
    """Return the data's own id of a problem, otherwise its position in the source."""
    return str(prompt.metadata.get("id", prompt.index))


def eval_sample(
    name: str,
    request: EvalRequest,
    sample: Sample,
    response: str | Response,
    answer: Callable[[Prompt, str | Response], str | None] | None,
    *,
    keep_tokens: bool,
) -> EvalSample:
    """Return a scored sample in its stored form.

    Args:
        name: the set.
        answer: extracts the answer of a response to a prompt; None if no verifier of the set defines that.
    """
    prompt, (kind, index, number) = request.prompt, request.key
    tokens = sample.num_trained_tokens
    logprob = math.fsum(sample.logprobs[sample.loss_mask].tolist()) / tokens if tokens else None
    return EvalSample(
        set=name,
        id=problem_id(prompt),
        prompt_index=index,
        kind=kind,
        number=number,
        prompt=prompt.text,
        label=_short(prompt.label),
        text=response.text if isinstance(response, Response) else response,
        answer=(answer(prompt, response) or None) if answer is not None else None,
        reward=sample.reward,
        correct=sample.correct,
        error=sample.reward_error,
        finish_reason=sample.finish_reason,
        num_tokens=tokens,
        details=dict(sample.reward_details),
        mean_logprob=logprob,
        token_ids=sample.token_ids.tolist() if keep_tokens else None,
    )


def _short(label: str) -> str:
    if len(label) <= _LONGEST_LABEL:
        return label
    return f"{label[:_LONGEST_LABEL]}… ({len(label):,} characters in all)"


# -------------------------------------------------------------------------------------------------- the files


RESULTS_FILE = "results.json"
UNFINISHED, FINISHED = "unfinished", "finished"

Settings = dict[str, Any]
"""Everything that a sample of a set depends on, by the flag that sets it."""


class KeptError(ValueError):
    """A directory whose samples cannot be continued; the message gives the reason and what to do."""


class KeptSamples(ExitStack):
    """The samples of an evaluation, read at its start and appended to during it. A context manager."""

    def __init__(self, directory: Path, policy: str, settings: Mapping[str, Settings]) -> None:
        """Open the files of every set.

        Args:
            policy: the evaluated policy, for readers.
            settings: name of each set → its settings.

        Raises:
            KeptError: existing samples were made with other settings, or were not written by this class.
        """
        super().__init__()
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._settings = dict(settings)
        self._found: dict[str, dict[Key, EvalSample]] = {}
        self._files: dict[str, io.FileIO] = {}
        self.num_added = 0
        """Number of samples that this process made."""
        stored = read_results(directory)
        for name, set_settings in settings.items():
            self._check(name, set_settings, stored)
        for name, set_settings in settings.items():
            self._found[name] = self._open(name, settings_hash(set_settings))
        entries = stored.get("sets", {}) | {
            name: {"settings": set_settings, "settings_hash": settings_hash(set_settings)}
            for name, set_settings in settings.items()
        }
        write_results(directory, {"status": UNFINISHED, "policy": policy, "sets": entries})

    @property
    def num_found(self) -> int:
        """Number of samples that an earlier process made."""
        return sum(map(len, self._found.values()))

    def stored(self, name: str) -> Mapping[Key, EvalSample]:
        """Return the samples of a set that an earlier process made, without those whose verifier failed."""
        return self._found[name]

    def add(self, sample: EvalSample) -> None:
        """Store a sample. Raises the errors of `append_record`."""
        own_hash = settings_hash(self._settings[sample.set])
        append_record(self._files[sample.set], {**asdict(sample), "settings": own_hash})
        self.num_added += 1

    def _check(self, name: str, settings: Settings, stored: Mapping[str, Any]) -> None:
        path = samples_path(self.directory, name)
        entry = stored.get("sets", {}).get(name)
        if entry is None:
            if path.exists():
                raise KeptError(
                    f"{path}: the settings it was made with are not recorded; remove it, or choose "
                    "another --run-dir"
                )
            return
        if entry["settings"] != settings:
            changed = "; ".join(changed_settings(entry["settings"], settings))
            raise KeptError(
                f"{self.directory} holds an evaluation of {name} with other settings: {changed}. Choose "
                "another --run-dir, or give the same settings to resume"
            )

    def _open(self, name: str, own_hash: str) -> dict[Key, EvalSample]:
        path = samples_path(self.directory, name)
        samples = _read(path, own_hash) if path.exists() else []
        scored = {sample.key: sample for sample in samples if sample.error is None}
        unfinished = path.with_suffix(".tmp")
        lines = ({**asdict(sample), "settings": own_hash} for sample in scored.values())
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        unfinished.replace(path)
        self._files[name] = self.enter_context(open_records(path))
        return scored


def complete_samples(
    requests: Sequence[EvalRequest],
    stored: Mapping[Key, EvalSample],
    ask: Callable[[Sequence[EvalRequest], Callable[[int, EvalSample], None]], None],
    add: Callable[[EvalSample], None],
) -> list[EvalSample]:
    """Return a sample for every request, in order: stored ones, and the rest from `ask`.

    Args:
        ask: generates samples, and calls its second argument with the index and the sample of each as soon as
            it is scored.
        add: called at once with every new sample.
    """
    samples = {key: stored[key] for key in (request.key for request in requests) if key in stored}
    missing = [request for request in requests if request.key not in samples]

    def take(index: int, sample: EvalSample) -> None:
        add(sample)
        samples[missing[index].key] = sample

    if missing:
        ask(missing, take)
    return [samples[request.key] for request in requests]


def samples_path(directory: Path, name: str) -> Path:
    """Return the path of a set's samples."""
    return directory / f"{name}.samples.jsonl"


def read_results(directory: Path) -> dict[str, Any]:
    """Return the content of results.json; empty if there is none. Raises KeptError if it was not written by
    an evaluation."""
    path = directory / RESULTS_FILE
    if not path.exists():
        return {}
    try:
        content = read_json_file(path, RECORD_BYTES)
        entries = content["sets"].values()
        fine = all(isinstance(entry["settings"], dict) for entry in entries)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise KeptError(f"{path}: cannot be read as the results of an evaluation: {error!r:.200}") from error
    if not fine:
        raise KeptError(f"{path}: a set's settings must be an object")
    return dict(content)


def write_results(directory: Path, content: Mapping[str, Any]) -> None:
    """Write results.json atomically."""
    unfinished = directory / f".{RESULTS_FILE}.tmp"
    unfinished.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(directory / RESULTS_FILE)


def settings_hash(settings: Settings) -> str:
    """Return a hash of the settings in 16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return a digest that tells whether two evaluations use the same prompts and labels."""
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(prompt.token_ids.tobytes() + b"\0" + prompt.label.encode(errors="replace") + b"\0")
    return digest.hexdigest()


def _read(path: Path, own_hash: str) -> list[EvalSample]:
    """Return the samples of all finished lines, which must have been made with the settings of this hash."""
    samples = []
    for location, line in record_lines(path):
        try:
            row = read_json(line)
            sample = EvalSample(**{item.name: row[item.name] for item in fields(EvalSample)})
        except (ValueError, TypeError, KeyError) as error:
            raise KeptError(f"{location}: no sample of an evaluation: {error!r:.200}") from error
        if row.get("settings") != own_hash:
            raise KeptError(f"{location}: made by other settings than results.json says; remove the file")
        samples.append(sample)
    return samples
