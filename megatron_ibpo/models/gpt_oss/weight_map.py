"""gpt-oss's tensors. Checkpoints hold the experts of a layer in four tensors: matrices are [in, out], the
transpose of Megatron's, and outputs of gate and up alternate, while Megatron has one after the other."""

from collections.abc import Callable
from functools import lru_cache

from torch import Tensor

from megatron_ibpo.models.shape import ModelShape
from megatron_ibpo.models.shared_entries import attention
from megatron_ibpo.models.weight_map import Entry, Fused, Piece

Change = Callable[[Tensor], Tensor]


def layer_entries(shape: ModelShape, layer: int) -> list[Entry]:
    hidden = shape.hidden_size
    return [
        *attention(shape),
        Entry("pre_mlp_layernorm.weight", (Piece("post_attention_layernorm.weight", (hidden,)),)),
        Entry("mlp.router.weight", (Piece("mlp.router.weight", (shape.num_experts, hidden)),)),
        Entry("mlp.router.bias", (Piece("mlp.router.bias", (shape.num_experts,)),)),
        *_experts(shape),
    ]


@lru_cache(maxsize=2)  # the same in every layer
def _experts(shape: ModelShape) -> tuple[Entry, ...]:
    hidden, size = shape.hidden_size, shape.expert_hidden_size
    both = 2 * size
    return (
        *_of_all(
            shape, "linear_fc1.weight", "gate_up_proj", (hidden, both), (both, hidden), _gate_up, _in_turn
        ),
        *_of_all(shape, "linear_fc1.bias", "gate_up_proj_bias", (both,), (both,), _apart, _together),
        *_of_all(
            shape, "linear_fc2.weight", "down_proj", (size, hidden), (hidden, size), _transposed, _transposed
        ),
        *_of_all(shape, "linear_fc2.bias", "down_proj_bias", (hidden,), (hidden,), _same, _same),
    )


def _of_all(
    shape: ModelShape,
    megatron: str,
    hf: str,
    piece: tuple[int, ...],
    parameter: tuple[int, ...],
    join: Change,
    part: Change,
) -> list[Entry]:
    """Return the entries of one parameter for every expert; its tensor in a checkpoint has `piece` of
    each."""
    return [
        Entry(
            f"mlp.experts.{megatron}{expert}",
            (
                Piece(
                    f"mlp.experts.{expert}.{hf}",
                    piece,
                    fused=Fused(f"mlp.experts.{hf}", (shape.num_experts, *piece), expert, 0, always=True),
                ),
            ),
            lambda cuts: join(cuts[0]),
            lambda shard: [part(shard)],
            by_rows=False,
            joined_shape=parameter,
            expert=expert,
            num_experts=shape.num_experts,
        )
        for expert in range(shape.num_experts)
    ]


def _apart(x: Tensor) -> Tensor:
    """Return all rows of gate, then all rows of up, from alternating rows."""
    return x.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


def _together(x: Tensor) -> Tensor:
    return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def _gate_up(x: Tensor) -> Tensor:
    return _apart(x.t())


def _in_turn(x: Tensor) -> Tensor:
    return _together(x).t()


def _transposed(x: Tensor) -> Tensor:
    return x.t()


def _same(x: Tensor) -> Tensor:
    return x
