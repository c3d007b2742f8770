"""Routers choose again what was chosen before: the same experts, with the trainer's own weights for them, in
every pass, layout and recomputation.

Gradients are read off the weights, as in `test_trainer`.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ibpo.basics.records import expert_ids, no_expert
from megatron_ibpo.config import ConfigError, check_config
from megatron_ibpo.engines.vllm.routing_record import RoutingRecord
from megatron_ibpo.policy.overrides import check_overrides
from megatron_ibpo.policy.planning import plan_forward, plan_update
from support import planned
from support.layouts import layout
from support.ranks import run_ranks
from support.replayed_routing import all_updated, replaying, updated
from support.tiny_models import make_glm4_moe, make_gpt_oss, make_qwen3_next
from support.train_sequences import sequences
from support.trainers import close_trainer, open_trainer, weights_of

LAYERS, EXPERTS, K = 4, 4, 2
"""Of the tiny Qwen3-Next."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_qwen3_next(tmp_path_factory.mktemp("models"), 4, std=0.1)


def with_strange_choices(rows, seed=0, layers=LAYERS):
    """Give the rows choices that no router would make: two different experts at random, for each token and
    layer."""
    rng = np.random.default_rng(seed)
    return [
        replace(
            row,
            routed_experts=expert_ids(
                rng.random((row.num_tokens - 1, layers, EXPERTS)).argsort(-1)[..., :K], EXPERTS
            ),
        )
        for row in rows
    ]


def own_choices(trainer, rows):
    """Return what the trainer's routers choose by themselves, of each row, in the order of the rows."""
    from megatron_ibpo.policy.forward_backward import infer
    from megatron_ibpo.policy.packing import packed

    found = []
    share = planned.own_share(plan_forward, rows, trainer.config)
    infer(
        trainer.chunks, packed(share), trainer._logprob_output, trainer.world.device, routing=trainer.routing,
        records=found,
    )  # fmt: skip
    return [ids for _, ids in sorted(found, key=lambda pair: pair[0])]


def on_one_rank(world, hf_dir, rows):
    """Return by name what `updated` gives with and without the choices that the routers would make anyway,
    with these in other slots, and with one expert exchanged."""
    trainer, _, _ = open_trainer(world, hf_dir, replaying())
    recorded = own_choices(trainer, rows)
    close_trainer()
    told = [replace(row, routed_experts=ids) for row, ids in zip(rows, recorded, strict=True)]
    turned = [replace(row, routed_experts=row.routed_experts[..., ::-1].copy()) for row in told]
    other = told[0].routed_experts.copy()
    # the last token that is read, in the last layer: an expert that was not chosen in the place of the second
    other[-1, -1, 1] = next(e for e in range(EXPERTS) if e not in other[-1, -1])
    unlike = [replace(told[0], routed_experts=other), *told[1:]]
    cases = {"alone": (rows, False), "told": (told, True), "turned": (turned, True), "unlike": (unlike, True)}
    return {
        name: updated(world, hf_dir, replaying(rollout=replays, max_tokens=60), own)
        for name, (own, replays) in cases.items()
    }


def largest(gradients):
    return max(g.abs().max().item() for g in gradients.values())


def gap(found, expected):
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


@pytest.mark.world
def test_replaying_a_routers_own_choices_changes_no_bit_and_other_experts_do(model):
    rows = [row for row in sequences() if row.advantage]
    found = run_ranks(on_one_rank, 1, model, rows)[0]
    metrics, gradients, logprobs = found["alone"]
    told_metrics, told_gradients, told_logprobs = found["told"]
    assert gap(told_gradients, gradients) == 0
    assert told_logprobs == logprobs
    for name in ("loss", "grad_norm", "logprob_diff_abs_mean"):
        assert told_metrics[name] == metrics[name]
    assert told_metrics["routing_changed"] == told_metrics["routing_live"] == 0
    assert "routing_changed" not in metrics
    # an id takes its weight along into another slot
    assert gap(found["turned"][1], gradients) <= 1e-6 * largest(gradients)
    assert found["turned"][0]["routing_changed"] == 0
    # one choice of all tokens and layers
    reads = sum(row.num_tokens - 1 for row in rows)
    assert gap(found["unlike"][1], gradients) > 1e-3 * largest(gradients)
    assert found["unlike"][0]["routing_changed"] == pytest.approx(1 / (reads * LAYERS))


def routed(world, hf_dir, rows):
    """Return, for one micro-batch of an update, by layer the router's logits, weights and choices; and the
    metrics."""
    trainer, _, _ = open_trainer(world, hf_dir, replaying(max_tokens=10_000))
    from megatron.core.transformer.moe.router import TopKRouter

    seen = []
    for module in trainer.chunks[0].modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(
                lambda router, args, out: seen.append(
                    (router.gating(args[0]).detach().flatten(0, 1), *(part.detach() for part in out))
                )
            )
    metrics = planned.update(trainer, rows)
    ((pack,),) = [part.cut.micro_batches for part in planned.own_share(plan_update, rows, trainer.config)]
    close_trainer()
    return seen, pack.members, metrics


@pytest.mark.world
def test_experts_are_those_that_are_given_and_weights_the_trainers_own(model):
    """Tokens without a record are routed by the trainer, and counted."""
    rows = with_strange_choices([row for row in sequences() if row.advantage])
    rows[1] = replace(rows[1], routed_experts=None)
    part = rows[2].routed_experts.copy()
    part[:3] = 255  # three tokens that the engine took from its cache
    rows[2] = replace(rows[2], routed_experts=part)
    seen, members, metrics = run_ranks(routed, 1, model, rows)[0]
    absent = np.full((rows[1].num_tokens - 1, LAYERS, K), 255)
    given = np.concatenate([absent if m == 1 else rows[m].routed_experts for m in members]).astype(np.int64)
    assert len(seen) == LAYERS
    changed = 0
    for layer, (logits, probabilities, chosen) in enumerate(seen):
        live = logits.topk(K).indices.numpy()
        recorded = given[:, layer, 0] != 255
        expected = np.where(recorded[:, None], given[:, layer], live[: len(given)])
        ids = torch.from_numpy(expected)
        wanted = torch.zeros(len(ids), EXPERTS).scatter(1, ids, logits[: len(ids)].gather(1, ids).softmax(-1))
        torch.testing.assert_close(probabilities[: len(ids)], wanted, atol=1e-7, rtol=0)
        assert chosen[: len(ids)].equal(wanted > 0)
        changed += (np.sort(live[: len(given)]) != np.sort(expected)).any(1).sum()
    without = rows[1].num_tokens - 1 + 3
    assert metrics["routing_live"] == pytest.approx(without / len(given))
    assert metrics["routing_changed"] == pytest.approx(changed / ((len(given) - without) * LAYERS))
    assert metrics["routing_changed"] > 0.3


def agree(found, expected):
    metrics, gradients, _ = expected
    own_metrics, own_gradients, _ = found
    assert gap(own_gradients, gradients) <= 2e-4 * largest(gradients)
    for name in {*metrics} - {"seconds_old_logprobs"}:
        assert own_metrics[name] == pytest.approx(metrics[name], rel=2e-4, abs=1e-6), name


RECOMPUTED = [{"recompute": "full"}, {"recompute": "selective", "overrides": ("recompute_modules=[moe]",)}]


@pytest.mark.world
def test_recomputation_replays_the_same_choices(model):
    """Bit for bit, with several micro-batches."""
    rows = with_strange_choices(sequences(6))
    rows[0] = replace(rows[0], routed_experts=None)
    configs = [replaying(max_tokens=60, **how) for how in ({}, *RECOMPUTED)]
    expected, *found = run_ranks(all_updated, 1, model, configs, rows)[0]
    for metrics, gradients, _ in found:
        assert gap(gradients, expected[1]) == 0
        assert metrics["routing_changed"] == expected[0]["routing_changed"] > 0


VPP = "virtual_pipeline_model_parallel_size=2"
TWO = [
    replaying(layout(tp=2, ep=2), max_tokens=60),
    replaying(layout(pp=2), max_tokens=60, recompute="full", overrides=(VPP,)),
]
MORE = {
    2: [
        replaying(layout(pp=2), max_tokens=60),
        replaying(layout(pp=2), max_tokens=60, recompute="full"),
        replaying(layout(), max_tokens=60),
    ],
    4: [replaying(layout(tp=2, pp=2, ep=2), max_tokens=60, recompute="full")],
}


@pytest.mark.world
@pytest.mark.parametrize(
    "layouts", [pytest.param({2: TWO}, id="each kind"), pytest.param(MORE, id="more", marks=pytest.mark.slow)]
)
def test_choices_are_replayed_alike_under_every_layout(model, layouts):
    rows = with_strange_choices(sequences(6))
    expected = run_ranks(all_updated, 1, model, [replaying(max_tokens=60)], rows)[0][0]
    for size, configs in layouts.items():
        for found in run_ranks(all_updated, size, model, configs, rows, timeout=300)[0]:
            agree(found, expected)


@pytest.mark.world
def test_dense_layers_have_no_place_among_the_choices(tmp_path):
    """Three layers of which the first is dense; also where it is all that a pipeline stage has. An update
    that replays its own pass takes that for what it is, too."""
    glm = make_glm4_moe(tmp_path / "glm", 8, std=0.1)
    rows = with_strange_choices(sequences(6), layers=2)
    own = {"rollout": False, "own": True}
    expected = run_ranks(all_updated, 1, glm, [replaying(), replaying(**own)], rows)[0]
    apart = replace(layout(pp=2), decoder_first_pipeline_num_layers=1)
    found = run_ranks(all_updated, 2, glm, [replaying(apart), replaying(apart, **own)], rows)[0]
    assert expected[0][0]["routing_changed"] > 0.3
    for one, other in zip(found, expected, strict=True):
        agree(one, other)


@pytest.mark.world
def test_choices_of_a_router_with_biases_are_replayed(tmp_path):
    oss = make_gpt_oss(tmp_path / "oss", 9, std=0.1)
    rows = with_strange_choices(sequences(6), layers=2)
    expected = run_ranks(all_updated, 1, oss, [replaying()], rows)[0][0]
    found = run_ranks(all_updated, 2, oss, [replaying(layout(tp=2, ep=2))], rows)[0][0]
    assert expected[0]["routing_changed"] > 0.3
    agree(found, expected)


def second_step(world, hf_dir, rows, parallel, cases):
    """Metrics of updates of two mini-batches, of which the first changes the weights much."""
    found = []
    for case in cases:
        config = replaying(
            parallel, rollout=False, max_tokens=60, num_steps_per_rollout=2, lr=0.05, eps_adam=1e-8, **case
        )
        trainer, export, _ = open_trainer(world, hf_dir, config)
        metrics = planned.update(trainer, rows)
        found.append((metrics, weights_of(export)))
        close_trainer()
    return found


@pytest.mark.world
@pytest.mark.parametrize("parallel", [layout(tp=2, ep=2), pytest.param(layout(pp=2), marks=pytest.mark.slow)])
def test_an_update_replays_the_pass_for_its_old_log_probs(model, parallel):
    """Cut otherwise than the update, so that rows lie elsewhere and on other ranks."""
    rows = [row for row in sequences(10) if row.advantage]
    cases = [{"own": False}, {"own": True, "log_probs_tokens": 90}, {"own": True, "log_probs_tokens": 1}]
    alone, whole, single = run_ranks(second_step, 1, model, rows, layout(), cases)[0]
    assert alone[0]["updates_skipped"] == whole[0]["updates_skipped"] == 0
    assert whole[0]["routing_changed"] > 0, "the weights have moved"
    # the first mini-batch has no pass before it
    first = {row.group for row in rows if row.group < 2}
    reads = [(row.num_tokens - 1, row.group in first) for row in rows]
    share = sum(n for n, of_first in reads if of_first) / sum(n for n, _ in reads)
    assert whole[0]["routing_live"] == pytest.approx(share)
    assert gap(whole[1], alone[1]) > 0
    assert whole[0]["loss"] == pytest.approx(single[0]["loss"], rel=1e-4)
    for own, wanted in zip(
        run_ranks(second_step, 2, model, rows, parallel, cases[1:])[0], (whole, single), strict=True
    ):
        for name in ("routing_changed", "routing_live"):
            assert own[0][name] == pytest.approx(wanted[0][name], abs=0.01)
        assert own[0]["ratio_max"] == pytest.approx(wanted[0]["ratio_max"], rel=1e-2)


def test_a_dense_model_is_refused_by_name(shapes):
    from megatron_ibpo.run.processes import check_model_layout

    config = replaying(layout())
    with pytest.raises(ValueError, match="qwen3 is dense and routes"):
        check_model_layout(shapes["dense"], config, 1)
    check_model_layout(shapes["next"], config, 1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"own": True, "old_logprobs": "engine"}, "--old-logprobs engine does not run"),
        ({"overrides": ["moe_router_fusion=true"]}, "chooses experts itself"),
        ({"overrides": ["cuda_graph_impl=local"]}, "chooses experts itself"),
        ({"overrides": ["moe_enable_routing_replay=true"]}, "use --use-rollout-routing-replay"),
    ],
)
def test_what_it_cannot_be_had_with_is_refused(flags, says):
    with pytest.raises(ConfigError, match=says):
        check_config(replaying(**flags), [check_overrides])


def test_choices_that_do_not_fit_their_sequence_are_refused():
    rows = with_strange_choices(sequences(1))
    rows[0] = replace(rows[0], advantage=1.0, routed_experts=rows[0].routed_experts[1:])
    with pytest.raises(ValueError, match="it needs one for each but the last"):
        plan_update(rows, replaying(), 1, planned.cost)


def test_an_update_is_sent_choices_only_where_it_replays_them():
    rows = [replace(row, advantage=1.0) for row in with_strange_choices(sequences(2))]
    for replays in (False, True):
        ((part,),) = plan_update(rows, replaying(rollout=replays), 1, planned.cost).shares
        sent = [s.routed_experts is not None for batch in part.cut.micro_batches for s in batch.sequences]
        assert sent == [replays] * 2


def test_the_first_choice_of_a_position_is_kept():
    """Of four tokens the first was taken from a cache; after an update all are computed again, and one more,
    and a step that began past the end."""
    record = RoutingRecord(EXPERTS)
    first, again = (np.full((n, 2, 1), mark) for n, mark in ((3, 1), (5, 2)))
    record.add("a", 1, first)
    record.add("a", 0, again)
    record.add("a", 5, np.full((1, 2, 1), 3))
    record.add("b", 0, first)
    found = record.take("a", 5)
    assert found.dtype == np.uint8
    assert found[:, :, 0].T.tolist() == [[255, 1, 1, 1, 2]] * 2
    assert no_expert(found) == 255
    assert record.take("a", 5) is None
    record.forget("b")
    assert record.names() == []


def test_many_experts_take_two_bytes():
    assert expert_ids([[254, -1]], 255).tolist() == [[254, 255]]
    wide = expert_ids([[255, -1]], 256)
    assert (wide.dtype, wide.tolist()) == (np.uint16, [[255, 65535]])
    with pytest.raises(ValueError, match="two bytes"):
        expert_ids([[0]], 2**16)
