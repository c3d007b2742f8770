"""Sampling masks on their way from sequences to the trainer's rows, on the host: no torch. Old, new and
reference log-probs of a token are all normalised over the ids that it was drawn from; a sequence sampled from
another prompt has no mask."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import Flags, TrainSequence
from megatron_ibpo.basics.sampling_mask import Ids, Offsets, SamplingMask, concatenated, unrestricted

Places = npt.NDArray[np.int64]


def check_mask(sequence: TrainSequence, number: int) -> None:
    """Refuse a mask without one set per response token, with ids that do not rise, or with a token in the
    loss that is not in its own set. `number` is the sequence's, for the message."""
    mask, tokens = sequence.sampling_mask, sequence.response_token_ids
    if mask is None:
        return
    if len(mask) != len(tokens):
        raise ValueError(
            f"sequence {number}: sampling_mask has {len(mask)} sets for {len(tokens)} response tokens; it "
            "needs one for each"
        )
    ids, offsets = mask.token_ids, mask.offsets
    falls = ids[1:] <= ids[:-1]
    falls[offsets[(offsets > 0) & (offsets < len(ids))] - 1] = False  # from one set to the next
    if falls.any():
        position = int(_positions(mask, falls.argmax() + 1))
        raise ValueError(
            f"sequence {number}: the sampling set of response token {position} does not name each id once, "
            f"in rising order: {_listed(mask[position])}"
        )
    has_token = np.zeros(len(mask), np.bool_)
    has_token[_positions(mask, np.flatnonzero(ids == np.repeat(tokens, mask.counts)))] = True
    lacks = sequence.loss_mask & (mask.counts > 0) & ~has_token
    if lacks.any():
        position = int(lacks.argmax())
        raise ValueError(
            f"sequence {number}: response token {position} has the id {tokens[position]}, which is not in "
            f"its sampling set ({_listed(mask[position])}); the mask is that of another response"
        )


def check_ids(mask: SamplingMask | None, vocab_size: int) -> None:
    """Raise ValueError for an id that the model does not have."""
    if mask is None or not len(mask.token_ids):
        return
    outside = (mask.token_ids < 0) | (mask.token_ids >= vocab_size)
    if outside.any():
        raise ValueError(
            f"a sampling set has the id {mask.token_ids[outside.argmax()]}, which is outside the model's "
            f"vocabulary of {vocab_size}; engine and trainer do not have the same model"
        )


def joined_mask(sequences: Sequence[TrainSequence]) -> SamplingMask | None:
    """Return the masks of the sequences' responses laid end to end; None if none restricts a token."""
    masks = [None if s.off_policy else s.sampling_mask for s in sequences]
    if not any(mask is not None and len(mask.token_ids) for mask in masks):
        return None
    pairs = zip(masks, sequences, strict=True)
    return concatenated([unrestricted(len(s.response_token_ids)) if m is None else m for m, s in pairs])


def sets_of_rows(
    mask: SamplingMask, chosen_R: Flags, rows_R: Places, num_rows: int
) -> tuple[Ids, Offsets, Offsets]:
    """Return the ids of all rows, and the bounds of each row's ids among them, for the chosen response
    tokens, whose rows are `rows_R`."""
    counts_R = np.where(chosen_R, mask.counts, 0)
    stops_R = counts_R.cumsum()
    starts_N, stops_N = np.zeros((2, num_rows), np.int64)
    starts_N[rows_R[chosen_R]] = (stops_R - counts_R)[chosen_R]
    stops_N[rows_R[chosen_R]] = stops_R[chosen_R]
    return mask.token_ids[np.repeat(chosen_R, mask.counts)], starts_N, stops_N


def _positions(mask: SamplingMask, places: npt.ArrayLike) -> Places:
    """Return the positions to which the ids at these places belong."""
    return np.searchsorted(mask.offsets, places, side="right") - 1


def _listed(ids: Ids) -> str:
    """Return the first few ids, then their number."""
    first_ids = ", ".join(str(token) for token in ids[:6].tolist())
    return first_ids if len(ids) <= 6 else f"{first_ids}, … {len(ids)} in all"
