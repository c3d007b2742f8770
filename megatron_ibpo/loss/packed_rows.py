"""The packed rows of a loss: everything known of them besides their logits. Sampling sets, small beside a
vocabulary, are lists of ids; a restricted row's other logits are never read."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SamplingSets:
    """A set of ids for each of N rows, empty for the whole vocabulary; 4 bytes per id, 16 per row."""

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
        """Raise ValueError for another number of sets than of rows, or an id outside the whole vocabulary's
        range, unless other ranks have a part of it (None). Values are read on CPUs only."""
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


@dataclass(frozen=True)
class GradientPlaces:
    """Places of the response rows with a gradient among all response rows, rising."""

    on_host: npt.NDArray[np.int64]
    on_device: Tensor
    """int64."""


@dataclass(frozen=True)
class RowIndex:
    """Places of rows as the host knows them: to read them from the device it would wait for earlier work."""

    bounds: tuple[int, ...]
    """Content of cu_seqlens."""
    response_rows_R: Tensor
    """[R] int64 on the device, rising: this rank's rows that response_mask_N keeps."""
    ends: tuple[int, ...]
    """Each sequence's end among those rows."""
    policy_places: GradientPlaces
    """Places among those rows of the ones whose advantage, token weight and sequence weight are not 0."""


@dataclass(frozen=True)
class LossRows:
    """N rows of S sequences, laid end to end. Row t of the logits predicts targets_N[t]."""

    targets_N: Tensor
    """[N] int64."""
    response_mask_N: Tensor
    """[N], 0 for rows that take no part in anything: prompt, padding, and tokens of a response that the
    policy did not write. Their other values may be arbitrary."""
    cu_seqlens: Tensor
    """[S + 1] int32 boundaries of the sequences, from 0 to N. A sequence must be whole within one call."""
    advantages: Tensor
    """[S], or [N] for variants without a sequence term; if N = S it is taken as [S]."""
    old_logprobs_N: Tensor | None = None
    """[N] log-probs under the policy that sampled; None: the present values, detached, as in the first update
    after a rollout."""
    ref_logprobs_N: Tensor | None = None
    """[N] log-probs under the reference policy, for the KL estimate."""
    rollout_logprobs_N: Tensor | None = None
    """[N] log-probs under the weights and the engine that sampled; only for variants that read them."""
    positions_N: Tensor | None = None
    """[N] places among a sequence's response rows, from 0; only for variants that read them. None: counted,
    where sequences are whole (no cp_group)."""
    token_weights_N: Tensor | None = None
    """[N] factors on the policy gradient of each token; they change neither the ratio's value (IBPO's mask,
    `ibpo` step 10) nor the KL penalty."""
    sequence_weights_S: Tensor | None = None
    """[S]; None: 1/S each."""
    off_policy_S: Tensor | None = None
    """[S] bool: sequences sampled from another prompt; their loss is the shaped surrogate (`segments.py`)
    in place of the variant's terms. None: there are none."""
    temperature: Tensor | float = 1.0
    """Sampling temperature, a number or [S]; logits are divided by it."""
    sampling_sets: SamplingSets | None = None
    """Ids that top-k and top-p left to sample from, of N rows: log-probs and entropies are those of the
    distribution over them, now as under the policy that sampled. None: the whole vocabulary."""
    cp_group: Any = None
    """Group of the ranks that share every sequence equally. Each has 1/size of its rows, in any order, and
    arrays [N] cover those; cu_seqlens and arrays [S] cover the whole sequences. None: this rank alone."""
    index: RowIndex | None = None
    """None: read from the device when needed."""

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def sequence_of_row(self) -> Tensor:
        """Return the sequence of each row, [N] int64."""
        device, rows = self.response_mask_N.device, len(self.response_mask_N)
        numbers = torch.arange(self.num_sequences, device=device)
        # boundaries may still be those of the whole sequences; each rank of cp_group has its share of these
        lengths_S = self.cu_seqlens.diff().long() * rows // self.cu_seqlens[-1].clamp(min=1)
        return torch.repeat_interleave(numbers, lengths_S, output_size=rows)

    def position_of_row(self) -> Tensor | None:
        """Return the place of each row among its sequence's response rows, [N]; None if it is unknown."""
        if self.cp_group is not None or self.positions_N is not None:
            return self.positions_N
        return response_positions(self.response_mask_N, self.cu_seqlens)

    def temperature_of_row(self) -> Tensor | float:
        """Return per-sequence temperatures as [N]; a number stays a number."""
        if not isinstance(self.temperature, Tensor) or self.temperature.ndim == 0:
            return self.temperature
        return self.temperature[self.sequence_of_row()]

    def response_rows(self) -> Tensor:
        """Return [R] int64, rising. The host waits for their number, unless there is an index."""
        return self.response_mask_N.nonzero().squeeze(1) if self.index is None else self.index.response_rows_R

    def gradient_places(self, *, kl_coef: float) -> GradientPlaces:
        """Return which of this rank's response rows have a gradient, as far as that is known before their
        log-probs. A KL penalty reaches every row."""
        if kl_coef:
            rows_R = self.response_rows()
            return GradientPlaces(np.arange(len(rows_R)), torch.arange(len(rows_R), device=rows_R.device))
        return self._policy_places() if self.index is None else self.index.policy_places

    def _policy_places(self) -> GradientPlaces:
        rows_R = self.response_rows()
        sequence_R = self.sequence_of_row()[rows_R]
        per_token = len(self.advantages) != self.num_sequences
        has_gradient_R = self.advantages[rows_R if per_token else sequence_R] != 0
        if self.sequence_weights_S is not None:
            has_gradient_R &= self.sequence_weights_S[sequence_R] != 0
        if self.token_weights_N is not None:
            has_gradient_R &= self.token_weights_N[rows_R] != 0
        places = has_gradient_R.nonzero().squeeze(1)
        return GradientPlaces(places.cpu().numpy(), places)

    def checked(self, num_rows: int, *, kl_coef: float, per_token: bool) -> LossRows:
        """Return these rows in the form that the loss takes: a bool mask, cu_seqlens of this rank's own, and
        weights filled in. One copy to the host, unless there is an index.

        Args:
            kl_coef: of the objective; other than 0 it needs reference log-probs.
            per_token: whether the variant takes an advantage per token as well.

        Raises:
            ValueError: values that do not fit the number of rows, the sequences or the objective.
        """
        if kl_coef != 0 and self.ref_logprobs_N is None:
            raise ValueError(f"kl_coef={kl_coef} needs ref_logprobs_N")
        bounds = self._own_boundaries(num_rows)
        self._check_sizes(num_rows, per_token=per_token)
        weights_S = self.sequence_weights_S
        if weights_S is None:
            equal, device = 1.0 / self.num_sequences, self.response_mask_N.device
            weights_S = torch.full((self.num_sequences,), equal, dtype=torch.float64, device=device)
        return replace(
            self,
            response_mask_N=self.response_mask_N.to(torch.bool),
            cu_seqlens=bounds,
            sequence_weights_S=weights_S,
        )

    def _own_boundaries(self, num_rows: int) -> Tensor:
        size = 1 if self.cp_group is None else dist.get_world_size(self.cp_group)
        bounds = self.cu_seqlens.tolist() if self.index is None else self.index.bounds
        lengths = [end - start for start, end in pairwise(bounds)]
        if not lengths or bounds[0] != 0 or bounds[-1] != num_rows * size or min(lengths) < 0:
            shared = f", {size} times over for the ranks of cp_group" if size > 1 else ""
            raise ValueError(
                f"cu_seqlens must rise from 0 to the number of rows ({num_rows}{shared}) and goes from "
                f"{bounds[0]} to {bounds[-1]}: a sequence cannot be cut across micro-batches, since its "
                "ratio needs all its tokens"
            )
        uneven = [length for length in lengths if length % size]
        if uneven:
            raise ValueError(
                f"a sequence of {uneven[0]} rows does not divide among the {size} ranks of cp_group"
            )
        return self.cu_seqlens if size == 1 else self.cu_seqlens // size

    def _check_sizes(self, num_rows: int, *, per_token: bool) -> None:
        for name in (field.name for field in fields(self) if field.name.endswith("_N")):
            if name != "targets_N":  # the log-probs' own check
                _check_shape(name, getattr(self, name), num_rows)
        _check_shape("sequence_weights_S", self.sequence_weights_S, self.num_sequences)
        _check_shape("off_policy_S", self.off_policy_S, self.num_sequences)
        if isinstance(self.temperature, Tensor) and self.temperature.ndim > 0:
            _check_shape("temperature", self.temperature, self.num_sequences)
        sizes = [self.num_sequences, num_rows] if per_token else [self.num_sequences]
        if self.advantages.ndim != 1 or len(self.advantages) not in sizes:
            shapes = " or ".join(f"({size},)" for size in sizes)
            raise ValueError(f"advantages have shape {tuple(self.advantages.shape)}, wanted {shapes}")


def response_positions(response_mask_N: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the place of each row among its sequence's response rows, from 0, [N] int64."""
    is_response_N = response_mask_N.long()
    before_N = is_response_N.cumsum(0) - is_response_N
    starts_S = cu_seqlens[:-1].long().clamp(max=len(before_N) - 1)  # an empty last one starts at the end
    lengths_S = cu_seqlens.diff().long()
    return before_N - torch.repeat_interleave(before_N[starts_S], lengths_S, output_size=len(before_N))


def sum_over_ranks(values: Tensor, group: Any) -> Tensor:
    """Return the sum over the group; the gradient is that of this rank's own share. One all-reduce."""
    if group is None or dist.get_world_size(group) == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total, group=group)
    return total + (values - values.detach())  # exactly `total`, so equal on every rank


def _check_shape(name: str, tensor: Tensor | None, size: int) -> None:
    if tensor is not None and tensor.shape != (size,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, wanted ({size},)")
