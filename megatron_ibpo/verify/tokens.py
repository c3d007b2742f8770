"""Tokens: prompts are the rendered text, and only what the policy wrote has a gradient."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_ibpo.basics.records import (
    Group,
    Prompt,
    Sample,
    SampleRequest,
    TokenIds,
    TrainSequence,
)
from megatron_ibpo.data import Tokenizer
from megatron_ibpo.data.row_prompts import template_settings
from megatron_ibpo.data.tokenizer import read_eos_token_ids
from megatron_ibpo.rewards.verifier import rm_type_of
from megatron_ibpo.run.run_data import open_run_data
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.engine import engine_samples
from megatron_ibpo.verify.one_rank import policy_on_one_rank, update_on_one_rank, with_lr
from megatron_ibpo.verify.rows import NotCheckedError, Row, attempted, counted_faults
from megatron_ibpo.verify.small_run import STAND_IN
from megatron_ibpo.verify.split import from_engine
from megatron_ibpo.verify.stand_in_reward import score

NUM_PROMPTS, NUM_CUT = 64, 8
"""Prompts that are compared with their text, and prompts whose responses are cut."""

Turn = tuple[bytes, bytes]
"""Ids and log-probs of what an engine wrote at once."""


def check_tokens(subject: Subject) -> Iterator[Row]:
    """Look at the prompts, and at the gradient of what the policy did not write."""
    data = open_run_data(subject.config, subject.foundation)
    prompts = data.first_prompts[:NUM_PROMPTS]
    faults = [fault for prompt in prompts for fault in _prompt_faults(prompt, data.tokenizer)]
    yield counted_faults(
        "tokens: prompts", faults, f"{len(prompts)} prompts show their text, and begin as they should"
    )
    yield from attempted("tokens: rendering", lambda: _rendering(subject, prompts, data.tokenizer))
    yield _masked(subject)


def as_turn(sample: Sample) -> Turn:
    """Return the content of one sample of an engine, to be compared."""
    return sample.token_ids.tobytes(), sample.logprobs.tobytes()


def check_samples(
    subject: Subject, groups: Sequence[Group], trained: Sequence[TrainSequence], turns: set[Turn]
) -> Iterator[Row]:
    """Compare what engines returned with what was asked and with what is trained on.

    Args:
        turns: `as_turn` of every sample that engines returned, before samples were joined to episodes.
    """
    count = sum(len(group.samples) for group in groups)
    cut = sum(sample.finish_reason == "length" for group in groups for sample in group.samples)
    looked_at = {
        "samples": f"{count} samples: prompt, ends, log-probs and masks fit; {cut} end at a limit of length",
        "turns": f"what {count} samples have as the policy's is what {len(turns)} turns of engines were, and "
        "no more",
        "rewards": "every sample has the reward of its own text",
    }
    faults: dict[str, list[str]] = {name: [] for name in looked_at}
    for group in groups:
        for number, sample in enumerate(group.samples):
            place = f"prompt {group.prompt.index}, sample {number}"
            faults["samples"] += [f"{place}: {f}" for f in _sample_faults(subject, group, number, sample)]
            faults["turns"] += [f"{place}: {f}" for f in _turn_faults(sample, turns)]
            faults["rewards"] += [f"{place}: {f}" for f in _reward_faults(subject, group.prompt, sample)]
    for name, reason in looked_at.items():
        yield counted_faults(f"tokens: {name}", faults[name], reason)
    differing = list(_trained_faults(groups, trained))
    yield counted_faults("tokens: training", differing, f"{len(trained)} sequences are those sampled")


def check_cut(subject: Subject, run: Run) -> Iterator[Row]:
    """Ask the engine for fewer tokens than responses need, so that some are cut whatever the policy."""
    if run.engines is None or subject.data.prompts is None:
        raise NotCheckedError("recorded rollouts are replayed, so there is no engine")
    eos = set(read_eos_token_ids(subject.foundation.hf_dir))
    temperature = subject.small.rollout.rollout_temperature
    requests = [
        SampleRequest(ids, seed, 1 + seed % 3, temperature)
        for seed, ids in enumerate(subject.prompt_ids(NUM_CUT))
    ]
    samples = engine_samples(run, requests)
    faults = [
        f"request {i}: {fault}"
        for i, (request, sample) in enumerate(zip(requests, samples, strict=True))
        for fault in _end_faults(sample, request.max_tokens, eos)
    ]
    cut = sum(not eos & set(sample.token_ids[-1:].tolist()) for sample in samples)
    if not cut and not faults:
        raise NotCheckedError("the policy ends every response within three tokens")
    reason = f"{cut} of {len(samples)} responses are cut at a limit of 1 to 3 tokens, and say so"
    yield counted_faults("tokens: cut responses", faults, reason)


def _end_faults(sample: Sample, limit: int, eos: set[int]) -> Iterator[str]:
    """A response ends with its only end-of-sequence id, or at its limit, and says which."""
    ids = sample.token_ids[sample.num_begun_tokens :].tolist()
    if eos & set(ids[:-1]):
        yield "goes on after an end-of-sequence id"
    if (sample.finish_reason == "stop") != bool(eos & set(ids[-1:])):
        yield f"ends with id {ids[-1:]} and says {sample.finish_reason}"
    length = sample.num_trained_tokens
    if length > limit or (length < limit and sample.finish_reason == "length"):
        yield f"is cut after {length} tokens, and not {limit}"


def _prompt_faults(prompt: Prompt, tokenizer: Tokenizer) -> Iterator[str]:
    where = f"prompt {prompt.index}"
    if not 0 < prompt.head_length <= len(prompt.token_ids):
        yield f"{where}: candidate solutions would go to token {prompt.head_length}"
    if _doubled_start(prompt.token_ids, tokenizer):
        yield f"{where}: begins with {tokenizer.decode_all(prompt.token_ids[:1])} twice"
    if "".join(prompt.text.split()) not in "".join(tokenizer.decode_all(prompt.token_ids).split()):
        yield f"{where}: its ids do not show its text, {prompt.text[:60]!r} (--apply-chat-template?)"


def _doubled_start(ids: TokenIds, tokenizer: Tokenizer) -> bool:
    """Return whether a sequence begins with the same special token twice."""
    if len(ids) < 2 or ids[0] != ids[1]:
        return False
    return bool(tokenizer.decode_all(ids[:1])) and not tokenizer.decode(ids[:1])


def _rendering(subject: Subject, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Iterator[Row]:
    """Prompts begin and end, and responses stop, as transformers has it."""
    from transformers import AutoTokenizer, GenerationConfig  # take seconds

    hf_dir, data = subject.foundation.hf_dir, subject.config.data
    try:
        theirs = AutoTokenizer.from_pretrained(hf_dir)
    except (OSError, ValueError) as error:
        raise NotCheckedError(f"transformers cannot read the tokenizer: {error}") from error
    faults = []
    for prompt in prompts:
        if prompt.environment is not None:  # it writes the prompt
            continue
        if data.apply_chat_template:
            chat = [{"role": "user", "content": prompt.text}]
            settings = {"add_generation_prompt": True, "tokenize": False, **template_settings(data)}
            text = theirs.apply_chat_template(chat, **settings)
            tail = tokenizer.decode_all(prompt.tail_ids).strip()
            expected = text.rpartition(prompt.text.strip())[2].strip()
            if tail != expected:
                faults.append(
                    f"prompt {prompt.index} ends in {tail!r}, and with transformers in {expected!r}"
                )
            begin = theirs(text, add_special_tokens=False)["input_ids"][0]
        else:
            begin = theirs(prompt.text)["input_ids"][0]
        if prompt.token_ids[0] != begin:
            faults.append(f"prompt {prompt.index} begins with id {prompt.token_ids[0]}, and not {begin}")
    if (hf_dir / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(hf_dir).eos_token_id
        missing = {*(ends if isinstance(ends, list) else [ends])} - {None, *read_eos_token_ids(hf_dir)}
        faults += [f"id {number} does not end a response" for number in sorted(missing)]
    yield counted_faults("tokens: rendering", faults, "prompts begin and end as transformers renders them")


def _masked(subject: Subject) -> Row:
    """Masked tokens have no log-probs, and what stands at masked places has no part in a gradient."""
    config = from_engine(with_lr(subject.small))
    sequences = subject.sequences
    masked = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in sequences]
    faults = []
    with policy_on_one_rank(config) as (policy, _):
        if any(own.any() for own in policy.logprobs(masked)):
            faults.append("masked tokens have log-probs")
    plain = update_on_one_rank(config, sequences)
    loud = update_on_one_rank(config, [_loud(s) for s in sequences])
    faults += [
        f"{n} depends on masked tokens" for n, c in plain.change.items() if not c.equal(loud.change[n])
    ]
    return counted_faults(
        "tokens: masked",
        faults,
        "log-probs, weights and advantages at masked places have no part in the gradient",
    )


def _loud(s: TrainSequence) -> TrainSequence:
    """Return the sequence with absurd values wherever its mask is False."""

    def at_masked(values: Any, absurd: float) -> Any:
        return None if values is None else np.where(s.loss_mask, values, absurd).astype(values.dtype)

    return replace(
        s,
        rollout_logprobs=at_masked(s.rollout_logprobs, -30.0),
        token_weights=at_masked(s.token_weights, 50.0),
        token_advantages=at_masked(s.token_advantages, 50.0),
    )


def _sample_faults(subject: Subject, group: Group, number: int, sample: Sample) -> Iterator[str]:
    rollout, prompt = subject.small.rollout, group.prompt
    yield from _array_faults(sample)
    if sample.temperature not in {rollout.rollout_temperature, *rollout.rollout_temperature_cycle}:
        yield f"sampled at temperature {sample.temperature}"
    if _doubled_start(sample.prompt_token_ids, subject.data.tokenizer):
        yield "begins with the same special token twice"
    if prompt.environment is not None:  # it has turns, and writes the prompt
        return
    is_plain = number < len(group.responses) and not rollout.rollout_prompt_suffixes
    if is_plain and not np.array_equal(sample.prompt_token_ids, prompt.token_ids):
        yield "sampled from other ids than the prompt's"
    room = subject.foundation.max_context - len(sample.prompt_token_ids)
    eos = set(read_eos_token_ids(subject.foundation.hf_dir))
    yield from _end_faults(sample, min(rollout.rollout_max_response_len, room), eos)


def _array_faults(sample: Sample) -> Iterator[str]:
    lengths = {len(sample.token_ids), len(sample.logprobs), len(sample.loss_mask)}
    if len(lengths) != 1:
        yield f"ids, log-probs and mask have lengths {sorted(lengths)}"
        return
    logprobs = sample.logprobs[sample.loss_mask]
    if not np.isfinite(logprobs).all() or (logprobs > 1e-4).any():
        yield "log-probs that are none"
    if sample.logprobs[~sample.loss_mask].any():
        yield "tokens that the policy did not write have log-probs"


def _turn_faults(sample: Sample, turns: Container[Turn]) -> Iterator[str]:
    edges = np.flatnonzero(np.diff(sample.loss_mask, prepend=False, append=False))
    for start, end in edges.reshape(-1, 2).tolist():
        if (sample.token_ids[start:end].tobytes(), sample.logprobs[start:end].tobytes()) not in turns:
            yield f"no engine wrote tokens {start} to {end - 1}"


def _reward_faults(subject: Subject, prompt: Prompt, sample: Sample) -> Iterator[str]:
    """Score a sample again with the made-up reward of the small run, unless its row names another."""
    if prompt.environment is None and rm_type_of(prompt, subject.small.data) == STAND_IN:
        text = subject.data.tokenizer.decode(sample.token_ids)
        if sample.reward != score("", text, "", {}):
            yield f"the reward {sample.reward} for {text!r}"


def _trained_faults(groups: Sequence[Group], trained: Sequence[TrainSequence]) -> Iterator[str]:
    sampled = {
        (number, kind, sample.index, sample.token_ids.tobytes()): sample
        for number, group in enumerate(groups)
        for kind, samples in (
            ("response", group.responses),
            ("correction", [correction.response for correction in group.corrections]),
        )
        for sample in samples
    }
    for s in trained:
        sample = sampled.get((s.group, s.kind, s.index, s.response_token_ids.tobytes()))
        where = f"group {s.group}, {s.kind} {s.index}"
        if sample is None:
            yield f"{where}: its tokens were not sampled"
        elif (s.loss_mask & ~sample.loss_mask).any():
            yield f"{where}: trains on tokens that the policy did not write"
        elif s.temperature != sample.temperature:
            yield f"{where}: trains at temperature {s.temperature}, sampled at {sample.temperature}"
        elif s.rollout_logprobs is not None and not np.array_equal(s.rollout_logprobs, sample.logprobs):
            yield f"{where}: has other log-probs than its tokens were sampled with"
        elif not s.off_policy and not np.array_equal(s.prompt_token_ids, sample.prompt_token_ids):
            yield f"{where}: has another prompt than it was sampled from"
