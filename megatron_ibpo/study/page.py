"""The result of a study on one page: page.html, which needs nothing beside it; and its parts as files."""

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.console import Console

from megatron_ibpo.basics.text import counted
from megatron_ibpo.study.break_even_curve import break_even_figure, break_even_points
from megatron_ibpo.study.claims import Comparison
from megatron_ibpo.study.curves import dose_figure, figure_of_runs
from megatron_ibpo.study.findings import Findings
from megatron_ibpo.study.power import in_words
from megatron_ibpo.study.table import Table, markdown, tables

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left; }
.wide { overflow-x: auto; }
.legend { color: #555; font-size: 13px; max-width: 70rem; }
svg { height: auto; max-width: 100%; }
"""


def write_page(
    found: Findings, compared: Comparison, directory: Path, console: Console | None = None
) -> list[Path]:
    """Write page.html, table.md, curves.png and curves.svg; returns the files, results.json first if it is
    there.

    Args:
        console: shows the tables too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    made = tables(found, compared)
    written = markdown(found, made)
    (directory / "table.md").write_text(written, encoding="utf-8")
    figures = [("Curves", figure_of_runs(found.study, found.runs))]
    if points := compared.dose_response:
        figures.append(("Dose and response", dose_figure(found.study, points)))
    if standing := break_even_points(found.runs):
        figures.append(("Where corrections pay", break_even_figure(standing)))
    with mpl.rc_context({"svg.hashsalt": "study"}):  # the same study gives the same file
        for name in ("curves.png", "curves.svg"):
            figures[0][1].savefig(directory / name)
        drawings = [(title, _svg(figure)) for title, figure in figures]
    (directory / "page.html").write_text(_page(found, made, drawings), encoding="utf-8")
    if console is not None:
        console.print(written, highlight=False, markup=False, soft_wrap=True)
    names = ("results.json", "page.html", "table.md", "curves.png", "curves.svg")
    return [directory / name for name in names if (directory / name).exists()]


def _svg(figure: Figure) -> str:
    """The drawing as a part of a page: without the head of a file of its own."""
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]


def _page(found: Findings, made: Sequence[Table], drawings: Sequence[tuple[str, str]]) -> str:
    study = found.study
    name = escape(study.name)
    first = (
        f"{counted(len(study.tasks), 'task')}, {counted(len(study.methods), 'method')}, "
        f"{counted(len(study.seeds), 'seed')}; "
        f"{study.budget:g} {study.budget_unit} per run; baseline {study.baseline}."
    )
    if found.runs_left:
        first += f" {counted(found.runs_left, 'run')} to go."
    power = in_words(found.power) if found.power is not None else "power: no pilot was run."
    kinds = "".join(
        f"<li>{escape(task.name)}: {escape(task.kind)}</li>"
        for task in study.tasks
        if task.name and task.kind
    )
    parts = [f"<h1>{name}</h1><p>{escape(first)}</p><p>{escape(power)}</p><ul>{kinds}</ul>"]
    head, rest = made[:2], made[2:]
    parts += map(_section, head)
    parts += [f"<h2>{escape(title)}</h2>{drawing}" for title, drawing in drawings]
    parts += map(_section, rest)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _section(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows)
    legend = f'<p class="legend">{escape(table.legend)}</p>' if table.legend else ""
    body = f'<div class="wide"><table><tr>{head}</tr>\n{rows}</table></div>'
    return f"<h2>{escape(table.title)}</h2>{body}{legend}"
