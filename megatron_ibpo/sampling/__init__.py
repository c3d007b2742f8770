"""The stream of scored and corrected groups made from prompts; the only access to engines and verifiers."""

from megatron_ibpo.sampling.requests import scorer
from megatron_ibpo.sampling.sampler import Sampler

__all__ = ["Sampler", "scorer"]
