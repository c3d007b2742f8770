"""Weights and states that wait in host memory: a trainer's, while engines sample on the same device, and the
reference policy's of the KL penalty, which replace the policy's for a pass of log-probs.

Memory is freed and comes back below the same tensors and all their views. (Megatron's
`optimizer.offload_to_cpu` gives the optimizer's parameters new memory: views into the model would be cut
off.) Streams have not run on a GPU.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from torch import Tensor, UntypedStorage

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.models import ModelShape
from megatron_ibpo.weights.formats.hf_models import load_hf

ALIGNMENT = 256
"""Alignment in bytes of storages in host memory: a multiple of any element's size, fast to copy from."""


class OnDevice(IntEnum):
    """Parts of the trainer's state that are on the device."""

    NOTHING = 0
    """Only caches and communicators."""
    WEIGHTS = 1
    """State that log-probs, exports and weight updates need."""
    EVERYTHING = 2
    """Gradients and optimizer state too: what training and checkpoints need."""


class Trained(Protocol):
    """A model under training: `Trainer` or `Critic`."""

    chunks: list[Any]
    optimizer: Any


class Residence:
    """Moves the state of this rank's models; with `offload` off, only caches are freed."""

    def __init__(self, trained: Sequence[Trained], world: World, *, offload: bool) -> None:
        """Raise ValueError if something on the device keeps the weights' old addresses."""
        graphs = any(getattr(chunk.config, "cuda_graph_impl", "none") != "none" for chunk in _chunks(trained))
        if offload and graphs:
            raise ValueError(
                "--offload-train: CUDA graphs of the model keep the addresses of its weights, which "
                "change when the weights come back; use --no-offload-train, or no graphs"
            )
        self._trained, self._world, self._offload = trained, world, offload
        self._weights, self._states = _HostCopy(), _HostCopy()
        self._arrivals = torch.cuda.Stream()
        for inner in self._optimizers():
            inner.register_step_pre_hook(self._wait_for_arrivals)
        self.on_device = OnDevice.EVERYTHING

    def bring(self, needed: OnDevice) -> None:
        """Bring at least `needed` to the device; values are unchanged, gradients 0."""
        self._fetch(needed)
        self._wait_for_arrivals()

    def bring_for_steps(self) -> None:
        """Bring everything, for optimizer steps, which alone may use the optimizer's state: they wait for it,
        and it is copied during the passes before them."""
        self._fetch(OnDevice.EVERYTHING)

    def _fetch(self, needed: OnDevice) -> None:
        if needed >= OnDevice.WEIGHTS > self.on_device:
            self._weights.allocate()
            self._weights.fill()
        if needed == OnDevice.EVERYTHING > self.on_device:
            self._states.allocate()
            self._arrivals.wait_stream(torch.cuda.current_stream())  # earlier uses of that memory are done
            with torch.cuda.stream(self._arrivals):
                self._states.fill()
            for chunk in _chunks(self._trained):
                chunk.restore_grad_buffers(synchronize=False)
        self.on_device = max(self.on_device, needed)

    def _wait_for_arrivals(self, *_: Any) -> None:
        """Make the present stream wait until the optimizer's state has arrived."""
        torch.cuda.current_stream().wait_stream(self._arrivals)

    def leave(self, limit: OnDevice) -> None:
        """Keep at most `limit` on the device, and empty PyTorch's caches. Returns when all ranks have done
        so, since other processes may then take the devices' memory. Collective."""
        self._wait_for_arrivals()
        if self._offload:
            self._move_out(limit)
        parallel_state.get_global_memory_buffer().buffer.clear()  # grows with micro-batches and never shrinks
        gc.collect()  # tensors in cycles hold memory, too
        if torch.cuda.is_initialized():
            self._world.barrier()  # every owner's engines have returned borrowed memory (transport ipc)
            torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        self._world.barrier()

    @contextmanager
    def visited(self) -> Iterator[None]:
        """Bring the weights to the device within the context, and restore the state after it. Collective."""
        previous = self.on_device
        self.bring(OnDevice.WEIGHTS)
        yield
        if previous < self.on_device:
            self.leave(previous)

    def _move_out(self, limit: OnDevice) -> None:
        if self.on_device == OnDevice.EVERYTHING > limit:
            weights = {storage.data_ptr() for storage in _storages(self._weight_tensors())}
            states = [
                storage
                for storage in _storages(self._optimizer_tensors())
                if storage.data_ptr() not in weights
            ]  # some optimizers' parameters are views into the model
            self._states.take(states)
            for chunk in _chunks(self._trained):
                chunk.offload_grad_buffers(empty_cache=False)
        if self.on_device >= OnDevice.WEIGHTS > limit:
            self._weights.take(_storages(self._weight_tensors()))
        self.on_device = min(self.on_device, limit)

    def _weight_tensors(self) -> Iterator[Tensor]:
        for chunk in _chunks(self._trained):
            yield from chunk.parameters()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors on the device: an optimizer may keep some in host memory at all times."""
        device = self._world.device.type
        for optimizer in self._optimizers():
            for inner in [optimizer, *getattr(optimizer, "sub_optimizers", [])]:
                tensors = [parameter for group in inner.param_groups for parameter in group["params"]]
                for state in inner.state.values():
                    tensors += [value for value in state.values() if isinstance(value, Tensor)]
                yield from (tensor for tensor in tensors if tensor.device.type == device)

    def _optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Yield torch's optimizers, inside Megatron's."""
        for trained in self._trained:
            yield from (part.optimizer for part in trained.optimizer.chained_optimizers)


class _HostCopy:
    """Contents of storages whose memory was freed. The host's memory is kept for the next time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._taken: list[tuple[UntypedStorage, Tensor]] = []

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        """Copy the contents of `storages` to the host, and free them until `allocate` and `fill`."""
        sizes = [-(-storage.nbytes() // ALIGNMENT) * ALIGNMENT for storage in storages]
        if sum(sizes) > len(self._memory):
            self._grow(sum(sizes), pinned=storages[0].device.type == "cuda")
        places = self._memory[: sum(sizes)].split(sizes)
        for storage, place in zip(storages, places, strict=True):
            content = place[: storage.nbytes()]
            content.copy_(_bytes_of(storage), non_blocking=True)
            self._taken.append((storage, content))
        torch.cuda.synchronize()
        for storage in storages:
            storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the storages' memory again."""
        for storage, content in self._taken:
            storage.resize_(len(content))

    def fill(self) -> None:
        """Copy their contents back, in the order of the present stream."""
        for storage, content in self._taken:
            _bytes_of(storage).copy_(content, non_blocking=True)
        self._taken.clear()

    def _grow(self, size: int, *, pinned: bool) -> None:
        """Grow the memory to `size` bytes, pinned for copies at full speed. PyTorch's own pinned memory comes
        in powers of two, which would waste up to half of it."""
        if pinned and len(self._memory):
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory = torch.empty(size, dtype=torch.uint8)
        if pinned:
            error = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0))
            if error:
                raise RuntimeError(
                    f"--offload-train: CUDA could not pin {size / 1024**3:.1f} GiB of host memory (error "
                    f"{error}); the node may have too little of it; if it has enough, use "
                    "--no-offload-train"
                )


def _chunks(trained: Sequence[Trained]) -> Iterator[Any]:
    for model in trained:
        yield from model.chunks


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the storages below the tensors, each once: a flat buffer is below many tensors."""
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in storages.values() if storage.nbytes()]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Reference:
    """Weights of this rank that can be exchanged with those of the policy: one set waits here while the other
    is in the model. Values are exchanged in place, so that their views stay valid; master weights of the
    optimizer are not touched."""

    def __init__(self, chunks: Sequence[Any], *, frozen: bool = True):
        """Copy the present weights of the model's parts on this rank, wrapped or not; `frozen=False` leaves
        out those that are never trained, if the two sets agree on them."""
        self._frozen = frozen
        self._waiting = [_host_copy(weight) for weight in self._weights(chunks)]
        self._is_in = False

    @contextmanager
    def swapped_in(self, chunks: Sequence[Any]) -> Iterator[None]:
        """Make the chunks, parts of the same model as at the start, compute with these weights within the
        context; afterwards with their own again, bit for bit, even after an error. Not collective. Raises
        RuntimeError if they are in already: a second exchange would take them out."""
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
    """Return the reference policy for the model `chunks`, which keeps its own weights: that of --ref-load, or
    the present weights (beside adapters only these). Raises CheckpointError as `load_hf` does."""
    reference = Reference(chunks, frozen=hf_dir is not None)
    if hf_dir is not None:
        with reference.swapped_in(chunks):
            load_hf(list(chunks), shape, hf_dir)  # leaving the context makes these the waiting set
    return reference


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)  # pinned: copied at full speed
    return copy.copy_(tensor.detach())
