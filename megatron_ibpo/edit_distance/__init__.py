"""Token edit distance and alignment of batches, in C++ (csrc/): exact, of any lengths, for ids of any size.

Ids are int32 or int64, of any value, in numpy arrays, CPU tensors or anything else that numpy views without a
copy; sequences of Python ints are taken too and copied. A batch is ragged, all ids one after another with
offsets as in cu_seqlens, or a list of sequences. The GIL is released during the work, results do not depend
on the number of threads, and there is nothing that a fork could break.

AVX-512, AVX2 or plain C++ is chosen when it runs; IBPO_EDIT_DISTANCE_ISA=avx512|avx2|portable forces one.
"""

from megatron_ibpo.edit_distance.alignments import Opcode, opcodes, unmodified_mask
from megatron_ibpo.edit_distance.distances import SATURATED, batch_distance, distance
from megatron_ibpo.edit_distance.inputs import read_ids
from megatron_ibpo.edit_distance.rewrites import RewriteTest, rewrite_test

__all__ = [
    "SATURATED",
    "Opcode",
    "RewriteTest",
    "batch_distance",
    "distance",
    "opcodes",
    "read_ids",
    "rewrite_test",
    "unmodified_mask",
]
