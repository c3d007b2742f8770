"""What must hold of the code made of loss terms on any `device`, as tests for two files."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from megatron_ibpo.kernels.term_agreement import run_source, trial_inputs
from megatron_ibpo.kernels.traced_terms import PASSED, traced_source, traced_term
from megatron_ibpo.loss.term_inputs import FURTHER_INPUTS
from support.loss_terms import EXACT, OFTEN_BY_AUTOGRAD, PARAMETERS


@triton.jit
def apply_kernel(a, b, c, others, parameters, value, slope, clipped, N, TERM: tl.constexpr):
    i = tl.arange(0, 2048)
    kept = i < N
    x, y, z = tl.load(a + i, mask=kept), tl.load(b + i, mask=kept), tl.load(c + i, mask=kept)
    found = TERM(x, y, z, others, i, kept, parameters)
    tl.store(value + i, found[0], mask=kept)
    tl.store(slope + i, found[1], mask=kept)
    tl.store(clipped + i, found[2], mask=kept)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in OFTEN_BY_AUTOGRAD else ()) for name in EXACT],
)
def test_triton_equals_the_check_of_a_term(name, device):
    """The check runs the same source in torch. NaN apart: the interpreter never drops it."""
    params = PARAMETERS.get(name, {})
    inputs = {key: values[:-3] for key, values in trial_inputs((*PASSED, *FURTHER_INPUTS), params).items()}
    given, others = [inputs[key] for key in PASSED], [inputs[key] for key in FURTHER_INPUTS]
    wanted = run_source(
        traced_source(EXACT[name], PASSED, FURTHER_INPUTS, params), given, others, [*params.values()]
    )
    value, slope = torch.empty(2, len(given[0]), device=device)
    clipped = torch.empty(len(value), dtype=torch.bool, device=device)
    function, numbers = traced_term(EXACT[name], PASSED, FURTHER_INPUTS, params), tuple(params.values())
    given, others = ([values.to(device) for values in several] for several in (given, others))
    apply_kernel[(1,)](*given, tuple(others), numbers, value, slope, clipped, len(value), TERM=function)
    value, slope, clipped = value.cpu(), slope.cpu(), clipped.cpu()
    near = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    wrong = ~value.isclose(wanted[0], **near) | ~slope.isclose(wanted[1], **near) | (clipped != wanted[2])
    # where the last bit of an exponential decides: at the bound of ppo, and in 1 - p for p near 1
    wrong &= ~inputs["log_ratio"].exp().isclose(torch.tensor(1.2)) & (inputs["logprobs"] < -1e-6)
    assert not wrong.any(), inputs["log_ratio"][wrong]
