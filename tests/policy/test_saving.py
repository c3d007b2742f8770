"""A checkpoint that is written while training goes on."""

import errno
import io
import json
import os
import threading
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
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
from support.train_sequences import sequences
from support.trainers import config_for, open_trainer, weights_of

pytestmark = pytest.mark.world

ROWS = sequences(6)


class FullForAMoment(io.FileIO):
    """A file without room for one write. torch then complains of the place in the file, and closing it
    succeeds."""

    refused = False

    def write(self, data):
        if not self.refused:
            self.refused = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@contextmanager
def writing(change):
    """Megatron's function that writes, changed: `change(write, *arguments)` takes its place."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync as Writer

    changed = partial(change, Writer.write_preloaded_data)
    with mock.patch.object(Writer, "write_preloaded_data", changed):
        yield


def finish(saver):
    saver.rests(wait=True)
    saver.seal()
    saver.rests(wait=True)
    saver.end()


def overtaken(saver, trainer, export, order, begin):
    """A save that an update overtakes, before a byte is written; from the checkpoint it goes the same way, to
    the bit. `begin` begins it."""
    from megatron_ibpo.policy.checkpoint import load_checkpoint

    may_write = threading.Event()

    def late(write, *arguments, **named):
        assert may_write.wait(60)
        return write(*arguments, **named)

    with writing(late):
        begin()
        metrics, weights = planned.update(trainer, ROWS), weights_of(export)
        may_write.set()
        finish(saver)
    load_checkpoint(trainer, order.final)
    assert planned.update(trainer, ROWS)["grad_norm"] == metrics["grad_norm"]
    assert all(tensor.equal(weights[name]) for name, tensor in weights_of(export).items())


@pytest.mark.world(2)
def test_a_save_gets_its_name_when_it_is_whole_and_a_full_disk_leaves_nothing(world, checkpoints, tmp_path):
    """Saves of one trainer: one that training overtakes, one for which the disk of rank 1 has no room, one
    whose disk is full in the end, and two that are not disturbed, after which older ones go."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    directory = tmp_path / "checkpoints"
    config = config_for(layout(tp=2), lr=1e-3, eps_adam=1e-8)
    trainer, export, _ = open_trainer(world, checkpoints["dense"], config)
    saver = saving.Saver(world)

    def order(step):
        return saving.SaveOrder(directory, step, {"note": "kept"}, Keep(1))

    def there():
        world.barrier()
        names = sorted(path.name for path in directory.iterdir())
        world.barrier()
        return names

    def begin():
        saver.begin(trainer, order(1))
        assert not saver.rests(wait=False)
        assert there() == [".step_000001.partial"]

    planned.update(trainer, ROWS)
    overtaken(saver, trainer, export, order(1), begin)
    assert there() == ["step_000001"]

    def on_full_disk(path, mode):
        return io.BufferedWriter(FullForAMoment(path, mode))

    def full_on_rank_1(write, *arguments, **named):
        # Megatron opens its files by this name
        full = mock.patch.object(filesystem_async, "open", on_full_disk, create=True)
        with full if world.rank == 1 else nullcontext():
            return write(*arguments, **named)

    in_the_end = mock.patch.object(saving.shutil, "disk_usage", return_value=SimpleNamespace(free=0))
    for while_writing, afterwards in ((writing(full_on_rank_1), nullcontext()), (nullcontext(), in_the_end)):
        with while_writing:
            saver.begin(trainer, order(2))
            with afterwards, pytest.raises(OSError) as refused:  # noqa: PT011
                finish(saver)
        assert refused.value.errno == errno.ENOSPC, "known to all ranks"
        assert there() == ["step_000001"]
    assert saving.save_checkpoint(trainer, directory, 3, {}).name == "step_000003"
    saver.begin(trainer, order(4))
    finish(saver)
    assert there() == ["step_000004"]
    assert json.loads((directory / "step_000004/run_state.json").read_text()) == {"note": "kept", "step": 4}


class Allocations(TorchDispatchMode):
    """Within, storages that operators of this thread make are counted in `present` until nobody holds them.

    What was there before is not counted.
    """

    def __init__(self):
        super().__init__()
        self.present = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.know((args, kwargs), before=True)
        made = function(*args, **(kwargs or {}))
        self.know(made, before=False)
        self.peak = max(self.peak, self.present)
        return made

    def know(self, tree, before):
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.known:
                storage = leaf.untyped_storage()
                num_bytes = 0 if before else storage.nbytes()
                self.known.add(storage._cdata)
                self.present += num_bytes
                weakref.finalize(storage, self.gone, storage._cdata, num_bytes)

    def gone(self, number, num_bytes):
        self.known.discard(number)
        self.present -= num_bytes


@pytest.mark.world(2)
def test_the_state_of_a_sharded_optimizer_is_gathered_once_and_not_copied(world, checkpoints, tmp_path):
    """12 bytes a parameter and the weights' 2 are held by the first of two ranks until they are written; at
    most there is one kind of state more, and the rank's half of it."""
    config = config_for(layout(distributed_optimizer=True), lr=1e-3, eps_adam=1e-8)
    config.model.bf16 = True
    trainer, export, _ = open_trainer(world, checkpoints["dense"], config)
    saver, order = saving.Saver(world), saving.SaveOrder(tmp_path / "saved", 1, {}, Keep(1))
    parameters = sum(own.numel() for chunk in trainer.chunks for own in chunk.parameters())

    def begin():
        on_device = mock.patch.object(torch.Tensor, "cuda", side_effect=AssertionError("on the device"))
        with Allocations() as taken, on_device:
            saver.begin(trainer, order)
        held, most = taken.present / parameters, taken.peak / parameters
        assert held == (pytest.approx(12 + 2, rel=0.01) if world.is_rank_0 else pytest.approx(0, abs=0.1))
        assert most == (
            pytest.approx(12 + 4 + 2, rel=0.01) if world.is_rank_0 else pytest.approx(4 / 2, rel=0.1)
        )

    planned.update(trainer, ROWS)
    overtaken(saver, trainer, export, order, begin)


def test_a_checkpoint_for_which_there_is_no_room_is_refused_before_it_is_written(tmp_path):
    (begun := tmp_path / ".step_000001.partial").mkdir()
    saving._check_room(begun, 0)
    with pytest.raises(OSError, match="no room for 1000000000000"):
        saving._check_room(begun, 10**18)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_cannot_be_finished_leaves_nothing(tmp_path):
    """The model that it was trained from, and whose tokenizer it takes along, has gone meanwhile."""
    order = saving.SaveOrder(tmp_path, 1, {}, Keep(3))
    partial_of(order.final).mkdir()
    others = {"model": ModelConfig(hf_checkpoint=tmp_path / "gone"), "layout": {}, "dtype": torch.float32}
    with pytest.raises(FileNotFoundError):
        saving._publish(order, others)
    assert list(tmp_path.iterdir()) == []
