"""The sampling mask of a response: the token ids that top-k and top-p left to sample from, for each position.

An engine's log-probs are normalised over these ids. A trainer that normalises over the whole vocabulary
computes another probability for the same token, so it replays the mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
