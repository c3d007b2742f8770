import json
from collections import Counter
from dataclasses import replace

import pytest
from fit_planner import PAGE, RESULTS, fit, judge, known, orderings, tables
from judge_memory import config_of, counted_bytes
from predict_published import predict
from published_runs import Row, halves, read_evidence, shape_of

from megatron_ibpo.models import padded_vocab_size
from megatron_ibpo.plan.hardware import hardware_names
from megatron_ibpo.plan.machine import NAMES, Coefficients, fitted
from megatron_ibpo.plan.memory import GIB, rank_memory
from megatron_ibpo.plan.parameter_count import estimate_census

ROWS = read_evidence()
SHAPE = shape_of("qwen3_4b")
TRAINING = {
    "model": "qwen3_4b", "hardware": "h100", "gpus": 64, "precision": "bf16", "batch": 256, "micro_batch": 1,
    "sequence": 4096, "recompute": "none",
}  # fmt: skip


def test_each_row_says_where_it_was_read_what_it_leaves_open_and_belongs_to_a_half_by_its_source():
    assert len(ROWS) >= 80
    assert all(row.cited and row.measured and row.facts["hardware"] in hardware_names() for row in ROWS)
    assert not [name for name, count in Counter((row.source, row.name) for row in ROWS).items() if count > 1]
    for row in ROWS:
        for fact, (low, high) in row.left_open.items():
            value = row.facts.get(fact)
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert low <= value <= high, (row.name, fact)
    # halves hold whole sources of every kind
    of = halves(ROWS)
    kinds = {half: {row.kind for row in ROWS if of[row.source] == half} for half in ("fitted", "held out")}
    assert kinds["fitted"] == {"training", "generation", "step", "update"}
    assert kinds["held out"] >= {"training", "generation", "step"}
    # by name alone: neither what a source says nor the order in which sources are read matters
    assert halves(ROWS[::-1]) == of
    assert (of["nemo"], of["torchtitan"], of["pith_train"], of["gpu_recipes"]) == ("fitted", "held out") * 2


def test_a_checkpoint_that_is_partly_in_fp8_weighs_what_its_source_logs():
    """Llama 3.1 405B of Meta on eight H100: 126 layers of 16,384 by 53,248, of which attention and the MLPs
    of the first and the last layer stay in BF16. The log says 56.77 GiB a GPU."""
    attention, mlp, table = 2 * 16384**2 + 2 * 16384 * 1024, 3 * 16384 * 53248, 2 * 128256 * 16384
    held = 126 * attention * 2 + 124 * mlp + 2 * mlp * 2
    assert (held + 2 * table) / 8 / 1024**3 == pytest.approx(56.77, rel=2e-3)
    (share,) = {row.facts["weight_bytes"] for row in ROWS if "weight_bytes" in row.facts}
    assert share == pytest.approx(held / 126 / (attention + mlp), rel=1e-3)


def test_what_other_programs_hold_is_counted_as_by_hand():
    facts = TRAINING | {"gpus": 8, "fsdp": True, "sequence": 8192, "recompute": "full"}

    def counted(**changed):
        row = Row("here", "row", "training", facts | changed, {}, {"peak_gib": 1.0}, "nowhere")
        return counted_bytes(row, SHAPE)

    def census_of(**changed):
        return estimate_census(SHAPE, config_of(facts | changed, SHAPE.num_layers), 8)

    # sharded state is 16 bytes shared out, and what is gathered
    (part,) = census_of().stages
    gathered = (2 + 2 + 2 + 4) * part.parameters / part.layers
    state, _ = counted()
    assert state == pytest.approx(16 * part.parameters / 8 + gathered, rel=1e-6)
    away, _ = counted(offload_optimizer=True)
    assert state - away == pytest.approx(8 * part.parameters / 8, rel=1e-6)
    # stages keep their weights gathered and gradients whole
    largest = max(part.parameters for part in census_of(pipeline=4).stages)
    assert counted(pipeline=4)[0] == pytest.approx(16 * largest / 2 + 6 * largest, rel=1e-6)
    # whole logits take 14 bytes each
    config = config_of(facts, SHAPE.num_layers)
    own = rank_memory(SHAPE, config, part, census_of(), 8192)
    more = 14 * 8192 * padded_vocab_size(SHAPE, config.parallel) - own.logits
    whole = own.training - own.process + 1.05 * more
    assert counted(fsdp=False)[1] == pytest.approx(whole, abs=0.001 * GIB)


@pytest.mark.slow  # a tool for maintainers
def test_the_fit_finds_the_coefficients_that_rows_were_made_with():
    chosen = [one for one in known(ROWS) if one.source in ("nemo", "gpustack", "verl")][::3]
    rows = [replace(one, left_open={}) for one in chosen]
    true = replace(Coefficients(), matmul=0.8, prefill=0.4, memory=0.6)
    made = [replace(one, measured=predict(one.facts, one.kind, one.times, true)) for one in rows]
    found, intervals = fit(made, Coefficients())
    for name in ("matmul", "prefill", "memory"):
        low, high = intervals[name]
        assert low < getattr(true, name) < high
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.05)
    errors = [abs(judged.error) for judged in judge(made, found, {one.source: "fitted" for one in made})]
    assert max(errors) < 0.05


def test_layouts_are_ordered_by_speed_within_what_is_otherwise_alike():
    rows = [
        Row("here", str(n), "training", TRAINING | {"tensor": n}, {}, {"tokens_per_gpu_second": speed}, "")
        for n, speed in ((1, 3.0), (2, 1.0), (4, 2.0))
    ]
    (found,) = orderings(judge(rows, Coefficients(), {"here": "fitted"}), rows)
    assert (found.layouts, found.fastest, found.pairs, found.right) == (3, True, 3, 2)


@pytest.mark.lint
def test_the_page_and_the_coefficients_are_those_of_the_results():
    results, page = json.loads(RESULTS.read_text()), PAGE.read_text()
    for name, table in tables(results).items():
        assert f"<!-- {name} -->\n{table}\n<!-- end of {name} -->" in page
    used = {name: results["coefficients"][name]["used"] for name in NAMES}
    assert {name: getattr(fitted().coefficients, name) for name in NAMES} == pytest.approx(used, rel=1e-3)
    for kind, factor in fitted().error.items():
        assert factor == results["halves"][f"held out, {kind}"]["factor"]
