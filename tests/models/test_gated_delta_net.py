"""The gated delta net's pieces against their definitions, token by token and sequence by sequence."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.models import packed, read_hf_config
from megatron_ibpo.models.backends import LOCAL, Backends
from megatron_ibpo.models.delta_net import layer as delta_net
from megatron_ibpo.models.delta_net.layer import causal_conv, gated_delta_rule
from support.delta_net_kernels import HostReads, kernels_stood_in, rule_token_by_token
from support.tiny_models import make_qwen3_next

RULE: Any = gated_delta_rule  # mypy cannot count what a star unpacks
LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=5)


def boundaries(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def rule_inputs(lengths, seed, key_heads=2, value_heads=4, key_dim=5, value_dim=3):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(sum(lengths), *shape, generator=generator)

    decay = -F.softplus(2 * draw(value_heads))
    keys = draw(key_heads, key_dim), draw(key_heads, key_dim)
    return (*keys, draw(value_heads, value_dim), decay, draw(value_heads).sigmoid())


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_the_chunked_rule_over_packed_sequences_is_the_rule_token_by_token(lengths, seed):
    inputs = rule_inputs(lengths, seed)
    found = RULE(*inputs, boundaries(lengths))
    expected = rule_token_by_token(*[*(x.double() for x in inputs), boundaries(lengths)])
    assert torch.allclose(found.double(), expected, atol=1e-5)


def test_repeated_keys_do_not_blow_up():
    """Equal keys with beta 1 and no decay: powers of the chunk's matrix grow like binomials."""
    query, key, value, decay, beta = rule_inputs([64], seed=0)
    inputs = (query, key[:1].expand_as(key), value, torch.zeros_like(decay), torch.ones_like(beta))
    expected = rule_token_by_token(*[*(x.double() for x in inputs), boundaries([64])])
    assert torch.allclose(RULE(*inputs, boundaries([64])).double(), expected, atol=1e-5)


def test_the_rules_gradient_is_that_of_finite_differences():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(9, 5, *shape, generator=generator, dtype=torch.float64)

    query, key = F.normalize(draw(3), dim=-1), F.normalize(draw(3), dim=-1)
    first_states = torch.randn(4, 3, 4, generator=generator, dtype=torch.float64)
    inputs = (query, key, draw(4), -F.softplus(draw()), draw().sigmoid(), first_states)
    inputs = tuple(x.requires_grad_() for x in inputs)
    chained_rows = [4, 3, 2]  # four sequences, three of which have a second chunk, two a third

    def rule(*args):
        return delta_net._ChunkedDeltaRule.apply(*args, chained_rows)

    assert torch.autograd.gradcheck(rule, inputs, fast_mode=True)


@settings(max_examples=10, deadline=None)
@given(lengths=LENGTHS, cut=st.integers(0, 100), seed=st.integers(0, 99))
def test_a_sequence_goes_on_from_the_state_that_its_first_part_ended_with(lengths, cut, seed):
    """Cut anywhere, also before its first token and behind its last."""
    inputs = [x.double() for x in rule_inputs(lengths, seed)]
    whole = RULE(*inputs, boundaries(lengths))
    firsts = [min(cut, length) for length in lengths]
    seconds = [length - first for length, first in zip(lengths, firsts, strict=True)]
    sizes = [size for pair in zip(firsts, seconds, strict=True) for size in pair]
    states, found = torch.zeros(len(lengths), 4, 5, 3, dtype=torch.float64), []
    for place, own in ((0, firsts), (1, seconds)):
        parts = [torch.cat(x.split(sizes)[place::2]) for x in inputs]
        if not sum(own):
            found.append(parts[2])
            continue
        output, states = RULE(*parts, boundaries(own), states)
        found.append(output)
    halves = [part.split(own) for part, own in zip(found, (firsts, seconds), strict=True)]
    together = torch.cat([piece for pair in zip(*halves, strict=True) for piece in pair])
    assert (together - whole).abs().max() < 1e-12


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_the_convolution_stays_within_its_sequence(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lengths), 6, generator=generator)
    weight = torch.randn(6, 4, generator=generator)
    found = causal_conv(x, weight, packed.positions(boundaries(lengths)))
    expected = [
        F.conv1d(F.pad(part.t(), (3, 0))[None], weight[:, None], groups=6)[0].t() for part in x.split(lengths)
    ]
    assert torch.allclose(found, torch.cat(expected), atol=1e-6)


def test_the_convolutions_gradient_is_that_of_finite_differences():
    x = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    positions = packed.positions(boundaries([2, 1, 6, 2]))
    assert torch.autograd.gradcheck(lambda x, weight: causal_conv(x, weight, positions), (x, weight))


@pytest.mark.parametrize("layout", [packed.by_length, lambda cu: packed.by_chunks(cu, 8)])
@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 70), min_size=1, max_size=8).filter(sum))
def test_rectangles_hold_every_token_once_in_order_and_give_it_back(layout, lengths):
    rectangles = layout(boundaries(lengths))
    tokens = torch.arange(sum(lengths), dtype=torch.float32).unsqueeze(1)
    placed = packed.take(tokens, rectangles)
    assert torch.equal(packed.drop(placed, rectangles), tokens)
    assert len(rectangles.places_N.unique()) == sum(lengths)
    assert layout is not packed.by_length or len(rectangles.tokens_M) <= 2 * sum(lengths)
    rows = [row for part in rectangles.split(rectangles.tokens_M) for row in part.tolist()]
    assert all(row == list(range(row[0], row[0] + len(row))) or max(row) == sum(lengths) - 1 for row in rows)


@pytest.mark.world(1)
def test_megatrons_layer_asks_once_a_micro_batch_whether_the_boundaries_fit(world, tmp_path):
    """It computes the same as ours around the kernels, which are for GPUs and have stand-ins here."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.model import build_model
    from megatron_ibpo.weights.formats.load import load_hf

    hf_dir = make_qwen3_next(tmp_path / "next", 0, key_heads=2, value_heads=4)
    parallel.initialize(ParallelConfig(), world, seed=0)
    shape, reads = read_hf_config(hf_dir), HostReads()
    flash = Backends(transformer_engine=False, flash_linear_attention=True)
    hidden = torch.randn(90, 1, shape.hidden_size, generator=torch.Generator().manual_seed(0))

    def sequences(*lengths):
        cu_seqlens = boundaries(list(lengths))
        return PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=max(lengths))

    with kernels_stood_in(reads), torch.no_grad():
        built = [build_model(shape, Config(), libraries=libraries) for libraries in (LOCAL, flash)]
        for model in built:
            load_hf(model, shape, hf_dir)
        plain, fast = ([layer.self_attention for layer in model[0].decoder.layers[:3]] for model in built)
        packs = sequences(40, 1, 49)
        for ours, theirs in zip(plain, fast, strict=True):
            expected = ours(hidden, None, packed_seq_params=packs)[0]
            with reads:
                output = theirs(hidden, None, packed_seq_params=packs)[0]
            assert (output - expected).abs().max() < 3e-6 * expected.abs().max(), "float32 in another order"
            assert reads.count == 2
        with pytest.raises(ValueError, match="does not match total_sequence_length=90"):
            fast[1](hidden, None, packed_seq_params=sequences(40, 49))
