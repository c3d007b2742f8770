"""The stream of scored and corrected groups made from prompts; the only access to engines and verifiers."""

from megatron_ibpo.sampling.sampler import Sampler
from megatron_ibpo.sampling.scoring import scorer
from megatron_ibpo.sampling.threaded import ThreadedEngine

__all__ = [
    "Sampler",
    "ThreadedEngine",
    "scorer",
]
