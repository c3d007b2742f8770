"""Opens the page of a run with graded rewards in headless Chromium, and compares what it shows and saves with
the run's journal and metrics.

    PYTHONPATH=.:tests python tests/support/page_against_journal.py RUN_DIR PAGE.html
"""

import csv
import json
import sys
from pathlib import Path

from megatron_ibpo.journal import read_journal
from megatron_ibpo.report import read_rows
from support.browser import BROWSER, WHY_NOT, open_page

CATCH_FILES = """(() => {
    window.saved = [];
    window.Blob = class { constructor(parts) { window.saved.push(parts.join("")); } };
    URL.createObjectURL = () => "#saved";
})()"""
EVERY = "[...document.querySelectorAll('{}')]"


def check(run_dir: Path, path: Path) -> None:
    steps = [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "step"]
    rewards = last_rewards(run_dir)
    with open_page(path) as page:
        page.evaluate(CATCH_FILES)
        page.wait_until("document.querySelector('[data-metric=reward] .save')")
        page.click("[data-metric=reward] .save")
        page.press("2")
        page.wait_until("document.querySelector('#detail .pane')")
        marks = page.evaluate(f"{EVERY.format('.chip')}.map((chip) => chip.style.backgroundColor)")
        bars = page.evaluate(f"{EVERY.format('.bar')}.map((bar) => Number(bar.dataset.count))")
        page.click("#prompt .save")
        curve, group = page.evaluate("window.saved")
        assert page.problems() == [], page.problems()
    drawn = [float(row["reward"]) for row in csv.DictReader(curve.splitlines())]
    # the page holds five digits of a number
    assert drawn == [float(f"{row['reward']:.5g}") for row in steps], drawn
    assert [response["reward"] for response in json.loads(group)["responses"]] == rewards[0]
    every = [reward for rewards_of_group in rewards for reward in rewards_of_group]
    assert len(marks) == sum(bars) == len(every), (len(marks), bars, len(every))
    assert len(set(marks)) == len(set(every)) > 2, "each reward has a shade of its own"
    print(f"{path.name}: a curve of {len(drawn)} steps and {len(every)} rewards in {len(set(marks))} shades")


def last_rewards(run_dir: Path) -> list[list[float | None]]:
    """Return the rewards of the last step's responses, group by group, as the journal has them."""
    recovered = read_journal(run_dir / "journal", after_step=0)
    groups = recovered.batches[-1].groups
    return [
        [recovered.samples[key].reward for key in group.sample_keys() if key.kind == "response"]
        for group in groups
    ]


if __name__ == "__main__":
    if BROWSER is None:
        sys.exit(WHY_NOT)
    check(*map(Path, sys.argv[1:]))
