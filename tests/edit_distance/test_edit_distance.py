"""Token edit distance and alignment, on every path, against tables by the book and rapidfuzz."""

import math
import multiprocessing
import sys
import threading
import time
from contextlib import suppress
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from megatron_ibpo import _edit_distance
from megatron_ibpo.edit_distance import (
    SATURATED,
    batch_distance,
    distance,
    opcodes,
    rewrite_test,
    unmodified_mask,
)
from megatron_ibpo.edit_distance.rewrites import adaptive_threshold

ISAS = _edit_distance.supported_isas()
ENGINES = ["", "packed", "stripes", "wavefront"]
ANY_IDS = st.lists(
    st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 2**61 - 1, 2**63 - 1, -(2**63), 2**18, 2**18 - 1]),
    max_size=70,
)
EDGES = [0, 1, 3, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 511, 512, 513]
EDGES += [1023, 1024, 1025, 2047, 2048, 2049]  # around the words, stripes and tiles of all instruction sets


def flatten(sequences) -> tuple[np.ndarray, np.ndarray]:
    """Values one after another, and offsets."""
    return np.concatenate(sequences).astype(np.int64), np.cumsum([0, *map(len, sequences)])


def both_flat(pairs) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return *flatten([a for a, _ in pairs]), *flatten([b for _, b in pairs])


def edited(rng, a, rate, alphabet):
    """A copy of `a` with about so many of its tokens replaced, left out, or preceded by another."""
    kind = np.where(rng.random(len(a)) < rate, rng.integers(1, 4, len(a)), 0)
    copies = np.array([1, 1, 0, 2])[kind]
    b = np.repeat(a, copies)
    first = (np.cumsum(copies) - copies)[(kind == 1) | (kind == 3)]
    b[first] = rng.integers(0, alphabet, len(first))
    return b


def pairs_of_all_kinds(seed, count, lengths):
    rng, pairs = np.random.default_rng(seed), []
    for _ in range(count):
        alphabet = int(rng.choice([1, 2, 4, 50, 150_000]))
        a, unrelated = (rng.integers(0, alphabet, int(rng.choice(lengths))) for _ in range(2))
        moved, much_shorter = np.roll(a, len(unrelated)), edited(rng, a[: len(a) // 4], 0.1, alphabet)
        periodic = np.arange(len(a)) % 7, (np.arange(max(0, len(a) - 5)) + 3) % 7
        near = edited(rng, a, rng.choice([0.0, 0.02, 0.2, 0.6, 0.95]), alphabet)
        kinds = [(a, unrelated), (a, moved), (a, much_shorter), periodic, (a, near), (near, a)]
        a, b = kinds[rng.integers(len(kinds))]
        pairs.append((a, b) if rng.random() < 0.5 else (b, a))
    return pairs


@given(ANY_IDS, ANY_IDS)
@settings(max_examples=50)
def test_ids_of_any_size_and_sign(a, b):
    count, matches = canonical_alignment(a, b)  # rapidfuzz takes ids for equal whose hashes are
    assert distance(a, b, normalized=False) == count
    mask, other, counts = unmodified_mask([a], None, [b], None, return_other=True)
    assert list(zip(*map(np.flatnonzero, (mask, other)), strict=True)) == matches
    assert counts.tolist() == [count]


@pytest.mark.parametrize("isa", ISAS)
def test_every_engine_equals_rapidfuzz_and_saturates_above_the_cutoff(isa):
    pairs = pairs_of_all_kinds(seed=0, count=300, lengths=EDGES)
    arguments = both_flat(pairs)
    want = np.array([Levenshtein.distance(a.tolist(), b.tolist()) for a, b in pairs])
    for engine in ENGINES:
        for threads in (0, 1, 3):
            got = _edit_distance.batch_distance(*arguments, None, threads, isa, engine)
            assert got.tolist() == want.tolist(), (engine, threads)
        for more in (-1, 0, 1):
            cutoffs = np.maximum(want + more, 0)
            got = _edit_distance.batch_distance(*arguments, cutoffs, 2, isa, engine)
            assert got.tolist() == np.where(want <= cutoffs, want, SATURATED).tolist(), (engine, more)


def test_long_pairs_equal_rapidfuzz():
    rng = np.random.default_rng(3)
    ranks = rng.zipf(1.2, (3, 20_000)) % 150_000
    pairs = [(ranks[0], edited(rng, ranks[0], rate, 150_000)) for rate in (0.02, 0.2, 0.6)]
    pairs += [(ranks[1], ranks[2]), (ranks[1], ranks[2][:4000]), (ranks[0], np.roll(ranks[0], 7000))]
    want = [Levenshtein.distance(a.tolist(), b.tolist()) for a, b in pairs]
    for isa in ISAS:
        assert _edit_distance.batch_distance(*both_flat(pairs), None, 1, isa, "").tolist() == want
        assert _edit_distance.batch_align(*both_flat(pairs), 1, isa, "")[2].tolist() == want


def test_distances_and_cutoffs_are_in_the_unit_asked_for():
    assert (distance([], []), distance([], [1, 2]), distance([1, 9, 3, 4, 5], [1, 2, 3, 4])) == (0, 1, 0.4)
    assert distance([1, 9, 3, 4, 5], [1, 2, 3, 4], normalized=False) == 2
    a, b = list(range(10)), [*range(7), 20, 21, 22]  # three edits of ten
    assert distance(a, b, cutoff=0.3) == 0.3
    assert distance(a, b, cutoff=0.29) == np.inf
    assert distance(a, b, normalized=False, cutoff=3) == 3
    assert distance(a, b, normalized=False, cutoff=2.9) == np.inf
    assert batch_distance([a], None, [b], None, normalized=False, cutoff=2).tolist() == [SATURATED]
    assert batch_distance([a, []], None, [b, []], None, cutoff=0).tolist() == [np.inf, 0.0]
    assert distance(a, b, cutoff=10**400) == 0.3
    assert distance(a, b, normalized=False, cutoff=10**400) == 3


@given(st.integers(1, 2000), st.integers(0, 2000), st.floats(0, 1.2))
@settings(max_examples=50)
def test_a_cutoff_decides_as_comparing_the_distance_itself_would(length, count, cutoff):
    count = min(count, length)
    a = np.arange(length)
    b = np.where(a < count, -1, a)
    assert (distance(a, b, cutoff=cutoff) == np.inf) == (count / length > cutoff)
    assert distance(a, b, cutoff=count / length) == count / length


def shared_start(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def canonical_alignment(a, b):
    """(distance, pairs of matched places) of the canonical alignment, as unmodified_mask documents it."""
    start = shared_start(a, b)
    shared = shared_start(a[start:][::-1], b[start:][::-1])
    end = len(a) - shared, len(b) - shared
    best = {end: (0, 0, 0, end)}  # cost and, negated, matches to come; preference and place of the next step
    for i, j in product(range(end[0], start - 1, -1), range(end[1], start - 1, -1)):
        ways = [best[end]] if (i, j) == end else [(math.inf, 0, 0, end)]
        if (i + 1, j + 1) in best:
            cost, matches, *_ = best[i + 1, j + 1]
            ways.append((cost + (a[i] != b[j]), matches - (a[i] == b[j]), 0, (i + 1, j + 1)))
        if (i + 1, j) in best and (j == start or a[i] != b[j - 1]):
            ways.append((best[i + 1, j][0] + 1, best[i + 1, j][1], 1, (i + 1, j)))
        if (i, j + 1) in best and (i == start or a[i - 1] != b[j]):
            ways.append((best[i, j + 1][0] + 1, best[i, j + 1][1], 2, (i, j + 1)))
        best[i, j] = min(ways)
    i = j = start
    found = [(place, place) for place in range(start)]
    while (i, j) != end:
        *_, preference, place = best[i, j]
        if preference == 0 and a[i] == b[j]:
            found.append((i, j))
        i, j = place
    return best[start, start][0], found + [(len(a) - k, len(b) - k) for k in range(shared, 0, -1)]


def test_the_alignment_is_canonical_on_every_path():
    """Pairs that are too long for the definition are bit-equal."""
    short = pairs_of_all_kinds(seed=2, count=60, lengths=[1, 20, 63, 64, 65, 130, 200])
    arguments = both_flat([*short, *pairs_of_all_kinds(seed=4, count=120, lengths=EDGES)])
    found = [
        [part.tobytes() for part in _edit_distance.batch_align(*arguments, threads, isa, engine)]
        for isa, engine, threads in product(ISAS, ("", "stripes", "wavefront"), (1, 3))
    ]
    assert all(again == found[0] for again in found)
    masks = [np.frombuffer(part, np.uint8) for part in found[0][:2]]
    kept, also = (np.split(mask, arguments[place][1:-1]) for mask, place in zip(masks, (1, 3), strict=True))
    for (a, b), *own in zip(short, kept, also, strict=False):
        _, matches = canonical_alignment(a.tolist(), b.tolist())
        assert list(zip(*map(np.flatnonzero, own), strict=True)) == matches


def test_an_edit_script_rebuilds_the_sequence_and_costs_its_distance():
    for a, b in pairs_of_all_kinds(seed=5, count=80, lengths=EDGES):
        mask, other, count = unmodified_mask([a], None, [b], None, return_other=True)
        assert mask.dtype == np.uint8, (a, b)
        assert a[mask == 1].tolist() == b[other == 1].tolist()
        made, reached, spent = [], (0, 0), 0
        for tag, a_start, a_end, b_start, b_end in opcodes(a, b):
            assert reached == (a_start, b_start)
            reached = (a_end, b_end)
            made += (a[a_start:a_end] if tag == "equal" else b[b_start:b_end]).tolist()
            spent += 0 if tag == "equal" else max(a_end - a_start, b_end - b_start)
        assert (made, reached) == (b.tolist(), (len(a), len(b)))
        assert spent == count[0] == Levenshtein.distance(a.tolist(), b.tolist())


def test_a_script_by_hand():
    a, b = [1, 2, 3, 4, 5, 6], [1, 9, 3, 5, 6, 7, 8]
    assert [tuple(step) for step in opcodes(a, b)] == [
        ("equal", 0, 1, 0, 1), ("replace", 1, 2, 1, 2), ("equal", 2, 3, 2, 3),
        ("delete", 3, 4, 3, 3), ("equal", 4, 6, 3, 5), ("insert", 6, 6, 5, 7),
    ]  # fmt: skip
    assert opcodes([], []) == []
    assert [tuple(step) for step in opcodes([1, 2], [4])] == [("replace", 0, 1, 0, 1), ("delete", 1, 2, 1, 1)]


def test_rewrites_by_hand():
    y = [[1, 2, 3, 4, 5]] * 5
    y_hat = [[1, 2, 8, 8, 8]] + [[1, 8, 8, 8, 8]] * 4
    refs = [[[9] * 5], [[9, 9, 9, 9, 8]], [[9, 9, 9, 8, 8]], [[9] * 5, [9, 9, 9, 8, 8], [9] * 5], []]
    test = rewrite_test(y, y_hat, refs, threshold=0.6)
    # not above α; above it, but as far from the reference; nearer to it; the nearest of three counts; none: α
    # alone
    assert test.rewritten.tolist() == [False, False, True, True, True]
    assert test.distance.tolist() == [0.6, 0.8, 0.8, 0.8, 0.8]
    assert test.reference_distance.tolist()[:4] == [np.inf, 0.8, 0.6, 0.6]  # the first: above 0.6
    assert np.isnan(test.reference_distance[4])
    known = rewrite_test(flatten(y), flatten(y_hat), refs, threshold=0.6, edits=np.array([3, 4, 4, 4, 4]))
    assert known.rewritten.tolist() == test.rewritten.tolist()
    with pytest.raises(ValueError, match=r"edits: must be int64 \[5\], not int64 \[4\]"):
        rewrite_test(y, y_hat, refs, threshold=0.6, edits=np.array([3, 4, 4, 4]))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9), st.integers(1, 3))
@settings(max_examples=50)
def test_a_distance_equal_to_the_adaptive_threshold_is_no_rewrite(common, other, equal, times):
    """Of equal distances none is above their mean. One in five that is greater than the others, all equal,
    lies on mean + 2 deviations; one in seven lies above."""

    def rewrites(edits):
        y = [[0] * 40] * len(edits)
        y_hat = [[1] * edited + [0] * (40 - edited) for edited in edits]
        return rewrite_test(y, y_hat, [[]] * len(edits), threshold="adaptive").rewritten.sum()

    assert rewrites([common] * equal) == 0
    assert rewrites([common] * 4 * times + [other] * times) == 0
    assert rewrites([common] * 6 + [40]) == (common < 40)
    nothing = rewrite_test([], [], [], threshold="adaptive")
    assert (np.isnan(nothing.threshold), nothing.rewritten.shape) == (True, (0,))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
@settings(max_examples=50)
def test_the_adaptive_threshold_is_the_double_below_the_exact_one(distances):
    exact = [Fraction(value) for value in distances]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / len(exact)
    threshold = adaptive_threshold(np.array(distances))
    above = Fraction(math.nextafter(threshold, 2))
    assert threshold <= mean or (Fraction(threshold) - mean) ** 2 <= 4 * variance
    assert above > mean
    assert (above - mean) ** 2 > 4 * variance


@pytest.mark.parametrize(("of_values", "of_offsets"), [(np.int32, np.int64), (np.int64, np.int32)])
def test_arrays_tensors_and_lists_are_accepted_in_any_layout(of_values, of_offsets):
    values, offsets = np.array([1, 2, 3, 4, 4], of_values), np.array([0, 3, 3, 5], of_offsets)
    arrays = (values, offsets, np.array([1, 3, 9, 4, 5]), np.array([0, 2, 3, 5]))
    others = [torch.tensor(own) for own in ([1, 3], [9], [4, 5])]
    lists = (np.split(values, offsets[1:-1]), None, others, None)
    for batch in (arrays, [torch.from_numpy(array) for array in arrays], lists):
        assert batch_distance(*batch, normalized=False).tolist() == [1, 1, 1]
    assert distance(values[::2], np.array([1, 3])) == 1 / 3
    array = np.array([3, -1, 2**40])
    off_by_a_byte = np.frombuffer(b"\0" + array.tobytes(), np.int64, offset=1)
    for same in (array.tolist(), tuple(array), off_by_a_byte, np.repeat(array, 2)[::2], torch.tensor(array)):
        assert distance(same, array) == 0.0
        assert distance(same, [*array, 4], normalized=False) == 1.0


def test_batches_of_more_than_two_billion_ids():
    longest = 2**30 - 1
    many = np.zeros(3 * longest, np.int32)  # pages that no one touches take no memory
    nothing = np.zeros(0, np.int32)
    offsets = np.arange(4) * longest
    got = batch_distance(many, offsets, nothing, np.zeros(4, np.int64), normalized=False)
    assert got.tolist() == [longest] * 3
    with pytest.raises(ValueError, match="a: sequence 0 has 1073741824 ids; the most are 1073741823"):
        batch_distance(many, [0, 2**30, many.size], nothing, [0, 0, 0])


def test_a_sequence_too_long_is_refused_before_it_is_copied():
    """Four bytes with a stride of 0 pass for 2^40 ids."""
    endless, none = np.broadcast_to(np.int32(7), 2**40), np.zeros(0, np.int32)
    for refused in (
        lambda: distance(endless, none),
        lambda: batch_distance(endless, [0, 2**40], none, [0, 0]),
        lambda: batch_distance([endless], None, [none], None),
        lambda: opcodes(endless, none),
    ):
        with pytest.raises(ValueError, match="sequence 0 has 1099511627776 ids; the most are 1073741823"):
            refused()


def exit_code_of_a_fork(work):
    """None if it hangs."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    exit_code = child.exitcode
    child.kill()
    return exit_code


@pytest.mark.parametrize("written", ["offsets", "ids"])
def test_concurrent_writes_to_the_arrays_cause_no_crash(written):
    """The process once ended in a segmentation fault within the first calls."""
    ids, offsets = np.random.default_rng(0).integers(0, 500, 64 * 600), np.arange(65) * 600
    other, steady = np.where(np.arange(ids.size) % 7, ids, 1), offsets.copy()
    target, wrong = (offsets[1:-1], (2**40, -(2**40))) if written == "offsets" else (ids, (2**50, 3))

    def work():
        right, stopping = target.copy(), threading.Event()

        def write():
            while not stopping.is_set():
                for value in wrong:
                    target[:] = value
                    target[:] = right

        writer = threading.Thread(target=write)
        writer.start()
        calls, end = 0, time.monotonic() + 0.4
        while calls <= 20 or time.monotonic() < end:
            calls += 1
            with suppress(ValueError):  # caught in the middle of a write
                _edit_distance.batch_distance(ids, offsets, other, steady, None, 2)
                _edit_distance.batch_align(ids, offsets, other, steady, 2)
        stopping.set()
        writer.join()

    assert exit_code_of_a_fork(work) == 0


def test_empty_batches_and_any_thread_count_are_accepted():
    assert batch_distance([], [0], [], [0]).shape == (0,)
    assert batch_distance([], None, [], None).shape == (0,)
    assert [part.shape for part in unmodified_mask([], None, [], None)] == [(0,), (0,)]
    assert batch_distance([1, 2], [0, 2], [1, 3], [0, 2], num_threads=2**70).tolist() == [0.5]


def test_other_threads_run_meanwhile():
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 150_000, 131_072), rng.integers(0, 150_000, 131_072)
    worker = threading.Thread(target=unmodified_mask, args=([a], None, [b], None))
    worker.start()
    ticks = 0
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 10, "the GIL was held"


def test_a_fork_after_threads_were_at_work_still_computes():
    arguments = both_flat(pairs_of_all_kinds(seed=7, count=100, lengths=[300, 900]))
    want = batch_distance(*arguments, num_threads=4)

    def work():
        sys.exit(not np.array_equal(batch_distance(*arguments, num_threads=4), want))

    assert exit_code_of_a_fork(work) == 0


def test_an_instruction_set_is_forced_by_name_or_environment(monkeypatch):
    arguments = both_flat([([1, 2], [1, 3])])
    monkeypatch.setenv("IBPO_EDIT_DISTANCE_ISA", "portable")
    assert batch_distance(*arguments).tolist() == [0.5]
    monkeypatch.setenv("IBPO_EDIT_DISTANCE_ISA", "mmx")
    with pytest.raises(ValueError, match=r"IBPO_EDIT_DISTANCE_ISA=mmx: this machine runs .*portable"):
        batch_distance(*arguments)
    with pytest.raises(ValueError, match=r"isa=mmx: this machine runs .*portable"):
        _edit_distance.batch_distance(*arguments, None, 1, "mmx")


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"a_values": [1.0, float("nan")]}, TypeError, "a_values: must hold int32 or int64 ids, not float64"),
        ({"a_values": [1, True]}, TypeError, "a_values: holds a bool"),  # a list of ints is read in C
        ({"a_values": np.ma.array([1, 2], mask=[0, 1])}, TypeError, "a_values: a masked array"),
        ({"a_values": [2**64, 1]}, TypeError, "a_values: .* not object"),
        ({"a_values": [[1, 2]]}, ValueError, r"a_values: must be 1-D, not of shape \(1, 2\)"),
        ({"a_values": 5, "a_offsets": None}, TypeError, "a: values without offsets must be a list of seq"),
        ({"a_values": [[1, 2.5]], "a_offsets": None}, TypeError, r"a\[0\]: .* not float64"),
        ({"a_offsets": [1, 2]}, ValueError, "a_offsets: must start with 0"),
        ({"b_offsets": [0, 1]}, ValueError, "b_offsets: must end with the number of values, 2, not 1"),
        ({"b_offsets": [0, 3, 2]}, ValueError, "b_offsets: must not fall, but entry 2 is 2 after 3"),
        ({"b_offsets": [0, 1, 2]}, ValueError, "b: 2 sequences, but a has 1"),
        ({"a_values": np.array([1, 2], ">i8")}, TypeError, "a_values: .* not >i8"),
        ({"a_offsets": [0.0, 2.0]}, TypeError, "a_offsets: .* not float64"),
        ({"num_threads": -1}, ValueError, "num_threads: must be 0 or more, not -1"),
        ({"cutoff": float("nan")}, ValueError, "cutoff: must be 0 or more, not nan"),
        ({"cutoff": "0.5"}, TypeError, "cutoff: must be a number, not '0.5'"),
    ],
)
def test_bad_input_is_refused_by_name(bad, error, message):
    good = {"a_values": [1, 2], "a_offsets": [0, 2], "b_values": [1, 3], "b_offsets": [0, 2]}
    with pytest.raises(error, match=message):
        batch_distance(**(good | bad))


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"threshold": "adaptiv"}, TypeError, 'threshold: must be a number or "adaptive"'),
        ({"threshold": -1}, ValueError, "threshold: must be 0 or more, not -1"),
        ({"refs": []}, ValueError, "refs: of 0 pairs, but y has 1"),
        ({"refs": [None]}, TypeError, "refs: must be a list with, for each pair, a list"),
        ({"refs": [[1, 3]]}, ValueError, r"refs\[0\]: must be 1-D"),
        ({"y_hat": [[1], [2]]}, ValueError, "y_hat: 2 sequences, but y has 1"),
    ],
)
def test_a_bad_rewrite_test_is_refused_by_name(bad, error, message):
    good = {"y": [[1, 2]], "y_hat": [[1, 3]], "refs": [[[1, 3]]], "threshold": 0.6}
    with pytest.raises(error, match=message):
        rewrite_test(**(good | bad))
