"""docs/scale.md says what tools/results/scale.json holds, and that what the planner predicts."""

import json

import pytest
from scale_table import DRIVER, SIZES, Driver, line, predicted, recipe, with_tables

from support.paths import ROOT

FOUND = json.loads((ROOT / "tools/results/scale.json").read_text())


@pytest.mark.lint
def test_the_page_has_the_tables_of_the_data():
    page = (ROOT / "docs/scale.md").read_text()
    assert with_tables(page, FOUND["rows"]) == page


def test_every_size_is_there_with_the_recipes_batch_and_with_one_that_grows():
    own = {row["gpus"] for row in FOUND["rows"] if row["prompts"] == 32}
    grown = {row["gpus"] for row in FOUND["rows"] if row["prompts"] == row["gpus"]}
    assert own == grown == set(SIZES)


@pytest.mark.lint
def test_the_data_is_what_the_planner_predicts_now():
    driver = Driver.read(DRIVER)
    now, recorded = predicted(recipe(), 32, 32, driver), FOUND["rows"][0]
    assert (now["layout"], now["engines"]) == (recorded["layout"], recorded["engines"])
    for name in ("seconds", "samples_per_second", "weight_bytes", "driver_share"):
        assert now[name] == pytest.approx(recorded[name], rel=2e-3), f"{name}: run tools/scale_table.py again"


def test_the_cost_of_a_sample_goes_through_what_was_measured():
    assert line({64: 3.0, 1024: 4.92}) == pytest.approx((2.872, 0.002))
    driver = Driver(own=(1.0, 0.5), calls=2.0)
    assert (driver.python(8), driver.seconds(8)) == (1 + 4, 1 + 4 + 2)


def test_what_goes_through_the_driver_by_hand():
    """256 responses and 128 corrections; a correction shows two responses of 4,096 tokens."""
    row = FOUND["rows"][0]
    assert (row["responses"], row["corrections"]) == (256, 128)
    assert row["samples_per_second"] == pytest.approx(384 / row["seconds"], rel=1e-3)
    sent = 384 * (4096 * 9 + 200 * 4) + 128 * 2 * 4096 * 4
    assert row["store_bytes_per_second"] == pytest.approx(sent / row["seconds"], rel=2e-3)
