"""The result of a study on one page: page.html, which is self-contained; and its parts as files."""

import base64
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.console import Console

from megatron_ibpo.basics.text import counted
from megatron_ibpo.report.page.comparison import comparison
from megatron_ibpo.report.page.html import embedded, page
from megatron_ibpo.study.claims import Comparison
from megatron_ibpo.study.curves import break_even_figure, break_even_points, dose_figure, figure_of_runs
from megatron_ibpo.study.findings import Findings
from megatron_ibpo.study.power import in_words
from megatron_ibpo.study.table import Table, markdown, tables


def write_page(
    findings: Findings, compared: Comparison, directory: Path, console: Console | None = None
) -> list[Path]:
    """Write page.html, table.md, curves.png and curves.svg. Return the files, results.json first if it
    exists.

    Args:
        console: shows the tables too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    all_tables = tables(findings, compared)
    written = markdown(findings, all_tables)
    (directory / "table.md").write_text(written, encoding="utf-8")
    figures = [("Curves", figure_of_runs(findings.study, findings.runs))]
    if points := compared.dose_response:
        figures.append(("Dose and response", dose_figure(findings.study, points)))
    if standing := break_even_points(findings.runs):
        figures.append(("Where corrections pay", break_even_figure(standing)))
    with mpl.rc_context({"svg.hashsalt": "study"}):  # the same study gives the same file
        figures[0][1].savefig(directory / "curves.png")
        drawn = [(title, _svg(figure)) for title, figure in figures]
    (directory / "curves.svg").write_bytes(drawn[0][1])
    pictures = [
        (title, "data:image/svg+xml;base64," + base64.b64encode(svg).decode()) for title, svg in drawn
    ]
    (directory / "page.html").write_text(_page(findings, all_tables, pictures), encoding="utf-8")
    if console is not None:
        console.print(written, highlight=False, markup=False, soft_wrap=True)
    names = ("results.json", "page.html", "table.md", "curves.png", "curves.svg")
    return [directory / name for name in names if (directory / name).exists()]


def _svg(figure: Figure) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()


def _page(findings: Findings, all_tables: Sequence[Table], pictures: Sequence[tuple[str, str]]) -> str:
    """Return the page of runs with the study in place of runs."""
    study = findings.study
    size = (
        f"{counted(len(study.tasks), 'task')}, {counted(len(study.methods), 'method')}, "
        f"{counted(len(study.seeds), 'seed')}; "
        f"{study.budget:g} {study.budget_unit} per run; baseline {study.baseline}."
    )
    if findings.runs_left:
        size += f" {counted(findings.runs_left, 'run')} to go."
    power = in_words(findings.power) if findings.power is not None else "power: no pilot was run."
    drawn = [{"title": title, "picture": picture} for title, picture in pictures]
    first_tables, later_tables = (
        [asdict(table) for table in all_tables[:2]],
        [asdict(table) for table in all_tables[2:]],
    )
    overview = {
        "name": study.name,
        "lines": [size, power],
        "tasks": [f"{task.name}: {task.kind}" for task in study.tasks if task.name and task.kind],
        "sections": [*first_tables, *drawn, *later_tables],
    }
    runs = {"version": "", "runs": [], "comparison": comparison([]), "study": overview}
    return page(study.name, f'{{"runs":{embedded(runs)}}}')
