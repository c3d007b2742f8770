"""The sampling mask of packed rows on the device: the ids over which each row's log-prob is normalised.

Sets are small beside a vocabulary (a few dozen of 151,936 ids at top-p .95), so they are stored as lists of
ids. A restricted row's statistics and gradient come from the logits of these ids alone: its other logits are
never read, and their gradient is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingSets:
    """A set of ids for each of N rows. A row with an empty set is normalised over the whole vocabulary.

    On the device 4 bytes per id and 16 per row.
    """

    ids_K: Tensor
    """[K] int32 global vocabulary ids of all rows; those of one row lie together and rise."""
    starts_N: Tensor
    """[N] int64: row t has ids_K[starts_N[t]:stops_N[t]]."""
    stops_N: Tensor
    """[N] int64."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The fields, in order."""
        return self.ids_K, self.starts_N, self.stops_N

    def of_rows(self, rows_R: Tensor) -> SamplingSets:
        """Return the sets of these rows. The host does not wait for the device."""
        return SamplingSets(self.ids_K, self.starts_N[rows_R], self.stops_N[rows_R])

    def check(self, num_rows: int, vocab_range: tuple[int, int] | None) -> None:
        """Refuse sets that do not fit the rows, or the vocabulary if it is known. Values are read on CPUs
        only.

        Args:
            vocab_range: range of the whole vocabulary; None: other ranks have a part of it.

        Raises:
            ValueError: a number of sets other than of rows, or an id outside the vocabulary.
        """
        if self.starts_N.shape != (num_rows,) or self.stops_N.shape != (num_rows,):
            raise ValueError(f"sampling_sets has {len(self.starts_N)} sets for {num_rows} rows")
        if vocab_range is None or self.ids_K.is_cuda:
            return
        outside_K = (self.ids_K < vocab_range[0]) | (self.ids_K >= vocab_range[1])
        if bool(outside_K.any()):
            raise ValueError(
                f"sampling_sets has id {self.ids_K[outside_K][0].item()}, which is outside the vocabulary of "
                f"{vocab_range[1]} ids"
            )

    def padded(self) -> Tensor:
        """Return [N, largest set] int64 ids, filled up with -1. The host waits for the size."""
        counts_N = self.stops_N - self.starts_N
        places_M = torch.arange(int(counts_N.max()), device=self.ids_K.device)
        is_inside_NM = places_M < counts_N[:, None]
        places_NM = torch.where(is_inside_NM, self.starts_N[:, None] + places_M, 0)
        return torch.where(is_inside_NM, self.ids_K[places_NM].long(), -1)
