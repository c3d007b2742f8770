"""The policy-gradient loss over packed sequences: the torch reference that defines it, behind one door."""

from megatron_ibpo.loss.logprobs import packed_logprobs
from megatron_ibpo.loss.sequence_loss import LossStats, packed_sequence_loss
from megatron_ibpo.loss.variants import VARIANTS, Variant

__all__ = ["VARIANTS", "LossStats", "Variant", "packed_logprobs", "packed_sequence_loss"]
