"""What must hold of the loss by kernels on any `device`, as tests for two files, and under any layout."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_ibpo.basics.sampling_mask import sampling_mask
from megatron_ibpo.loss import LossRows, Variant, make_objective, packed_logprobs, resolve_variant
from megatron_ibpo.loss.packed_rows import response_positions
from megatron_ibpo.loss.segments import checked_rows, segment_loss
from support import linear_cases
from support.loss_calls import loss_of_logits
from support.sampling_set_cases import as_sets, draw_sets

LOSS_BOUND = 1e-6  # relative to the largest term in it (a log-prob for cispo and k1, about 1 for the others)
GRADIENT_BOUND = 2e-6  # of the gradient in fp32, relative, in the Euclidean norm
BF16_STEP = 2.0**-7  # GPUs round to nearest, half a step; the interpreter rounds towards zero
KINDS = ("gspo", "gspo-token", "gmpo", "cispo")  # they sum differently; test_traced_terms.py has all terms
LENGTHS = (3, 1, 5, 0, 2, 4)
ROWS = sum(LENGTHS)


def make_batch(device, *, lengths=LENGTHS, vocab=517, seed=0, shift=0.3):
    """Random rows with a mask inside; old log-probs about `shift` off; rubbish where the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    targets = torch.randint(vocab, (rows,), generator=generator)
    mask = (torch.rand(rows, generator=generator) > 0.25).float()
    logprobs = packed_logprobs(logits.double(), targets)[0]
    batch = {
        "logits_NV": logits, "targets_N": targets,
        "old_logprobs_N": logprobs.float() + shift * torch.randn(rows, generator=generator),
        "response_mask_N": mask, "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "advantages": torch.linspace(-2, 1.5, len(lengths)).roll(2),
    }  # fmt: skip
    batch["advantages"][0] = 0.0
    batch["old_logprobs_N"][mask == 0] = torch.nan
    return {name: tensor.to(device) for name, tensor in batch.items()}


def options_for(variant):
    constant = resolve_variant(variant)[0].aggregation == "constant"
    return {"variant": variant, "aggregation": 6.0 if constant else None}


def run(batch, dtype=torch.float32, scale=1.0, **options):
    """(loss, gradient of scale · loss, stats) of the logits in that dtype."""
    logits = batch["logits_NV"].to(dtype).clone().requires_grad_()
    given = logits * 1 if options.get("inplace") else logits  # a leaf may not be written over
    loss, stats = loss_of_logits(**{**batch, "logits_NV": given}, **options)
    (loss * scale).backward()
    return loss.detach().double(), logits.grad.double(), stats


def reference(batch, scale=1.0, **options):
    return run(batch, torch.float64, scale, **options, backend="torch")


def compare(batch, size=1.0, **options):
    loss, gradient, stats = run(batch, scale=3.0, backend="triton", **options)
    expected_loss, expected, expected_stats = reference(batch, 3.0, **options)
    assert (loss - expected_loss).abs() <= LOSS_BOUND * max(size, 1.0, expected_loss.abs())
    assert (gradient - expected).norm() <= GRADIENT_BOUND * expected.norm()
    for name in ("logprobs_N", "entropy_N", "mean_log_ratio_S", "kl_N"):
        found, wanted = getattr(stats, name), getattr(expected_stats, name)
        if wanted is not None:
            torch.testing.assert_close(found.double(), wanted, atol=5e-6, rtol=1e-6)
    assert torch.equal(stats.clipped, expected_stats.clipped)


def check_variant(device, variant):
    """Compare with weights, temperatures and a padded vocabulary; ratios of e² pass all bounds."""
    batch = make_batch(device)
    batch["old_logprobs_N"][4:11] -= 2.0
    generator = torch.Generator().manual_seed(1)
    batch["logits_NV"] = torch.nn.functional.pad(batch["logits_NV"], (0, 11), value=9.0)
    batch["token_weights_N"] = torch.rand(ROWS, generator=generator).to(device)
    batch["sequence_weights_S"] = torch.rand(6, generator=generator).to(device)
    options = options_for(variant) | {"temperature": torch.linspace(0.8, 1.2, 6).to(device)}
    compare(batch, 10.0, **options, vocab_range=(0, 517))  # cispo's loss has log-probs


WHOLE, VOCAB = (8, 4, 0, 12), 133  # of one process, to whose loss that of every layout is equal


def by_place(log_ratio, advantages, lengths, positions):
    return -log_ratio.exp() * advantages * (positions + 1.0) / lengths, positions > 2


BY_PLACE = Variant(token_term=by_place)
BY_PLACE_NAME = "support.kernel_cases:BY_PLACE"


def one_loss(batch, variant, backend):
    options = {**options_for(variant), "kl": "k3", "kl_coef": 0.3, "temperature": 0.9, "backend": backend}
    loss, gradient, stats = run(batch, scale=2.0, **options)
    shown = ("logprobs_N", "entropy_N", "mean_log_ratio_S", "kl_N", "clipped")
    return {name: getattr(stats, name) for name in shown} | {"loss": loss, "gradient": gradient}


def context_rows(part, cp):
    """Rows of one context-parallel rank as Megatron deals them: chunks `part` and 2·cp-1-part of each."""
    rows = []
    for own in torch.arange(sum(WHOLE)).split(WHOLE):
        chunks = own.chunk(2 * cp) if len(own) else ()
        rows += [chunk for number, chunk in enumerate(chunks) if number in (part, 2 * cp - 1 - part)]
    return torch.cat(rows)


def check_layout(world, backend, tp, cp, variants, **more):
    """On each rank of a tp × cp layout, tensor-parallel ranks next to each other; `more` of the batch."""
    tensor_groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, tp * cp, tp)]
    context_groups = [dist.new_group(list(range(first, tp * cp, tp))) for first in range(tp)]
    part, place = divmod(world.rank, tp)
    whole, rows = make_batch("cpu", lengths=WHOLE, vocab=VOCAB) | more, context_rows(part, cp)
    generator = torch.Generator().manual_seed(5)
    whole["token_weights_N"] = torch.rand(sum(WHOLE), generator=generator)
    whole["sequence_weights_S"] = torch.rand(len(WHOLE), generator=generator)
    whole["ref_logprobs_N"] = whole["old_logprobs_N"] + 0.1
    batch = whole | {"positions_N": response_positions(whole["response_mask_N"], whole["cu_seqlens"])}
    batch |= {name: value[rows] for name, value in batch.items() if name.endswith(("_N", "_NV"))}
    width = -(-VOCAB // tp)
    first, last = place * width, min((place + 1) * width, VOCAB)
    shard = torch.full((len(rows), width), 77.0)  # padding that must not count
    shard[:, : last - first] = batch["logits_NV"][:, first:last]
    batch |= {"logits_NV": shard, "tp_group": tensor_groups[part], "vocab_range": (first, last)}
    batch["cp_group"] = context_groups[place] if cp > 1 else None
    if whole.get("sampling_sets"):
        batch["sampling_sets"] = whole["sampling_sets"].of_rows(rows)
    for variant in variants:
        found, expected = one_loss(batch, variant, backend), one_loss(whole, variant, "torch")
        assert not found["gradient"][:, last - first :].any(), variant
        found["gradient"] = found["gradient"][:, : last - first]
        expected["gradient"] = expected["gradient"][:, first:last]
        for name, value in expected.items():
            own = value[rows] if value.dim() and len(value) == sum(WHOLE) else value
            torch.testing.assert_close(found[name], own, atol=3e-6, rtol=3e-6, msg=f"{variant}: {name}")
        same: list = [None] * world.size
        dist.all_gather_object(same, [found[name].tolist() for name in ("loss", "mean_log_ratio_S")])
        assert same == [same[0]] * world.size, f"{variant}: the same bits everywhere"


def check_set_layout(world, backend, tp, cp, variants):
    """As `check_layout`, with sampling sets of random ids, and of ids that are all on the first rank."""
    targets = make_batch("cpu", lengths=WHOLE, vocab=VOCAB)["targets_N"]
    low = targets % (VOCAB // tp)
    for more in ({}, {"targets_N": low}):
        ids = {**more, "sampling_sets": draw_sets(low if more else targets, VOCAB // tp if more else VOCAB)}
        check_layout(world, backend, tp, cp, variants, **ids)


every_kind = pytest.mark.parametrize("variant", KINDS)


@every_kind
def test_every_kind_of_variant_equals_its_reference(device, variant):
    check_variant(device, variant)


@pytest.mark.parametrize(("variant", "kl"), [("gspo", "k2"), ("gmpo", "k1"), ("cispo", "k3")])
def test_the_penalty_equals_its_reference(device, variant, kl):
    batch = make_batch(device)
    ref = torch.where(batch["response_mask_N"] > 0, batch["old_logprobs_N"] - 0.2, torch.nan)
    compare(batch, 10.0, **options_for(variant), ref_logprobs_N=ref, kl=kl, kl_coef=0.5)


def test_kernel_options_equal_the_reference(device):
    batch = make_batch(device)
    for aggregation in ("token-mean", 9.0):
        compare(batch, 10.0, aggregation=aggregation)
    of_tokens = torch.linspace(-1, 1, ROWS).to(device).round(decimals=1)
    for variant in ("gspo-token", "cispo"):
        compare({**batch, "advantages": of_tokens}, 10.0, **options_for(variant))
    for variant in ("gspo-token", "gmpo"):
        compare({**batch, "old_logprobs_N": None}, 10.0, **options_for(variant))


@every_kind
def test_tokens_of_probability_0(device, variant):
    """Tokens whose log-prob, or old log-prob, is -inf under every sign of the advantage: never a NaN."""
    from megatron_ibpo.kernels.segment_loss import triton_segment_loss

    in_triton = partial(triton_segment_loss, loaded={})
    objective = make_objective(variant, aggregation=options_for(variant)["aggregation"])
    for old, advantage in product((False, True), (-1.0, 0.0, 1.0)):
        found = []
        for loss_of, dtype in ((in_triton, torch.float32), (segment_loss, torch.float64)):
            kind = {"dtype": dtype, "device": device}
            now, before = torch.linspace(-2, -1, 6, **kind), torch.linspace(-1.9, -1.2, 6, **kind)
            (before if old else now)[3] = -torch.inf
            rows = LossRows(
                targets_N=torch.zeros(6, dtype=torch.int64, device=device), old_logprobs_N=before,
                response_mask_N=torch.ones(6, device=device), token_weights_N=torch.linspace(0, 2, 6, **kind),
                cu_seqlens=torch.tensor([0, 2, 5, 6], dtype=torch.int32, device=device),
                advantages=torch.full((3,), advantage, **kind),
            )  # fmt: skip
            now.requires_grad_()
            loss, mean_log_ratio_S, clipped, _ = loss_of(now, checked_rows(rows, 6, objective), objective)
            loss.backward()
            found.append((loss.detach().double(), now.grad.double(), mean_log_ratio_S.double(), clipped))
        for of_kernel, of_reference in zip(*found, strict=True):
            assert not of_reference.isnan().any()
            torch.testing.assert_close(of_kernel, of_reference, atol=2e-6, rtol=2e-6)


def test_bf16_logits(device):
    """The loss has fp32's error, since only the logits are bf16; the gradient is rounded when written."""
    batch = make_batch(device)
    batch["logits_NV"] = batch["logits_NV"].bfloat16()
    loss, gradient, _ = run(batch, torch.bfloat16, backend="triton")
    expected_loss, expected, _ = reference(batch)
    assert (loss - expected_loss).abs() <= 10 * LOSS_BOUND
    step = BF16_STEP / 2 if device == "cuda" else BF16_STEP
    slack = GRADIENT_BOUND * expected.abs().max()
    assert ((gradient - expected).abs() <= step * expected.abs() + slack).all()


def with_peaks(device, peaks):
    """Rows of more than one block of columns and a tail, with a peak in each."""
    batch = make_batch(device, lengths=(4, 2), vocab=2 * 4096 + 37) | {"old_logprobs_N": None}
    for row, (column, height) in enumerate(peaks):
        batch["logits_NV"][row, column] = height
    batch["response_mask_N"][:] = 1
    return batch


def test_rows_of_several_blocks_and_a_tail(device):
    columns = (5, 4096 + 7, 8192 + 36, 8191, 4096, 0)
    compare(with_peaks(device, [(column, 25.0) for column in columns]), 30.0)


def test_rows_whose_peak_comes_late(device):
    """Logits so far above the first block and the target that the row is read twice."""
    batch = with_peaks(device, [(8200, 60.0), (4100, 200.0), (8228, 900.0), (5000, 1e4)])
    found, entropy = packed_logprobs(batch["logits_NV"], batch["targets_N"], backend="triton")
    exact, exact_entropy = packed_logprobs(batch["logits_NV"].double(), batch["targets_N"], backend="torch")
    largest = batch["logits_NV"].abs().amax(1).double()
    assert ((found - exact).abs() <= 2e-6 + largest * 2**-23).all()
    assert ((entropy - exact_entropy).abs() <= 5e-6 + largest * 2**-23).all()
    gradient, expected = run(batch, backend="triton")[1], reference(batch)[1]
    assert (gradient - expected).norm() <= GRADIENT_BOUND * expected.norm()


@pytest.mark.parametrize(
    "offset", [-1e4, 900.0, *(pytest.param(offset, marks=pytest.mark.slow) for offset in (-40.0, -900.0))]
)
def test_rows_of_large_logits(device, offset):
    """All logits far from 0: the error is the rounding of the logits' own size, and nothing overflows."""
    batch = make_batch(device)
    batch["logits_NV"] += offset
    loss, gradient, stats = run(batch, backend="triton")
    expected_loss, expected, expected_stats = reference(batch)
    rounding = abs(offset) * 2.0**-23
    mask = batch["response_mask_N"] > 0
    assert ((stats.logprobs_N - expected_stats.logprobs_N).abs()[mask] <= 5e-6 + rounding).all()
    assert (loss - expected_loss).abs() <= LOSS_BOUND + 4 * rounding
    assert (gradient - expected).norm() <= (GRADIENT_BOUND + 2 * rounding) * expected.norm()


def test_logits_of_minus_infinity_take_no_part(device):
    batch = make_batch(device)
    columns = torch.arange(517, device=device)
    kept = (columns % 3 != 0)[None] | (columns[None] == batch["targets_N"][:, None])
    floor = {**batch, "logits_NV": batch["logits_NV"].masked_fill(~kept, -1e6)}
    forbidden = {**batch, "logits_NV": batch["logits_NV"].masked_fill(~kept, -torch.inf)}
    expected_loss, expected, expected_stats = reference(floor)
    for backend in ("torch", "triton"):
        loss, gradient, stats = run(forbidden, backend=backend)
        assert (loss - expected_loss).abs() <= LOSS_BOUND, backend
        assert (gradient - expected).norm() <= GRADIENT_BOUND * expected.norm(), backend
        torch.testing.assert_close(stats.entropy_N, expected_stats.entropy_N.float(), atol=1e-5, rtol=1e-5)


@every_kind
def test_ratios_that_overflow_give_no_nan(device, variant):
    """Ratios of e^10000 and e^-10000, each under every sign of the advantage, and an empty sequence."""
    batch = make_batch(device, lengths=(5, 0, 5, 5, 5, 5, 5), vocab=31)
    sequence_N = torch.repeat_interleave(torch.arange(7), batch["cu_seqlens"].cpu().diff()).to(device)
    offsets_S = torch.tensor([-1e4, 0.0, 1e4, -1e4, 1e4, -1e4, 1e4], device=device)
    batch["old_logprobs_N"] -= offsets_S[sequence_N]
    batch["advantages"] = torch.tensor([-1.0, 0.0, -1.0, 0.0, 0.0, 1.0, 1.0], device=device)
    loss, gradient, _ = run(batch, backend="triton", **options_for(variant))
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[batch["advantages"][sequence_N] == 0].any()


def test_masked_rows_and_empty_sequences(device):
    """A fully masked sequence, an empty one, one of a single token; and a batch without a token."""
    batch = make_batch(device)
    batch["response_mask_N"][: LENGTHS[0]] = 0
    compare(batch)
    _, gradient, stats = run(batch, backend="triton")
    assert not gradient[batch["response_mask_N"] == 0].any()
    assert not stats.logprobs_N[batch["response_mask_N"] == 0].any()
    batch["response_mask_N"][:] = 0
    loss, gradient, _ = run(batch, backend="triton")
    assert loss == 0
    assert not gradient.any()


def test_the_gradient_is_written_over_the_logits_once(device):
    batch = make_batch(device)
    logits = batch["logits_NV"].clone().requires_grad_()
    given = logits * 1
    loss, _ = loss_of_logits(**{**batch, "logits_NV": given}, backend="triton", inplace=True)
    seen = []
    given.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    loss.backward(retain_graph=True)
    assert seen == [given.data_ptr()]
    assert torch.equal(logits.grad.double(), run(batch, backend="triton")[1])
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


def test_padded_vocabulary_takes_no_part(device):
    batch = make_batch(device)
    loss, gradient, _ = run(batch, backend="triton")
    padding = torch.full((ROWS, 67), 50.0, device=device)
    padded = {**batch, "logits_NV": torch.cat([batch["logits_NV"], padding], 1)}
    for inplace in (False, True):
        found = run(padded, backend="triton", vocab_range=(0, 517), inplace=inplace)
        assert found[0] == loss, inplace
        assert torch.equal(found[1][:, :517], gradient), inplace
        assert not found[1][:, 517:].any(), inplace


def restricted(device, **shape):
    """A batch with random sampling sets; one is longer than a block."""
    batch = make_batch(device, **shape)
    sets = draw_sets(batch["targets_N"], batch["logits_NV"].shape[1], largest=300)
    return batch | {"sampling_sets": sets}


@pytest.mark.parametrize("variant", ["gspo", "gmpo"])
def test_sampling_sets(device, variant):
    """Old log-probs near the truncated ones, so that ratios stay between the clips."""
    batch = restricted(device)
    batch["old_logprobs_N"] = packed_logprobs(
        batch["logits_NV"], batch["targets_N"], sampling_sets=batch["sampling_sets"], backend="torch"
    )[0] + 0.1 * torch.randn(ROWS, generator=torch.Generator().manual_seed(0)).to(device)
    compare(batch, 10.0, **options_for(variant), temperature=torch.linspace(0.8, 1.2, 6).to(device))


def test_sampling_sets_in_place_beside_padding(device):
    batch = restricted(device)
    _, expected, _ = run(batch, backend="triton")
    padding = torch.full((ROWS, 67), 50.0, device=device)
    padded = {**batch, "logits_NV": torch.cat([batch["logits_NV"], padding], 1)}
    _, gradient, _ = run(padded, backend="triton", vocab_range=(0, 517), inplace=True)
    assert torch.equal(gradient[:, :517], expected)
    assert not gradient[:, 517:].any()


def test_rows_without_a_set_have_the_same_bits(device):
    batch = restricted(device)
    sets = batch["sampling_sets"]
    is_whole_N = (sets.starts_N == sets.stops_N) & (batch["response_mask_N"] > 0)
    assert 0 < is_whole_N.sum() < ROWS
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for own in (sets, None):
            logits = batch["logits_NV"].to(dtype, copy=True).requires_grad_()
            logprobs, entropy = packed_logprobs(
                logits, batch["targets_N"], sampling_sets=own, backend="triton"
            )
            logprobs.sum().backward()
            found.append((logprobs[is_whole_N], entropy[is_whole_N], logits.grad[is_whole_N]))
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)


def test_set_logits_far_apart_and_of_minus_infinity(device):
    """Logits of a set that lie 1e4 apart in blocks of their own, and -inf among them."""
    logits = torch.zeros(3, 517, device=device)
    logits[0, 400], logits[1, 3], logits[2, 7] = 1e4, -1e4, -torch.inf
    mask = sampling_mask([range(517), [3], [7, 8]])
    targets = torch.tensor([400, 3, 8], device=device)
    logprobs, entropy = packed_logprobs(
        logits, targets, sampling_sets=as_sets(mask, device), backend="triton"
    )
    torch.testing.assert_close(logprobs, torch.zeros_like(logprobs))
    torch.testing.assert_close(entropy, torch.zeros_like(entropy))


def test_a_target_outside_its_set_is_named(device):
    if device == "cuda":
        pytest.skip("on GPUs the device asserts, which no test survives")
    sets = as_sets(sampling_mask([[1, 2]]))
    with pytest.raises(ValueError, match="target id 3 is outside the vocabulary of the logits, or not in"):
        packed_logprobs(torch.zeros(1, 5), torch.tensor([3]), sampling_sets=sets, backend="triton")


@pytest.mark.parametrize(("variant", "with_sets"), [
    ("dual-clip", False), ("gmpo", True), pytest.param("dual-clip", True, marks=pytest.mark.slow),
    pytest.param("gmpo", False, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_fused_head_equals_the_loss_of_the_logits(device, variant, with_sets):
    """Compare fp32 by the kernels, in chunks that cut sequences, with the loss of the logits in fp64."""
    lengths, own = (1, 5, 17, 2, 30, 3), linear_cases.options_for(variant) | {"kl_coef": 0.05}
    low, exact = (
        linear_cases.batch_of(lengths, dtype=dtype, device=device) for dtype in (torch.float32, torch.float64)
    )
    for batch in (low, exact) if with_sets else ():
        batch["sampling_sets"] = draw_sets(batch["targets_N"], linear_cases.V)
    loss, hidden, weight, _ = linear_cases.fused(low, chunk=7, backend="triton", **own)
    exact_loss, exact_hidden, exact_weight, _ = linear_cases.plain(exact, backend="torch", **own)
    assert abs(loss.double() - exact_loss) <= 2e-6 * max(1.0, abs(exact_loss))
    assert (hidden - exact_hidden).norm() <= 3e-6 * exact_hidden.norm()
    assert (weight - exact_weight).norm() <= 3e-6 * exact_weight.norm()
