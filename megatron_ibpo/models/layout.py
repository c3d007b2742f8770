"""Requirements of a parallel layout on a model, and the division of layers into stages."""

import math
from collections.abc import Iterator

from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.models.shape import ModelShape


def pipeline_layers(
    num_layers: int, parallel: ParallelConfig, virtual_stages: int = 1
) -> list[tuple[range, ...]]:
    """Return the layers of each pipeline stage, as one range per model chunk: consecutive layers, or with
    several virtual stages those of an interleaved pipeline, which runs through all stages once per virtual
    stage. Raises ValueError, which names the flags, if the layers cannot be divided like this."""
    stages = parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if stages == 1 and (first, last) != (None, None):
        raise ValueError("layers of the first or last pipeline stage need --pipeline-model-parallel-size > 1")
    undivided = f"--pipeline-model-parallel-size={stages} does not divide the layers ({num_layers})"
    if stages > num_layers:  # checked before building a list that may exhaust the memory
        raise ValueError(undivided)
    counts: list[int | None] = [None] * stages
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    fixed_counts = [count for count in counts if count is not None]
    num_other_stages, num_other_layers = stages - len(fixed_counts), num_layers - sum(fixed_counts)
    if num_other_layers < 0 or (
        num_other_layers % num_other_stages if num_other_stages else num_other_layers
    ):
        if not fixed_counts:
            raise ValueError(undivided)
        raise ValueError(
            f"--pipeline-model-parallel-size={stages}: {num_other_layers} of {num_layers} layers remain for "
            f"the {num_other_stages} stages besides those of --decoder-first/last-pipeline-num-layers"
        )
    sizes = [num_other_layers // num_other_stages if count is None else count for count in counts]
    for stage, size in enumerate(sizes):
        if size == 0 or size % virtual_stages:
            raise ValueError(
                f"pipeline stage {stage} would hold {size} layers, "
                f"not a positive multiple of its {virtual_stages} virtual stages"
            )
    chunks: list[list[range]] = [[] for _ in sizes]
    start = 0
    for _ in range(virtual_stages):
        for stage, size in enumerate(sizes):
            chunks[stage].append(range(start, start + size // virtual_stages))
            start += size // virtual_stages
    return [tuple(ranges) for ranges in chunks]


def padded_vocab_size(shape: ModelShape, parallel: ParallelConfig) -> int:
    """Return the rows of the embedding and of the head over all tensor-parallel ranks: the vocabulary, padded
    to a multiple of --make-vocab-size-divisible-by times TP, as in Megatron-LM."""
    multiple = parallel.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size
    return -(-shape.vocab_size // multiple) * multiple


def context_chunks(ranks: int) -> int:
    """Return the number of chunks into which context-parallel ranks cut every sequence (`packed.places`)."""
    return 2 * ranks if ranks > 1 else 1


def exchanges_heads(shape: ModelShape, parallel: ParallelConfig) -> bool:
    """Return whether delta nets exchange heads between context-parallel ranks."""
    return shape.is_recurrent and parallel.context_parallel_size > 1 and parallel.delta_net_cp == "heads"


def least_world(parallel: ParallelConfig) -> int:
    """Return the number of ranks of the smallest world with this layout; 1 if a size is 0."""
    stages = parallel.pipeline_model_parallel_size
    dense = parallel.tensor_model_parallel_size * parallel.context_parallel_size * stages
    experts = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size * stages
    return math.lcm(dense, experts) or 1


def check_layout(
    shape: ModelShape, parallel: ParallelConfig, world_size: int, virtual_stages: int = 1, mtp_layers: int = 0
) -> list[str]:
    """Return the problems of training `shape` under `parallel` on `world_size` ranks; empty if there are
    none. `mtp_layers` counts the multi-token prediction layers that are trained too."""
    sizes = {
        "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
        "--context-parallel-size": parallel.context_parallel_size,
        "--expert-model-parallel-size": parallel.expert_model_parallel_size,
        "--expert-tensor-parallel-size": parallel.expert_tensor_parallel_size,
        "--make-vocab-size-divisible-by": parallel.make_vocab_size_divisible_by,
    }
    problems = [f"{flag}={size}: must be at least 1" for flag, size in sizes.items() if size < 1]
    if mtp_layers:
        problems += _mtp_problems(shape, parallel)
    if problems:
        return problems
    of_the_model = _layout_problems(shape, parallel, virtual_stages)
    return [*of_the_model, *world_problems(shape, parallel, world_size)]


def world_problems(shape: ModelShape, parallel: ParallelConfig, world_size: int) -> list[str]:
    """Return the products of parallel sizes that do not divide the number of ranks."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp, ep, etp = (
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size,
    )
    problems = []
    if shape.is_moe and world_size % (ep * etp * pp):
        problems.append(f"EP x ETP x PP = {ep * etp * pp} does not divide the world size ({world_size})")
    if world_size % (tp * pp * cp):
        sizes = f"TP x PP = {tp * pp}" if cp == 1 else f"TP x PP x CP = {tp * pp * cp}"
        last = "" if cp == 1 else f"; --context-parallel-size is {cp}"
        problems.append(f"{sizes} does not divide the world size ({world_size}){last}")
    return problems


def _layout_problems(shape: ModelShape, parallel: ParallelConfig, virtual_stages: int) -> Iterator[str]:
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    yield from _undivided("--tensor-model-parallel-size", tp, shape.divided_by_tp())
    if shape.is_recurrent and tp > 1 and not parallel.sequence_parallel:
        # each rank's norm after a delta net has the gradient of its own heads, and Megatron adds those up
        # only under sequence parallelism
        yield "delta nets with --tensor-model-parallel-size > 1 need --sequence-parallel"
    if exchanges_heads(shape, parallel):
        counts = {name: count for name, count in shape.divided_by_tp().items() if "delta net" in name}
        yield from _undivided("--delta-net-cp heads: TP x CP", tp * cp, counts)
    heads = shape.num_key_value_heads
    if heads % tp and tp % heads:  # more ranks than heads share them, as in Megatron
        yield (
            f"--tensor-model-parallel-size={tp} is neither a divisor nor a multiple of the key/value heads "
            f"({heads})"
        )
    rows = padded_vocab_size(shape, parallel) // tp
    if idle := tp - -(-shape.vocab_size // rows):
        yield (
            f"--tensor-model-parallel-size={tp} and --make-vocab-size-divisible-by="
            f"{parallel.make_vocab_size_divisible_by} give each rank {rows} rows of the vocabulary, which "
            f"has {shape.vocab_size}: {idle} of {tp} ranks would hold nothing but padding; lower one of them"
        )
    try:
        pipeline_layers(shape.num_layers, parallel, virtual_stages)
    except ValueError as error:
        yield str(error)
    yield from _expert_problems(shape, parallel)


def _mtp_problems(shape: ModelShape, parallel: ParallelConfig) -> Iterator[str]:
    stages = parallel.pipeline_model_parallel_size
    if not shape.mtp_in_checkpoints:
        yield (
            f"--mtp-num-layers: {shape.family} has no multi-token prediction layer that can be trained; "
            "leave it at 0"
        )
    if stages > 1:
        yield (
            f"--mtp-num-layers and --pipeline-model-parallel-size={stages}: the layer needs embedding and "
            "head, which lie on different stages; use 1 stage, or leave the layer untrained"
        )
    if parallel.context_parallel_size > 1:
        yield (
            f"--mtp-num-layers and --context-parallel-size={parallel.context_parallel_size}: the token "
            "after the next may lie on another rank, which is not supported; use 1, or leave the layer "
            "untrained"
        )


def _expert_problems(shape: ModelShape, parallel: ParallelConfig) -> Iterator[str]:
    tp = parallel.tensor_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    if not shape.is_moe:
        if ep > 1 or etp > 1:
            yield (
                f"{shape.family} has no experts: --expert-model-parallel-size {ep} and "
                f"--expert-tensor-parallel-size {etp} must be 1; is this the recipe of a mixture of experts? "
                "examples/run.sh chooses a recipe by the model"
            )
        return
    yield from _undivided("--expert-model-parallel-size", ep, {"the experts": shape.num_experts})
    if shape.expert_bias and etp > 1:
        yield (
            f"--expert-tensor-parallel-size={etp}: megatron-core does not divide experts with biases, which "
            f"{shape.family} has; use 1, and --expert-model-parallel-size"
        )
    hidden = {"an expert's hidden size": shape.expert_hidden_size}
    yield from _undivided("--expert-tensor-parallel-size", etp, hidden)
    if tp > 1 and not parallel.sequence_parallel:
        yield "a mixture of experts with --tensor-model-parallel-size > 1 needs --sequence-parallel"


def _undivided(flag: str, size: int, counts: dict[str, int]) -> Iterator[str]:
    for name, count in counts.items():
        if count % size:
            yield f"{flag}={size} does not divide {name} ({count})"
