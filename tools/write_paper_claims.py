"""Write the tables of docs/paper_claims.md from the results of its studies.

    "$(bash tools/bootstrap.sh)" tools/write_paper_claims.py

The results are docs/studies/{paper,default_run}.json.gz: results.json of a run of the file of that name in
examples/studies, gzipped without its date (gzip -n). tests/tools/test_paper_claims.py compares the page with
them. docs/studies/test_time.json has, for each seed of `gspo`, the measures of `ibpo evaluate` on its policy.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.text import counted
from megatron_ibpo.study.claims import compare_all
from megatron_ibpo.study.findings import Findings, read_findings
from megatron_ibpo.study.statistics import estimate
from megatron_ibpo.study.table import Table, brief, interval, lines_of

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs/paper_claims.md", ROOT / "docs/studies"
STUDIES = ("paper", "default_run")
TEST_TIME = {
    "accuracy": "GSPO, one response",
    "corrected_accuracy": "GSPO with the comparing prompt at test time",
    "best_of_accuracy": "GSPO, best of 8 by mean log-prob",
    "majority_accuracy": "GSPO, majority of 8",
}
END = "<!-- end of what it writes -->\n"


@dataclass
class Arguments:
    pass


def page_with_tables(page: str) -> str:
    """Return the page with the tables of each study's results between its two marks."""
    findings = {study: read_findings(RESULTS / f"{study}.json.gz") for study in STUDIES}
    legends: set[str] = set()
    parts = {study: _tables(of_study, legends) for study, of_study in findings.items()}
    parts["test_time"] = _test_time(findings["paper"])
    for name, part in parts.items():
        begin = f"<!-- {name}, written by tools/write_paper_claims.py -->\n"
        head, tail = page.split(begin)
        page = f"{head}{begin}\n{part}\n\n{END}{tail.split(END, 1)[1]}"
    return page


def _test_time(findings: Findings) -> str:
    """Return the table of what more responses of GSPO's policies reach, beside one response of IBPO's."""
    measures = json.loads((RESULTS / "test_time.json").read_text(encoding="utf-8"))["measures"]
    ibpo = {run.seed: run.accuracy[-1][1] for run in findings.runs if run.method == "ibpo"}
    seeds = sorted(map(int, measures))
    rows = []
    for key, title in TEST_TIME.items():
        values = [measures[str(seed)][key] for seed in seeds]
        differences = [ibpo[seed] - value for seed, value in zip(seeds, values, strict=True)]
        rows.append(
            [
                title,
                str(len(seeds)),
                interval(asdict(estimate(values))),
                interval(asdict(estimate(differences)), "+"),
            ]
        )
    rows.append(
        [
            "IBPO, one response",
            str(len(seeds)),
            interval(asdict(estimate([ibpo[seed] for seed in seeds]))),
            "–",
        ]
    )
    return lines_of(Table("", ["policy", "seeds", "accuracy [95 %, t]", "IBPO less this [95 %, t]"], rows))


def _tables(findings: Findings, legends: set[str]) -> str:
    """Return a study's tables, with the legends that are not among `legends` yet, and add these to them."""
    planned = len(findings.study.methods) * len(findings.study.seeds)
    seconds = sum(run.seconds or 0.0 for run in findings.runs)
    seeds = counted(len(findings.study.seeds), "seed")
    runs = f"{counted(len(findings.runs), 'run')} of {planned}, {seeds} for each method"
    state = f"{runs}, {seconds / 60:.0f} minutes of wall time."
    if findings.runs_left:
        state = f"**Partial: {state}** Rows with fewer than {seeds} say nothing yet."
    tuned = [
        f"{choice.method} ({counted(len(choice.tried), 'trial')}): "
        + ", ".join(f"{key} {value}" for key, value in choice.setting.items())
        + (f"; {', '.join(choice.at_edge)} at the edge of the grid" if choice.at_edge else "")
        for choice in findings.choices
    ]
    parts = [state]
    for table in brief(findings, compare_all(findings)):
        parts += [f"### {table.title}"] if table.title else []
        parts.append(lines_of(_without(table, "seeds")))
        if table.legend and table.legend not in legends:
            legends.add(table.legend)
            parts.append(_wrapped(table.legend))
    if tuned:
        parts.append(_wrapped(f"Tuned to: {'. '.join(tuned)}."))
    return "\n\n".join(parts)


def _without(table: Table, title: str) -> Table:
    """Return the table without the column of this title."""
    column = list(table.header).index(title)
    header, *rows = [[*row[:column], *row[column + 1 :]] for row in (table.header, *table.rows)]
    return replace(table, header=header, rows=rows)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def main(arguments: Arguments) -> None:
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
