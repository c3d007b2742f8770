"""Compare the dry run's memory of a training pass with published peaks.

    "$(bash tools/bootstrap.sh)" tools/judge_memory.py --save

The rows are those of tools/planner_evidence/ that give a peak, of models that this project knows, with layers
kept or recomputed whole. Memory that other programs use differently is counted as they use it:

- Fully sharded (FSDP2): weights in fp32 in place of the optimizer's, gradients in fp32 and Adam's moments are
  divided by the ranks that share them. Two layers' weights are there in bf16, the current one and the next,
  and one layer's gradients in bf16 and in fp32, in which they are reduced. Pipeline stages keep all their
  weights gathered between micro-batches, and their whole gradients in fp32.
- Whole logits: the head's output, its copy in fp32, log-probabilities, and a gradient in fp32. The peaks are
  of memory that torch's allocator has reserved, so that the first two count even after they are freed.

CUDA's context and communicators, which allocators do not count, are left out.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from published_runs import Row, read_evidence, shape_of

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.config import Config
from megatron_ibpo.models import ModelShape, padded_vocab_size
from megatron_ibpo.plan.memory import GIB, RankMemory, rank_memory
from megatron_ibpo.plan.parameter_count import Census, StagePart, take_census
from megatron_ibpo.policy.overrides import read_overrides

RESULTS = Path(__file__).parent / "results/judge_memory.json"
GATHERED = 2
"""Bytes of a gathered weight: bf16."""
SINGLE = 4
"""Bytes of an fp32 value."""
LOGIT = 2 + 3 * 4
"""Bytes of a logit held whole: the head's output, fp32 copy, log-probability, gradient."""


@dataclass(frozen=True)
class Peak:
    """A published peak and the dry run's count, in GiB."""

    source: str
    row: str
    published: float
    state: float
    """Counted weights, gradients and optimizer state."""
    counted: float
    fused: bool
    """True if logits are never held whole, as in this project's loss."""
    cited: str

    @property
    def error(self) -> float:
        """Relative error of the count."""
        return self.counted / self.published - 1


def peaks() -> Iterator[Peak]:
    """Yield the peaks of all comparable rows."""
    for row in read_evidence():
        facts, shape = row.facts, shape_of(row.facts["model"])
        published = row.measured.get("peak_gib")
        if published is None or shape is None or facts.get("offload_activations"):
            continue
        if facts["recompute"] != "selective":
            state, counted = counted_bytes(row, shape)
            fused = facts.get("fused_head", False)
            yield Peak(row.source, row.name, published, state / GIB, counted / GIB, fused, row.cited)


def counted_bytes(row: Row, shape: ModelShape) -> tuple[int, int]:
    """Return (weights, gradients and optimizer state; everything that a training pass takes) on the fullest
    GPU."""
    config, gpus = (
        config_of(row.facts, shape.num_layers),
        row.facts.get("training_gpus", row.facts.get("gpus")),
    )
    census = take_census(shape, config, gpus)
    tokens = row.facts.get("micro_batch_tokens") or row.facts["micro_batch"] * row.facts["sequence"]
    tokens //= config.parallel.context_parallel_size
    totals = []
    for part in census.stages:
        memory = rank_memory(shape, config, read_overrides(config), part, census, tokens)
        if memory.logits and not config.loss.fuse_lm_head:
            columns = padded_vocab_size(shape, config.parallel) // config.parallel.tensor_model_parallel_size
            memory = replace(memory, logits=LOGIT * tokens * columns)
        if row.facts.get("fsdp"):
            memory = fully_sharded(memory, config, part, census)
        totals.append((memory.training - memory.process, memory.state))
    counted, state = max(totals)
    return state, counted


def fully_sharded(memory: RankMemory, config: Config, part: StagePart, census: Census) -> RankMemory:
    """Return the memory of a rank under FSDP2."""
    shared = census.data_parallel
    shard, layer = part.parameters // shared, part.parameters // part.layers
    unsharded = 0
    if config.parallel.pipeline_model_parallel_size > 1:
        unsharded = (GATHERED + SINGLE) * part.parameters
    elif shared > 1:
        unsharded = (2 * GATHERED + GATHERED + SINGLE) * layer
    means = 0 if config.optimizer.optimizer_cpu_offload else 2 * SINGLE * shard
    return replace(memory, weights=SINGLE * shard + unsharded, gradients=SINGLE * shard, optimizer=means)


def config_of(facts: Any, layers: int) -> Config:
    """Return the configuration of a run of this project with the same layout. If stages do not divide the
    layers, the first and the last have one less, beside embeddings and head."""
    config = Config()
    config.model.bf16 = True
    config.model.recompute_granularity = facts["recompute"]
    config.loss.fuse_lm_head = facts.get("fused_head", False)
    config.optimizer.optimizer_cpu_offload = facts.get("offload_optimizer", False)
    config.optimizer.use_precision_aware_optimizer = config.optimizer.optimizer_cpu_offload
    parallel = config.parallel
    parallel.tensor_model_parallel_size = facts.get("tensor") or 1
    parallel.pipeline_model_parallel_size = facts.get("pipeline") or 1
    stages = parallel.pipeline_model_parallel_size
    if remaining_layers := layers % stages:
        least = layers // stages - (remaining_layers < stages - 2)
        parallel.decoder_first_pipeline_num_layers = parallel.decoder_last_pipeline_num_layers = least
    parallel.context_parallel_size = facts.get("context") or 1
    parallel.expert_model_parallel_size = facts.get("expert") or 1
    parallel.sequence_parallel = parallel.tensor_model_parallel_size > 1
    parallel.use_distributed_optimizer = True
    return config


def table(all_peaks: list[Peak]) -> str:
    """Return the rows as a table for display."""
    rows = [
        f"| {peak.source} | {peak.row} | {'fused' if peak.fused else 'whole'} | {peak.published:.1f} | "
        f"{peak.counted:.1f} | {peak.state:.1f} | {100 * peak.error:+.0f} % |"
        for peak in all_peaks
    ]
    head = "| source | row | logits | published, GiB | counted | of it state | error |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


@dataclass
class Arguments:
    save: bool = False
    """Save the results: tools/results/judge_memory.json."""


def main(arguments: Arguments) -> None:
    all_peaks = list(peaks())
    errors = {
        fused: [abs(peak.error) for peak in all_peaks if peak.fused == fused] for fused in (True, False)
    }
    summary = {
        "fused" if fused else "whole": {
            "rows": len(part_errors),
            "median": round(statistics.median(part_errors), 4),
            "worst": round(max(part_errors), 4),
        }
        for fused, part_errors in errors.items()
    }
    print(table(all_peaks))
    print(json.dumps(summary))
    if arguments.save:
        rows = [asdict(peak) | {"error": round(peak.error, 4)} for peak in all_peaks]
        RESULTS.write_text(json.dumps(summary | {"peaks": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
