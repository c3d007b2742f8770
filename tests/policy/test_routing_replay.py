"""Routers choose again what was chosen before, with the trainer's own weights, in every pass and layout."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_ibpo.basics.records import expert_ids, no_expert
from megatron_ibpo.config import ConfigError, check_config
from megatron_ibpo.engines.vllm.routing_record import RoutingRecord
from megatron_ibpo.policy.forward_backward import infer
from megatron_ibpo.policy.model import whole_hidden_states
from megatron_ibpo.policy.overrides import check_overrides
from megatron_ibpo.policy.packing import packed
from megatron_ibpo.policy.planning import plan_forward, plan_update
from megatron_ibpo.run.resolve import check_model_layout
from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.tiny_models import make_glm4_moe, make_gpt_oss
from support.train_sequences import sequences
from support.trainers import all_updated, close_trainer, open_trainer, replaying, updated

LAYERS, EXPERTS, K = 4, 4, 2  # of the tiny Qwen3-Next


def with_strange_choices(rows, layers=LAYERS):
    """Choices that no router would make: two different experts at random, for each token and layer."""
    rng = np.random.default_rng(0)
    drawn = [rng.random((row.num_tokens - 1, layers, EXPERTS)).argsort(-1)[..., :K] for row in rows]
    drawn = [expert_ids(own, EXPERTS) for own in drawn]
    return [replace(row, routed_experts=own) for row, own in zip(rows, drawn, strict=True)]


def gap(found, expected):
    """The largest difference, relative to the largest number."""
    largest = max(own.abs().max().item() for own in expected.values())
    return max((found[name] - expected[name]).abs().max().item() for name in expected) / largest


@pytest.mark.world(1)
def test_replaying_own_routing_changes_no_bit_but_other_experts_do(world, checkpoints):
    rows = [row for row in sequences() if row.advantage]
    trainer, _, _ = open_trainer(world, checkpoints["next"], replaying())
    share, records = packed(planned.own_share(plan_forward, rows, trainer.config)), []
    device, output = trainer.world.device, trainer._logprob_output
    infer(
        trainer.chunks, share, output, device, whole_hidden_states, routing=trainer.routing, records=records
    )
    close_trainer()
    recorded = [ids for _, ids in sorted(records, key=lambda pair: pair[0])]
    told = [replace(row, routed_experts=ids) for row, ids in zip(rows, recorded, strict=True)]
    turned = [replace(row, routed_experts=row.routed_experts[..., ::-1].copy()) for row in told]
    other = told[0].routed_experts.copy()
    # the last token that is read, in the last layer: an expert that was not chosen in the place of the second
    other[-1, -1, 1] = next(e for e in range(EXPERTS) if e not in other[-1, -1])
    unlike = [replace(told[0], routed_experts=other), *told[1:]]
    (metrics, gradients, logprobs), told, turned, unlike = (
        updated(world, checkpoints["next"], replaying(rollout=own is not rows, max_tokens=60), own)
        for own in (rows, told, turned, unlike)
    )
    assert gap(told[1], gradients) == 0
    assert told[2] == logprobs
    for name in ("loss", "grad_norm", "logprob_diff_abs_mean"):
        assert told[0][name] == metrics[name]
    assert told[0]["routing_changed"] == told[0]["routing_live"] == 0
    assert "routing_changed" not in metrics
    # an id takes its weight along into another slot
    assert gap(turned[1], gradients) <= 1e-6
    assert turned[0]["routing_changed"] == 0
    # one choice of all tokens and layers
    reads = sum(row.num_tokens - 1 for row in rows)
    assert gap(unlike[1], gradients) > 1e-3
    assert unlike[0]["routing_changed"] == pytest.approx(1 / (reads * LAYERS))


@pytest.mark.world(1)
def test_replay_uses_the_given_experts_with_the_trainers_weights(world, checkpoints):
    """Tokens without a record are routed by the trainer, and counted."""
    rows = with_strange_choices([row for row in sequences() if row.advantage])
    rows[1] = replace(rows[1], routed_experts=None)
    rows[2].routed_experts[:3] = 255  # three tokens that the engine took from its cache
    trainer, _, _ = open_trainer(world, checkpoints["next"], replaying(max_tokens=10_000))
    seen = []

    def note(router, args, out):
        seen.append((router.gating(args[0]).detach().flatten(0, 1), *(part.detach() for part in out)))

    for module in trainer.chunks[0].modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(note)
    metrics = planned.update(trainer, rows)
    ((pack,),) = [part.cut.micro_batches for part in planned.own_share(plan_update, rows, trainer.config)]
    absent = np.full((rows[1].num_tokens - 1, LAYERS, K), 255)
    given = np.concatenate([absent if m == 1 else rows[m].routed_experts for m in pack.members]).astype(int)
    assert len(seen) == LAYERS
    changed = 0
    for layer, (logits, probabilities, chosen) in enumerate(seen):
        live = logits.topk(K).indices.numpy()[: len(given)]
        recorded = given[:, layer, 0] != 255
        expected = np.where(recorded[:, None], given[:, layer], live)
        ids = torch.from_numpy(expected)
        wanted = torch.zeros(len(ids), EXPERTS).scatter(1, ids, logits[: len(ids)].gather(1, ids).softmax(-1))
        torch.testing.assert_close(probabilities[: len(ids)], wanted, atol=1e-7, rtol=0)
        assert chosen[: len(ids)].equal(wanted > 0)
        changed += (np.sort(live) != np.sort(expected)).any(1).sum()
    without = rows[1].num_tokens - 1 + 3
    assert metrics["routing_live"] == pytest.approx(without / len(given))
    assert metrics["routing_changed"] == pytest.approx(changed / ((len(given) - without) * LAYERS))
    assert metrics["routing_changed"] > 0.3


OWN = {"rollout": False, "own": True}  # an update replays its own pass
INTERLEAVED = {"overrides": ("virtual_pipeline_model_parallel_size=2",)}
FULL = {"recompute": "full"}
SELECTIVE = {"recompute": "selective", "overrides": ("recompute_modules=[moe]",)}
MORE = {2: [(layout(pp=2), FULL), (layout(), {})], 4: [(layout(tp=2, pp=2, ep=2), FULL)]}


@pytest.mark.world
@pytest.mark.parametrize(("family", "cases"), [
    ("next", {1: [(layout(), SELECTIVE)], 2: [(layout(tp=2, ep=2), {}), (layout(pp=2), FULL | INTERLEAVED)]}),
    pytest.param("next", MORE, marks=pytest.mark.slow),
    pytest.param("glm", {2: [(layout(pp=2, first=1), {}), (layout(pp=2, first=1), OWN)]},
                 marks=pytest.mark.slow),
    pytest.param("oss", {2: [(layout(tp=2, ep=2), {})]}, marks=pytest.mark.slow),
])  # fmt: skip
def test_choices_are_replayed_alike_under_every_layout_and_recomputed(checkpoints, tmp_path, family, cases):
    """The dense first of GLM's three layers, all that a pipeline stage has, has no place among the choices.
    Routers of gpt-oss have biases."""
    make = {"glm": make_glm4_moe, "oss": make_gpt_oss}.get(family)
    hf_dir = make(tmp_path / family, 8, std=0.1) if make else checkpoints[family]
    rows = with_strange_choices(sequences(6), layers=LAYERS if family == "next" else 2)
    configs = [replaying(max_tokens=60, **how) for how in ({}, OWN)]
    plain, of_own_pass = run_ranks(all_updated, 1, hf_dir, configs, rows)[0]
    assert plain[0]["routing_changed"] > 0.3
    for size, several in cases.items():
        configs = [replaying(parallel, max_tokens=60, **how) for parallel, how in several]
        found = run_ranks(all_updated, size, hf_dir, configs, rows, timeout=300)[0]
        for (chosen, how), (own_metrics, own_gradients, _) in zip(several, found, strict=True):
            metrics, gradients, _ = of_own_pass if how == OWN else plain
            assert gap(own_gradients, gradients) <= 2e-4, (size, how)
            for name in {*metrics} - {"seconds_old_logprobs"}:
                assert own_metrics[name] == pytest.approx(metrics[name], rel=2e-4, abs=1e-6), (chosen, name)


@pytest.mark.world
def test_an_update_replays_the_pass_for_its_old_log_probs(checkpoints):
    """Cut otherwise than the update, so that rows lie elsewhere and on other ranks."""
    rows = [row for row in sequences(10) if row.advantage]
    steps = {"rollout": False, "max_tokens": 60, "num_steps_per_rollout": 2, "lr": 0.05, "eps_adam": 1e-8}
    cases = [{"own": False}, {"own": True, "log_probs_tokens": 90}, {"own": True, "log_probs_tokens": 1}]
    configs = [replaying(**steps, **case) for case in cases]
    alone, whole, single = run_ranks(all_updated, 1, checkpoints["next"], configs, rows)[0]
    assert alone[0]["updates_skipped"] == whole[0]["updates_skipped"] == 0
    assert whole[0]["routing_changed"] > 0, "the weights have moved"
    # the first mini-batch, of the groups 0 and 1, has no pass before it
    reads = [(row.num_tokens - 1, row.group < 2) for row in rows]
    share = sum(n for n, of_first in reads if of_first) / sum(n for n, _ in reads)
    assert whole[0]["routing_live"] == pytest.approx(share)
    assert gap(whole[1], alone[1]) > 0
    assert whole[0]["loss"] == pytest.approx(single[0]["loss"], rel=1e-4)
    configs = [replaying(layout(tp=2, ep=2), **steps, **case) for case in cases[1:]]
    found = run_ranks(all_updated, 2, checkpoints["next"], configs, rows)[0]
    for (own, *_), (wanted, *_) in zip(found, (whole, single), strict=True):
        for name in ("routing_changed", "routing_live"):
            assert own[name] == pytest.approx(wanted[name], abs=0.01)
        assert own["ratio_max"] == pytest.approx(wanted["ratio_max"], rel=1e-2)


def test_settings_incompatible_with_routing_replay_are_refused(shapes):
    with pytest.raises(ValueError, match="qwen3 is dense and routes"):
        check_model_layout(shapes["dense"], replaying(), 1)
    check_model_layout(shapes["next"], replaying(), 1)
    for settings, says in (
        ({"own": True, "old_logprobs": "engine"}, "--old-logprobs engine does not run"),
        ({"overrides": ["moe_router_fusion=true"]}, "chooses experts itself"),
        ({"overrides": ["moe_enable_routing_replay=true"]}, "use --use-rollout-routing-replay"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_config(replaying(**settings), [check_overrides])


def test_only_replaying_updates_receive_choices_which_must_fit():
    rows = [replace(row, advantage=1.0) for row in with_strange_choices(sequences(2))]
    for replays in (False, True):
        ((part,),) = plan_update(rows, replaying(rollout=replays), 1, planned.cost).shares
        sent = [s.routed_experts is not None for batch in part.cut.micro_batches for s in batch.sequences]
        assert sent == [replays] * 2
    rows[0] = replace(rows[0], routed_experts=rows[0].routed_experts[1:])
    with pytest.raises(ValueError, match="it needs one for each but the last"):
        plan_update(rows, replaying(), 1, planned.cost)


def test_the_first_choice_of_a_position_is_kept():
    """The first token was taken from a cache; after an update all are computed again, and one more."""
    record = RoutingRecord(EXPERTS)
    for name, start, tokens, mark in (("a", 1, 3, 1), ("a", 0, 5, 2), ("a", 5, 1, 3), ("b", 0, 3, 1)):
        record.add(name, start, np.full((tokens, 2, 1), mark))
    found = record.take("a", 5)
    assert (found.dtype, no_expert(found)) == (np.uint8, 255)
    assert found[:, :, 0].T.tolist() == [[255, 1, 1, 1, 2]] * 2
    assert record.take("a", 5) is None
    record.forget("b")
    assert record.names() == []


def test_many_experts_take_two_bytes():
    assert expert_ids([[254, -1]], 255).tolist() == [[254, 255]]
    wide = expert_ids([[255, -1]], 256)
    assert (wide.dtype, wide.tolist()) == (np.uint16, [[255, 65535]])
    with pytest.raises(ValueError, match="two bytes"):
        expert_ids([[0]], 2**16)
