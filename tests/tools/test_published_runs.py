import json
from collections import Counter

import pytest
from fit_planner import PAGE, RESULTS, tables
from judge_memory import config_of, counted_bytes
from published_runs import Row, halves, read_evidence, shape_of

from megatron_ibpo.plan.hardware import hardware_names
from megatron_ibpo.plan.parameter_count import take_census
from megatron_ibpo.plan.workload import COEFFICIENT_NAMES, fitted

ROWS = read_evidence()
SHAPE = shape_of("qwen3_4b")


def test_each_row_has_a_source_open_facts_and_a_half():
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


def test_other_programs_memory_is_counted_as_by_hand():
    facts = {"model": "qwen3_4b", "hardware": "h100", "gpus": 8, "precision": "bf16", "batch": 256}
    facts |= {"micro_batch": 1, "sequence": 8192, "recompute": "full", "fsdp": True}

    def counted(**changed):
        row = Row("here", "row", "training", facts | changed, {}, {"peak_gib": 1.0}, "nowhere")
        return counted_bytes(row, SHAPE)

    def census_of(**changed):
        return take_census(SHAPE, config_of(facts | changed, SHAPE.num_layers), 8)

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


@pytest.mark.lint
def test_the_page_and_the_coefficients_are_those_of_the_results():
    results, page = json.loads(RESULTS.read_text()), PAGE.read_text()
    for name, table in tables(results).items():
        assert f"<!-- {name} -->\n{table}\n<!-- end of {name} -->" in page
    used = {name: results["coefficients"][name]["used"] for name in COEFFICIENT_NAMES}
    assert {name: getattr(fitted().coefficients, name) for name in COEFFICIENT_NAMES} == pytest.approx(
        used, rel=1e-3
    )
    for kind, factor in fitted().error.items():
        assert factor == results["halves"][f"held out, {kind}"]["factor"]
