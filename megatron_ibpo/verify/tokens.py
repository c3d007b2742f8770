"""Tokens: prompts are the rendered text, and only what the policy wrote has a gradient."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megatron_ibpo.basics.records import Group, Prompt, Sample, SampleRequest, TokenIds, TrainSequence
from megatron_ibpo.config import rm_type_in
from megatron_ibpo.config.config_error import broken
from megatron_ibpo.data import Tokenizer
from megatron_ibpo.data.row_prompts import template_settings
from megatron_ibpo.run.inputs import open_run_data
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify.batch import Subject, policy_on_one_rank
from megatron_ibpo.verify.engine import engine_samples
from megatron_ibpo.verify.made_up_rewards import score
from megatron_ibpo.verify.rows import NotCheckedError, Row, attempted, counted_faults, not_checked
from megatron_ibpo.verify.small_run import STAND_IN

NUM_PROMPTS, NUM_CUT = 64, 8
"""Prompts that are compared with their text, and prompts whose responses are cut."""
ABSURD = {"rollout_logprobs": -30.0, "token_weights": 50.0, "token_advantages": 50.0}
"""Values that would change a gradient if they had a part in it."""

Turns = set[tuple[bytes, bytes]]
"""Ids and log-probs of each sample that engines returned, before samples were joined to episodes."""


def check_tokens(subject: Subject) -> Iterator[Row]:
    """Look at the prompts, and at the gradient of what the policy did not write."""
    data = open_run_data(subject.config, subject.foundation)
    prompts, tokenizer = data.first_prompts[:NUM_PROMPTS], data.tokenizer
    faults = [f"prompt {p.index}: {fault}" for p in prompts for fault in _prompt_faults(p, tokenizer)]
    reason = f"{len(prompts)} prompts show their text, and begin as they should"
    no_prompts = not_checked("tokens: prompts", "the run replays recorded rollouts and reads no prompts")
    yield counted_faults("tokens: prompts", faults, reason) if prompts else no_prompts
    yield from attempted("tokens: rendering", lambda: _rendering(subject, prompts, tokenizer))
    yield _masked_row(subject)


def _prompt_faults(prompt: Prompt, tokenizer: Tokenizer) -> list[str]:
    ids = prompt.token_ids
    shown = "".join(tokenizer.decode_all(ids).split())
    return broken({
        f"candidate solutions would go to token {prompt.head_length}": not 0 < prompt.head_length <= len(ids),
        f"begins with {tokenizer.decode_all(ids[:1])} twice": _doubled_start(ids, tokenizer),
        f"its ids do not show its text, {prompt.text[:60]!r} (--apply-chat-template?)":
            "".join(prompt.text.split()) not in shown,
    })  # fmt: skip


def _doubled_start(ids: TokenIds, tokenizer: Tokenizer) -> bool:
    """Return whether a sequence begins with the same special token twice."""
    is_repeated = len(ids) > 1 and ids[0] == ids[1]
    return is_repeated and bool(tokenizer.decode_all(ids[:1])) and not tokenizer.decode(ids[:1])


def _rendering(subject: Subject, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Iterator[Row]:
    """Yield whether prompts are rendered to the ids that transformers makes of them, and responses stop at
    the ids of its generation settings."""
    from transformers import AutoTokenizer, GenerationConfig  # take seconds

    hf_dir, data = subject.foundation.hf_dir, subject.config.data
    try:
        theirs = AutoTokenizer.from_pretrained(hf_dir)
    except (OSError, ValueError) as error:
        raise NotCheckedError(f"transformers cannot read the tokenizer: {error}") from error
    written = [prompt for prompt in prompts if prompt.environment is None]  # others write the prompt
    faults = []
    for prompt in written:
        text = prompt.text
        if data.apply_chat_template:
            chat = [{"role": "user", "content": prompt.text}]
            settings = {"add_generation_prompt": True, "tokenize": False, **template_settings(data)}
            text = theirs.apply_chat_template(chat, **settings)
            tail = tokenizer.decode_all(prompt.tail_ids).strip()
            expected = text.rpartition(prompt.text.strip())[2].strip()
            if tail != expected:
                faults.append(f"prompt {prompt.index} ends in {tail!r}, and in transformers in {expected!r}")
        begin = theirs(text, add_special_tokens=not data.apply_chat_template)["input_ids"][0]
        if prompt.token_ids[0] != begin:
            faults.append(f"prompt {prompt.index} begins with id {prompt.token_ids[0]}, and not {begin}")
    if has_settings := (hf_dir / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(hf_dir).eos_token_id
        missing = {*(ends if isinstance(ends, list) else [ends])} - {None, *subject.foundation.eos_token_ids}
        faults += [f"id {number} does not end a response" for number in sorted(missing)]
    if not (written or has_settings):
        raise NotCheckedError("environments write the prompts, and there is no generation_config.json")
    reason = f"{len(written)} prompts begin and end, and responses end, as in transformers"
    yield counted_faults("tokens: rendering", faults, reason)


def _masked_row(subject: Subject) -> Row:
    """Masked tokens have no log-probs, and what stands at masked places has no part in a gradient."""
    sequences, change = subject.batch.sequences, subject.uncut.change
    masked = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in sequences]
    with policy_on_one_rank(subject.small) as (policy, _):
        has_logprobs = any(logprobs.any() for logprobs in policy.logprobs(masked))
    faults = ["masked tokens have log-probs"] if has_logprobs else []
    loud_change = subject.update([_loud(s) for s in sequences]).change
    faults += [f"{n} depends on masked tokens" for n in change if not change[n].equal(loud_change[n])]
    reason = "log-probs, weights and advantages at masked places have no part in the gradient"
    return counted_faults("tokens: masked", faults, reason)


def _loud(s: TrainSequence) -> TrainSequence:
    """Return the sequence with absurd values wherever its mask is False."""
    arrays: dict[str, Any] = {name: getattr(s, name) for name in ABSURD if getattr(s, name) is not None}
    for name, values in arrays.items():
        arrays[name] = np.where(s.loss_mask, values, ABSURD[name]).astype(values.dtype)
    return replace(s, **arrays)


def check_samples(
    subject: Subject, groups: Sequence[Group], trained: Sequence[TrainSequence], turns: Turns
) -> Iterator[Row]:
    """Compare what engines returned with what was asked and with what is trained on."""

    def faults(faults_of: Callable[[Group, Sample], Iterable[str]]) -> list[str]:
        return [
            f"prompt {group.prompt.index}, sample {number}: {fault}"
            for group in groups
            for number, sample in enumerate(group.samples)
            for fault in faults_of(group, sample)
        ]

    finishes = [sample.finish_reason for group in groups for sample in group.samples]
    count, cut = len(finishes), finishes.count("length")
    reason = f"{count} samples: prompt, ends, log-probs and masks fit; {cut} end at a limit of length"
    yield counted_faults("tokens: samples", faults(partial(_sample_faults, subject)), reason)
    reason = f"what {count} samples have as the policy's is what {len(turns)} turns of engines were, no more"
    yield counted_faults("tokens: turns", faults(partial(_turn_faults, turns)), reason)
    if any(_has_made_up_reward(subject, group) for group in groups):
        reason = "every sample has the reward of its own text"
        yield counted_faults("tokens: rewards", faults(partial(_reward_faults, subject)), reason)
    else:
        yield not_checked("tokens: rewards", "environments, or functions that rows name, reward the samples")
    if trained:
        differing = list(_trained_faults(groups, trained))
        yield counted_faults("tokens: training", differing, f"{len(trained)} sequences are those sampled")
    else:
        yield not_checked("tokens: training", "credit made no sequences of the samples")


def _sample_faults(subject: Subject, group: Group, sample: Sample) -> list[str]:
    rollout, prompt = subject.small.rollout, group.prompt
    lengths = {len(sample.token_ids), len(sample.logprobs), len(sample.loss_mask)}
    if len(lengths) != 1:
        return [f"ids, log-probs and mask have lengths {sorted(lengths)}"]
    has_turns = prompt.environment is not None  # which writes the prompt, too
    is_plain = not has_turns and sample in group.responses and not rollout.rollout_prompt_suffixes
    temperatures = {rollout.rollout_temperature, *rollout.rollout_temperature_cycle}
    logprobs = sample.logprobs[sample.loss_mask]
    faults = broken({
        "log-probs that are none": not np.isfinite(logprobs).all() or bool((logprobs > 1e-4).any()),
        "tokens that the policy did not write have log-probs": bool(sample.logprobs[~sample.loss_mask].any()),
        f"sampled at temperature {sample.temperature}": sample.temperature not in temperatures,
        "begins with the same special token twice":
            _doubled_start(sample.prompt_token_ids, subject.data.tokenizer),
        "sampled from other ids than the prompt's":
            is_plain and not np.array_equal(sample.prompt_token_ids, prompt.token_ids),
    })  # fmt: skip
    room = subject.foundation.max_context - len(sample.prompt_token_ids)
    limit = min(rollout.rollout_max_response_len, room)
    return faults if has_turns else faults + _end_faults(subject, sample, limit)


def _end_faults(subject: Subject, sample: Sample, limit: int) -> list[str]:
    """A response ends with its only end-of-sequence id, or at its limit, and says which."""
    eos, ids = {*subject.foundation.eos_token_ids}, sample.token_ids[sample.num_begun_tokens :].tolist()
    length, finish = sample.num_trained_tokens, sample.finish_reason
    return broken({
        "goes on after an end-of-sequence id": not eos.isdisjoint(ids[:-1]),
        f"ends with id {ids[-1:]} and says {finish}": (finish == "stop") == eos.isdisjoint(ids[-1:]),
        f"is cut after {length} tokens, and not {limit}":
            length > limit or (length < limit and finish == "length"),
    })  # fmt: skip


def _turn_faults(turns: Turns, group: Group, sample: Sample) -> Iterator[str]:
    edges = np.flatnonzero(np.diff(sample.loss_mask, prepend=False, append=False))
    for start, end in edges.reshape(-1, 2).tolist():
        if (sample.token_ids[start:end].tobytes(), sample.logprobs[start:end].tobytes()) not in turns:
            yield f"no engine wrote tokens {start} to {end - 1}"


def _has_made_up_reward(subject: Subject, group: Group) -> bool:
    """Return whether the small run's reward scores a group, and no other of its row or environment."""
    prompt = group.prompt
    return prompt.environment is None and rm_type_in(prompt.metadata, subject.small.data) == STAND_IN


def _reward_faults(subject: Subject, group: Group, sample: Sample) -> Iterator[str]:
    text = subject.data.tokenizer.decode(sample.token_ids)
    if _has_made_up_reward(subject, group) and sample.reward != score("", text, "", {}):
        yield f"the reward {sample.reward} for {text!r}"


def _trained_faults(groups: Sequence[Group], trained: Sequence[TrainSequence]) -> Iterator[str]:
    sampled = {
        (number, "response" if sample in group.responses else "correction", sample.index,
         sample.token_ids.tobytes()): sample
        for number, group in enumerate(groups)
        for sample in group.samples
    }  # fmt: skip
    for s in trained:
        sample = sampled.get((s.group, s.kind, s.index, s.response_token_ids.tobytes()))
        faults = ["its tokens were not sampled"] if sample is None else broken({
            "trains on tokens that the policy did not write": bool((s.loss_mask & ~sample.loss_mask).any()),
            f"trains at temperature {s.temperature}, sampled at {sample.temperature}":
                s.temperature != sample.temperature,
            "has other log-probs than its tokens were sampled with":
                s.rollout_logprobs is not None and not np.array_equal(s.rollout_logprobs, sample.logprobs),
            "has another prompt than it was sampled from":
                not s.off_policy and not np.array_equal(s.prompt_token_ids, sample.prompt_token_ids),
        })  # fmt: skip
        yield from (f"group {s.group}, {s.kind} {s.index}: {fault}" for fault in faults[:1])


def check_cut(subject: Subject, run: Run) -> Iterator[Row]:
    """Ask the engine for fewer tokens than responses need, so that some are cut whatever the policy."""
    temperature = subject.small.rollout.rollout_temperature
    requests = [
        SampleRequest(prompt.token_ids, seed, 1 + seed % 3, temperature)
        for seed, prompt in enumerate(subject.first_prompts(NUM_CUT))
    ]
    samples = engine_samples(run, requests)
    faults = [
        f"request {i}: {fault}"
        for i, (request, sample) in enumerate(zip(requests, samples, strict=True))
        for fault in _end_faults(subject, sample, request.max_tokens)
    ]
    eos = {*subject.foundation.eos_token_ids}
    cut = sum(eos.isdisjoint(sample.token_ids[-1:].tolist()) for sample in samples)
    if not cut and not faults:
        raise NotCheckedError("the policy ends every response within three tokens")
    reason = f"{cut} of {len(samples)} responses are cut at a limit of 1 to 3 tokens, and say so"
    yield counted_faults("tokens: cut responses", faults, reason)
