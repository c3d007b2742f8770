"""The reference policy of the KL penalty: a second set of weights for the policy's model.

A second model would cost its weights on the device all the time. These wait in host memory instead, and take
the policy's place for a pass of log-probs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ibpo.models import ModelShape
from megatron_ibpo.weights.formats.load import load_hf


class Reference:
    """Weights of this rank that change places with those of the policy.

    One set waits here while the other is in the model, so the host holds one copy and never two. Values are
    exchanged in place: whatever else views them (flat buffers of data parallelism, tied embeddings) stays as
    it is. The optimizer's float32 master weights are no part of the model and are not touched.
    """

    def __init__(self, chunks: Sequence[Any], *, frozen: bool = True):
        """
        Args:
            chunks: the model's parts on this rank, wrapped or not; what they hold now is copied.
            frozen: False leaves out what is never trained, where the two sets do not differ in it.
        """
        self._frozen = frozen
        self._waiting = [_host_copy(own) for own in self._weights(chunks)]
        self._is_in = False

    @contextmanager
    def swapped_in(self, chunks: Sequence[Any]) -> Iterator[None]:
        """Within, the chunks compute with these weights; afterwards with their own again, bit for bit, also
        when an error ends it. Collects nothing over ranks: each exchanges its own part.

        Args:
            chunks: parts of the same model as at the start.

        Raises:
            RuntimeError: the weights are in already, and a second exchange would take them out.
        """
        if self._is_in:
            raise RuntimeError("the reference's weights are in the model already")
        self._exchange(chunks)
        self._is_in = True
        try:
            yield
        finally:
            self._exchange(chunks)
            self._is_in = False

    @torch.no_grad()
    def _exchange(self, chunks: Sequence[Any]) -> None:
        for own, waiting in zip(self._weights(chunks), self._waiting, strict=True):
            leaving = _host_copy(own)
            own.copy_(waiting)
            waiting.copy_(leaving)

    def _weights(self, chunks: Sequence[Any]) -> Iterator[Tensor]:
        """Parameters and buffers, each once, in an order that wrapping does not change."""
        for chunk in chunks:  # by names, since Megatron's wrapper calls something else `buffers`
            for _, parameter in chunk.named_parameters():
                if self._frozen or parameter.requires_grad:
                    yield parameter
            yield from (buffer for _, buffer in chunk.named_buffers())


def load_reference(chunks: Sequence[Any], shape: ModelShape, hf_dir: Path | None) -> Reference:
    """The reference policy for the model `chunks`, which keeps its own weights.

    Args:
        chunks: what `build_model` made for this rank, filled.
        hf_dir: --ref-load, in Hugging Face format. None: the weights that the chunks hold now; beside
            adapters only these change places.

    Raises:
        CheckpointError: as `load_hf`.
    """
    reference = Reference(chunks, frozen=hf_dir is not None)
    if hf_dir is not None:
        with reference.swapped_in(chunks):
            load_hf(list(chunks), shape, hf_dir)  # and so it is what waits afterwards
    return reference


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)  # pinned: copied at full speed
    return copy.copy_(tensor.detach())
