"""Published peaks beside counts: what other programs hold in another way, by hand."""

import pytest
from judge_memory import config_of, counted_bytes
from published_runs import Row, shape_of

from megatron_ibpo.models import padded_vocab_size
from megatron_ibpo.plan.memory import GIB, rank_memory
from megatron_ibpo.plan.parameter_count import estimate_census

FACTS = {
    "model": "qwen3_4b", "hardware": "h100", "gpus": 8, "fsdp": True, "micro_batch": 1, "sequence": 8192,
    "recompute": "full",
}  # fmt: skip
SHAPE = shape_of("qwen3_4b")


def row(**changed):
    return Row("here", "row", "training", {**FACTS, **changed}, {}, {"peak_gib": 1.0}, "nowhere")


def test_sharded_state_is_sixteen_bytes_shared_out_and_what_is_gathered():
    state, _ = counted_bytes(row(), SHAPE)
    (part,) = estimate_census(SHAPE, config_of(FACTS, SHAPE.num_layers), 8).stages
    gathered = (2 + 2 + 2 + 4) * part.parameters / part.layers
    assert state == pytest.approx(16 * part.parameters / 8 + gathered, rel=1e-6)
    away, _ = counted_bytes(row(offload_optimizer=True), SHAPE)
    assert state - away == pytest.approx(8 * part.parameters / 8, rel=1e-6)


def test_stages_keep_their_weights_gathered_and_gradients_whole():
    state, _ = counted_bytes(row(pipeline=4), SHAPE)
    parts = estimate_census(SHAPE, config_of(row(pipeline=4).facts, SHAPE.num_layers), 8).stages
    assert max(16 * part.parameters / 2 + 6 * part.parameters for part in parts) == pytest.approx(
        state, rel=1e-6
    )


def test_whole_logits_take_fourteen_bytes_each():
    whole = counted_bytes(row(fsdp=False), SHAPE)[1]
    config = config_of(FACTS, SHAPE.num_layers)
    census = estimate_census(SHAPE, config, 8)
    own = rank_memory(SHAPE, config, census.stages[0], census, 8192)
    more = 14 * 8192 * padded_vocab_size(SHAPE, config.parallel) - own.logits
    assert whole == pytest.approx(own.training - own.process + 1.05 * more, abs=0.001 * GIB)
