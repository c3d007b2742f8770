"""Checkpoints written in the background of training, one at a time; a checkpoint is whole before it gets its
name.

The stages are those of Megatron's asynchronous save: all ranks plan, each writes its part, all finalize. A
thread of the rank writes copies that were taken before training went on. (Megatron would fork the trainer,
which is unsafe beside the threads of Ray, gloo and CUDA, or keep a process for each rank that imports
everything again.)
"""

import errno
import json
import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch import Tensor

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.policy.checkpoint import CRITIC, saved_state
from megatron_ibpo.policy.critic import Critic
from megatron_ibpo.policy.trainer import Trainer
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats import run_state
from megatron_ibpo.weights.formats.checkpoint_files import write_integrity
from megatron_ibpo.weights.formats.directories import disk_error, publish
from megatron_ibpo.weights.formats.hf_models import ADAPTER, Adapters, describe_adapters, save_peft
from megatron_ibpo.weights.formats.hugging_face import copy_all_but_weights
from megatron_ibpo.weights.formats.run_state import HF_FILES, LAYOUT, RUN_STATE, Keep

SMALL_FILES_BYTES = 4 * 1024**2
"""Bytes of a checkpoint's small files: metadata, configuration, tokenizer."""


@dataclass(frozen=True)
class SaveOrder:
    """An order to save: content and place."""

    directory: Path
    """Directory of all checkpoints; this one is `directory`/step_N."""
    step: int
    run_state: dict[str, Any]
    """JSON of the loop's own state; `load_run_state` returns it."""
    keep: Keep
    """Rule for the checkpoints that stay once this one has its name."""

    @property
    def final(self) -> Path:
        return self.directory / run_state.step_name(self.step)


@dataclass(frozen=True)
class _Part:
    """This rank's part of saving one model and its optimizer."""

    request: Any
    """Megatron's `AsyncRequest`."""
    files: list[Any]
    """Megatron's write buckets, their tensors copied into main memory; empty if this rank writes nothing."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, _, (_, tensors) in self.files for _, tensor in tensors)


@dataclass
class Saver:
    """One rank's part in saving. `begin` and `seal` are collective; the other methods are local to the rank.

    begin → the thread writes → `rests` → seal → the thread of rank 0 publishes → `rests` → end
    """

    world: World
    adapters: Adapters | None = None
    """Adapters to store in every checkpoint for PEFT."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    _job: "Future[None] | None" = None
    _order: SaveOrder | None = None
    _parts: list[_Part] = field(default_factory=list)
    _model_info: dict[str, Any] = field(default_factory=dict)

    def begin(self, trainer: Trainer, order: SaveOrder, critic: Critic | None = None) -> None:
        """Copy the state and begin to write it, when training may go on. Raises OSError (ENOSPC) if the disk
        has no room for it; nothing is left of it then."""
        assert self._order is None, "one save at a time"
        partial = run_state.partial_of(order.final)
        directories = [partial] if critic is None else [partial, partial / CRITIC]

        def prepare() -> None:
            order.directory.mkdir(exist_ok=True)  # in the run's directory, which exists or was deleted
            run_state.remove_leftovers(order.directory)
            for directory in directories:
                directory.mkdir()

        self._on_rank_0(prepare)
        models: list[Trainer | Critic] = [trainer] if critic is None else [trainer, critic]
        self._parts = [
            _staged(saved_state(model), directory)
            for model, directory in zip(models, directories, strict=True)
        ]
        needed = sum(self.world.all_gather(sum(part.num_bytes for part in self._parts)))
        self._on_rank_0(lambda: _check_room(partial, needed))
        if self.adapters is not None:
            self._save_adapters(partial)
        self._order = order
        model = trainer.config.model
        self._model_info = {
            "layout": {"optimizer": True, "parallel": asdict(trainer.config.parallel)},
            "model": model,
            "dtype": next(trainer.chunks[0].parameters()).dtype,
        }
        self._job = self._thread.submit(_write, self._parts)

    def _save_adapters(self, partial: Path) -> None:
        """Save the adapters at once: they are small, and training waits for them."""
        assert self.adapters is not None
        error: Exception | None = None
        try:
            save_peft(self.adapters, partial / ADAPTER)
        except OSError as caught:  # rank 0 writes after everything is gathered
            error = caught
            shutil.rmtree(partial, ignore_errors=True)
        self._raise_everywhere(error)

    def rests(self, *, wait: bool) -> bool:
        """Return whether this rank has nothing to do in the background; raises nothing."""
        if wait and self._job is not None:
            self._job.exception()
        return self._job is None or self._job.done()

    def seal(self) -> None:
        """Complete the checkpoint once every rank rests, and begin to publish it. Raises OSError or
        CheckpointError on all ranks if some rank could not write its part; nothing is left of it then."""
        order, parts, job = self._order, self._parts, self._job
        assert order is not None
        assert job is not None
        self._order, self._parts, self._job = None, [], None
        partial = run_state.partial_of(order.final)
        try:
            self._raise_everywhere(job.exception())
            # rank 0 writes the metadata while the others wait for it in a collective
            self._on_rank_0(lambda: _check_room(partial, SMALL_FILES_BYTES))
            for part in parts:
                for finalize in part.request.finalize_fns:
                    finalize()
        except BaseException as error:
            if self.world.is_rank_0:
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, Exception):
                raise
            raise CheckpointError(f"{order.final}: {error}") from None  # torch's is no Exception
        if self.world.is_rank_0:
            self._job = self._thread.submit(_publish, order, self._model_info)

    def end(self) -> None:
        """Raise OSError if the checkpoint could not get its name."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def _on_rank_0(self, work: Callable[[], None]) -> None:
        """Run `World.on_rank_0` with the original error on every rank: a full disk must be recognised."""
        error: Exception | None = None
        if self.world.is_rank_0:
            try:
                work()
            except Exception as caught:
                error = caught
        self._raise_everywhere(error)

    def _raise_everywhere(self, error: BaseException | None) -> None:
        """Raise the first rank's error, if any, on every rank: a full disk as it is, others as text."""
        if error is not None and not isinstance(error, OSError):
            reason = f"{type(error).__name__}: {error}"
            error = CheckpointError(f"trainer {self.world.rank} could not write its part: {reason}")
        for rank_error in self.world.all_gather(error):
            if rank_error is not None:
                raise rank_error


def save_checkpoint(
    trainer: Trainer, directory: Path, step: int, run_state: dict[str, Any], critic: Critic | None = None
) -> Path:
    """Write a checkpoint and wait for it; return its directory. Collective."""
    saver, order = Saver(trainer.world), SaveOrder(directory, step, run_state, Keep(step + 1))
    saver.begin(trainer, order, critic)
    saver.rests(wait=True)
    saver.seal()
    trainer.world.on_all_ranks(saver.end)
    return order.final


def _staged(state: dict[str, Any], directory: Path) -> _Part:
    """Return Megatron's plan for this rank, with copies of the tensors that training will change."""
    apply_factories(state)  # before anything is copied: they would cut a second copy out of it
    optimizers = [optimizer for name, optimizer in state.items() if name.endswith("optimizer")]
    gathered = _cut_out([shard for optimizer in optimizers for shard in _gathered(optimizer)])
    trained = {_place(tensor) for tensor in _tensors(state)} - gathered
    # Each writer gives its results to the thread that called it and needs no more than this queue. Megatron's
    # queue serves writers elsewhere: it lives in a process of its own for each rank, which takes seconds to
    # import everything again.
    with mock.patch.object(filesystem_async, "_results_queue", queue.SimpleQueue()):
        request = dist_checkpointing.save(
            state, str(directory), async_sharded_save=True, async_strategy="mcore"
        )
    if request.async_fn is None:
        return _Part(request, [])
    write_buckets = request.async_fn_args[1]
    files = [
        # tensors from a GPU, and those that Megatron cut out of a buffer, are copies already
        (path, name, (texts, [(item, t.clone() if _place(t) in trained else t) for item, t in tensors]))
        for path, name, (texts, tensors) in request.preload_fn()
    ]
    for _, _, (_, tensors) in write_buckets:
        tensors.clear()  # Megatron's writer would hold them until the save is over
    return _Part(request, files)


def _gathered(optimizer: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Yield the state of sharded optimizers that was gathered on this rank, and only here, for this save."""
    for part in (optimizer, *optimizer.values()):  # one alone, or one for dense and one for expert parameters
        if isinstance(part, dict) and part.get("param_state"):
            yield from (
                shard for shard in nested_values(part["param_state"]) if isinstance(shard, ShardedTensor)
            )


def _cut_out(gathered: Sequence[ShardedTensor]) -> set[int]:
    """Give each of them, views into buffers of a whole model's part, memory of its own, and return the
    addresses. Here each buffer is freed before the next is cut; Megatron would copy while all exist."""
    buffers: dict[int, list[ShardedTensor]] = {}
    for shard in gathered:
        buffers.setdefault(_place(shard.data), []).append(shard)
    for shards in buffers.values():
        for shard in shards:
            shard.data = shard.data.clone()
    return {_place(shard.data) for shard in gathered}


def _tensors(state: dict[str, Any]) -> Iterator[Tensor]:
    for value in nested_values(state):
        if isinstance(tensor := value.data if isinstance(value, ShardedTensor) else value, Tensor):
            yield tensor


def _place(tensor: Tensor) -> int:
    """Return the address of the memory below a tensor."""
    return tensor.untyped_storage().data_ptr()


def _write(parts: Sequence[_Part]) -> None:
    """Write this rank's files, in its thread; they are on the disk when this returns. (Megatron's function
    for all files of a rank turns every error into text; its function for one file, used here, keeps it.)"""
    for part in parts:
        if not part.files:
            continue
        transforms, *_ = part.request.async_fn.args
        results = {}
        for index, file in enumerate(part.files):
            _, written = FileSystemWriterAsync.write_preloaded_data(
                transforms, index, file, None, None, use_fsync=True
            )
            if isinstance(written, Exception):
                raise disk_error(written)
            results[index] = written
        part.request.async_fn_args[2].put(results)
        part.files.clear()
    if torch.cuda.is_initialized():
        _free_pinned_memory()


def _free_pinned_memory() -> None:
    """Give back the host memory that PyTorch pinned for copies from a GPU, and would keep."""
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    else:  # torch 2.11
        torch._C._host_emptyCache()


def _check_room(partial: Path, needed: int) -> None:
    """Refuse before anything large is written: a full disk stops everything on the machine."""
    free = shutil.disk_usage(partial).free
    if free < needed:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(
            errno.ENOSPC, f"no room for {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free", str(partial)
        )


def _publish(order: SaveOrder, model_info: dict[str, Any]) -> None:
    """Write the small files, give the checkpoint its name and remove older ones, in the thread of rank 0."""
    partial = run_state.partial_of(order.final)
    try:
        model, layout = model_info["model"], model_info["layout"]
        if model.hf_checkpoint is not None:
            (partial / HF_FILES).mkdir()
            copy_all_but_weights(model.hf_checkpoint, partial / HF_FILES, model_info["dtype"])
        if described := describe_adapters(model):
            layout = {**layout, "lora": described}
        (partial / LAYOUT).write_text(json.dumps(layout), encoding="utf-8")
        state = {"step": order.step, **order.run_state}
        (partial / RUN_STATE).write_text(json.dumps(state), encoding="utf-8")
        write_integrity(partial)
        publish(partial, order.final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    run_state.remove_superseded(order.directory, order.step, order.keep)
