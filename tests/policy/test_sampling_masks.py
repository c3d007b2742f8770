"""The trainer's log-probs, losses and gradients of responses that were sampled with top-k and top-p."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ibpo.basics.sampling_mask import sampling_mask, unrestricted
from megatron_ibpo.policy.packing import Context, lay_out, pack
from megatron_ibpo.policy.planning import (
    MicroBatch,
    plan_forward,
    plan_measure,
    plan_update,
    plan_value_update,
)
from support import planned, trainers
from support.layouts import layout
from support.ranks import run_ranks
from support.sampling_set_cases import draw_mask
from support.tiny_models import VOCAB_SIZE
from support.train_sequences import sequence, sequences, with_holes
from support.trainers import COMPARED, assert_close, close_trainer, config_for, open_trainer

TOP_K, TOP_P = 20, 0.8


def truncated_rows(hf_dir, count=9):
    """Sequences with the mask of top-k and top-p under a model, the log-probs over it in float64, and the
    share of the distribution that it keeps. A token that the policy did not write, and every tenth of the
    others, are not restricted."""
    from transformers import AutoModelForCausalLM

    model, rows, kept = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).double(), [], []
    for number, row in enumerate(with_holes(sequences(count))):
        row.temperature = (0.7, 1, 1.3)[number % 3]
        ids = torch.tensor([[*row.prompt_token_ids, *row.response_token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(row.prompt_token_ids) - 1 : -1] / row.temperature
        order = logits.argsort(1, descending=True)
        sums = logits.softmax(1).gather(1, order).cumsum(1)
        sets, logprobs = [], []
        for place, token in enumerate(row.response_token_ids.tolist()):
            size = min(TOP_K, 1 + int((sums[place] < TOP_P).sum()))
            own = np.union1d(order[place, :size], [token])
            is_whole = not row.loss_mask[place] or place % 10 == 9
            sets.append([] if is_whole else own)
            over = logits[place] if is_whole else logits[place, own]
            logprobs.append((logits[place, token] - over.logsumexp(0)).item())
            if row.loss_mask[place]:
                kept.append((over.logsumexp(0) - logits[place].logsumexp(0)).exp().item())
        mask, engine = sampling_mask(sets), np.where(row.loss_mask, logprobs, 0.0).astype(np.float32)
        rows.append(replace(row, sampling_mask=mask, rollout_logprobs=engine))
    return rows, np.mean(kept)


def logprobs_of(world, hf_dir, cases, rows):
    found = []
    for parallel, settings in cases:
        trainer, _, _ = open_trainer(world, hf_dir, config_for(parallel, **settings))
        found.append(planned.logprobs(trainer, rows))
        close_trainer()
    return found


@pytest.mark.world
def test_log_probs_equal_the_truncated_engines_under_every_layout(checkpoints):
    """With the head fused too. Masked tokens have none."""
    rows, _ = truncated_rows(checkpoints["dense"])
    fused = {"fuse_lm_head": True}
    alone = [(layout(), {}), (layout(), {**fused, "log_probs_tokens": 30})]
    shared = [(layout(tp=2), fused), *((own, {}) for own in (layout(tp=2), layout(cp=2), layout(pp=2)))]
    for size, cases in ((1, alone), (2, shared)):
        for found in run_ranks(logprobs_of, size, checkpoints["dense"], cases, rows):
            for case, of_case in zip(cases, found, strict=True):
                for row, own in zip(rows, of_case, strict=True):
                    assert own == pytest.approx(row.rollout_logprobs.tolist(), abs=1e-5), (size, case)


@pytest.mark.world(1)
def test_ratios_are_1_with_the_mask_but_not_without(world, checkpoints):
    """In every correction, and with the engine's log-probs as old ones."""
    rows, kept = truncated_rows(checkpoints["dense"])
    rows = [row for row in rows if row.advantage and row.loss_mask.any()]
    assert kept < 0.95
    without = [replace(row, sampling_mask=None) for row in rows]
    for settings in ({"use_tis": True}, {"icepop": (0.999, 1.001)}, {"sequence_rejection": (0.999, 1.001)}):
        metrics, off = (
            trainers.one_update(world, checkpoints["dense"], config_for(layout(), **settings), own)[2]
            for own in (rows, without)
        )
        assert metrics["importance_weight_mean"] == pytest.approx(1, abs=1e-5), settings
        assert metrics["importance_token_cut_fraction"] == 0 == metrics["importance_sequence_cut_fraction"], (
            settings
        )
        assert metrics["logprob_diff_abs_max"] < 2e-5, settings
        assert off["importance_weight_mean"] < 0.96, settings
        assert off["logprob_diff_abs_mean"] > 0.03, settings
    engine = config_for(layout(), old_logprobs="engine", loss_variant="grpo")
    metrics, off = (
        trainers.one_update(world, checkpoints["dense"], engine, own)[2] for own in (rows, without)
    )
    assert (metrics["ratio_mean"], metrics["ratio_max"]) == pytest.approx((1, 1), abs=1e-5)
    assert off["ratio_mean"] < 0.97
    assert metrics["entropy"] < off["entropy"], "of the truncated distribution"


LAYOUTS = [layout(tp=2), layout(cp=2), layout(pp=2), layout(distributed_optimizer=True)]


@pytest.mark.world
@pytest.mark.timeout(600)
def test_gradients_are_the_same_under_every_layout_and_cut(checkpoints):
    """Two mini-batches with corrections and a KL penalty whose reference is the model itself. Some ranks and
    micro-batches have no restricted row."""
    rows, _ = truncated_rows(checkpoints["dense"])
    rows[2] = replace(rows[2], sampling_mask=None)
    noise = np.random.default_rng(0)
    for row in rows:
        row.rollout_logprobs = row.rollout_logprobs + noise.normal(0, 0.2, len(row.loss_mask)).astype(
            np.float32
        )
    shared = {"num_steps_per_rollout": 2, "icepop": (0.7, 1.6), "loss_variant": "grpo"}
    cuts = {"max_tokens": 1}, {"max_tokens": 60, "log_probs_tokens": 1, "fuse_lm_head": True}
    alone = [(layout(), {**shared, **cut}) for cut in ({}, *cuts)]
    cases = {1: alone, 2: [(own, shared) for own in LAYOUTS]}
    expected = None
    for size, of_size in cases.items():
        given = [(checkpoints["dense"], *case) for case in of_size]
        (found, *_) = run_ranks(trainers.gradients, size, given, rows, timeout=300)
        for case, (moved, metrics) in zip(of_size, found, strict=True):
            expected = expected or (moved, metrics)
            assert_close(moved, expected[0], size, case)
            for name in {*COMPARED} & metrics.keys():
                assert metrics[name] == pytest.approx(expected[1][name], rel=2e-4, abs=1e-6), (case, name)
    assert 0 < expected[1]["importance_token_cut_fraction"] < 1


@pytest.mark.world(1)
def test_the_step_is_that_of_autograd_over_the_kept_ids(world, checkpoints):
    """GSPO by transformers, with logits of -inf at all ids that were cut off."""
    from transformers import AutoModelForCausalLM

    rows = [row for row in truncated_rows(checkpoints["dense"])[0] if row.advantage and row.loss_mask.any()]
    model = AutoModelForCausalLM.from_pretrained(checkpoints["dense"], dtype=torch.float32)
    loss = torch.zeros(())
    for row in rows:
        row.token_weights = None
        ids = torch.tensor([[*row.prompt_token_ids, *row.response_token_ids]])
        logits = model(ids).logits[0, len(row.prompt_token_ids) - 1 : -1] / row.temperature
        is_kept = torch.zeros(logits.shape, dtype=torch.bool)
        for place in range(len(row.loss_mask)):
            own = row.sampling_mask[place]
            is_kept[place, own if len(own) else slice(None)] = True
        logprobs = logits.masked_fill(~is_kept, -torch.inf).log_softmax(1)
        own = logprobs.gather(1, ids[0, len(row.prompt_token_ids) :, None])[:, 0][row.loss_mask]
        loss = loss - row.weight * row.advantage * (own - own.detach()).mean().exp()
    loss.backward()
    before, after, _ = trainers.one_update(world, checkpoints["dense"], config_for(layout()), rows)
    exact = {
        name: own / (1 - own.abs() / trainers.EPSILON) for name, own in trainers.moved(before, after).items()
    }
    assert_close(exact, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.slow
@pytest.mark.world(1)
def test_the_kl_penalty_compares_the_two_truncated_policies(world, checkpoints):
    rows = [row for row in truncated_rows(checkpoints["dense"])[0] if row.advantage and row.loss_mask.any()]
    gaps, logprobs = [], []
    for name in ("dense", "other"):
        trainer, _, _ = open_trainer(world, checkpoints[name], config_for(layout()))
        logprobs.append(planned.logprobs(trainer, rows))
        close_trainer()
    for row, own, ref in zip(rows, *logprobs, strict=True):
        gaps.append(np.subtract(ref, own)[row.loss_mask])
    gap = np.concatenate(gaps)
    config = config_for(layout(), kl_coef=0.5, kl_estimator="k3")
    trainer, _, _ = open_trainer(world, checkpoints["dense"], config, checkpoints["other"])
    assert planned.update(trainer, rows)["kl"] == pytest.approx((np.exp(gap) - 1 - gap).mean(), rel=1e-4)
    close_trainer()


def micro_batch(rows):
    return MicroBatch(tuple(range(len(rows))), tuple(rows))


def test_sets_lie_at_the_rows_that_predict_their_tokens():
    """Under context parallelism each rank has those of its own rows; padding has none, and neither have
    tokens that are not in the loss or sequences that were sampled from another prompt."""
    rows = with_holes(sequences(7))
    rows = [replace(row, sampling_mask=draw_mask(row.response_token_ids, VOCAB_SIZE, seed=number))
            for number, row in enumerate(rows)]  # fmt: skip
    rows[3].off_policy = True
    rows[5].sampling_mask = None
    wanted = [
        row.sampling_mask[place].tolist()
        if row.loss_mask[place] and row.sampling_mask is not None and not row.off_policy else []
        for row in rows for place in range(len(row.loss_mask))
    ]  # fmt: skip
    arrays = pack(micro_batch(rows))
    for size in (1, 2):
        found = {}
        for rank in range(size):
            context = Context(rank, size, None)
            batch = lay_out(arrays, multiple=3, device=torch.device("cpu"), context=context)
            sets, num_rows = batch.rows.sampling_sets, batch.input_ids_1N.shape[1]
            sets.check(num_rows, (0, VOCAB_SIZE))
            for row in range(num_rows):
                own = slice(sets.starts_N[row], sets.stops_N[row])
                found[rank * num_rows + row] = sets.ids_K[own].tolist()
            assert len(sets.ids_K) == (sets.stops_N - sets.starts_N).sum(), rank
        assert [found.pop(place) for place in batch.places_R.tolist()] == wanted, size
        assert not any(found.values()), size


def test_without_a_restricted_token_there_are_no_sets():
    rows = sequences(3)
    assert pack(micro_batch(rows)).sampling_mask_R is None
    assert pack(micro_batch([])).sampling_mask_R is None
    for row in rows:
        row.sampling_mask = unrestricted(len(row.loss_mask))
    assert pack(micro_batch(rows)).sampling_mask_R is None


def test_passes_that_ignore_the_mask_do_not_receive_it():
    rows = sequences(4)
    for row in rows:
        row.returns = row.values = np.zeros(len(row.loss_mask))
        row.sampling_mask = draw_mask(row.response_token_ids, VOCAB_SIZE)
    config = config_for(layout())

    def sent(batches):
        return {s.sampling_mask is not None for batch in batches for s in batch.sequences}

    (values,) = plan_value_update(rows, config, 1, planned.cost).shares
    assert sent(values[0].cut.micro_batches) == {False}
    (update,) = plan_update(rows, config, 1, planned.cost).shares
    assert sent(update[0].cut.micro_batches) == {True}
    assert sent(plan_forward(rows, config, 1, planned.cost).shares[0]) == {True}


def test_the_gradient_meter_measures_once_if_both_losses_share_masks():
    rows = sequences(8)
    masks = [draw_mask(row.response_token_ids, VOCAB_SIZE) for row in rows]
    masked = [replace(row, sampling_mask=mask) for row, mask in zip(rows, masks, strict=True)]
    for plain, is_same in (([replace(row) for row in masked], True), (rows, False)):
        (share,) = plan_measure(masked, plain, config_for(layout()), 1, planned.cost).shares
        assert (share.plain is None) == is_same


@pytest.mark.parametrize(("sets", "says"), [
    ([[3], [4]], "sequence 0: sampling_mask has 2 sets for 3 response tokens"),
    ([[3], [4, 6], [6, 9]], r"response token 2 has the id 5, which is not in its sampling set \(6, 9\)"),
    ([[], [7], [5]], r"token 1 has the id 4, which is not in its sampling set \(7\)"),
    ([[3], [1, 2, 3, 6, 7, 8, 9], []], r"token 1 has the id 4, .* \(1, 2, 3, 6, 7, 8, … 7 in all\)"),
])  # fmt: skip
def test_masks_of_another_response_are_refused_before_any_pass(sets, says):
    row = replace(
        sequence([1], [3, 4, 5], advantage=1.0, weight=1.0, group=0), sampling_mask=sampling_mask(sets)
    )
    for plan in (plan_update, plan_forward):
        with pytest.raises(ValueError, match=says):
            plan([row], config_for(layout()), 1, planned.cost)


def test_ids_that_do_not_rise_are_refused():
    row = sequence([1], [3, 4], advantage=1.0, weight=1.0, group=0)
    mask = sampling_mask([[2, 3], [4, 7]])
    row.sampling_mask = replace(mask, token_ids=np.array([2, 3, 4, 4], np.int32))
    with pytest.raises(ValueError, match="the sampling set of response token 1 does not name each id once"):
        plan_update([row], config_for(layout()), 1, planned.cost)


@pytest.mark.world(1)
def test_ids_beyond_the_vocabulary_are_refused_before_the_pass(world, checkpoints):
    row = sequence([1], [3], advantage=1.0, weight=1.0, group=0)
    row.sampling_mask = sampling_mask([[3, VOCAB_SIZE]])
    trainer, _, _ = open_trainer(world, checkpoints["dense"], config_for(layout()))
    for door in (planned.update, planned.logprobs):
        with pytest.raises(ValueError, match=f"id {VOCAB_SIZE}, which is outside the model's vocabulary of"):
            door(trainer, [row])
    close_trainer()
