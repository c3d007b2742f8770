"""Plain data of the time model: lengths of responses, a trainer's layout, an engine, a step's work, and their
times; and the coefficients of the roofline, shares of a data sheet's rates that programs reach.

`tools/fit_planner.py` fits the coefficients to published runs. They are the same for every GPU, except for
one factor on products per generation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import yaml

from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.cost import seen_pairs, weight_count
from megatron_ibpo.plan.hardware import Hardware

COEFFICIENTS_FILE = Path(__file__).parent / "coefficients.yaml"


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Coefficients of the roofline. The defaults are the start of a fit; `fitted` has those for runs."""

    matmul: float = 0.6
    """Share of the peak that a trainer's matrix products reach."""
    experts: float = 0.4
    """The same for products of experts, whose tokens are unevenly distributed."""
    attention: float = 0.5
    """Share of the peak in bf16 that a trainer's attention reaches."""
    memory: float = 0.7
    """Share of the memory bandwidth that trainers and engines reach."""
    link: float = 0.6
    """Share of a link's or network's bandwidth that exchanges between GPUs reach."""
    prefill: float = 0.5
    """Share of the peak that an engine's products reach."""
    engine_layer: float = 5e-5
    """Seconds that a layer adds to a step of an engine, whatever it reads and computes."""
    engine_sequence: float = 2e-5
    """Seconds of the host per running sequence and step of an engine."""
    update: float = 0.1
    """Share of the bandwidth that a weight update reaches."""
    host: float = 0.5
    """Share of the bandwidth to main memory that state moves, and an optimizer there, reach."""
    step: float = 5.0
    """Seconds of a step outside its stages."""
    loop: float = 1.2
    """Time of a trainer or engine within a training loop, relative to a benchmark."""
    ampere: float = 1.0
    """Share of the peak that products reach on A100, relative to Hopper's share."""
    blackwell: float = 1.0
    """The same for B200 and GB200."""
    cdna: float = 1.0
    """The same for MI300X."""

    def on(self, generation: str) -> float:
        """Return the factor on products of a generation; 1 where it has none."""
        return {"ampere": self.ampere, "blackwell": self.blackwell, "cdna": self.cdna}.get(generation, 1.0)

    def within_a_loop(self) -> "Coefficients":
        """Return coefficients that make trainers and engines slower by `loop`."""
        rates = {name: getattr(self, name) / self.loop for name in _RATES}
        seconds = {name: getattr(self, name) * self.loop for name in _SECONDS}
        return replace(self, **rates, **seconds, loop=1.0)


_RATES = ("matmul", "experts", "attention", "memory", "link", "prefill", "host")
_SECONDS = ("engine_layer", "engine_sequence")
COEFFICIENT_NAMES = tuple(field.name for field in fields(Coefficients))


@dataclass(frozen=True)
class Fitted:
    """Coefficients, and the errors of their predictions."""

    coefficients: Coefficients
    error: dict[str, float]
    """Kind of prediction → 90 % error factor on held-out runs."""


@cache
def fitted() -> Fitted:
    """Return the coefficients that `tools/fit_planner.py` saved."""
    raw: dict[str, Any] = yaml.safe_load(COEFFICIENTS_FILE.read_text(encoding="utf-8"))
    return Fitted(Coefficients(**raw["coefficients"]), raw["error"])


SIGMA = 1.0
"""Assumed standard deviation of the logarithm of lengths before truncation."""
MOST_STAND_INS = 256
"""Most responses of an engine to simulate one by one."""
_NORMAL = NormalDist()
_POINTS = 512


def log_normal(mean: float, longest: float, count: int, sigma: float = SIGMA) -> np.ndarray:
    """Return `count` quantiles of lengths in order, none above `longest`, with the given mean. Raises
    ValueError if the mean is not between 1 and the longest."""
    if not 1 <= mean <= longest:
        raise ValueError(f"a mean length of {mean:g} is not between 1 and the longest, {longest:g}")
    median = median_length(mean, longest, sigma)
    return np.clip(median * np.exp(sigma * _quantiles(count)), 1, longest)


def recorded(lengths: Sequence[float] | np.ndarray, count: int) -> np.ndarray:
    """Return `count` quantiles of a run's lengths."""
    return np.quantile(np.asarray(lengths, np.float64), (np.arange(count) + 0.5) / count)


def stand_ins(lengths: Sequence[float] | np.ndarray, count: int) -> tuple[np.ndarray, float]:
    """Return the lengths of `count` responses with these quantiles, in order of arrival, and the number of
    responses that each represents."""
    num_simulated = min(count, MOST_STAND_INS)
    if num_simulated == 0:
        return np.empty(0), 1.0
    picked = recorded(lengths, num_simulated)
    picked *= np.mean(lengths) / picked.mean()
    return np.random.default_rng(0).permutation(picked), count / num_simulated


@lru_cache(maxsize=256)
def median_length(mean: float, longest: float, sigma: float = SIGMA) -> float:
    """Return the median of the distribution before truncation, by bisection: the mean grows with it."""
    low, high = 0.0, math.log(longest) + 12 * sigma
    spread = np.exp(sigma * _quantiles(_POINTS))
    for _ in range(60):
        middle = (low + high) / 2
        if np.clip(math.exp(middle) * spread, 1, longest).mean() < mean:
            low = middle
        else:
            high = middle
    return math.exp(high)


@lru_cache(maxsize=32)
def _quantiles(count: int) -> np.ndarray:
    return np.array([_NORMAL.inv_cdf((place + 0.5) / count) for place in range(count)])


@dataclass(frozen=True, kw_only=True)
class Basis:
    """A model, its GPUs, and the shares of their rates that programs reach."""

    shape: ModelShape
    hardware: Hardware
    reached: Coefficients

    def peak(self, precision: str) -> float:
        """Return the operations per second of products, before the share that is reached."""
        return self.hardware.peak(precision) * self.reached.on(self.hardware.generation)

    def between(self, gpus: int) -> float:
        """Return the bytes per second that each of neighbouring GPUs sends to the others."""
        return self.hardware.between(gpus) * self.reached.link


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a trainer over its GPUs, and the kind of its passes."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1
    """Pieces of the model on each pipeline stage."""
    precision: str = "bf16"
    """Precision of products: bf16, fp8 or mxfp8. Attention stays in bf16."""
    recompute: Literal["none", "selective", "full"] = "none"
    offload_optimizer: bool = False
    delta_net_cp: Literal["state", "heads"] = "state"
    """Delta nets on ranks that share a sequence: pass states on, or exchange heads."""
    micro_batch: int
    """Tokens of a micro-batch, over all its context-parallel ranks."""

    @property
    def data(self) -> int:
        """Number of model copies that share the batch."""
        return max(1, self.gpus // (self.tensor * self.pipeline * self.context))

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same parameters outside the experts."""
        return self.data * self.context

    @property
    def expert_copies(self) -> int:
        """Number of ranks that hold the same experts."""
        return max(1, self.gpus // (self.expert * self.pipeline))

    @property
    def passes_states(self) -> bool:
        """True if delta nets pass states between ranks that share a sequence."""
        return self.context > 1 and self.delta_net_cp == "state"

    def parameters(self, shape: ModelShape) -> tuple[float, float]:
        """Return the parameters of one GPU, (outside the experts, in the experts)."""
        count = weight_count(shape)
        dense = (count.total - count.experts) / (self.tensor * self.pipeline)
        return dense, count.experts / (self.expert * self.pipeline)

    def optimizer_parameters(self, shape: ModelShape) -> float:
        """Return the parameters whose optimizer state one GPU holds."""
        dense, experts = self.parameters(shape)
        return dense / self.copies + experts / self.expert_copies


@dataclass(frozen=True)
class Batch:
    """The sequences of a pass."""

    lengths: tuple[float, ...]
    times: float = 1.0
    """Number of sequences that each length represents."""

    @classmethod
    def of(cls, lengths: Sequence[float] | npt.NDArray[np.float64], times: float = 1.0) -> "Batch":
        """Return a batch of these lengths."""
        return cls(tuple(map(float, lengths)), times)

    @property
    def tokens(self) -> float:
        """Total tokens."""
        return self.times * sum(self.lengths)

    @property
    def sequences(self) -> float:
        """Total sequences."""
        return self.times * len(self.lengths)

    def pairs(self, window: int | None) -> float:
        """Return the number of pairs of a token and one that it attends to, itself included."""
        return self.times * _pairs(self.lengths, window)


@lru_cache(maxsize=256)
def _pairs(lengths: tuple[float, ...], window: int | None) -> float:
    return sum(seen_pairs(length, window) for length in lengths)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine: a group of GPUs that write together."""

    tensor: int = 1
    """Number of its GPUs."""
    weight_bytes: float = 2.0
    """Bytes per element of the layers' matrices; embeddings and head have two."""
    cache_bytes: float = 2.0
    """Bytes per element of keys and values."""
    memory_share: float = 0.9
    """Share of the GPUs' memory that the engine may use."""
    most_running: int = 1024
    """Largest number of sequences at once."""

    @property
    def precision(self) -> str:
        """Precision of its products."""
        return "bf16" if self.weight_bytes == 2 else "fp8"


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one step."""

    responses: Sequence[float] | np.ndarray
    """Tokens of the responses, as quantiles in any order."""
    count: int
    """Responses per step."""
    prompt: float = 0.0
    """Tokens per prompt."""
    group: int = 1
    """Responses per prompt."""
    corrections: float = 0.0
    """Corrections per response, written in a second phase, with lengths like the responses'."""
    correction_prompt: float = 0.0
    """Tokens of a correction's prompt beyond those of a response's."""
    updates: int = 1
    """Optimizer steps per epoch."""
    epochs: int = 1
    """Updates on the same sequences."""
    passes_without_gradient: float = 1.0
    """Forward passes for the log-probs of old and reference policy."""
    staleness: int = 0
    """Steps that engines may sample ahead."""

    @property
    def batch(self) -> Batch:
        """The sequences that are trained on: responses and corrections."""
        lengths = np.asarray(self.responses, np.float64)
        num_sequences = self.count * (1 + self.corrections)
        return Batch.of(lengths + self.prompt, num_sequences / len(lengths))


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Seconds of one pass over a batch, by cause. They add up to the total."""

    products: float
    attention: float
    memory: float
    """Reading and writing of activations, weights and gradients."""
    tensor: float
    expert: float
    context: float
    pipeline: float
    """Sends between stages, and the bubble."""
    data: float
    """Gradients and weights between data-parallel ranks, except where computation hides them."""
    optimizer: float

    @property
    def total(self) -> float:
        """Total seconds."""
        return sum(self.named().values())

    def named(self) -> dict[str, float]:
        """Return the seconds by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def largest(self) -> str:
        """Return the name of the largest part."""
        named = self.named()
        return max(named, key=named.__getitem__)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The time of an engine for its responses."""

    seconds: float
    prompts: float
    """Seconds in which it reads prompts."""
    tail: float
    """Seconds in which fewer than half of the possible sequences run."""
    tokens: float
    """Tokens written."""
    mean_running: float
    slots: int

    def shared(self, steps: int) -> "Sampled":
        """Return the part of this time for one of `steps` steps that share it equally."""
        parts = {name: getattr(self, name) / steps for name in ("seconds", "prompts", "tail", "tokens")}
        return replace(self, **parts)
