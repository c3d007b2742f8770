"""What the journal said is on disk comes back bit for bit, whatever dies and whatever is damaged."""

import functools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megatron_ibpo.basics.records import Sample, token_ids
from megatron_ibpo.basics.sampling_mask import SamplingMask, decoded_mask, encoded_mask, sampling_mask
from megatron_ibpo.journal import DroppedGroup, Journal, JournalError, Recovered, read_journal, writer
from megatron_ibpo.journal.entries import (
    ClosedBatch,
    ClosedGroup,
    Damage,
    MalformedEntryError,
    Sampled,
    SampleKey,
    decode,
    encode,
)
from megatron_ibpo.journal.recovery import entries
from support.journals import KEEP, append, group, make_sample, response
from support.paths import TESTS


def bits_of(sample):
    return [exactly(getattr(sample, one.name)) for one in fields(Sample)]


def exactly(value):
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, SamplingMask):
        return exactly(value.token_ids), exactly(value.offsets)
    return struct.pack("<d", value) if isinstance(value, float) else repr(value)  # NaNs, too


def same(found, wanted):
    return {k: bits_of(v) for k, v in found.items()} == {k: bits_of(v) for k, v in wanted.items()}


def segments(directory):
    return sorted(directory.glob("*.journal"))


@pytest.fixture
def three_steps(tmp_path):
    """A journal with the batches of steps 1 to 3, one prompt each, and an open group; nothing is saved."""
    samples = {}
    with Journal(tmp_path, KEEP, "settings", 0) as journal:
        for step, index in ((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0)):
            key = response(step, index)
            samples[key] = replace(make_sample(10 * step + index), versions=((0, step - 1),))
            journal.sampled(key, samples[key])
            if index == 1:
                journal.closed(ClosedBatch(step, (group(step, 2),)))
    return tmp_path, samples


int64 = st.integers(-(2**63), 2**63 - 1)
any_id = st.integers(0, 5) | st.integers(0, 2**31 - 1)
any_sample = st.integers(0, 9).flatmap(
    lambda length: st.builds(
        Sample,
        prompt_token_ids=arrays(np.int32, st.integers(0, 5)),
        token_ids=arrays(np.int32, length, elements=st.integers(-1, 5) | st.integers(-(2**31), 2**31 - 1)),
        logprobs=arrays(np.uint32, length).map(lambda bits: bits.view(np.float32)),  # every infinity and NaN
        loss_mask=arrays(bool, length), finish_reason=st.sampled_from(["stop", "length"]),
        temperature=st.floats(), index=int64, correct=st.booleans(), reward=st.none() | st.floats(),
        versions=st.lists(st.tuples(int64, int64), max_size=3).map(tuple),
        reward_error=st.none() | st.text(st.characters() | st.characters(categories=["Cs"])),
        reward_details=st.dictionaries(st.text(), st.floats(), max_size=2),
        routed_experts=st.none() | st.sampled_from([np.uint8, np.uint16]).flatmap(
            lambda dtype: arrays(dtype, st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 2)))
        ),
        sampling_mask=st.none() | st.lists(
            st.sets(any_id, max_size=4).map(list), min_size=length, max_size=length
        ).map(sampling_mask),
        drafts=st.just((0, 0)) | st.tuples(st.integers(1, 2**31), st.integers(0, 2**31)),
    )
)  # fmt: skip


@given(any_sample)
def test_a_sample_comes_back_bit_for_bit(sample):
    key = SampleKey(2**40, 3, "correction", 7)
    back = decode(encode(Sampled(key, sample)))
    assert (back.key, bits_of(back.sample)) == (key, bits_of(sample))


@given(st.binary(), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(token_ids))
@example(b"\x02\x80\x80\x80\x80\x08", token_ids([0]))  # the id 2**31
@example(b"\x03\x04", token_ids([4]))  # an id twice
@example(b"\x01", token_ids([-1]))
def test_any_bytes_are_refused_or_decode_to_a_valid_mask(content, tokens):
    try:
        mask = decoded_mask(content, tokens)
    except ValueError:
        return
    assert len(mask) == len(tokens)
    assert exactly(decoded_mask(encoded_mask(mask, tokens), tokens)) == exactly(mask)


def test_invalid_sampling_masks_are_neither_written_nor_read():
    sample = make_sample(1)
    count = len(sample.token_ids)
    for wrong in (
        sampling_mask([[1]] * (count + 1)),
        SamplingMask(np.array([2, 1], np.int32), np.array([0, *[2] * count], np.int64)),
        SamplingMask(np.array([-1], np.int32), np.array([0, *[1] * count], np.int64)),
        SamplingMask(np.array([1], np.int64), np.array([0, *[1] * count], np.int64)),
    ):
        with pytest.raises(TypeError, match="sampling mask"):
            encode(Sampled(response(1), replace(sample, sampling_mask=wrong)))
    masked = encode(Sampled(response(1), replace(sample, sampling_mask=sampling_mask([[1, 2]] * count))))
    fields_written = msgpack.unpackb(masked)
    for content in (b"\x80", b"\x7f", 7, "text", [1], b""):
        with pytest.raises(MalformedEntryError):
            decode(msgpack.packb([*fields_written[:-1], content]))


def test_a_mask_takes_one_byte_per_certain_token():
    tokens, alone = token_ids([151_935] * 100), sampling_mask([[151_935]] * 100)
    assert len(encoded_mask(alone, tokens)) == 100
    assert len(encoded_mask(sampling_mask([[150_000, 151_935]] * 100), tokens)) == 400


def test_batches_come_back_in_order_with_all_that_they_say(tmp_path):
    nothing = read_journal(tmp_path / "none", 12)
    assert nothing == Recovered(None, (), {}, 12, True, ()), "where nothing was written"
    first = ClosedBatch(1, (ClosedGroup(5, 1, 2, 1, 3), ClosedGroup(4, 0, 1, 0, 0)))
    drops = (DroppedGroup(6, 0, "all responses agree \udc80"), DroppedGroup(9, 0, "never came"))
    second = ClosedBatch(2, (), drops)
    keys = [response(5, 0, 1), response(5, 1, 1), SampleKey(5, 1, "correction", 0), response(4)]
    with Journal(tmp_path, KEEP, "a: 1\nb: \udc80", 0) as journal:
        samples = append(journal, *keys)
        journal.closed(first)
        append(journal, response(6))
        journal.closed(second)
    recovered = read_journal(tmp_path, 0)
    assert recovered.batches == (first, second)
    assert same(recovered.samples, samples)  # and not the dropped one
    assert (recovered.settings, recovered.last_step, recovered.is_whole) == ("a: 1\nb: \udc80", 2, True)
    assert recovered.notes == ()
    recovered.samples[keys[0]].logprobs[0] = 0  # may be written to


def test_a_journal_that_ends_before_the_checkpoint_gives_nothing(three_steps):
    directory, _ = three_steps  # its open group may have been trained on in step 4 or 5
    recovered = read_journal(directory, 5)
    assert (recovered.batches, recovered.samples, recovered.is_whole) == ((), {}, False)
    assert "ends at step 3 and has no complete batch of step 6" in recovered.notes[0]
    with Journal(directory, KEEP, "settings", 5) as journal:  # even without a call of rewind
        new = append(journal, response(4))
    recovered = read_journal(directory, 5)
    assert same(recovered.samples, new)
    assert recovered.is_whole


def test_the_journal_refuses_inconsistent_entries(tmp_path):
    wide = replace(make_sample(1), logprobs=np.zeros(3))
    with Journal(tmp_path, KEEP, "", 0) as journal:
        append(journal, response(1, 0), response(1, 1), response(2))
        with pytest.raises(TypeError, match="float64"):  # it would come back changed
            journal.sampled(response(3), wide)
        with pytest.raises(ValueError, match="in the journal already"):
            append(journal, response(2))
        for step, responses, says in ((1, 3, "1 are missing, 0 too"), (1, 1, "0 are missing, 1 too")):
            with pytest.raises(ValueError, match=says):
                journal.closed(ClosedBatch(step, (group(1, responses),)))
        with pytest.raises(ValueError, match="cannot follow step 0"):
            journal.closed(ClosedBatch(2, (group(1, 2),)))
        journal.closed(ClosedBatch(1, (group(1, 2),), (DroppedGroup(2, 0, "filtered"),)))
        for late in (response(1, 2), response(2, 1)):
            with pytest.raises(ValueError, match="step 1 has closed or dropped"):
                append(journal, late)
    assert [batch.groups for batch in read_journal(tmp_path, 0).batches] == [(group(1, 2),)]
    with pytest.raises(ValueError, match="is closed"):
        append(journal, response(3))


def test_a_record_cut_at_any_byte_loses_only_itself(three_steps, tmp_path_factory):
    directory, samples = three_steps
    [segment] = segments(directory)
    whole = segment.read_bytes()
    start = whole.rindex(b"IBPJ")  # of the last record, that of prompt 4's response
    without = {k: s for k, s in samples.items() if k.prompt_index < 4}
    for size in (*range(start, start + 20), *range(start + 20, len(whole), 3)):  # header and content
        torn = tmp_path_factory.mktemp("torn")
        (torn / segment.name).write_bytes(whole[:size])
        recovered = read_journal(torn, 0)
        assert same(recovered.samples, without), size
        assert (len(recovered.batches), recovered.is_whole, len(recovered.notes)) == (3, True, size > start)
        with Journal(torn, KEEP, "settings", 0) as journal:
            again = append(journal, response(4))
        recovered = read_journal(torn, 0)
        assert same(recovered.samples, without | again), size
        assert recovered.notes == (), size


def flip(segment, place, bits=1):
    data = bytearray(segment.read_bytes())
    data[place] ^= bits
    segment.write_bytes(data)


def whole_records(directory):
    """(segment, entry) of all that can be read, from the first segment on."""
    return [(n, encode(found)) for n, found in entries(directory, 0) if not isinstance(found, Damage)]


@functools.cache
def every_kind_of_record(per_segment):
    """Segments with three batches, corrections, open groups, a restart and a rewind; and all samples."""
    samples = {}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SEGMENT_BYTES", per_segment)
        with Journal(Path(name), KEEP, "settings", 0) as journal:
            for step in (1, 2):
                corrections = SampleKey(step, 0, "correction", 0)
                samples |= append(journal, response(step, 0), response(step, 1), corrections)
                journal.closed(ClosedBatch(step, (group(step, 2, 1),)))
            samples |= append(journal, response(3))
        with Journal(Path(name), KEEP, "settings", 0) as journal:
            samples |= append(journal, response(9))
            journal.rewound(2)
            samples |= append(journal, response(3))
            journal.closed(ClosedBatch(3, (group(3),)))
            samples |= append(journal, response(4), response(5), SampleKey(5, 0, "correction", 0))
        return {path.name: path.read_bytes() for path in segments(Path(name))}, samples


@settings(max_examples=100)
@given(st.data(), st.sampled_from([1, 400, 10**6]), st.sampled_from([1, 1, 2, 6]))
def test_a_flipped_byte_loses_only_its_record(data, per_segment, flips):
    """After several too no file is deleted, nothing false is read, and a run can go on."""
    files, samples = every_kind_of_record(per_segment)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)  # nothing here loses power
        directory = Path(name)
        for file, content in files.items():
            (directory / file).write_bytes(content)
        written = whole_records(directory)
        for _ in range(flips):
            segment = data.draw(st.sampled_from(segments(directory)))
            place = data.draw(st.integers(0, segment.stat().st_size - 1))
            flip(segment, place, data.draw(st.integers(1, 255)))
        damaged = [path.read_bytes() for path in segments(directory)]
        left, recovered = whole_records(directory), read_journal(directory, 0)
        assert left == [one for one in written if one in left], "in order, each as it was written"
        if flips == 1:
            assert len(left) == len(written) - 1
            assert f"{segment}: 1 damaged record is left out" in recovered.notes[0]
        assert [batch.step for batch in recovered.batches] == list(range(1, recovered.last_step + 1))
        assert all(bits_of(found) == bits_of(samples[key]) for key, found in recovered.samples.items())
        with Journal(directory, KEEP, "settings", 0) as journal:
            journal.follow(recovered)
            for step in range(recovered.last_step + 1, 5):  # what is missing is sampled, and all are closed
                wanted = [key for key in samples if key.prompt_index == step]
                append(journal, *(key for key in wanted if key not in recovered.samples))
                corrections = sum(key.kind == "correction" for key in wanted)
                journal.closed(ClosedBatch(step, (group(step, len(wanted) - corrections, corrections),)))
        again = read_journal(directory, 0)
        assert ([batch.step for batch in again.batches], again.is_whole) == ([1, 2, 3, 4], True)
        trained = {key: sample for key, sample in samples.items() if key.prompt_index <= 4}
        assert same({key: again.samples[key] for key in trained}, trained)
        assert [path.read_bytes() for path in segments(directory)][: len(damaged)] == damaged


def test_everything_that_depends_on_a_lost_record_is_sampled_again(three_steps):
    directory, samples = three_steps
    [segment] = segments(directory)
    sampled = Sampled(response(2), samples[response(2)])  # its weights wrote the rest
    closed = ClosedBatch(2, (group(2, 2),))  # it may have trained on prompt 2
    for lost, checkpoint, steps, left in ((sampled, 0, [1], [1, 1, 2]), (closed, 2, [3], [3, 3, 4])):
        place = segment.read_bytes().index(encode(lost))
        flip(segment, place)
        recovered = read_journal(directory, checkpoint)
        assert [batch.step for batch in recovered.batches] == steps
        assert [key.prompt_index for key in recovered.samples] == left
        assert not recovered.is_whole, (lost, checkpoint, steps, left)
        flip(segment, place)


def test_losing_a_rewind_record_revives_no_rewound_sample(tmp_path):
    new = replace(make_sample(7), versions=((0, 1),))
    for after in ("settings", "other settings"):
        directory = tmp_path / after
        with Journal(directory, KEEP, "settings", 0) as journal:
            for step in (1, 2):
                append(journal, response(step))
                journal.closed(ClosedBatch(step, (group(step),)))
            append(journal, response(3), response(4))
        for step in (2, 3):
            with Journal(directory, KEEP, after, 0) as journal:
                if step == 2:
                    journal.rewound(1)
                journal.sampled(response(step), new)
                journal.closed(ClosedBatch(step, (group(step),)))
        flip(segments(directory)[1], 20)
        recovered = read_journal(directory, 0)
        assert recovered.settings == after
        if after == "settings":
            assert [batch.step for batch in recovered.batches] == [1, 2, 3], after
            assert recovered.samples.keys() == {response(step) for step in (1, 2, 3)}, "and not the open one"
            assert all(bits_of(recovered.samples[response(step)]) == bits_of(new) for step in (2, 3)), after
        else:
            assert (recovered.batches, recovered.is_whole) == ((), False), after


def test_records_after_damage_are_found_with_bounded_memory(three_steps):
    directory, samples = three_steps
    [segment] = segments(directory)
    whole = segment.read_bytes()
    # a header that lies across two reads, and records behind a hole that no disk could hold
    damages = [(b"IBPJ damaged", hole, b"") for hole in (5, 2**20 - 8, 2**20, 10**12)]
    for length in (2**32 - 1, 2**30):
        head = struct.pack("<4sII", b"IBPJ", length, 0)
        damages.append((b"", 0, head + struct.pack("<I", zlib.crc32(head))))
    for before, hole, after in damages:
        with segment.open("wb") as file:
            file.write(before)
            file.seek(hole, os.SEEK_CUR)
            file.write(whole + after)
        tracemalloc.start()
        recovered = read_journal(directory, 0)
        assert tracemalloc.get_traced_memory()[1] < 2**24, (before, hole, after)
        tracemalloc.stop()
        assert same(recovered.samples, samples), (before, hole, after)
        if before:
            assert "damaged" in recovered.notes[0], (before, hole, after)
        else:
            assert len(recovered.notes) == 1, (before, hole, after)


def test_damage_before_the_resume_point_does_no_harm(tmp_path):
    with Journal(tmp_path, KEEP, "settings", 0) as journal:
        append(journal, response(1))
        journal.closed(ClosedBatch(1, (group(1),)))
        journal.saved(1)
        samples = append(journal, response(2))
    segments(tmp_path)[0].write_bytes(b"x" * 100)
    for _ in range(2):
        recovered = read_journal(tmp_path, 1)
        assert same(recovered.samples, samples)
        assert (recovered.is_whole, recovered.notes) == (True, ())
        Journal(tmp_path, KEEP, "settings", 1).close()


def test_a_missing_segment_loses_only_its_own_records(three_steps):
    directory, samples = three_steps
    for prompt in (5, 6):
        with Journal(directory, KEEP, "settings", 0) as journal:
            samples |= append(journal, response(prompt))
    segments(directory)[1].unlink()
    recovered = read_journal(directory, 0)
    assert same(recovered.samples, {k: s for k, s in samples.items() if k.prompt_index != 5})
    assert "000002.journal: 1 damaged record is left out" in recovered.notes[0]
    assert "this segment is missing" in recovered.notes[0]
    Journal(directory, KEEP, "settings", 0).close()
    assert [path.name for path in segments(directory)] == ["000001.journal", "000003.journal"]


def test_a_journal_of_another_format_is_left_alone(three_steps, monkeypatch):
    directory, _ = three_steps
    [segment] = segments(directory)
    before = segment.read_bytes()
    monkeypatch.setattr("megatron_ibpo.journal.entries.FORMAT", 3)
    for use in (lambda: read_journal(directory, 0), lambda: Journal(directory, KEEP, "settings", 0)):
        with pytest.raises(JournalError, match=r"000001.journal: it has format 2.* reads format 3"):
            use()
    assert segment.read_bytes() == before


def test_a_full_disk_tears_no_record(three_steps, monkeypatch):
    directory, samples = three_steps
    write = os.write
    with Journal(directory, KEEP, "settings", 0) as journal:
        for room in (0, 10, 100):  # in a new segment, then in one that holds a record
            with monkeypatch.context() as full:
                full.setattr(os, "write", lambda file, data, room=room: write(file, data[:room]))
                with pytest.raises(OSError, match=r"No space left on device: '.*000002.journal'"):
                    append(journal, response(10 + room))
            samples |= append(journal, response(10 + room))
        recovered = read_journal(directory, 0)
        assert same(recovered.samples, samples)
        assert recovered.notes == ()
        shutil.rmtree(directory)
        with pytest.raises(FileNotFoundError, match=directory.name):
            journal.closed(ClosedBatch(4, (group(10),)))


NAMES = ["sample"] * 3 + ["close", "save", "crash", "torn crash", "go back", "rewind"]
ACTIONS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2**16)), max_size=40)


@settings(max_examples=60)
@given(ACTIONS, st.sampled_from([0, 300, 700, KEEP]), st.sampled_from([1, 500]))
@example([("close", 0), ("sample", 0), ("save", 1)], 0, 1)  # the segment with the saved batch is deleted
@example([("sample", 0), ("sample", 0), ("close", 2), ("save", 1), ("sample", 1)], 300, 1)  # part of it
@example([("sample", 0), ("sample", 1), ("close", 4), ("close", 2), ("save", 1), ("save", 1)], 0, 1)  # old
def test_recovery_equals_a_plain_model_under_random_actions(actions, keep, segment_bytes):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SEGMENT_BYTES", segment_bytes)
        patch.setattr(os, "fsync", lambda file: None)  # nothing here loses power
        directory, journal = Path(name), Journal(Path(name), keep, "settings", 0)
        # a run's own account of what it sampled and closed
        model = SimpleNamespace(saved=0, asked=0, batches=[], open={}, trained={})
        for action, number in actions:
            journal = act(journal, model, directory, keep, action, number)
            recovered = read_journal(directory, model.saved)
            assert recovered.batches == tuple(model.batches[model.saved :]), (action, number)
            assert same(recovered.samples, wanted_of(model, model.saved)), (action, number)
            assert recovered.is_whole, (action, number)
            assert keep < KEEP or {path.name for path in segments(directory)[:1]} <= {"000001.journal"}, (
                action,
                number,
            )
            check_older_checkpoints(directory, model)
        journal.close()


def wanted_of(model, after):
    prompts = {group.prompt_index for batch in model.batches[after:] for group in batch.groups}
    samples = {key: sample for key, sample in model.trained.items() if key.prompt_index in prompts}
    return samples | {key: sample for own in model.open.values() for key, sample in own.items()}


def act(journal, model, directory, keep, action, number):
    match action:
        case "sample":
            prompt = number % (model.asked + 1)  # of an open group, or of a new one
            if prompt not in model.open:
                prompt, model.asked = model.asked, model.asked + 1
            own = model.open.setdefault(prompt, {})
            key = response(prompt, len(own))
            own |= append(journal, key)
        case "close":
            taken = [prompt for place, prompt in enumerate(model.open) if number >> place & 2]
            dropped = taken[: number % 2]
            groups = tuple(group(prompt, len(model.open[prompt])) for prompt in taken[number % 2 :])
            drops = tuple(DroppedGroup(prompt, 0, "expired") for prompt in dropped)
            batch = ClosedBatch(len(model.batches) + 1, groups, drops)
            journal.closed(batch)
            model.batches.append(batch)
            for prompt in taken:
                own = model.open.pop(prompt)
                model.trained |= {} if prompt in dropped else own
        case "save":
            model.saved += number % (len(model.batches) - model.saved + 1)
            journal.saved(model.saved)
        case "crash" | "torn crash":
            journal.close()
            if action == "torn crash" and (files := segments(directory)):
                with files[-1].open("ab") as file:
                    file.write(files[-1].read_bytes()[: number % 30 + 1])
            journal = Journal(directory, keep, "settings", model.saved)
        case "go back":  # to an older checkpoint
            model.saved = number % (model.saved + 1)
            recovered = read_journal(directory, model.saved)
            journal.close()
            journal = Journal(directory, keep, "settings", model.saved)
            if not recovered.is_whole:
                journal.rewound(recovered.last_step)
            if not recovered.is_whole or recovered.settings is None:  # nothing is left, and nothing is known
                del model.batches[recovered.last_step :]
                model.open = {}
        case "rewind":
            step = model.saved + number % (len(model.batches) - model.saved + 1)
            journal.rewound(step)
            del model.batches[step:]
            model.open = {}
    return journal


def check_older_checkpoints(directory, model):
    """A run finds all from them, or is told that it does not, and nothing that is not its own."""
    for older in range(model.saved):
        recovered = read_journal(directory, older)
        batches, wanted = tuple(model.batches[older:]), wanted_of(model, older)
        if not segments(directory):  # nothing needed was left, and nothing is known
            assert (recovered.batches, recovered.samples) == ((), {}), older
            continue
        replayed = [group for batch in recovered.batches for group in batch.groups]
        assert recovered.batches == batches[: len(recovered.batches)], older
        assert {key for one in replayed for key in one.sample_keys()} <= recovered.samples.keys(), older
        assert same(recovered.samples, {key: wanted[key] for key in recovered.samples}), older
        if recovered.is_whole:
            assert (recovered.batches, recovered.samples.keys()) == (batches, wanted.keys()), older


def test_exactly_as_much_as_was_asked_for_may_stay(tmp_path):
    def kept(directory, most):
        with Journal(tmp_path / directory, most, "settings", 0) as journal:
            for step in (1, 2, 3):
                append(journal, response(step, 0))
                journal.closed(ClosedBatch(step, (group(step, 1),)))
                assert journal.pending_bytes == segments(tmp_path / directory)[-1].stat().st_size, step
                journal.saved(step)
                assert journal.pending_bytes == 0, step
        return sum(path.stat().st_size for path in segments(tmp_path / directory))

    everything, needed = kept("all", KEEP), kept("none", 0)
    assert kept("exactly", everything - needed) == everything
    assert kept("a byte less", everything - needed - 1) < everything


def test_a_closed_batch_is_on_disk_or_can_be_retried(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 1)
    reached, name = [], "/proc/self/fd/{}"
    monkeypatch.setattr(os, "fsync", lambda file: reached.append(Path(name.format(file)).readlink().name))
    with Journal(tmp_path, KEEP, "settings", 0) as journal:
        append(journal, response(1, 0), response(1, 1))
        assert reached == []
        journal.closed(ClosedBatch(1, (group(1, 2),)))
        assert reached == ["000001.journal", "000002.journal", "000003.journal", tmp_path.name]
        reached.clear()
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", lambda file: os.write(-1, b""))
            with pytest.raises(OSError, match=f"Bad file descriptor: '{tmp_path}'"):
                journal.closed(batch := ClosedBatch(2, ()))
        journal.closed(batch)
        assert reached == ["000003.journal", "000004.journal", tmp_path.name]
        journal.closed(ClosedBatch(3, ()))
    assert [batch.step for batch in read_journal(tmp_path, 0).batches] == [1, 2, 3]


def test_threads_may_append_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 5_000)
    with Journal(tmp_path, KEEP, "settings", 0) as journal, ThreadPoolExecutor(8) as threads:

        def work(prompt):
            return append(journal, *(response(prompt, index) for index in range(100)))

        found = {key: sample for own in threads.map(work, range(8)) for key, sample in own.items()}
        journal.closed(batch := ClosedBatch(1, tuple(group(prompt, 100) for prompt in range(8))))
    recovered = read_journal(tmp_path, 0)
    assert same(recovered.samples, found)
    assert (len(found), recovered.batches) == (800, (batch,))


WRITES_FOR_EVER = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from megatron_ibpo.journal import Journal
from support.journals import KEEP, append, response
journal = Journal(Path(sys.argv[1]), KEEP, "settings", 0)
for number in itertools.count():
    append(journal, response(number))
    print(number, flush=True)
"""


def test_a_killed_process_loses_no_acknowledged_record(tmp_path):
    command = [sys.executable, "-c", WRITES_FOR_EVER, str(tmp_path), str(TESTS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    told = [process.stdout.readline() for _ in range(300)]
    with pytest.raises(JournalError, match=f"process {process.pid} is writing"):
        Journal(tmp_path, KEEP, "settings", 0)
    process.kill()
    last = int([*told, *process.communicate()[0].splitlines()][-1])
    recovered = read_journal(tmp_path, 0)
    assert [key.prompt_index for key in recovered.samples][: last + 1] == list(range(last + 1))
    assert len(recovered.samples) <= last + 2
    Journal(tmp_path, KEEP, "settings", 0).close()  # a dead writer's lock is free
