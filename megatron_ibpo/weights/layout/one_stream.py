"""Tensors computed on one CUDA stream for a consumer that changes streams. Not run on GPUs."""

from collections.abc import Iterable, Iterator

import torch

Named = tuple[str, torch.Tensor | None]


def on_one_stream(tensors: Iterable[Named], stream: torch.cuda.Stream) -> Iterator[Named]:
    """Yield `tensors`, all computed on `stream`, after the work queued so far on the present stream.

    vLLM's packed sender takes each bucket under another of its own streams. A gather that waited for a
    message under one of them has not waited under the next, and memory freed under one could be reused while
    another still reads it. So the consumer's stream waits for each tensor, and the tensor's memory waits for
    the consumer's stream.
    """
    # now, and not when the first tensor is taken: the weights were trained on the present stream
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    return _computed_on(stream, iter(tensors))


def _computed_on(stream: torch.cuda.Stream, tensors: Iterator[Named]) -> Iterator[Named]:
    while True:
        with torch.cuda.stream(stream):
            item = next(tensors, None)
            ready = stream.record_event()
        taker = torch.cuda.current_stream(stream.device)
        taker.wait_event(ready)
        if item is None:
            return
        _, tensor = item
        if tensor is not None:
            tensor.record_stream(taker)
        yield item
