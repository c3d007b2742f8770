"""The loss with the LM head fused in equals that of the logits in value, statistics and both gradients."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.loss import LossRows, make_objective
from megatron_ibpo.loss.coefficients import RowCoefficients, schedule
from support.linear_cases import FUSED, H, V, batch_of, fused, options_for, plain
from support.loss_calls import loss_of_hidden, loss_of_logits
from support.ranks import run_ranks


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
@pytest.mark.parametrize("variant", FUSED)
def test_it_equals_the_loss_of_the_logits(variant, kl_coef):
    """Sequences inside a chunk, across two, and across many; all weights, temperatures and masks in play."""
    batch = batch_of((1, 5, 17, 2, 30, 3))
    options = options_for(variant) | {"kl_coef": kl_coef}
    expected = plain(batch, **options)
    for chunk in (1, 7, 1000):
        found = fused(batch, chunk=chunk, **options)
        for ours, theirs in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        for name, theirs in vars(expected[3]).items():
            torch.testing.assert_close(getattr(found[3], name), theirs)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    chunk=st.integers(1, 30),
    prompt=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_no_cut_into_chunks_changes_anything(lengths, chunk, prompt, seed):
    """Empty and fully masked sequences among them."""
    batch = batch_of(lengths, seed, prompt)
    options = {"params": {"eps_low": 0.1, "eps_high": 0.1}, "kl_coef": 0.1, "kl": "k2"}
    for ours, theirs in zip(
        fused(batch, chunk=chunk, **options)[:3], plain(batch, **options)[:3], strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_a_sequence_may_be_longer_than_what_is_scaled_at_a_time():
    batch = batch_of((9000, 5, 300), vocab=3)
    for ours, theirs in zip(fused(batch, chunk=4000)[:3], plain(batch)[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_the_gradient_is_that_of_finite_differences():
    """They are taken along random directions of both inputs; gradcheck would run backward twice."""
    batch = batch_of((3, 6, 2))
    del batch["token_weights_N"]  # they scale the gradient and not the value
    names, step = ("hidden_NH", "weight_VH"), 1e-6
    loss_of = functools.partial(loss_of_hidden, chunk=4, variant="gmpo", kl_coef=0.1)
    gradients = fused(batch, chunk=4, variant="gmpo", kl_coef=0.1)[1:3]
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        ways = [torch.randn(batch[n].shape, generator=generator, dtype=torch.float64) for n in names]
        ahead, behind = (
            loss_of(**batch | {n: batch[n] + sign * step * way for n, way in zip(names, ways, strict=True)})[
                0
            ]
            for sign in (1, -1)
        )
        slope = sum((gradient * way).sum() for gradient, way in zip(gradients, ways, strict=True))
        torch.testing.assert_close((ahead - behind) / (2 * step), slope, rtol=1e-6, atol=1e-9)


def test_the_worked_example_of_coefficients():
    """Three rows of A (advantage 2) and two of B (advantage -1), chunks of two: what each chunk may use."""
    log_ratios = torch.tensor([0.1, 0.2, 0.0, -0.1, 0.3], dtype=torch.float64)
    s_a, s_b = math.exp(0.1), math.exp(0.1)
    objective = make_objective("gspo", {"eps_low": 0.5, "eps_high": 0.5})
    rows = LossRows(
        targets_N=torch.zeros(5, dtype=torch.int64),
        response_mask_N=torch.ones(5),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        advantages=torch.tensor([2.0, -1.0], dtype=torch.float64),
        old_logprobs_N=-log_ratios,
    ).checked(5, objective)
    rows_R = torch.arange(5)
    known = RowCoefficients(rows, objective, rows_R, torch.float64)
    seen = []
    for step in schedule(rows, rows_R, known.ends, 2):
        zeros = torch.zeros(step.stop - step.start, dtype=torch.float64)
        known.see(step, zeros, zeros)
        seen.append(known.of_chunk(step))
    assert [found.final_C.tolist() for found in seen] == [
        [],
        pytest.approx([-2 * s_a / 6]),
        pytest.approx([s_b / 4]),
    ]
    assert [found.open_C.tolist() for found in seen] == [pytest.approx([1 / 6, 1 / 6]), [0.25], []]
    assert seen[0].closing is None
    assert [found.closing.item() for found in seen[1:]] == pytest.approx([-2 * s_a, s_b])
    expected = [-2 * s_a / 6] * 3 + [s_b / 4] * 2
    assert known.of_all_rows().tolist() == pytest.approx(expected)


def test_bf16_sums_its_weight_gradient_in_fp32():
    """Against fp64 the error is that of rounding logits, P and scaled rows to bf16 (2^-9 each), however many
    chunks there are."""
    batch = batch_of((40, 3, 25, 60), dtype=torch.float64)
    options = {"params": {"eps_low": 0.5, "eps_high": 0.5}}
    for name in ("hidden_NH", "weight_VH"):
        batch[name] = batch[name].bfloat16().double()
    _, hidden_exact, weight_exact, _ = plain(batch, **options)
    low = {**batch, "hidden_NH": batch["hidden_NH"].bfloat16(), "weight_VH": batch["weight_VH"].bfloat16()}
    for chunk in (2, 1000):
        _, hidden, weight, stats = fused(low, chunk=chunk, **options)
        assert stats.logprobs_N.dtype == torch.float32
        assert (hidden - hidden_exact).norm() <= 2**-7 * hidden_exact.norm()
        assert (weight - weight_exact).norm() <= 2**-7 * weight_exact.norm()


def test_a_scaled_loss_scales_both_gradients_and_backward_runs_once():
    batch = batch_of((4, 6))
    hidden, weight = (batch[name].clone().requires_grad_() for name in ("hidden_NH", "weight_VH"))
    loss, _ = loss_of_hidden(**{**batch, "hidden_NH": hidden, "weight_VH": weight}, chunk=3)
    (loss * 1024).backward(retain_graph=True)
    _, hidden_grad, weight_grad, _ = plain(batch)
    torch.testing.assert_close(hidden.grad, hidden_grad * 1024)
    torch.testing.assert_close(weight.grad, weight_grad * 1024)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


def test_no_gradient_is_computed_where_none_is_wanted():
    batch = batch_of((4, 6))
    with torch.no_grad():
        loss, _ = loss_of_hidden(**batch, chunk=3)
    torch.testing.assert_close(loss, plain(batch)[0])
    hidden = batch["hidden_NH"].clone().requires_grad_()
    frozen, _ = loss_of_hidden(**{**batch, "hidden_NH": hidden}, chunk=3)
    frozen.backward()
    torch.testing.assert_close(hidden.grad, plain(batch)[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "gspo-token"}, "cannot be fused with the LM head"),
        ({"into_main_grad": True}, "needs weight_VH.main_grad"),
        ({"chunk": 0}, "chunk is 0"),
        ({"weight_VH": torch.zeros(V, H + 1, dtype=torch.float64)}, "do not share H"),
        ({"weight_VH": torch.zeros(V, H)}, "must agree"),
        ({"targets_N": torch.zeros(3, dtype=torch.int64)}, "targets_N has shape"),
        ({"cu_seqlens": torch.tensor([0, 6, 20])}, "a sequence cannot be cut across micro-batches"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        loss_of_hidden(**{**batch_of((4, 6)), **change})


# ------------------------------------------------------------------------------ Megatron's output layer


def megatron_gradients(world, batch, options):
    """{(tied, way): what Megatron's DDP has in main_grad}, for the logits, for the fused head, and for the
    fused head that adds to main_grad itself; two backward passes each, with a scaled loss."""
    from megatron_ibpo.policy import cpu

    cpu.activate()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=1, use_cpu_initialization=True
    )
    init = {"config": config, "init_method": torch.nn.init.normal_}

    class Model(torch.nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.embedding = VocabParallelEmbedding(V, H, **init)
            self.output = ColumnParallelLinear(H, V, bias=False, skip_weight_param_allocation=tied, **init)
            self.tied = tied

        def forward(self, tokens, fused_head, into_main_grad):
            hidden = self.embedding(tokens)
            weight = self.embedding.weight if self.tied else self.output.weight
            rest = {k: v for k, v in batch.items() if k not in ("hidden_NH", "weight_VH")}
            if fused_head:
                return loss_of_hidden(
                    hidden_NH=hidden, weight_VH=weight, **rest, into_main_grad=into_main_grad, **options
                )[0]
            logits, _ = self.output(hidden, weight=weight)
            return loss_of_logits(logits_NV=logits, **rest, params=options["params"])[0]

    found = {}
    tokens = torch.arange(len(batch["targets_N"])) % V
    for tied in (False, True):
        for way in ("logits", "fused", "into_main_grad"):
            torch.manual_seed(0)
            ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
            model = DistributedDataParallel(config, ddp_config, Model(tied))
            model.zero_grad_buffer()
            for _ in range(2):
                (model(tokens, way != "logits", way == "into_main_grad") * 64).backward()
            found[tied, way] = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.world
def test_megatrons_main_grad_gets_the_same_gradient_tied_or_not():
    batch = batch_of((5, 17, 2, 30), dtype=torch.float32)
    options = {"chunk": 7, "params": {"eps_low": 0.5, "eps_high": 0.5}}
    (found,) = run_ranks(megatron_gradients, 1, batch, options)
    for (tied, _), gradients in found.items():
        assert len(gradients) == (1 if tied else 2)
        for name, expected in found[tied, "logits"].items():
            assert expected.norm() > 0
            torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-5 * expected.abs().max())


# -------------------------------------------------------------------------------------- parallel layouts


def vocab_parallel(world, batch, options):
    size = V // world.size + 1
    start, stop = world.rank * size, min((world.rank + 1) * size, V)
    shard = torch.zeros(size, H, dtype=torch.float64)  # the last rank's has padding
    shard[: stop - start] = batch["weight_VH"][start:stop]
    found = fused(
        {**batch, "weight_VH": shard},
        vocab_range=(start, stop),
        tp_group=torch.distributed.group.WORLD,
        **options,
    )
    hidden = found[1].clone()
    torch.distributed.all_reduce(hidden)
    return found[0], hidden, found[2][: stop - start]


@pytest.mark.world
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_vocabulary_shards_equal_one_process(size):
    batch, options = batch_of((5, 17, 2, 30)), {"chunk": 7, "params": {"eps_low": 0.1, "eps_high": 0.1}}
    loss, hidden, weight, _ = fused(batch, **options)
    per_rank = run_ranks(vocab_parallel, size, batch, options)
    for found in per_rank:
        torch.testing.assert_close(found[0], loss)
        torch.testing.assert_close(found[1], hidden)
    torch.testing.assert_close(torch.cat([found[2] for found in per_rank]), weight)


def context_parallel(world, cases):
    """Each rank takes an end and a middle piece of every sequence, as Megatron deals them."""
    return [one_context_parallel(world, batch, options) for batch, options in cases]


def one_context_parallel(world, batch, options):
    rows = torch.cat(dealt(batch["cu_seqlens"].tolist(), world.rank, world.size))
    names = (
        "hidden_NH",
        "targets_N",
        "response_mask_N",
        "old_logprobs_N",
        "ref_logprobs_N",
        "token_weights_N",
    )
    local = {**batch, **{name: batch[name][rows] for name in names}}
    loss, hidden, weight, stats = fused(local, cp_group=torch.distributed.group.WORLD, **options)
    torch.distributed.all_reduce(weight)
    return loss, rows, hidden, weight, stats.mean_log_ratio_S


def dealt(bounds, rank, size):
    pieces = []
    for start, stop in itertools.pairwise(bounds):
        step = (stop - start) // (2 * size)
        first, second = start + rank * step, start + (2 * size - 1 - rank) * step
        pieces += [torch.arange(first, first + step), torch.arange(second, second + step)]
    return pieces


@pytest.mark.world
def test_context_shards_equal_one_process():
    """They do so where either rank's last chunk has no row in the loss, too."""
    cases = []
    for variant, padded in [("gspo", []), ("gspo", [54, 55, 62, 63]), ("dapo", []), ("gmpo", [])]:
        batch = batch_of((6, 18, 2, 30))
        batch["response_mask_N"][padded] = 0
        cases.append((batch, options_for(variant) | {"chunk": 5, "kl_coef": 0.1}))
    for of_rank in run_ranks(context_parallel, 2, cases):
        for (batch, options), (found_loss, rows, *found) in zip(cases, of_rank, strict=True):
            loss, hidden, weight, stats = fused(batch, **options)
            torch.testing.assert_close(found_loss, loss)
            expected = hidden[rows], weight, stats.mean_log_ratio_S
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, msg=options["variant"])
