"""vLLM's norms on CPUs compute by its kernel what their definition says."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import rms_norm

EPSILON = 1e-6


@pytest.fixture(scope="module")
def forwards():
    """Name of a norm → (its forward by the kernel, what is added to its weight)."""
    from vllm.platforms import current_platform

    from megatron_ibpo.engines.vllm import fixes

    current_platform.import_kernels()
    return {"RMSNorm": (fixes._normalize, 0.0), "GemmaRMSNorm": (fixes._normalize_around_one, 1.0)}


@pytest.mark.engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["RMSNorm", "GemmaRMSNorm"])
@pytest.mark.parametrize("shape", [(1, 8), (5, 96), (3, 4, 32)], ids=str)
def test_norms_on_cpus_equal_their_definition_in_float64(forwards, name, dtype, shape):
    forward, shift = forwards[name]
    generator = torch.Generator().manual_seed(0)
    size = shape[-1]
    queries, x, residual = torch.randn(3, *shape[:-1], 2 * size, generator=generator).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    norm = SimpleNamespace(
        weight=weight, has_weight=True, variance_size_override=None, variance_epsilon=EPSILON
    )
    bound = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-6}

    def expected(rows):
        return rms_norm(rows.double(), (size,), weight.double() + shift, EPSILON)

    part = queries[..., :size]  # rows with a gap between them, as queries beside keys and values
    torch.testing.assert_close(forward(norm, part).double(), expected(part), **bound)
    x, residual = x[..., :size], residual[..., :size]
    normalized, total = forward(norm, x.clone(), residual.clone())  # it may write over both
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    torch.testing.assert_close(normalized.double(), expected(x.double() + residual.double()), **bound)


@pytest.mark.engine
def test_a_norm_over_part_of_a_row_is_torchs(forwards):
    norm = SimpleNamespace(has_weight=True, variance_size_override=4, forward_native=lambda x, _: x + 1)
    assert forwards["RMSNorm"][0](norm, torch.zeros(1)).item() == 1
