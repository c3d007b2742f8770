import json
from dataclasses import asdict, replace

import bench_loss
import pytest
from bench_driver import LOADS
from scale_table import DRIVER, SIZES, Driver, line, predicted, recipe, with_tables
from simulated_engines import StepTime
from simulated_fleet import Fleet, bound, simulate

from megatron_ibpo.sampling.ahead import Pace
from support.paths import ROOT

RESULTS, PAGE = ROOT / "tools/results", ROOT / "docs/scale.md"
FOUND = json.loads((RESULTS / "scale.json").read_text())
# a batch is 32 sequences for each engine, of about 100 tokens; sampling takes longer than training
SMALL = Fleet(
    engines=2, training_seconds=0.5, pause_seconds=0.02, step_time=StepTime(0.018, 5e-5), most_running=100,
    groups=8, group_size=8, longest=128, median_length=139,
)  # fmt: skip
SLOW_TRAINING = replace(SMALL, training_seconds=6.0)


@pytest.mark.lint
def test_the_page_has_the_tables_of_the_data():
    page = PAGE.read_text()
    assert with_tables(page, FOUND["rows"]) == page
    rows = json.loads((RESULTS / "driver_load.json").read_text())["load"]["rows"]
    assert len(rows) == len(LOADS)
    for row, load in zip(rows, LOADS, strict=True):
        assert asdict(load).items() <= row.items()
        journal = "yes" if row["journal"] else "no"
        asked = f"| {row['engines']:,} | {row['in_flight']:,} | {row['tokens']:,} | {journal} | "
        rate, events, peak = (row[name] for name in ("samples_per_second", "events_per_second", "peak_mb"))
        took = f"{row['samples']:,} | {1e3 / rate:.2f} | {rate:,.0f} | {events:,.0f} | {peak:,.0f} |"
        assert asked + took in page, (row, load)


@pytest.mark.lint
def test_the_data_equal_the_planners_present_predictions_for_every_size():
    own = {row["gpus"] for row in FOUND["rows"] if row["prompts"] == 32}
    grown = {row["gpus"] for row in FOUND["rows"] if row["prompts"] == row["gpus"]}
    assert own == grown == set(SIZES)
    driver = Driver.read(DRIVER)
    now, recorded = predicted(recipe(), 32, 32, driver), FOUND["rows"][0]
    assert (now["layout"], now["engines"]) == (recorded["layout"], recorded["engines"])
    for name in ("seconds", "samples_per_second", "weight_bytes", "driver_share"):
        assert now[name] == pytest.approx(recorded[name], rel=2e-3), f"{name}: run tools/scale_table.py again"


def test_a_rows_samples_and_bytes_are_counted_as_by_hand():
    """256 responses and 128 corrections; a correction shows two responses of 4,096 tokens."""
    assert line({64: 3.0, 1024: 4.92}) == pytest.approx((2.872, 0.002))
    driver = Driver(own=(1.0, 0.5), calls=2.0)
    assert (driver.python(8), driver.seconds(8)) == (1 + 4, 1 + 4 + 2)
    row = FOUND["rows"][0]
    assert (row["responses"], row["corrections"]) == (256, 128)
    assert row["samples_per_second"] == pytest.approx(384 / row["seconds"], rel=1e-3)
    sent = 384 * (4096 * 9 + 200 * 4) + 128 * 2 * 4096 * 4
    assert row["store_bytes_per_second"] == pytest.approx(sent / row["seconds"], rel=2e-3)


def test_the_committed_predictions_of_the_loss_equal_the_scripts(tmp_path, monkeypatch):
    bench_loss.main(bench_loss.Arguments(predict=True, save=tmp_path / "predicted.json"))
    fresh = json.loads((tmp_path / "predicted.json").read_text())
    assert fresh == json.loads((RESULTS / "bench_loss_predicted.json").read_text())
    assert fresh["kind"].startswith("prediction")
    largest = {"contestant": "ours", "tokens": 32768, "vocabulary": 151936, "masked": 0.0}
    (row,) = [row for row in fresh["rows"] if largest.items() <= row.items()]
    # three passes over 32768 x 151936 bf16 numbers at 4.3 TB/s
    assert row["floor_ms"] == round(3 * 2 * 32768 * 151936 / 4.3e12 * 1e3, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="no CUDA device"):
        bench_loss.main(bench_loss.Arguments(device="cuda"))


@pytest.mark.parametrize(
    ("fleet", "pace"),
    [
        (SMALL, Pace(1)), (SMALL, Pace(8)), (SMALL, Pace(4, keep_order=True)),
        (SLOW_TRAINING, Pace(1)), (SLOW_TRAINING, Pace(8)),
    ],
)  # fmt: skip
def test_an_asynchronous_step_stays_within_a_tenth_of_its_bound(fleet, pace):
    found = simulate(fleet, pace, steps=8)
    least = bound(fleet, pace.staleness, found.tokens_per_step).seconds
    # a little less is possible where responses that were begun before the first counted step are long
    assert 0.95 < found.seconds_per_step / least < 1.1


def test_an_on_policy_step_is_sampling_then_training():
    one, other = (simulate(fleet, Pace(0), steps=4).seconds_per_step for fleet in (SMALL, SLOW_TRAINING))
    assert other - one == pytest.approx(5.5)
    # by hand: 10 steps of 2 s, of 1 token that costs .5 s; 3 s of training; 1 s of pause
    changes = {"engines": 1, "longest": 10, "training_seconds": 3.0, "pause_seconds": 1.0}
    fleet = replace(SMALL, **changes, step_time=StepTime(2.0, 0.5))
    assert bound(fleet, 0, tokens_per_step=10).seconds == 10 * 2 + 10 * 0.5 + 3 + 1
