"""A checkpoint that is written while training goes on."""

import contextlib
import errno
import io
import json
import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ibpo.config import ModelConfig
from megatron_ibpo.policy import saving
from megatron_ibpo.weights.formats.retention import Keep, partial_of
from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.tiny_models import make_qwen3
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer, weights_of

pytestmark = pytest.mark.world


class FullForAMoment(io.FileIO):
    """A file without room for one write. torch then complains of the place in the file, and closing it
    succeeds."""

    refused = False

    def write(self, data):
        if not self.refused:
            self.refused = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def on_full_disk(path, mode):
    return io.BufferedWriter(FullForAMoment(path, mode))


@contextlib.contextmanager
def held_back():
    """Writing, which waits for the event."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write, may_write = FileSystemWriterAsync.write_preloaded_data, threading.Event()

    def late(*arguments, **named):
        assert may_write.wait(60)
        return write(*arguments, **named)

    with mock.patch.object(FileSystemWriterAsync, "write_preloaded_data", late):
        yield may_write


def finish(saver):
    saver.rests(wait=True)
    saver.seal()
    saver.rests(wait=True)
    saver.end()


def goes_on_alike(trainer, export, rows, saved, metrics, weights):
    """Return whether an update from what was saved is the one that was made meanwhile."""
    from megatron_ibpo.policy.checkpoint import load_checkpoint

    load_checkpoint(trainer, saved)
    again = planned.update(trainer, rows)
    own = weights_of(export)
    return again["grad_norm"] == metrics["grad_norm"] and all(own[n].equal(weights[n]) for n in own)


def while_training(world, hf_dir, rows, directory):
    """Four saves of one trainer of two ranks: one that training overtakes, one for which the disk of rank 1
    has no room, one whose disk is full in the end, one that is not disturbed. What was found, by rank."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from megatron_ibpo.policy.saving import SaveOrder, Saver, save_checkpoint

    write = FileSystemWriterAsync.write_preloaded_data
    trainer, export, _ = open_trainer(world, hf_dir, config_for(layout(tp=2), lr=1e-3, eps_adam=1e-8))
    saver, found = Saver(world), {}

    def full_on_rank_1(*arguments, **named):
        with contextlib.ExitStack() as stack:
            if world.rank == 1:  # Megatron opens its files by this name
                stack.enter_context(mock.patch.object(filesystem_async, "open", on_full_disk, create=True))
            return write(*arguments, **named)

    def there():
        world.barrier()
        names = sorted(path.name for path in directory.iterdir())
        world.barrier()
        return names

    planned.update(trainer, rows)
    with held_back() as may_write:
        saver.begin(trainer, SaveOrder(directory, 1, {"note": "kept"}, Keep(1)))
        found["under way"] = saver.rests(wait=False), there()
        metrics, weights = planned.update(trainer, rows), weights_of(export)
        may_write.set()
        finish(saver)
    found["whole"] = there()
    found["same"] = goes_on_alike(trainer, export, rows, directory / "step_000001", metrics, weights)

    with mock.patch.object(FileSystemWriterAsync, "write_preloaded_data", full_on_rank_1):
        saver.begin(trainer, SaveOrder(directory, 2, {}, Keep(1)))
        try:
            finish(saver)
        except OSError as error:
            found["full"] = error.errno
    found["after full"] = there()
    saver.begin(trainer, SaveOrder(directory, 2, {}, Keep(1)))
    with mock.patch.object(saving.shutil, "disk_usage", return_value=SimpleNamespace(free=0)):
        try:
            finish(saver)
        except OSError as error:
            found["full in the end"] = error.errno
    found["after full in the end"] = there()
    found["last"] = save_checkpoint(trainer, directory, 3, {}).name
    saver.begin(trainer, SaveOrder(directory, 4, {}, Keep(1)))
    finish(saver)
    found["kept"] = there()
    close_trainer()
    return found


class Allocations(TorchDispatchMode):
    """Within, storages that operators of this thread make are counted in `present` until nobody holds them.

    What was there before is not counted.
    """

    def __init__(self):
        super().__init__()
        self.present = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._know(storage, 0)
        made = function(*args, **(kwargs or {}))
        for storage in _storages(made):
            self._know(storage, storage.nbytes())
        self.peak = max(self.peak, self.present)
        return made

    def _know(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.present += num_bytes
            weakref.finalize(storage, self._gone, storage._cdata, num_bytes)

    def _gone(self, number: int, num_bytes: int) -> None:
        self._known.discard(number)
        self.present -= num_bytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def of_a_sharded_optimizer(world, hf_dir, rows, directory):
    """A save of bf16 weights and of an optimizer sharded over two ranks, which training overtakes: bytes a
    parameter that are held at most and afterwards, and whether the checkpoint goes on as training did."""
    from megatron_ibpo.policy.saving import SaveOrder, Saver

    config = config_for(layout(distributed_optimizer=True), lr=1e-3, eps_adam=1e-8)
    config.model.bf16 = True
    trainer, export, _ = open_trainer(world, hf_dir, config)
    saver, found = Saver(world), {}
    parameters = sum(own.numel() for chunk in trainer.chunks for own in chunk.parameters())

    planned.update(trainer, rows)
    with held_back() as may_write:
        on_device = mock.patch.object(torch.Tensor, "cuda", side_effect=AssertionError("on the device"))
        with Allocations() as taken, on_device:
            saver.begin(trainer, SaveOrder(directory, 1, {}, Keep(1)))
        found["most"], found["held"] = taken.peak / parameters, taken.present / parameters
        metrics, weights = planned.update(trainer, rows), weights_of(export)
        may_write.set()
        finish(saver)
    found["same"] = goes_on_alike(trainer, export, rows, directory / "step_000001", metrics, weights)
    close_trainer()
    return found


def test_the_state_of_a_sharded_optimizer_is_gathered_once_and_not_copied(tmp_path):
    """12 bytes a parameter and the weights' 2 are held until they are written; at most there is one kind of
    state more, and this rank's half of it."""
    model = make_qwen3(tmp_path / "model", 3, std=0.1)
    first, other = run_ranks(of_a_sharded_optimizer, 2, model, sequences(6), tmp_path / "saved")
    assert first["held"] == pytest.approx(12 + 2, rel=0.01)
    assert first["most"] == pytest.approx(12 + 4 + 2, rel=0.01)
    assert other["held"] == pytest.approx(0, abs=0.1)
    assert other["most"] == pytest.approx(4 / 2, rel=0.1)
    assert first["same"]
    assert other["same"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    place = tmp_path_factory.mktemp("saving")
    model = make_qwen3(place / "model", 3, std=0.1)
    by_rank = run_ranks(while_training, 2, model, sequences(6), place / "checkpoints")
    return place / "checkpoints", by_rank


def test_a_checkpoint_has_its_name_when_it_is_whole(found):
    for seen in found[1]:
        assert seen["under way"] == (False, [".step_000001.partial"])
        assert seen["whole"] == ["step_000001"]


def test_what_is_saved_is_what_was_there_when_saving_began(found):
    """Training goes on before a byte is written; from the checkpoint it goes the same way, to the bit."""
    assert all(seen["same"] for seen in found[1])


def test_a_full_disk_of_one_rank_is_known_to_all_and_leaves_nothing(found):
    for seen in found[1]:
        assert seen["full"] == errno.ENOSPC
        assert seen["after full"] == ["step_000001"]
        assert seen["full in the end"] == errno.ENOSPC
        assert seen["after full in the end"] == ["step_000001"]


def test_a_checkpoint_for_which_there_is_no_room_is_refused_before_it_is_written(tmp_path):
    (partial := tmp_path / ".step_000001.partial").mkdir()
    saving._check_room(partial, 0)
    with pytest.raises(OSError, match="no room for 1000000000000"):
        saving._check_room(partial, 10**18)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_cannot_be_finished_leaves_nothing(tmp_path):
    """The model that it was trained from, and whose tokenizer it takes along, has gone meanwhile."""
    order = saving.SaveOrder(tmp_path, 1, {}, Keep(3))
    partial_of(order.final).mkdir()
    others = {"model": ModelConfig(hf_checkpoint=tmp_path / "gone"), "layout": {}, "dtype": torch.float32}
    with pytest.raises(FileNotFoundError):
        saving._publish(order, others)
    assert list(tmp_path.iterdir()) == []


def test_older_checkpoints_go_when_a_newer_one_has_its_name(found):
    directory, by_rank = found
    for seen in by_rank:
        assert seen["last"] == "step_000003"
        assert seen["kept"] == ["step_000004"]
    assert json.loads((directory / "step_000004/run_state.json").read_text()) == {"step": 4}
