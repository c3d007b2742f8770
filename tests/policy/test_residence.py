"""A trainer whose memory is given back while engines sample computes what it would have computed with it."""

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.policy.planning import plan_forward, plan_update
from megatron_ibpo.weights.formats.retention import Keep
from megatron_ibpo.weights.transfer.link import Sent
from megatron_ibpo.weights.transfer.update_order import UpdateOrder
from support import planned
from support.ranks import run_ranks
from support.tiny_models import make_qwen3, make_qwen3_next
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer, weights_of

pytestmark = pytest.mark.world

CASES = {
    "dense fp32": ("dense", ParallelConfig(), False),
    "dense fp32, sharded": ("dense", ParallelConfig(use_distributed_optimizer=True), False),
    "dense bf16": ("dense", ParallelConfig(), True),
    "dense bf16, sharded": ("dense", ParallelConfig(use_distributed_optimizer=True), True),
    "next bf16, sharded": (
        "next",
        ParallelConfig(expert_model_parallel_size=2, use_distributed_optimizer=True),
        True,
    ),
}
"""Model, layout of two ranks, bf16: every kind of Megatron optimizer, whose parameters are the model's own,
views into its buffers, or copies."""
QUICK = ["next bf16, sharded"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return {
        "dense": make_qwen3(place / "dense", 3, std=0.1),
        "next": make_qwen3_next(place / "next", 4, std=0.1, layers=2),
    }


def config_of(case):
    _, parallel, bf16 = case
    config = config_for(parallel, lr=1e-3, eps_adam=1e-8)
    config.model.bf16 = bf16
    return config


def tensors_of(trainer):
    """Return the tensors that the model and its optimizer hold, by kind."""
    from megatron_ibpo.policy.checkpoint import _optimizers

    inner = [part.optimizer for part in _optimizers(trainer)]
    return {
        "weights": [own for chunk in trainer.chunks for own in chunk.parameters()],
        "gradients": trainer.gradient_buffers(),
        "states": [
            *(own for one in inner for group in one.param_groups for own in group["params"]),
            *(own for one in inner for state in one.state.values() for own in state.values()),
        ],
    }


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def taken(trainer):
    """Bytes on the device by kind, each storage once."""
    found, seen = {}, set()
    for kind, tensors in tensors_of(trainer).items():
        storages = {own.untyped_storage().data_ptr(): own.untyped_storage() for own in tensors}
        found[kind] = sum(own.nbytes() for place, own in storages.items() if place not in seen)
        seen |= storages.keys()
    return found


def moved(world, hf_dir, case, rows):
    """Two updates of a trainer that leaves and comes back after the first, and of one that stays."""
    from megatron_ibpo.policy.residence import Held, Residence

    config, found = config_of(case), {}
    stays, export, _ = open_trainer(world, hf_dir, config)
    planned.update(stays, rows)
    expected_logprobs = planned.logprobs(stays, rows)
    expected_norm = planned.update(stays, rows)["grad_norm"]
    expected = weights_of(export)
    close_trainer()

    moves, export, _ = open_trainer(world, hf_dir, config)
    residence = Residence([moves], world, offload=True)
    residence.leave(Held.NOTHING)  # also before there is any state
    residence.bring(Held.EVERYTHING)
    planned.update(moves, rows)
    found["whole"] = taken(moves)
    before = [own.clone() for kind in ("weights", "states") for own in tensors_of(moves)[kind]]
    residence.leave(Held.WEIGHTS)
    found["weights alone"] = taken(moves)
    residence.leave(Held.NOTHING)
    found["asleep"] = taken(moves)
    residence.bring(Held.WEIGHTS)
    found["weights again"] = taken(moves)
    found["same log-probs"] = planned.logprobs(moves, rows) == expected_logprobs
    residence.bring(Held.EVERYTHING)
    found["whole again"] = taken(moves)
    after = [own for kind in ("weights", "states") for own in tensors_of(moves)[kind]]
    found["same state"] = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    found["same norm"] = planned.update(moves, rows)["grad_norm"] == expected_norm
    found["same weights"] = same(weights_of(export), expected)
    close_trainer()
    return found


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_whatever_leaves_comes_back_to_the_bit_and_takes_no_memory_meanwhile(models, name):
    for seen in run_ranks(moved, 2, models[CASES[name][0]], CASES[name], sequences(6), timeout=240):
        whole = seen["whole"]
        assert min(whole.values()) > 0
        assert seen["weights alone"] == {**dict.fromkeys(whole, 0), "weights": whole["weights"]}
        assert seen["asleep"] == dict.fromkeys(whole, 0)
        assert seen["weights again"] == seen["weights alone"]
        assert seen["whole again"] == whole
        for what in ("log-probs", "state", "norm", "weights"):
            assert seen[f"same {what}"], what


class Late:
    """CUDA's streams as they may be at worst: what is copied beside the main stream arrives when that waits
    for it and not before."""

    def __init__(self):
        self.pending, self.aside, self.arrived = [], False, 0

    def current_stream(self):
        return self

    def wait_stream(self, other):
        if other is not self:
            self.arrived += len(self.pending)
            for arrive in self.pending:
                arrive()
            self.pending.clear()

    @contextmanager
    def stream(self, _):
        self.aside = True
        yield
        self.aside = False

    @contextmanager
    def installed(self):
        at_once = torch.Tensor.copy_

        def copy_(tensor, content, **_):
            if self.aside:
                self.pending.append(partial(at_once, tensor, content))
                content = torch.full_like(content, 255)  # NaN
            return at_once(tensor, content)

        with (
            mock.patch.object(torch.cuda, "current_stream", self.current_stream),
            mock.patch.object(torch.cuda, "stream", self.stream),
            mock.patch.object(torch.Tensor, "copy_", copy_),
        ):
            yield


def with_late_copies(world, hf_dir, rows):
    """(gradient norms, sums of what a checkpoint keeps) of steps and a save each after a return, whose copies
    come as late as they may; the same of steps at home; and how many copies were late."""
    from megatron_ibpo.policy.checkpoint import saved_state
    from megatron_ibpo.policy.residence import Held, Residence

    def steps(leaves):
        trainer, _, _ = open_trainer(world, hf_dir, config_of(CASES["dense bf16, sharded"]))
        residence = Residence([trainer], world, offload=leaves)
        norms = []
        for _ in range(2):
            residence.leave(Held.NOTHING)
            residence.bring_for_steps()
            norms.append(planned.update(trainer, rows)["grad_norm"])
        residence.leave(Held.WEIGHTS)
        residence.bring(Held.EVERYTHING)
        state = saved_state(trainer)["optimizer"]["param_state"] or {}
        sums = [shard.data.double().sum().item() for own in state.values() for shard in own.values()]
        close_trainer()
        return norms, sums

    at_home, late = steps(leaves=False), Late()
    with late.installed():
        return steps(leaves=True), at_home, late.arrived


def test_steps_and_checkpoints_wait_for_the_state_that_comes_beside_them(models):
    for away, at_home, arrived in run_ranks(with_late_copies, 2, models["dense"], sequences(6)):
        assert away == at_home
        assert arrived > 0


def test_memory_is_freed_when_its_content_is_on_the_host_and_not_before(monkeypatch):
    """What is copied to the host is there, at worst, when that waits for the device."""
    from megatron_ibpo.policy.residence import _HostCopy

    under_way, at_once = [], torch.Tensor.copy_

    def copy_(tensor, content, **_):
        under_way.append(partial(at_once, tensor, content))
        return at_once(tensor, torch.full_like(content, 255))

    weights, host = torch.arange(5.0), _HostCopy()
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: [arrive() for arrive in under_way])
    host.take([weights.untyped_storage()])
    monkeypatch.undo()
    host.allocate()
    host.fill()
    assert weights.tolist() == [0, 1, 2, 3, 4]


class Recorder:
    """A transport that keeps what it is given to send, and what was on the device at each wake."""

    def __init__(self, rank):
        self.rank, self.sent = rank, {}

    def send(self, source, links, engines, *, check):
        self.sent = weights_of(source)
        return Sent({}, 0, 0, {})


class Link:
    """A sleeping engine that notes what the trainer holds whenever it is asked."""

    def __init__(self, rank):
        self.rank, self.asked = rank, []

    def begin(self, method, *arguments):
        self.asked.append((method, *arguments, {k: v > 0 for k, v in taken(self.rank.trainer).items()}))

    def result(self, timeout):
        return []  # it lacks nothing


class Copied:
    """An export whose tensors are copies, as those that come from a GPU: what numpy has seen of a CPU tensor
    keeps its memory."""

    def __init__(self, export):
        self.export = export

    def __getattr__(self, name):
        return getattr(self.export, name)

    def __iter__(self):
        return ((name, None if tensor is None else tensor.clone()) for name, tensor in self.export)


def through_a_step(world, hf_dir, directory, rows, sleeping):
    """All that is asked of a rank in a step; `sleeping`: engines take the device whenever they may."""
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy import rank as module
    from megatron_ibpo.weights.formats.run_state import find_checkpoint

    config = config_of(CASES["dense bf16, sharded"])
    config.model.hf_checkpoint = Path(hf_dir)
    with mock.patch.object(module, "start_world", return_value=world):
        rank = module.TrainerRank(config, None)
    rank.transport, link, found = Recorder(rank), Link(rank), {}
    rank.export, rank.whole_export = Copied(rank.export), Copied(rank.whole_export)
    emptied = mock.patch.object(torch.cuda, "empty_cache", wraps=torch.cuda.empty_cache)
    with emptied as empty_cache:

        def room():
            if sleeping:
                rank.make_room()
                assert set(taken(rank.trainer).values()) == {0}

        room()
        found["log-probs"] = rank.logprobs(planned.own_share(plan_forward, rows, config))
        room()
        found["norm"] = rank.update(planned.own_share(plan_update, rows, config))["grad_norm"]
        order = UpdateOrder(version=1, sleeping=sleeping, check=False, timeout=5)
        rank.send({0: link} if world.is_rank_0 else {}, [0], order)
        found["sent"], found["asked"] = rank.transport.sent, link.asked
        found["asleep"] = set(taken(rank.trainer).values()) == {0}
        room()
        rank.save(Path(directory), 1, {}, Keep(1))
        room()  # what is written was copied
        rank.save_rests(True)
        rank.seal_save()
        rank.save_rests(True)
        rank.end_save()
        rank.save_hf(Path(directory) / "hf")
        found["asleep"] &= set(taken(rank.trainer).values()) == {0}
        found["norm again"] = rank.update(planned.own_share(plan_update, rows, config))["grad_norm"]
        found["emptied"] = empty_cache.call_count
    parallel.destroy()
    if sleeping:
        with mock.patch.object(module, "start_world", return_value=world):
            resumed = module.TrainerRank(config, find_checkpoint(Path(directory)))
        found["resumed"] = resumed.update(planned.own_share(plan_update, rows, config))["grad_norm"]
        parallel.destroy()
    return found


@pytest.fixture(scope="module")
def steps(models, tmp_path_factory):
    """Return what each of two ranks found, by whether engines sleep."""
    return {
        sleeping: run_ranks(
            through_a_step, 2, models["dense"], tmp_path_factory.mktemp("step"), sequences(6), sleeping
        )
        for sleeping in (True, False)
    }


def test_a_step_beside_sleeping_engines_is_the_step_without_them(steps):
    for own, alone in zip(steps[True], steps[False], strict=True):
        assert own["norm"] == alone["norm"]
        assert own["norm again"] == alone["norm again"] == own["resumed"]
        for (index, ours), (other, theirs) in zip(own["log-probs"], alone["log-probs"], strict=True):
            assert index == other
            assert ours.tolist() == theirs.tolist()
        assert same(own["sent"], alone["sent"])


def test_engines_wake_where_trainers_have_left_the_device(steps):
    only_weights = {"weights": True, "gradients": False, "states": False}
    nothing = dict.fromkeys(only_weights, False)
    assert [own["asleep"] for own in steps[True]] == [True, True]
    assert steps[True][0]["asked"] == [
        ("wake", "weights", only_weights),
        ("start_weight_update", False, only_weights),
        ("missing_weights", only_weights),
        ("finish_weight_update", 1, only_weights),
        ("wake", "kv_cache", nothing),
    ]
    # before each wake, and whenever the device was left
    assert min(own["emptied"] for own in steps[True]) >= 6
    assert [own["emptied"] for own in steps[False]] == [0, 0]
