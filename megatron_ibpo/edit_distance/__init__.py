"""Token edit distance and alignment of batches, in C++ (csrc/): exact, for any lengths and ids of any size.

Ids are int32 or int64, of any value, in numpy arrays, CPU tensors or any other object that numpy can view
without a copy; sequences of Python ints work too and are copied. A batch is ragged, all ids one after another
with offsets as in cu_seqlens, or a list of sequences. The GIL is released during the work, results do not
depend on the number of threads, and forks are safe.

AVX-512, AVX2 or plain C++ is chosen at run time; IBPO_EDIT_DISTANCE_ISA=avx512|avx2|portable forces one.
"""

from megatron_ibpo.edit_distance.distances import (
    SATURATED,
    Opcode,
    batch_distance,
    distance,
    opcodes,
    unmodified_mask,
)
from megatron_ibpo.edit_distance.rewrites import RewriteTest, rewrite_test

__all__ = [
    "SATURATED",
    "Opcode",
    "RewriteTest",
    "batch_distance",
    "distance",
    "opcodes",
    "rewrite_test",
    "unmodified_mask",
]
