"""Weights that are gathered while the next forward pass computes are those that were gathered before it."""

from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ibpo.config import ConfigError, ParallelConfig
from megatron_ibpo.run.settings import parse_config
from support import planned
from support.ranks import run_ranks
from support.tiny_models import make_qwen3, make_qwen3_moe, make_qwen3_next
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, open_trainer, weights_of

pytestmark = pytest.mark.world

BEFORE, AS_IT_IS, LATE, FORGOTTEN = "before", "as it is", "late", "late, children forgotten"
"""Ways of gathering weights: after the step; in the next pass; there as late as can be; so, unguarded."""


def config_of(layout, overlap, **loss):
    """Two steps a rollout, of ordinary size."""
    parallel = ParallelConfig(
        **layout, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=overlap
    )
    return config_for(parallel, lr=1e-2, eps_adam=1e-8, num_steps_per_rollout=2, **loss)


class LastMoment:
    """A gather that happens when it is waited for: what does not wait reads what was there before."""

    def __init__(self, group, gather):
        self.group, self.gather = group, gather

    def wait(self):
        self.group.param_gather_handle = None
        self.gather(self.group, force_sync=True)


def gathering_late():
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    gather = Group.start_param_sync

    def start(group, force_sync=False):
        assert not force_sync
        group.param_gather_handle, group.param_gather_dispatched = LastMoment(group, gather), True

    return mock.patch.object(Group, "start_param_sync", start)


def trained(world, hf_dir, config, directory, *, how):
    """Train on two rollouts; return metrics, and what readers of weights saw between and after them."""
    from megatron_ibpo.policy import forward_backward as module
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.residence import Held, Residence
    from megatron_ibpo.policy.saving import save_checkpoint

    rows, stack = sequences(8), ExitStack()
    with stack:
        small = partial(module.DistributedDataParallelConfig, bucket_size=1)
        stack.enter_context(mock.patch.object(module, "DistributedDataParallelConfig", small))
        if how != AS_IT_IS:
            stack.enter_context(gathering_late())
        if how == FORGOTTEN:
            stack.enter_context(mock.patch.object(module, "wait_around"))
        reference = hf_dir if config.loss.kl_coef else None
        trainer, export, _ = open_trainer(world, hf_dir, config, reference)
        if trainer.chunks[0].module.pre_process:  # Megatron has one bucket on the stages behind
            assert len(trainer.chunks[0].bucket_groups) > 8, "a bucket for each parameter"
        seen = [planned.update(trainer, rows)]
        if how == FORGOTTEN:
            return without_times(seen)
        seen += [planned.logprobs(trainer, rows), weights_of(export)]
        residence = Residence([trainer], world, offload=True)
        residence.leave(Held.NOTHING)
        residence.bring(Held.EVERYTHING)
        saved = save_checkpoint(trainer, directory, 1, {})
        seen += [planned.update(trainer, rows), weights_of(export)]
        close_trainer()
        trainer, export, _ = open_trainer(world, hf_dir, config, reference)
        load_checkpoint(trainer, saved)
        seen += [weights_of(export), planned.update(trainer, rows), weights_of(export)]
    return without_times(seen)


def without_times(seen):
    return [
        {name: value for name, value in one.items() if "seconds" not in name}
        if isinstance(one, dict)
        else one
        for one in seen
    ]


def compared(world, hf_dir, layout, directory, loss, ways):
    """Return what was seen on this rank, by the way of gathering."""
    found = {}
    for name in ways:
        how, config = AS_IT_IS if name == BEFORE else name, config_of(layout, name != BEFORE, **loss)
        found[name] = trained(world, hf_dir, config, directory / name, how=how)
        close_trainer()
    return found


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


MODELS = {
    "dense": make_qwen3,
    "tied": partial(make_qwen3, tie=True),
    "delta net": partial(make_qwen3_next, layers=1),
    "next": partial(make_qwen3_next, layers=2),
}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "dense, fused head": ("dense", 2, {}, {"fuse_lm_head": True, "loss_variant": "gspo"}),
    "tied, two stages, with a reference policy": (
        "tied",
        4,
        {"pipeline_model_parallel_size": 2},
        {"kl_coef": 0.1},
    ),
    "delta net": ("delta net", 2, {}, {}),
    "next": ("next", 2, {}, {}),
    "next, experts shared out": ("next", 2, {"expert_model_parallel_size": 2}, {}),
}
QUICK = "delta net"


@pytest.mark.parametrize(
    "case", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_steps_logprobs_offload_export_and_checkpoints_are_the_same_to_the_bit(case, tmp_path):
    """This is so when gathers come as late as they can; in slow cases also when they come as they come."""
    model, ranks, layout, loss = CASES[case]
    hf_dir = MODELS[model](tmp_path / "model", 3, std=0.1)
    ways = [BEFORE, LATE, FORGOTTEN] + [AS_IT_IS] * (case != QUICK)
    for found in run_ranks(compared, ranks, hf_dir, layout, tmp_path, loss, ways, timeout=300):
        expected = found[BEFORE]
        assert same(expected[5:], [expected[2], *expected[3:5]]), "resumed"
        assert all(same(found[way], expected) for way in {AS_IT_IS, LATE} & found.keys())
    reads_children = model not in ("dense", "tied") or loss.get("fuse_lm_head", False)
    assert same(found[FORGOTTEN], expected[:1]) != reads_children, "it would have shown"


def never_called(world, cases):
    """Return the modules that another has to wait for, and that other, by case."""
    from megatron_ibpo.policy import forward_backward as module

    found = []
    for hf_dir, loss in cases:
        with mock.patch.object(module, "wait_around") as wait_around:
            open_trainer(world, hf_dir, config_of({}, overlap=True, **loss))
        ((chunk, waits), _) = wait_around.call_args
        names = {part: name for name, part in chunk.module.named_modules()}
        found.append({(names[part], names[around]) for part, around in waits})
        close_trainer()
    return found


def test_the_modules_that_are_read_and_never_called(tmp_path):
    """These are the convolution of delta nets, of all layers of the families, and a head that the loss
    takes."""
    dense, moe = make_qwen3(tmp_path / "dense", 3), make_qwen3_moe(tmp_path / "moe", 4)
    tiny = make_qwen3_next(tmp_path / "next", 4)
    fused = {"fuse_lm_head": True, "loss_variant": "gspo"}
    found = run_ranks(never_called, 1, [(dense, {}), (moe, {}), (tiny, {}), (tiny, fused)])[0]
    mixers = [f"decoder.layers.{layer}.self_attention" for layer in range(3)]
    convolutions = {(f"{mixer}.conv1d", mixer) for mixer in mixers}
    assert found == [set(), set(), convolutions, convolutions | {("output_layer", "")}]


def reading_early(world, hf_dir):
    """Return the message about a model whose first layer reads the last norm's weight."""
    from megatron_ibpo.models import read_hf_config
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.forward_backward import make_trainable
    from megatron_ibpo.policy.model import build_model
    from megatron_ibpo.weights.formats.load import load_hf

    shape, config = read_hf_config(hf_dir), config_of({}, overlap=True)
    parallel.initialize(config.parallel, world, seed=0)
    chunks = build_model(shape, config, device="cpu")
    load_hf(chunks, shape, hf_dir)
    decoder = chunks[0].decoder

    def read(*_):
        torch.mul(decoder.final_layernorm.weight, 2)

    decoder.layers[0].register_forward_pre_hook(read)
    try:
        make_trainable(chunks, config, 1e-3, 1)
    except ValueError as error:
        return str(error)
    return ""


def test_a_module_whose_weights_are_read_before_anything_waits_for_them_is_refused_by_name(tmp_path):
    says = run_ranks(reading_early, 1, make_qwen3(tmp_path / "dense", 3))[0]
    assert "decoder.final_layernorm.weight, which other modules read before" in says


@pytest.mark.parametrize("flags", [["--overlap-grad-reduce"], ["--use-distributed-optimizer"]])
def test_it_needs_shares_to_gather_and_buckets(flags):
    from megatron_ibpo.run.checks import check_run

    with pytest.raises(ConfigError, match="--overlap-param-gather: needs --use-distributed-optimizer"):
        check_run(parse_config(["--overlap-param-gather", *flags, "--dry-run"]))
