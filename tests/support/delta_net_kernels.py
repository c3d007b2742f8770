from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ibpo.models import packed
from megatron_ibpo.models.delta_net.layer import causal_conv, gated_delta_rule


def rule_token_by_token(query, key, value, decay, beta, boundaries):
    """Return the delta rule as it is defined, over packed sequences; see `gated_delta_rule`."""
    repeats = value.shape[1] // key.shape[1]
    query, key = (l2norm(x).repeat_interleave(repeats, 1) for x in (query, key))
    outputs, starts = [], set(boundaries.tolist())
    state = value.new_zeros(value.shape[1], key.shape[2], value.shape[2])
    for token, (q, k, v, g, b) in enumerate(zip(query, key, value, decay, beta, strict=True)):
        if token in starts:
            state = torch.zeros_like(state)
        state = state * g.exp()[:, None, None]
        change = b[:, None] * (v - torch.einsum("hde,hd->he", state, k))
        state = state + torch.einsum("hd,he->hde", k, change)
        outputs.append(torch.einsum("hde,hd->he", state, q) * key.shape[2] ** -0.5)
    return torch.stack(outputs)


def l2norm(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class HostReads(TorchDispatchMode):
    """Counts values that the host asks tensors for: on a GPU it waits for each."""

    def __init__(self):
        super().__init__()
        self.count, self.counts = 0, True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        # of a tensor with itself, torch knows without looking
        compares = name == "equal" and args[0].data_ptr() != args[1].data_ptr()
        self.count += self.counts and (name == "_local_scalar_dense" or compares)
        return function(*args, **(kwargs or {}))


@contextmanager
def kernels_stood_in(reads):
    """Let this project's torch functions, whose reads do not count, be flash-linear-attention's kernels."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    def conv(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens):
        assert (bias, activation, initial_state, output_final_state) == (None, "silu", None, False)
        return F.silu(causal_conv(x[0], weight, packed.positions(cu_seqlens)))[None], None

    def rule(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
        assert not use_qk_l2norm_in_kernel
        assert output_final_state == (initial_state is not None)
        inputs = q[0], k[0], v[0], g[0], beta[0], cu_seqlens
        if initial_state is None:
            return gated_delta_rule(*inputs)[None], None
        output, last = gated_delta_rule(*inputs, initial_state)
        return output[None], last

    def uncounted(kernel):
        def call(*args, **kwargs):
            reads.counts = False
            try:
                return kernel(*args, **kwargs)
            finally:
                reads.counts = True

        return call

    with (
        mock.patch.object(common, "HAVE_FLA", True),
        mock.patch.object(common, "l2norm", l2norm),
        mock.patch.object(gdn, "causal_conv1d", uncounted(conv)),
        mock.patch.object(gdn, "chunk_gated_delta_rule", uncounted(rule)),
    ):
        yield
