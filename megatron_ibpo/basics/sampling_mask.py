"""The sampling mask of a response: the ids that top-k and top-p left to sample from, for each position.

An engine's log-probs are normalised over them, so a trainer replays the mask. As bytes, a set is the gaps
between its ids without the sampled token: each byte stands for at most one id, so memory stays bounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """Sets of token ids, one per position of a response, laid end to end (CSR).

    A position with an empty set is not restricted: the whole vocabulary was sampled from, or the policy did
    not write the token.
    """

    token_ids: Ids
    """Ids of all positions, each position's in rising order."""
    offsets: Offsets
    """[positions + 1]: position t has token_ids[offsets[t]:offsets[t + 1]]."""

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.offsets) - 1

    def __getitem__(self, position: int) -> Ids:
        """Return the ids of one position; empty if it is not restricted."""
        return self.token_ids[self.offsets[position] : self.offsets[position + 1]]

    @property
    def counts(self) -> Offsets:
        """Return the number of ids of each position; 0 where it is not restricted."""
        return np.diff(self.offsets)


def sampling_mask(sets: Sequence[npt.ArrayLike]) -> SamplingMask:
    """Return the mask with these sets of ids, one per position; an empty set restricts nothing."""
    arrays = [np.sort(np.asarray(ids, dtype=np.int32)) for ids in sets]
    offsets = np.append(0, np.cumsum([len(ids) for ids in arrays], dtype=np.int64)).astype(np.int64)
    return SamplingMask(np.concatenate([np.empty(0, np.int32), *arrays]), offsets)


def concatenated(masks: Sequence[SamplingMask]) -> SamplingMask:
    """Return one mask over the positions of all, in order."""
    starts = np.cumsum([0, *(len(mask.token_ids) for mask in masks)])
    offsets = [mask.offsets[1:] + start for mask, start in zip(masks, starts, strict=False)]
    return SamplingMask(
        np.concatenate([np.empty(0, np.int32), *(mask.token_ids for mask in masks)]),
        np.concatenate([np.zeros(1, np.int64), *offsets]),
    )


def unrestricted(positions: int) -> SamplingMask:
    """Return the mask that restricts none of these positions."""
    return SamplingMask(np.empty(0, np.int32), np.zeros(positions + 1, np.int64))


_Numbers = npt.NDArray[np.int64]
_BYTES = 5
"""Most bytes of a number: 35 bits."""
_SHIFTS = 7 * np.arange(_BYTES)
_MOST_ID = np.iinfo(np.int32).max


def encoded_mask(mask: SamplingMask, tokens: Ids) -> bytes:
    """Return the bytes of a mask: for every position twice the number of stored ids, plus 1 if the sampled
    token was left out, and then the gaps before the stored ids.

    Args:
        tokens: the sampled tokens, one per position.

    Raises:
        TypeError: a length, type or order of ids that would be restored differently.
    """
    ids, counts = mask.token_ids, mask.counts
    if ids.dtype != np.int32 or len(counts) != len(tokens) or counts.sum() != len(ids):
        raise TypeError(f"a sampling mask of {len(counts)} sets and {len(ids)} {ids.dtype} ids")
    positions = np.repeat(np.arange(len(tokens)), counts)
    if (ids < 0).any() or ((np.diff(ids) <= 0) & (np.diff(positions) == 0)).any():
        raise TypeError("the ids of a sampling mask do not rise within each set")
    is_stored = ids != tokens[positions]
    stored_counts = np.bincount(positions[is_stored], minlength=len(tokens))
    heads = 2 * stored_counts + (counts - stored_counts)
    ids, positions = ids[is_stored].astype(np.int64), positions[is_stored]
    follows = np.append(False, np.diff(positions) == 0)[: len(ids)]
    gaps = np.where(follows, ids - np.roll(ids, 1) - 1, ids)
    return _as_bytes(np.concatenate([heads, gaps]))


def decoded_mask(content: bytes, tokens: Ids) -> SamplingMask:
    """Return the mask that `encoded_mask` gave these bytes for; `tokens` are the sampled ones. Raises
    ValueError if they are no mask of as many positions."""
    numbers = _from_bytes(content)
    heads, gaps = numbers[: len(tokens)], numbers[len(tokens) :]
    stored_counts, has_token = heads // 2, heads % 2 == 1
    if len(heads) != len(tokens) or stored_counts.sum() != len(gaps):
        raise ValueError(f"{len(content)} bytes are no sampling mask of {len(tokens)} positions")
    stored_positions = np.repeat(np.arange(len(tokens)), stored_counts)
    starts = np.cumsum(stored_counts) - stored_counts
    sums = np.append(0, np.cumsum(gaps + 1))
    stored = sums[1:] - sums[starts][stored_positions] - 1
    ids = np.concatenate([stored, tokens[has_token]])
    positions = np.concatenate([stored_positions, np.flatnonzero(has_token)])
    order = np.lexsort([ids, positions])
    ids, positions = ids[order], positions[order]
    occurs_twice = (np.diff(ids) == 0) & (np.diff(positions) == 0)
    if (ids < 0).any() or (ids > _MOST_ID).any() or occurs_twice.any():
        raise ValueError("a sampling mask with an id that is no token's or occurs twice in a set")
    counts = stored_counts + has_token
    return SamplingMask(ids.astype(np.int32), np.append(0, np.cumsum(counts)).astype(np.int64))


def _as_bytes(numbers: npt.NDArray[Any]) -> bytes:
    """Return numbers of at most 35 bits with 7 bits per byte, lowest first; all but a number's last byte have
    their highest bit set (LEB128)."""
    groups = numbers[:, None] >> _SHIFTS
    is_used = groups > 0
    is_used[:, 0] = True
    continues = np.append(is_used[:, 1:], np.zeros((len(numbers), 1), bool), axis=1)
    return ((groups & 127) | (continues * 128))[is_used].astype(np.uint8).tobytes()


def _from_bytes(content: bytes) -> _Numbers:
    data = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(data < 128)
    if not len(data):
        return np.empty(0, np.int64)
    starts = np.append(0, ends[:-1] + 1)
    if data[-1] >= 128 or (ends - starts >= _BYTES).any():
        raise ValueError("a number that does not end")
    places = np.arange(len(data)) - np.repeat(starts, ends - starts + 1)
    return np.add.reduceat((data & 127).astype(np.int64) << 7 * places, starts)
