"""The gated delta net's pieces against their definitions, token by token and sequence by sequence."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.models import packed
from megatron_ibpo.models.backends import LOCAL, Backends
from megatron_ibpo.models.delta_net import layer as delta_net
from megatron_ibpo.models.delta_net.layer import causal_conv, gated_delta_rule
from support.delta_net_kernels import HostReads, kernels_stood_in, rule_token_by_token
from support.model_passes import loaded
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
def test_the_chunked_delta_rule_equals_the_rule_token_by_token(lengths, seed):
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
def test_rectangles_hold_every_token_once_and_return_it(layout, lengths):
    rectangles = layout(boundaries(lengths))
    tokens = torch.arange(sum(lengths), dtype=torch.float32).unsqueeze(1)
    placed = packed.take(tokens, rectangles)
    assert torch.equal(packed.drop(placed, rectangles), tokens)
    assert len(rectangles.places_N.unique()) == sum(lengths)
    assert layout is not packed.by_length or len(rectangles.tokens_M) <= 1.26 * sum(lengths)
    rows = [row for part in rectangles.split(rectangles.tokens_M) for row in part.tolist()]
    assert all(row == list(range(row[0], row[0] + len(row))) or max(row) == sum(lengths) - 1 for row in rows)


@pytest.mark.world(1)
def test_megatrons_delta_layer_checks_boundaries_once_per_micro_batch(world, tmp_path):
    """It computes the same as ours around the kernels, which are for GPUs and have stand-ins here."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_ibpo.policy import parallel

    hf_dir, reads = make_qwen3_next(tmp_path / "next", 0, key_heads=2, value_heads=4), HostReads()
    flash = Backends(transformer_engine=False, flash_linear_attention=True)
    hidden = torch.randn(90, 1, 96, generator=torch.Generator().manual_seed(0))

    def sequences(*lengths):
        cu_seqlens = boundaries(list(lengths))
        return PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=max(lengths))

    packs, expected = sequences(40, 1, 49), []
    with kernels_stood_in(reads), torch.no_grad():
        for libraries in (LOCAL, flash):
            (model,), _ = loaded(world, hf_dir, libraries=libraries)
            layers = [layer.self_attention for layer in model.decoder.layers[:3]]
            if libraries is LOCAL:
                expected = [layer(hidden, None, packed_seq_params=packs)[0] for layer in layers]
                parallel.destroy()
        for layer, own in zip(layers, expected, strict=True):
            with reads:
                output = layer(hidden, None, packed_seq_params=packs)[0]
            assert (output - own).abs().max() < 3e-6 * own.abs().max(), "float32 in another order"
            assert reads.count == 2, (layer, own)
        with pytest.raises(ValueError, match="does not match total_sequence_length=90"):
            layers[1](hidden, None, packed_seq_params=sequences(40, 49))
