"""What vLLM computes in float32 where the processor has no bfloat16 is what its own kernels compute."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.engine
BFLOAT16 = {"rtol": 2**-6, "atol": 2**-8}
LENGTHS = torch.tensor([1, 70, 2, 3, 5])
STARTS = torch.nn.functional.pad(LENGTHS.cumsum(0), (1, 0)).int()
TOKENS, SLOTS = int(LENGTHS.sum()), torch.tensor([4, 0, 7, 2, 5], dtype=torch.int32)
CONTINUED = torch.tensor([True, False, False, True, True])


@pytest.fixture(scope="module")
def fixes():
    from vllm.platforms import current_platform

    from megatron_ibpo.engines.vllm import emulated_bfloat16

    current_platform.import_kernels()
    return emulated_bfloat16


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


def test_every_prompt_is_convolved_behind_its_own_state(fixes, draw):
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    x, weight, bias, states = draw(6, TOKENS), draw(6, 4), draw(6), draw(9, 6, 3)
    results = []
    for convolve in (causal_conv1d_fn_cpu, lambda *arguments: fixes._convolve(None, *arguments)):
        kept = states.clone()
        results.append((convolve(x, weight, bias, kept, STARTS, SLOTS, CONTINUED, "silu"), kept))
    torch.testing.assert_close(*results)


def test_every_token_is_convolved_behind_its_own_state(fixes, draw):
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_update_cpu

    x, weight, bias, states = (draw(*shape).bfloat16() for shape in ((5, 64), (64, 4), (64,), (10, 3, 64)))
    for bias_or_none in (bias, None):
        results = []
        for convolve in (causal_conv1d_update_cpu, lambda **options: fixes._convolve_tokens(None, **options)):
            kept = states.clone()
            output = convolve(
                x=x, conv_state=kept.transpose(1, 2), weight=weight, bias=bias_or_none, activation="silu",
                conv_state_indices=SLOTS + 1,  # vLLM's own leaves slot 0 alone
            )  # fmt: skip
            results.append((output, kept))
        torch.testing.assert_close(*results, **BFLOAT16)
        assert torch.equal(results[0][1], results[1][1]), "states"


def prompts_read(fixes, read, tensors, pieces):
    """Return (outputs, states) of prompts that are read in pieces, as ranges of each prompt's tokens."""
    query, key, value, a, b, states = (tensor.clone() for tensor in tensors)
    gating = {"A_log": torch.linspace(-1, 1, 4), "dt_bias": torch.linspace(-1, 1, 4).bfloat16()}
    output = torch.zeros(1, TOKENS, 4, 64)
    for start, end in pieces:
        rows = [torch.arange(TOKENS)[STARTS[i] : STARTS[i + 1]][start:end] for i in range(len(LENGTHS))]
        present = [i for i, places in enumerate(rows) if len(places)]
        places, counts = torch.cat(rows), torch.tensor([len(rows[i]) for i in present])
        g, beta = read.gate(a=a[places], b=b[places], **gating)
        output[:, places] = read.read(
            query=query[:, places], key=key[:, places], value=value[:, places], g=g, beta=beta,
            initial_state=states, output_final_state=True, head_first=False, use_qk_l2norm_in_kernel=True,
            cu_seqlens=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
            initial_state_indices=SLOTS[present],
        )[0].float()  # fmt: skip
    return output, states


def test_prompts_read_token_by_token_are_those_read_by_chunks(fixes, draw):
    operators = fixes.operators
    chunks = SimpleNamespace(gate=operators.fused_gdn_gating_cpu, read=operators.chunk_gated_delta_rule_cpu)
    tokens = SimpleNamespace(
        gate=lambda **options: fixes._leave_gating(None, **options),
        read=lambda **options: fixes._read_prompts(None, **options),
    )
    tensors = [draw(1, TOKENS, 2, 64), draw(1, TOKENS, 2, 64), draw(1, TOKENS, 4, 64)]
    tensors = [tensor.bfloat16() for tensor in [*tensors, draw(TOKENS, 4), draw(TOKENS, 4)]]
    tensors += [draw(9, 4, 64, 64)]
    read = prompts_read(fixes, tokens, tensors, [(0, 70)])
    expected = prompts_read(fixes, chunks, tensors, [(0, 70)])
    torch.testing.assert_close(read[0], expected[0], rtol=2**-5, atol=2**-5)
    torch.testing.assert_close(read[1], expected[1], rtol=2**-5, atol=2**-5)
    in_parts = prompts_read(fixes, tokens, tensors, [(0, 2), (2, 64), (64, 70)])
    assert torch.equal(in_parts[0], read[0])
    assert torch.equal(in_parts[1], read[1])


@pytest.mark.parametrize("num_columns", [7, 2000], ids=["small", "large"])
def test_bfloat16_weights_multiply_with_sums_in_float32(fixes, draw, num_columns):
    x, weight, bias = (draw(*shape).bfloat16() for shape in ((5, 96), (num_columns, 96), (num_columns,)))
    assert (weight.numel() > fixes.SMALL_WEIGHT) == (num_columns == 2000)
    layer = SimpleNamespace(weight=weight)
    fixes._choose_product(None, layer, remove_weight=True)
    product = layer.cpu_linear(x, layer.weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(product.double(), expected, rtol=2**-8, atol=1e-5)
    assert product.dtype == torch.bfloat16
    assert not layer.weight.numel()


def test_other_layers_keep_the_kernels_of_vllm(fixes):
    chosen = []
    for weight in (torch.zeros(2, 1, 4, dtype=torch.bfloat16), torch.zeros(2000, 96)):
        layer = SimpleNamespace(weight=weight)
        fixes._choose_product(lambda layer, remove: chosen.append(remove), layer, remove_weight=True)
    assert chosen == [True, True]
