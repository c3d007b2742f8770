"""Token edit distance: against a textbook table, against rapidfuzz, and at its edges."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from megatron_ibpo.edit_distance import batch_distance, distance

SMALL_IDS = st.lists(st.integers(0, 3), max_size=200)
ANY_IDS = st.lists(
    st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 2**61 - 1, 2**63 - 1, -(2**63)]), max_size=70
)


def textbook(a, b) -> int:
    """Wagner and Fischer's table, one row at a time."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (x != y)))
    return row[-1]


def flatten(sequences):
    values = np.array([token for sequence in sequences for token in sequence], dtype=np.int64)
    return values, np.cumsum([0, *map(len, sequences)])


@pytest.mark.parametrize(
    ("a", "b", "edits", "normalized"),
    [
        ([], [], 0, 0.0),
        ([], [1, 2], 2, 1.0),
        ([5], [5], 0, 0.0),
        ([1, 2, 3], [4, 5], 3, 1.0),
        ([1, 2, 3, 4], [1, 3, 4], 1, 0.25),
        ([1, 2, 3, 4], [1, 9, 3, 4, 5], 2, 0.4),
        ([2**61 - 1], [0], 1, 1.0),
    ],
)
def test_known_distances(a, b, edits, normalized):
    assert distance(a, b, normalized=False) == edits
    assert distance(b, a) == normalized


@given(SMALL_IDS, SMALL_IDS)
@settings(max_examples=300, deadline=None)
def test_equals_the_textbook_table(a, b):
    assert distance(a, b, normalized=False) == textbook(a, b)


@given(ANY_IDS, ANY_IDS)
@settings(deadline=None)
def test_ids_of_any_size_and_sign(a, b):
    assert distance(a, b, normalized=False) == textbook(a, b)


@given(SMALL_IDS, SMALL_IDS, SMALL_IDS)
@settings(deadline=None)
def test_counts_are_a_metric(a, b, c):
    ab, ba = distance(a, b, normalized=False), distance(b, a, normalized=False)
    assert ab == ba
    assert (ab == 0) == (a == b)
    assert abs(len(a) - len(b)) <= ab <= max(len(a), len(b))
    assert distance(a, c, normalized=False) <= ab + distance(b, c, normalized=False)


def edited_pairs(seed: int, count: int, longest: int):
    """Random sequences and noisy copies, lengths around and far from multiples of 64, all rates of edits."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        length = int(
            rng.choice([0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000, int(rng.integers(0, longest))])
        )
        a = rng.integers(0, int(rng.choice([2, 50, 150_000])), length)
        kept = rng.random(length) > rng.choice([0.0, 0.02, 0.3, 0.9])
        b = np.insert(a[kept], np.flatnonzero(rng.random(int(kept.sum())) < 0.1), 7)
        yield a.tolist(), b.tolist()


def test_equals_rapidfuzz_on_a_batch_with_any_number_of_threads():
    pairs = list(edited_pairs(seed=0, count=400, longest=3000))
    arguments = [*flatten([a for a, _ in pairs]), *flatten([b for _, b in pairs])]
    expected = [Levenshtein.distance(a, b) for a, b in pairs]
    for threads in (0, 1, 2, 5):
        assert batch_distance(*arguments, normalized=False, num_threads=threads).tolist() == expected
    normalized = [count / max(len(a), len(b), 1) for count, (a, b) in zip(expected, pairs, strict=True)]
    assert batch_distance(*arguments).tolist() == normalized
    assert [distance(a, b) for a, b in pairs] == normalized


@pytest.mark.parametrize("values_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("offsets_dtype", [np.int32, np.int64])
def test_takes_arrays_and_tensors_of_both_widths(values_dtype, offsets_dtype):
    values_a, offsets_a = np.array([1, 2, 3, 4, 4], values_dtype), np.array([0, 3, 3, 5], offsets_dtype)
    values_b, offsets_b = np.array([1, 3, 9, 4, 5], np.int64), np.array([0, 2, 3, 5])
    expected = [1.0, 1.0, 1.0]
    assert batch_distance(values_a, offsets_a, values_b, offsets_b, normalized=False).tolist() == expected
    tensors = [torch.from_numpy(array) for array in (values_a, offsets_a, values_b, offsets_b)]
    assert batch_distance(*tensors, normalized=False).tolist() == expected
    assert distance(values_a[::2], values_b[:2]) == 1 / 3


@pytest.mark.parametrize("ids", [[3, -1, 2**40], []])
def test_takes_what_holds_ids_in_any_layout(ids):
    array = np.array(ids, np.int64)
    off_by_a_byte = np.frombuffer(b"\0" + array.tobytes(), np.int64, offset=1) if ids else array
    every_other = np.repeat(array, 2)[::2]
    for same in (ids, tuple(ids), list(array), array, off_by_a_byte, every_other, torch.from_numpy(array)):
        assert distance(same, ids) == 0.0
        assert distance(same, [*ids, 4], normalized=False) == 1.0


def test_other_threads_run_meanwhile():
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 150_000, 65_536), rng.integers(0, 150_000, 65_536)
    worker = threading.Thread(target=distance, args=(a, b))
    worker.start()
    ticks = 0
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 10, "the GIL was held"


def test_no_sequences_give_no_distances():
    assert batch_distance([], [0], [], [0]).shape == (0,)


def test_two_full_contexts_take_a_moment():
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 150_000, 32_768), rng.integers(0, 150_000, 32_768)
    started = time.perf_counter()
    assert distance(a, b, normalized=False) == Levenshtein.distance(a.tolist(), b.tolist())
    assert time.perf_counter() - started < 10, (
        "32 k against 32 k took seconds; a table in Python takes minutes"
    )


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"a_values": [1.0, float("nan")]}, TypeError, "a_values: must hold int32 or int64 ids, not float64"),
        ({"b_values": np.array([1, 2], np.uint64)}, TypeError, "b_values: .* not uint64"),
        ({"a_values": [True, False]}, TypeError, "a_values: .* not bool"),
        ({"a_values": [2**64, 1]}, TypeError, "a_values: .* not object"),
        ({"a_values": ["1", "2"]}, TypeError, "a_values: "),
        ({"a_values": [[1, 2]]}, ValueError, r"a_values: must be 1-D, not of shape \(1, 2\)"),
        (
            {"a_values": torch.empty(2, dtype=torch.int64, device="meta")},
            TypeError,
            "a_values: cannot be read",
        ),
        ({"a_offsets": [1, 2]}, ValueError, "a_offsets: must start with 0"),
        ({"b_offsets": []}, ValueError, "b_offsets: must start with 0"),
        ({"b_offsets": [0, 1]}, ValueError, "b_offsets: must end with the number of values, 2, not 1"),
        ({"b_offsets": [0, 3, 2]}, ValueError, "b_offsets: must not fall, but entry 2 is 2 after 3"),
        ({"b_offsets": [0, 1, 2]}, ValueError, "b_offsets: 2 sequences, but a_offsets has 1"),
        ({"a_values": [1, None]}, TypeError, "a_values: .* not object"),
        ({"a_values": [2**63, 2**63]}, TypeError, "a_values: .* not uint64"),
        ({"a_values": np.array([1, 2], ">i8")}, TypeError, "a_values: .* not >i8"),
        ({"a_offsets": [0.0, 2.0]}, TypeError, "a_offsets: .* not float64"),
        ({"num_threads": None}, TypeError, "num_threads: must be an integer, not None"),
        ({"num_threads": -1}, ValueError, "num_threads: must be 0 or more, not -1"),
    ],
)
def test_bad_input_is_refused_by_name(bad, error, message):
    good = {"a_values": [1, 2], "a_offsets": [0, 2], "b_values": [1, 3], "b_offsets": [0, 2]}
    with pytest.raises(error, match=message):
        batch_distance(**(good | bad))
