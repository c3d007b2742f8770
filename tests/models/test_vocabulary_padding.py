"""Tensor parallelism that does not divide the vocabulary: rows are added, and nothing but memory notices."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.models import check_layout, padded_vocab_size, read_hf_config
from megatron_ibpo.models.weight_map import weight_map
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats.convert import hf_to_megatron, megatron_to_hf
from megatron_ibpo.weights.formats.run_state import find_checkpoint, find_stored
from megatron_ibpo.weights.formats.torch_dist import ROWS_MAY_BE_PADDED, StoredCheckpoint
from support import planned
from support.checkpoint_bytes import assert_same_bytes, tensors_of
from support.layouts import layout
from support.model_passes import ALONE
from support.ranks import run_ranks
from support.tiny_models import make_qwen3
from support.train_sequences import sequence
from support.trainers import close_trainer, config_for, open_trainer, weights_of

VOCABULARY = 211


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    sizes = {"std": 0.1, "kv_heads": 4, "vocabulary": VOCABULARY}
    return {
        "dense": make_qwen3(directory / "dense", 3, **sizes),
        "tied": make_qwen3(directory / "tied", 5, tie=True, **sizes),
    }


def rows():
    rng, ids, made = random.Random(0), range(2, VOCABULARY), []
    for number in range(6):
        response = [*rng.choices(ids, k=rng.randrange(1, 30)), VOCABULARY - 1]
        prompt = rng.choices(ids, k=rng.randrange(1, 9))
        made.append(sequence(
            prompt, response, advantage=rng.choice([-1.5, -0.5, 1.0]), weight=1 / 6, group=number % 3,
        ))  # fmt: skip
    return made


@given(vocabulary=st.integers(1, 2000), tp=st.sampled_from([1, 2, 4]), multiple=st.integers(1, 200))
def test_shards_cover_the_vocabulary_once_with_padding_at_the_end(models, vocabulary, tp, multiple):
    shape = replace(read_hf_config(models["dense"]), vocab_size=vocabulary)
    parallel = layout(tp, vocabulary=multiple)
    total = padded_vocab_size(shape, parallel)
    entry = weight_map(shape, vocab_rows=total)["output_layer.weight"]
    shards = [entry.pieces[0].ranges(rank, tp) for rank in range(tp)]
    covered = [row for ((start, length),) in shards for row in range(start, start + length)]
    assert covered == list(range(vocabulary))
    padding = [entry.padding(rank, tp) for rank in range(tp)]
    held = [length + padded for ((_, length),), padded in zip(shards, padding, strict=True)]
    assert held == [total // tp] * tp
    assert held[0] % multiple == 0
    assert total - vocabulary < tp * multiple, "no more than needed"
    empty = sum(length == 0 for ((_, length),) in shards)
    if empty:
        (problem,) = check_layout(shape, parallel, tp)
        assert f"which has {vocabulary}: {empty} of {tp} ranks would hold nothing but padding" in problem
    else:
        assert check_layout(shape, parallel, tp) == []
        assert padding[:-1] == [0] * (tp - 1)


def trained(world, hf_dir, parallel):
    """(log-probs, metrics of an update, weights after it, what is in the padding then)"""
    from megatron_ibpo.weights.formats.hf_models import load_hf

    config = config_for(parallel, lr=1.0, fuse_lm_head=hf_dir.name == "dense")
    trainer, export, shape = open_trainer(world, hf_dir, config)
    for parameter in trainer.chunks[0].parameters():  # new memory may hold anything, and most often holds 0
        parameter.data.fill_(torch.nan)
    load_hf(trainer.chunks, shape, hf_dir)
    assert padding_of(trainer, shape)[1:] == (0.0, 0.0)
    found = planned.logprobs(trainer, rows()), planned.update(trainer, rows())
    found = *found, weights_of(export), padding_of(trainer, shape)
    close_trainer()
    return found


def without_padding(world, models):
    return {name: trained(world, path, layout()) for name, path in models.items()}


def padding_of(trainer, shape):
    """(rows of padding on this rank, largest weight in them, largest gradient in them)"""
    from megatron.core import parallel_state

    rank, weights, gradients = parallel_state.get_tensor_model_parallel_rank(), [], []
    for name, parameter in trainer.chunks[0].module.named_parameters():
        if name in ROWS_MAY_BE_PADDED:
            own = min(len(parameter), shape.vocab_size - rank * len(parameter))
            weights.append(parameter[own:].detach())
            gradients.append(parameter.main_grad[own:])
    largest = []
    for padding in (torch.cat(weights), torch.cat(gradients)):
        assert not padding.isnan().any()
        largest.append(padding.abs().max().item() if len(padding) else 0.0)
    return sum(map(len, weights)), *largest


@pytest.fixture
def alone(models):
    return run_ranks(without_padding, 1, models, timeout=280)[0]


@pytest.mark.world(2)
def test_training_is_the_same_with_padding_and_padding_stays_zero(world, models, alone):
    """Tied with logits held, and untied with a head fused with the loss."""
    for name, parallel in (("tied", layout(2)), ("dense", layout(2)), ("tied", layout(2, vocabulary=8))):
        case, before = (name, parallel), tensors_of(models[name])
        logprobs, metrics, weights, left = trained(world, models[name], parallel)
        expected, expected_metrics, expected_weights, nothing = alone[name]
        assert nothing == (0, 0.0, 0.0), (name, parallel)
        assert left[1:] == (0.0, 0.0), case
        rows_added = 13 if parallel.make_vocab_size_divisible_by == 8 else 2 if name == "dense" else 1
        assert sum(padded for padded, *_ in world.all_gather(left)) == rows_added, case
        for own, wanted in zip(logprobs, expected, strict=True):
            assert own == pytest.approx(wanted, abs=1e-5), case
        for metric in ("loss", "grad_norm", "entropy", "ratio_mean"):
            wanted = pytest.approx(expected_metrics[metric], rel=1e-4, abs=1e-6)
            assert metrics[metric] == wanted, (case, metric)
        assert weights.keys() == (expected_weights.keys() if world.is_rank_0 else set()), (name, parallel)
        for tensor, found in weights.items():
            moved = (expected_weights[tensor] - before[tensor]).abs().max()
            assert moved > 0, (case, tensor, "would not be tested")
            assert (found - expected_weights[tensor]).abs().max() <= 1e-3 * moved, (case, tensor)


def went_on(world, hf_dir, parallel, start, save_to, updates=1):
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint

    # a large epsilon: what rounding makes of a gradient near zero does not decide about the step
    trainer, export, shape = open_trainer(world, hf_dir, config_for(parallel, lr=1e-2, eps_adam=1e-2))
    if start is not None:
        load_checkpoint(trainer, find_checkpoint(start))
    assert padding_of(trainer, shape)[1:] == (0.0, 0.0)
    for _ in range(updates):
        norm = planned.update(trainer, rows())["grad_norm"]
    if save_to is not None:
        save_checkpoint(trainer, save_to, 1, {})
    weights = weights_of(export)
    close_trainer()
    return weights, norm


SHARDED = partial(layout, distributed_optimizer=True)


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "legs", "ends"),
    [
        ("tied", [(2, layout(2)), (4, layout(4))], [(1, layout()), (2, layout(2))]),
        ("dense", [(2, SHARDED(1)), (4, SHARDED(2))], [(1, SHARDED(1)), (4, SHARDED(4))]),
    ],
    ids=["whole optimizer", "sharded optimizer"],
)
def test_a_run_goes_on_under_layouts_that_pad_otherwise(models, tmp_path, name, legs, ends):
    """Ranks and layouts of the first update and of the second, which are saved, and several of the third."""
    hf_dir, start = models[name], None
    for size, parallel in legs:
        place, hf = tmp_path / f"TP{parallel.tensor_model_parallel_size}", tmp_path / "hf" / str(size)
        weights, _ = run_ranks(went_on, size, hf_dir, parallel, start, place, timeout=300)[0]
        padded = padded_vocab_size(read_hf_config(hf_dir), parallel)
        assert StoredCheckpoint(find_stored(place)).tensors[ROWS_MAY_BE_PADDED[0]].size[0] == padded, (
            size,
            parallel,
        )
        megatron_to_hf(find_stored(place), hf, ALONE, origin=hf_dir)
        assert_same_bytes(tensors_of(hf), weights)
        start = place
    expected, norm = run_ranks(went_on, 1, hf_dir, layout(), None, None, 3, timeout=300)[0]
    for size, parallel in ends:
        found, found_norm = run_ranks(went_on, size, hf_dir, parallel, start, None, timeout=300)[0]
        assert found_norm == pytest.approx(norm, rel=1e-5), parallel
        for tensor, wanted in expected.items():
            assert (found[tensor] - wanted).abs().max() < 1e-6, (parallel, tensor)


@pytest.mark.world(1)
def test_a_checkpoint_of_a_smaller_vocabulary_is_not_filled_up(world, models, tmp_path):
    other = make_qwen3(tmp_path / "other", 3, kv_heads=4, vocabulary=VOCABULARY + 2)
    hf_to_megatron(models["dense"], tmp_path / "stored", layout(), world)
    with pytest.raises(CheckpointError, match="has 211 rows for a vocabulary of 213: it is of another"):
        went_on(world, other, layout(), tmp_path / "stored", None)
