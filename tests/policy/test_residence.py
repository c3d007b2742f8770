"""What leaves the device, for engines or for a reference policy, comes back as it was; reads are counted."""

import os
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

import megatron_ibpo
from megatron_ibpo.policy import rank as policy_rank
from megatron_ibpo.policy.checkpoint import _optimizers, saved_state
from megatron_ibpo.policy.planning import plan_forward, plan_update
from megatron_ibpo.policy.residence import OnDevice, Reference, Residence, _HostCopy, load_reference
from megatron_ibpo.weights.formats.run_state import Keep
from megatron_ibpo.weights.transfer.link import Sent, UpdateOrder
from support import planned
from support.critics import critic_config, open_critic, rows_with_returns
from support.layouts import layout
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer, weights_of

ROWS, SLOW = sequences(6), pytest.mark.slow
REST = ("dense fp32", "dense fp32 sharded", "dense bf16")


def config_of(case):
    parallel = layout(ep=2 if "deltas" in case else 1, distributed_optimizer="sharded" in case)
    config = config_for(parallel, lr=1e-3, eps_adam=1e-8)
    config.model.bf16 = "bf16" in case
    return config


def tensors_of(trainer):
    inner = [part.optimizer for part in _optimizers(trainer)]
    return {
        "weights": [own for chunk in trainer.chunks for own in chunk.parameters()],
        "gradients": trainer.gradient_buffers(),
        "states": [
            *(own for one in inner for group in one.param_groups for own in group["params"]),
            *(own for one in inner for state in one.state.values() for own in state.values()),
        ],
    }


def taken(trainer):
    """Bytes on the device by kind, each storage once."""
    found, seen = {}, set()
    for kind, tensors in tensors_of(trainer).items():
        storages = {own.untyped_storage().data_ptr(): own.untyped_storage() for own in tensors}
        found[kind] = sum(own.nbytes() for place, own in storages.items() if place not in seen)
        seen |= storages.keys()
    return found


@pytest.mark.world(2)
@pytest.mark.parametrize("case", ["deltas bf16 sharded", *(pytest.param(own, marks=SLOW) for own in REST)])
def test_offloaded_state_returns_bit_for_bit_and_frees_its_memory(world, checkpoints, case):
    """With every kind of Megatron optimizer: its parameters are the model's own, views, or copies."""
    hf_dir, config = checkpoints[case.split()[0]], config_of(case)
    stays, export, _ = open_trainer(world, hf_dir, config)
    planned.update(stays, ROWS)
    expected_logprobs = planned.logprobs(stays, ROWS)
    expected_norm, expected = planned.update(stays, ROWS)["grad_norm"], weights_of(export)
    close_trainer()

    moves, export, _ = open_trainer(world, hf_dir, config)
    residence = Residence([moves], world, offload=True)
    residence.leave(OnDevice.NOTHING)  # also before there is any state
    residence.bring(OnDevice.EVERYTHING)
    planned.update(moves, ROWS)
    whole = taken(moves)
    assert min(whole.values()) > 0
    nothing = dict.fromkeys(whole, 0)
    before = {kind: [own.clone() for own in tensors_of(moves)[kind]] for kind in ("weights", "states")}
    residence.leave(OnDevice.WEIGHTS)
    assert taken(moves) == nothing | {"weights": whole["weights"]}
    residence.leave(OnDevice.NOTHING)
    assert taken(moves) == nothing
    residence.bring(OnDevice.WEIGHTS)
    assert taken(moves) == nothing | {"weights": whole["weights"]}
    assert planned.logprobs(moves, ROWS) == expected_logprobs
    residence.bring(OnDevice.EVERYTHING)
    assert taken(moves) == whole
    for kind, tensors in before.items():
        assert all(map(torch.equal, tensors, tensors_of(moves)[kind])), kind
    assert planned.update(moves, ROWS)["grad_norm"] == expected_norm
    torch.testing.assert_close(weights_of(export), expected, rtol=0, atol=0)


@contextmanager
def late_copies(arrived):
    """CUDA's streams as they may be at worst: what is copied beside the main stream arrives when that waits
    for it and not before."""
    at_once, pending, main, aside = torch.Tensor.copy_, [], mock.Mock(), False

    def wait_stream(other):
        if other is not main:
            arrived.extend(pending)
            while pending:
                pending.pop(0)()

    @contextmanager
    def stream(_):
        nonlocal aside
        aside = True
        yield
        aside = False

    def copy_(tensor, content, **_):
        if aside:
            pending.append(partial(at_once, tensor, content))
            content = torch.full_like(content, 255)  # NaN
        return at_once(tensor, content)

    main.wait_stream = wait_stream
    streams = mock.patch.multiple(torch.cuda, current_stream=lambda: main, stream=stream)
    with streams, mock.patch.object(torch.Tensor, "copy_", copy_):
        yield


@pytest.mark.world(2)
def test_steps_and_checkpoints_wait_for_returning_state(world, checkpoints):
    def steps(leaves):
        trainer, _, _ = open_trainer(world, checkpoints["dense"], config_of("dense bf16 sharded"))
        residence, norms = Residence([trainer], world, offload=leaves), []
        for _ in range(2):
            residence.leave(OnDevice.NOTHING)
            residence.bring_for_steps()
            norms.append(planned.update(trainer, ROWS)["grad_norm"])
        residence.leave(OnDevice.WEIGHTS)
        residence.bring(OnDevice.EVERYTHING)
        state = saved_state(trainer)["optimizer"]["param_state"] or {}
        sums = [shard.data.double().sum().item() for own in state.values() for shard in own.values()]
        close_trainer()
        return norms, sums

    at_home, arrived = steps(leaves=False), []
    with late_copies(arrived):
        assert steps(leaves=True) == at_home
    assert arrived


@pytest.mark.world
def test_memory_is_freed_only_after_its_copy_is_complete(monkeypatch):
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


class Copied(SimpleNamespace):
    """Exported tensors as copies, as from a GPU: what numpy has seen of a CPU tensor keeps its memory."""

    def __getattr__(self, name):
        return getattr(self.export, name)

    def __iter__(self):
        return ((name, None if tensor is None else tensor.clone()) for name, tensor in self.export)


@pytest.mark.world(2)
def test_a_step_beside_sleeping_engines_is_the_step_without_them(world, checkpoints, tmp_path):
    """Engines take the device whenever they may, and wake where trainers have left it."""
    config = config_of("dense bf16 sharded")
    config.model.hf_checkpoint, config.model.ref_load = checkpoints["dense"], checkpoints["other"]
    config.loss.kl_coef = 0.1

    def opened(checkpoint):
        with mock.patch.object(policy_rank, "start_world", return_value=world):
            return policy_rank.TrainerRank(config, checkpoint)

    def norm(rank):
        metrics = rank.update(planned.own_share(plan_update, ROWS, config))
        assert metrics["kl"] > 0.1, "to the other"
        return metrics["grad_norm"]

    def step(sleeping, directory):
        rank, sent, asked = opened(None), {}, []
        rank.export, rank.whole_export = Copied(export=rank.export), Copied(export=rank.whole_export)

        def send(source, links, engines, order):
            sent.update(weights_of(source))
            return Sent({}, 0, 0, {})

        def begin(method, *arguments):
            asked.append((method, *arguments, {kind for kind, size in taken(rank.trainer).items() if size}))

        def check_away():
            assert not sleeping or not any(taken(rank.trainer).values())

        def leave():
            if sleeping:
                rank.make_room()
            check_away()

        rank.transport = SimpleNamespace(send=send, in_one_call=False)
        link = SimpleNamespace(begin=begin, result=lambda timeout: [])  # it lacks nothing
        with mock.patch.object(torch.cuda, "empty_cache", wraps=torch.cuda.empty_cache) as empty_cache:
            leave()
            logprobs = rank.logprobs(planned.own_share(plan_forward, ROWS, config))
            leave()
            first = norm(rank)
            order = UpdateOrder(version=1, sleeping=sleeping, check=False, timeout=5)
            rank.send({0: link} if world.is_rank_0 else {}, [0], order)
            check_away()
            leave()
            rank.save(directory, 1, {}, Keep(1))
            leave()  # what is written was copied
            rank.save_rests(True)
            rank.seal_save()
            rank.save_rests(True)
            rank.end_save()
            rank.save_hf(directory / "hf")
            check_away()
            second = norm(rank)
            # before each wake, and whenever the device was left
            assert empty_cache.call_count >= 6 if sleeping else empty_cache.call_count == 0
        close_trainer()
        return [(index, own.tolist()) for index, own in logprobs], first, second, sent, asked

    *alone, alone_sent, _ = step(False, tmp_path / "alone")
    *beside, sent, asked = step(True, tmp_path / "beside")
    assert beside == alone
    torch.testing.assert_close(sent, alone_sent, rtol=0, atol=0)
    assert norm(opened(tmp_path / "beside/step_000001")) == alone[-1], "resumed"
    if world.is_rank_0:
        assert asked == [
            ("wake", "weights", {"weights"}),
            ("start_weight_update", False, {"weights"}),
            ("missing_weights", {"weights"}),
            ("finish_weight_update", 1, {"weights"}),
            ("wake", "kv_cache", set()),
        ]


@pytest.mark.world(2)
@pytest.mark.parametrize(("family", "sizes", "bf16"), [
    ("next", {"tp": 2, "ep": 2}, False),
    pytest.param("dense", {"distributed_optimizer": True}, False, marks=SLOW),
    pytest.param("tied", {"pp": 2}, False, marks=SLOW),
    pytest.param("dense", {"tp": 2}, True, marks=SLOW),
])  # fmt: skip
def test_a_reference_takes_the_policys_place_and_gives_it_back(world, checkpoints, family, sizes, bf16):
    """With what the optimizer steps on: float32 masters under bfloat16."""
    config = config_for(layout(**sizes), lr=1e-2, eps_adam=1e-8)
    config.model.bf16 = bf16
    undisturbed, _, _ = open_trainer(world, checkpoints[family], config)
    wanted = planned.logprobs(undisturbed, ROWS)
    _, norm = (planned.update(undisturbed, ROWS)["grad_norm"] for _ in range(2))
    close_trainer()
    trainer, _, shape = open_trainer(world, checkpoints[family], config)
    planned.update(trainer, ROWS)
    held = [tensor for kind in ("weights", "states") for tensor in tensors_of(trainer)[kind]]
    copies, before = [tensor.detach().clone() for tensor in held], planned.logprobs(trainer, ROWS)
    reference = load_reference(trainer.chunks, shape, checkpoints[family])
    with reference.swapped_in(trainer.chunks):
        assert planned.logprobs(trainer, ROWS) == wanted != before
    assert planned.logprobs(trainer, ROWS) == before
    assert all(map(torch.equal, copies, held))
    assert planned.update(trainer, ROWS)["grad_norm"] == norm, "training goes on as if nothing had been"


def test_a_reference_is_swapped_out_after_errors_and_never_nested():
    def fail_inside():
        with reference.swapped_in([policy]):
            raise KeyError

    policy, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    for model in (policy, other):
        model.tied = model.weight  # is exchanged once
        model.register_buffer("shift", torch.rand(3))
    reference, expected = Reference([other]), [own.clone() for own in policy.state_dict().values()]
    view = policy.weight.data[:, 1:]
    with reference.swapped_in([policy]):
        assert not any(map(torch.equal, expected, policy.state_dict().values()))
        assert view.equal(policy.weight[:, 1:]), "in place"
        with pytest.raises(RuntimeError, match="in the model already"):
            fail_inside()
    with pytest.raises(KeyError):
        fail_inside()
    assert all(map(torch.equal, expected, policy.state_dict().values()))


PACKAGE = Path(megatron_ibpo.__file__).resolve().parent
OF_THE_CPU = ("_row_logprobs", "_write_gradient")  # the loss in torch; on a GPU kernels take its place
READS = {"item", "tolist", "cpu", "nonzero", "masked_select", "bincount", "unique"}
READS |= {"__bool__", "__int__", "__float__", "__index__"}


class HostReads(TorchFunctionMode):
    """Counts, by file and function of the caller, reads of values for which the host would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        called, by_mask = function.__name__, False
        if called in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            by_mask = any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in index)
        of_unknown_size = called == "repeat_interleave" and "output_size" not in (kwargs or {})
        if called in READS or by_mask or of_unknown_size:
            code = sys._getframe(1).f_code
            name = os.path.relpath(Path(code.co_filename).resolve(), PACKAGE)
            if name.startswith(("policy/", "loss/")) and code.co_name not in OF_THE_CPU:
                self.found[f"{name}:{code.co_name}"] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.world(1)
@pytest.mark.parametrize("max_tokens", [10_000, 60])
def test_reads_of_the_device_do_not_grow_with_micro_batches(world, checkpoints, max_tokens):
    """Once for the numbers of an optimizer step, once for its gradient's norm, and once for the log-probs or
    values of each pass."""
    rows, hf_dir = rows_with_returns(9), checkpoints["dense"]
    step, values = "policy/forward_backward.py:_on_host", "policy/packing.py:response_values"
    norm = "policy/forward_backward.py:gradient_norm"
    for settings, passes in (
        ({}, 1),  # the second step's old log-probs
        ({"loss_variant": "grpo", "old_logprobs": "engine", "loss_backend": "torch"}, 0),
        ({"fuse_lm_head": True, "use_tis": True}, 2),  # importance weights need both steps' old log-probs
        ({"kl_coef": 0.1}, 3),  # and the reference's
    ):
        config = config_for(layout(), max_tokens=max_tokens, num_steps_per_rollout=2, **settings)
        trainer, _, _ = open_trainer(world, hf_dir, config, hf_dir if "kl_coef" in settings else None)
        with HostReads() as counted:
            planned.update(trainer, rows)
        close_trainer()
        assert counted.found == Counter({step: 2, norm: 2, values: passes}), settings
    critic = open_critic(world, hf_dir, critic_config(layout(), lr=0.01, max_tokens=max_tokens))
    with HostReads() as counted:
        planned.values(critic, rows)
        planned.update_values(critic, rows)
    assert counted.found == {step: 1, norm: 1, values: 1}
