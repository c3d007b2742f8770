"""torch's flash attention over packed sequences, which only GPUs have, as a loop over sequences on the CPU:
`aten::_flash_attention_forward` and `_backward`, by what their arguments mean."""

import itertools

import torch

LIBRARY = torch.library.Library("aten", "IMPL")


def register():
    """Make the operators serve CPU tensors in this process."""
    for name, function in {
        "_flash_attention_forward": forward,
        "_flash_attention_backward": backward,
    }.items():
        LIBRARY.impl(name, function, "CPU", allow_override=True)


class Sequence:
    """The attention of one sequence's tokens to each other, all [heads, tokens, size]."""

    def __init__(self, query, key, value, span, scale, before, after):
        repeats = query.shape[1] // key.shape[1]
        self.query, *pair = (x[span].transpose(0, 1) for x in (query, key, value))
        self.key, self.value = (x.repeat_interleave(repeats, 0) for x in pair)
        self.scale = query.shape[-1] ** -0.5 if scale is None else scale
        places = torch.arange(self.query.shape[1])
        offsets = places - places[:, None]
        hidden = (offsets > after) & (after >= 0) | (offsets < -before) & (before >= 0)
        scores = self.query @ self.key.transpose(1, 2) * self.scale
        self.weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)

    def output(self):
        return self.weights @ self.value

    def gradients(self, gradient):
        wanted = gradient @ self.value.transpose(1, 2)
        scores = self.weights * (wanted - (wanted * self.weights).sum(-1, keepdim=True)) * self.scale
        return scores @ self.key, scores.transpose(1, 2) @ self.query, self.weights.transpose(1, 2) @ gradient


def sequences(query, key, value, cu_seqlens, longest, is_causal, scale, before, after):
    assert cu_seqlens.dtype == torch.int32
    assert int(cu_seqlens.diff().max()) <= longest
    assert {x.stride(-1) for x in (query, key, value)} == {1}
    assert query.shape[-1] % 8 == 0
    assert query.shape[-1] <= 256
    before, after = (-1 if size is None else size for size in (before, after))
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        span = slice(start, end)
        yield span, Sequence(query, key, value, span, scale, before, 0 if is_causal else after)


def forward(
    query, key, value, cu_seqlens, cu_seqlens_k, longest, longest_k, dropout, is_causal, debug,
    *, scale=None, window_size_left=None, window_size_right=None, **_,
):  # fmt: skip
    assert torch.equal(cu_seqlens, cu_seqlens_k)
    assert (longest, dropout, debug) == (longest_k, 0.0, False)
    window = window_size_left, window_size_right
    parts = sequences(query, key, value, cu_seqlens, longest, is_causal, scale, *window)
    output = torch.cat([part.output().transpose(0, 1) for _, part in parts])
    return output, query.new_zeros(query.shape[1], len(query)), *(query.new_zeros(0) for _ in range(3))


def backward(
    gradient, query, key, value, output, logsumexp, cu_seqlens, cu_seqlens_k, longest, longest_k, dropout,
    is_causal, state, unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    gradients = [torch.zeros_like(x) for x in (query, key, value)]
    window = window_size_left, window_size_right
    for span, part in sequences(query, key, value, cu_seqlens, longest, is_causal, scale, *window):
        for whole, own in zip(gradients, part.gradients(gradient[span].transpose(0, 1)), strict=True):
            own = own.unflatten(0, (whole.shape[1], -1)).sum(1)  # over the heads that share a key
            whole[span] = own.transpose(0, 1)
    return tuple(gradients)
