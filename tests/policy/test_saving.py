"""Checkpoints: written while training goes on, and gone on from under any layout."""

import errno
import gc
import io
import json
import os
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ibpo.config import ModelConfig
from megatron_ibpo.policy import saving
from megatron_ibpo.policy.checkpoint import load_checkpoint
from megatron_ibpo.policy.saving import save_checkpoint
from megatron_ibpo.weights.formats.run_state import Keep, partial_of
from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer, weights_of

pytestmark = pytest.mark.world

ROWS = sequences(6)


class FullForAMoment(io.FileIO):
    """A file without room for one write, and closed without complaint."""

    refused = False

    def write(self, data):
        if not self.refused:
            self.refused = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def writing(change):
    """Megatron's function that writes, changed: `change(write, *arguments)` takes its place."""
    writer = filesystem_async.FileSystemWriterAsync
    return mock.patch.object(writer, "write_preloaded_data", partial(change, writer.write_preloaded_data))


def finish(saver):
    for goes_on in (saver.seal, saver.end):
        saver.rests(wait=True)
        goes_on()


def overtaken(saver, trainer, export, order, begin):
    """A save that an update overtakes, before a byte is written; from the checkpoint it goes the same way, to
    the bit. `begin` begins it."""
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
def test_a_complete_save_gets_its_name_and_a_failed_none(world, checkpoints, tmp_path):
    """Saves of one trainer: one that training overtakes, one for which the disk of rank 1 has no room, one
    whose disk is full in the end, and two that are not disturbed, after which older ones go."""
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
        assert there() == ["step_000001"], (while_writing, afterwards)
    assert save_checkpoint(trainer, directory, 3, {}).name == "step_000003"
    saver.begin(trainer, order(4))
    finish(saver)
    assert there() == ["step_000004"]
    assert json.loads((directory / "step_000004/run_state.json").read_text()) == {"note": "kept", "step": 4}


class Allocations(TorchDispatchMode):
    """Counts bytes that operators of this thread make meanwhile, until nobody holds them."""

    present = peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made, given = function(*args, **(kwargs or {})), {own._cdata for own in storages((args, kwargs))}
        for storage in storages(made):
            if storage._cdata not in given:
                self.present += storage.nbytes()
                weakref.finalize(storage, self.gone, storage.nbytes())
        if self.present > self.peak:
            gc.collect()  # what only garbage in cycles still holds is no part of it
            self.peak = max(self.peak, self.present)
        return made

    def gone(self, num_bytes):
        self.present -= num_bytes


def storages(tree):
    return [own.untyped_storage() for own in tree_leaves(tree) if isinstance(own, torch.Tensor)]


@pytest.mark.world(2)
def test_the_sharded_optimizers_state_is_gathered_once_without_copies(world, checkpoints, tmp_path):
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
        held, most = (12 + 2, 12 + 4 + 2) if world.is_rank_0 else (0, 4 / 2)
        assert taken.present / parameters == pytest.approx(held, rel=0.01, abs=0.1)
        assert taken.peak / parameters == pytest.approx(most, rel=0.01, abs=0.18)

    planned.update(trainer, ROWS)
    overtaken(saver, trainer, export, order, begin)


def test_a_checkpoint_without_room_is_refused_before_writing(tmp_path):
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


SHARDED = {"distributed_optimizer": True}
ONE, TP2, PP2 = (1, {}), (2, {"tp": 2}), (2, {"pp": 2})
UNEVEN, INTERLEAVED, EP2 = (2, {"pp": 2, "first": 1}), (2, {"pp": 2, "pieces": 2}), (2, {"ep": 2})
EP2_SHARDED, TP2_DP2 = (2, {"ep": 2, **SHARDED}), (4, {"tp": 2, **SHARDED})
PP2_SHARDED = (2, {"pp": 2, **SHARDED})
QUICK = [("dense", TP2_DP2, PP2_SHARDED), ("deltas", TP2, UNEVEN), ("deltas", EP2_SHARDED, (1, SHARDED))]
"""Model; ranks and layout where a checkpoint is saved and where it goes on: each kind of parallelism is taken
apart and put together, with either optimizer."""
REST = [
    ("dense", (4, {"cp": 2, **SHARDED}), TP2_DP2),
    *(("next", EP2, other) for other in (ONE, (2, {"tp": 2, "ep": 2}))),
    ("next", (2, {"cp": 2, **SHARDED}), (1, SHARDED)),
    ("next", (4, {"ep": 2, **SHARDED}), (2, {"tp": 2, "ep": 2, **SHARDED})),
    *(("dense", TP2, PP2), ("deep", ONE, INTERLEAVED), ("deep", INTERLEAVED, PP2)),
    *(("next", PP2, INTERLEAVED), ("next", INTERLEAVED, ONE)),
]


def second_updates(world, cases, saves):
    """Return, for each (checkpoint to start from, where to save, layout): gradient norm and weights of the
    second update, before which the first is made and saved here or else read."""
    found = []
    for hf_dir, directory, sizes in cases:
        sizes = {"pieces": 1, **sizes}
        pieces = sizes.pop("pieces")
        # a large epsilon: what rounding makes of a gradient near zero does not decide about the step
        config = config_for(layout(**sizes), lr=1e-2, eps_adam=1e-2)
        if pieces > 1:
            config.model.model_override = (f"virtual_pipeline_model_parallel_size={pieces}",)
        trainer, export, _ = open_trainer(world, hf_dir, config)
        if saves:
            planned.update(trainer, ROWS)
            save_checkpoint(trainer, directory, 1, {})
        else:
            load_checkpoint(trainer, directory / "step_000001")
        found.append((planned.update(trainer, ROWS)["grad_norm"], weights_of(export)))
        close_trainer()
    return found


@pytest.mark.parametrize("pairs", [QUICK, pytest.param(REST, marks=pytest.mark.slow)])
def test_another_layout_goes_on_from_the_same_state(checkpoints, tmp_path, pairs):
    """All pairs of a size share a world."""
    through, resumed = {}, {}
    for results, saves in ((through, True), (resumed, False)):
        ends = {number: pair[1 if saves else 2] for number, pair in enumerate(pairs)}
        for size in sorted({ranks for ranks, _ in ends.values()}):
            own = [number for number, (ranks, _) in ends.items() if ranks == size]
            cases = [(checkpoints[pairs[n][0]], tmp_path / str(n), ends[n][1]) for n in own]
            found = run_ranks(second_updates, size, cases, saves, timeout=240)[0]
            results |= zip(own, found, strict=True)
    assert len(through) == len(resumed) == len(pairs)
    for number, (norm, weights) in through.items():
        resumed_norm, resumed_weights = resumed[number]
        assert resumed_norm == pytest.approx(norm, rel=1e-5), pairs[number]
        assert resumed_weights.keys() == weights.keys()
        for name, expected in weights.items():
            assert (resumed_weights[name] - expected).abs().max() < 1e-6, (pairs[number], name)


@pytest.mark.world(1)
def test_a_sharded_optimizer_refuses_the_state_of_a_whole_one(world, checkpoints, tmp_path):
    trainer, _, _ = open_trainer(world, checkpoints["dense"], config_for(layout()))
    saved = save_checkpoint(trainer, tmp_path, 1, {})
    close_trainer()
    trainer, _, _ = open_trainer(world, checkpoints["dense"], config_for(layout(**SHARDED)))
    with pytest.raises(ValueError, match="saved with use_distributed_optimizer=False"):
        load_checkpoint(trainer, saved)


@pytest.mark.parametrize("torch_version", ["2.11", "2.13"])
def test_memory_pinned_for_a_checkpoint_is_freed_under_either_name(monkeypatch, torch_version):
    freed: list[str] = []
    accelerator = torch.accelerator
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    if torch_version == "2.11":
        monkeypatch.delattr(accelerator, "empty_host_cache", raising=False)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: freed.append("2.11"), raising=False)
    else:
        monkeypatch.setattr(accelerator, "empty_host_cache", lambda: freed.append("2.13"), raising=False)
    saving._write([])
    assert freed == [torch_version]
