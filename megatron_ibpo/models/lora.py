"""Low-rank adapters in a model: W [out, in] computes as W + alpha/rank · B·A (Hu et al., "LoRA", 2021).

Every Hugging Face matrix has a pair A, B of its own, even if Megatron joins several, so that PEFT stores what
is trained. Only of an expert gate and up share one pair, as in transformers, which holds them as one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ibpo.config import ConfigError, ModelConfig, ParallelConfig, nearest
from megatron_ibpo.models.layout import pipeline_layers
from megatron_ibpo.models.shape import ModelShape
from megatron_ibpo.models.weight_map import COLUMNS, Cut, Entry, Piece, weight_map

ALL_TARGETS = "all"
EXPERTS = "experts"


@dataclass(frozen=True)
class Lora:
    """The adapters of a run."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names of HF modules, sorted; `experts` for the routed experts of all layers."""

    @property
    def scale(self) -> float:
        """Factor of B·A."""
        return self.alpha / self.rank


def chosen_lora(model: ModelConfig, shape: ModelShape) -> Lora | None:
    """Return the adapters that --lora-* ask for, if any. Raises ConfigError for a target that is not
    there."""
    if model.lora_rank is None:
        return None
    available = sorted({target_of(piece) for entry in weight_map(shape).values() for piece in adapted(entry)})
    if unknown := [name for name in model.lora_targets if name not in (ALL_TARGETS, *available)]:
        raise ConfigError(
            f"--lora-targets: {shape.family} has no {unknown[0]!r}{nearest(unknown[0], available)}; it has "
            f"{', '.join(available)}, and {ALL_TARGETS} means all of them"
        )
    chosen = available if ALL_TARGETS in model.lora_targets else sorted(set(model.lora_targets))
    alpha = 2.0 * model.lora_rank if model.lora_alpha is None else model.lora_alpha
    return Lora(model.lora_rank, alpha, tuple(chosen))


def check_lora(
    model: ModelConfig, shape: ModelShape, parallel: ParallelConfig, virtual_stages: int = 1
) -> list[str]:
    """Return the problems of training these adapters under a layout that holds the model."""
    try:
        lora = chosen_lora(model, shape)
    except ConfigError as error:
        return [str(error)]
    return [] if lora is None else list(_layout_problems(lora, shape, parallel, virtual_stages))


def _layout_problems(
    lora: Lora, shape: ModelShape, parallel: ParallelConfig, virtual_stages: int
) -> Iterator[str]:
    tensor = parallel.tensor_model_parallel_size
    uneven = [name for name in ("q_proj", "k_proj", "v_proj") if name in lora.targets]
    if tensor > shape.num_key_value_heads and uneven:
        yield (
            f"--lora-targets {uneven[0]}: --tensor-model-parallel-size={tensor} exceeds the "
            f"{shape.num_key_value_heads} key/value heads, so ranks would hold uneven parts; lower it, or "
            "leave q_proj, k_proj and v_proj out"
        )
    adapted_layers = {entry.layer for entry in weight_map(shape).values() if pairs(entry, lora)}
    for stage, ranges in enumerate(pipeline_layers(shape.num_layers, parallel, virtual_stages)):
        if any(adapted_layers.isdisjoint(layers) for layers in ranges):
            yield (
                f"--lora-targets {' '.join(lora.targets)}: no layer of pipeline stage {stage} has one of "
                "them, and it would have nothing to train; name more of them, or use fewer stages"
            )


def adapted(entry: Entry) -> tuple[Piece, ...]:
    """Return the HF matrices of a Megatron parameter that may have adapters: those of the layers' linear
    modules, and for an expert the tensor in which transformers holds it. Routers and gates have none."""
    if entry.layer is None or entry.cut is None or len(entry.shape) != 2:
        return ()
    if entry.expert is None:
        return entry.pieces
    fused = entry.pieces[0].fused
    assert fused is not None  # so are all experts
    return (Piece(f"{fused.name}.{entry.expert}.weight", entry.shape, entry.cut),)


def target_of(piece: Piece) -> str:
    """Return the name by which --lora-targets chooses an HF matrix."""
    parts = piece.name.split(".")
    return EXPERTS if EXPERTS in parts else parts[-2]


@dataclass(frozen=True)
class Pair:
    """The adapter's A and B of one HF matrix."""

    number: int
    """Place of the matrix among those that a Megatron parameter joins."""
    a: Entry
    b: Entry
    """Entry of B, whose rows are those of the matrix: a rank holds them section by section
    (`Cut.sections`)."""

    def sections(self) -> tuple[int, ...]:
        """Return the numbers of B's rows in the sections that ranks divide separately."""
        cut = self.b.cut
        return cut.sections if cut is not None and cut.sections else (self.b.shape[0],)


def pairs(entry: Entry, lora: Lora) -> list[Pair]:
    """Return the adapters beside a Megatron parameter. Their entries are named after it, `….lora.A0` for its
    first HF matrix, with the expert's number; their pieces after that matrix, `….lora_A.weight`."""
    adapter_pairs = []
    for number, piece in enumerate(adapted(entry)):
        if target_of(piece) not in lora.targets:
            continue
        out_features, in_features = piece.shape
        by_columns = piece.cut is not None and piece.cut.dim == COLUMNS.dim
        cut_a, cut_b = (COLUMNS, None) if by_columns else (None, piece.cut)
        a = _factor(entry, piece, f"A{number}", (lora.rank, in_features), cut_a)
        b = _factor(entry, piece, f"B{number}", (out_features, lora.rank), cut_b)
        adapter_pairs.append(Pair(number, a, b))
    return adapter_pairs


def lora_entries(shape: ModelShape, lora: Lora) -> Iterator[Entry]:
    """Yield all adapters of the model, A and B alternating, in checkpoint order."""
    for entry in weight_map(shape).values():
        for pair in pairs(entry, lora):
            yield from (pair.a, pair.b)


def is_adapter(name: str) -> bool:
    """Return whether a parameter of a Megatron model is a part of an adapter."""
    return ".lora." in name


def module_of(entry: Entry) -> str:
    """Return the name of the Megatron module that holds a parameter."""
    return entry.name.rpartition(".")[0]


def _factor(entry: Entry, matrix: Piece, name: str, shape: tuple[int, int], cut: Cut | None) -> Entry:
    number = "" if entry.expert is None else f".{entry.expert}"
    piece = Piece(f"{matrix.name.removesuffix('.weight')}.lora_{name[0]}.weight", shape, cut)
    return Entry(
        f"{module_of(entry)}.lora.{name}{number}",
        (piece,),
        layer=entry.layer,
        expert=entry.expert,
        num_experts=entry.num_experts,
    )
