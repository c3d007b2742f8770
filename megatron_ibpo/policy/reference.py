"""The reference policy of the KL penalty: a second set of weights for the policy's model.

A second model would occupy the device with its weights all the time. This set waits in host memory, and
replaces the policy's for a pass of log-probs.
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
    """Weights of this rank that can be exchanged with those of the policy.

    One set waits here while the other is in the model, so the host holds one copy and never two. Values are
    exchanged in place: their views (flat buffers of data parallelism, tied embeddings) stay valid. The
    optimizer's float32 master weights are no part of the model and are not touched.
    """

    def __init__(self, chunks: Sequence[Any], *, frozen: bool = True):
        """
        Args:
            chunks: the model's parts on this rank, wrapped or not; their present weights are copied.
            frozen: False leaves out weights that are never trained, if the two sets agree on them.
        """
        self._frozen = frozen
        self._waiting = [_host_copy(weight) for weight in self._weights(chunks)]
        self._is_in = False

    @contextmanager
    def swapped_in(self, chunks: Sequence[Any]) -> Iterator[None]:
        """Make the chunks compute with these weights within the context; afterwards, even after an error,
        with their own again, bit for bit. Not collective: each rank exchanges its own part.

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
        for weight, waiting in zip(self._weights(chunks), self._waiting, strict=True):
            leaving = _host_copy(weight)
            weight.copy_(waiting)
            waiting.copy_(leaving)

    def _weights(self, chunks: Sequence[Any]) -> Iterator[Tensor]:
        """Yield parameters and buffers, each once, in an order that wrapping does not change."""
        for chunk in chunks:  # by name, since Megatron's wrapper uses `buffers` for something else
            for _, parameter in chunk.named_parameters():
                if self._frozen or parameter.requires_grad:
                    yield parameter
            yield from (buffer for _, buffer in chunk.named_buffers())


def load_reference(chunks: Sequence[Any], shape: ModelShape, hf_dir: Path | None) -> Reference:
    """Return the reference policy for the model `chunks`, which keeps its own weights.

    Args:
        chunks: result of `build_model` on this rank, with weights.
        hf_dir: --ref-load, in Hugging Face format. None: the chunks' present weights; beside adapters only
            these are exchanged.

    Raises:
        CheckpointError: see `load_hf`.
    """
    reference = Reference(chunks, frozen=hf_dir is not None)
    if hf_dir is not None:
        with reference.swapped_in(chunks):
            load_hf(list(chunks), shape, hf_dir)  # leaving the context makes these the waiting set
    return reference


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)  # pinned: copied at full speed
    return copy.copy_(tensor.detach())
