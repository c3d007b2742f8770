"""Weights in MXFP4: 4-bit numbers, in groups of 32 that share a power of two ("OCP Microscaling Formats (MX)
Specification", version 1.0, 2023). gpt-oss is published with its experts in it. It is read, never written."""

from typing import Any

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors that hold one weight."""
SHARING = 32
"""Numbers that share a scale."""
SCALE_BIAS = 127
"""Bias added to stored scales."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits; the highest bit is the sign."""


def dequantised(blocks_XGB: Tensor, scales_XG: Tensor) -> Tensor:
    """Return the numbers in bfloat16, which represents all of them exactly: [..., G * 32].

    Args:
        blocks_XGB: uint8 [..., G, 16], two numbers each, the lower four bits first.
        scales_XG: uint8 [..., G].
    """
    values = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)])
    codes = torch.stack((blocks_XGB & 15, blocks_XGB >> 4), dim=-1).flatten(-2)
    powers = torch.exp2(scales_XG.float() - SCALE_BIAS)
    return (values[codes.int()] * powers.unsqueeze(-1)).flatten(-2).bfloat16()


class PackedSlice:
    """A tensor [experts, in, out] with the methods of safetensors' slices. Its two parts are stored in a file
    as [experts, out, …]."""

    def __init__(self, blocks: Any, scales: Any):
        """
        Raises:
            ValueError: these are not two such parts.
        """
        self._blocks, self._scales = blocks, scales
        sizes, shared = list(blocks.get_shape()), list(scales.get_shape())
        dtypes = {blocks.get_dtype(), scales.get_dtype()}
        if len(sizes) != 4 or sizes[-1] != SHARING // 2 or shared != sizes[:-1] or dtypes != {"U8"}:
            raise ValueError(f"blocks {sizes} and scales {shared} of {' and '.join(sorted(dtypes))}")

    def get_shape(self) -> list[int]:
        experts, rows, groups, _ = self._blocks.get_shape()
        return [experts, groups * SHARING, rows]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        experts, columns, rows = index
        weights = dequantised(self._blocks[experts, rows], self._scales[experts, rows])
        return weights.transpose(1, 2)[:, columns]
