"""Draw small faults by lot: changes of one expression or statement, in proportion to the code of the
packages."""

from __future__ import annotations

import ast
import copy
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOMS = (
    "credit", "data", "edit_distance", "evaluate", "journal", "loss", "models", "policy", "rewards", "run",
    "sampling", "study", "weights",
)  # fmt: skip
"""Packages that decide numbers and data."""
SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
OUTPUT_CALLS = {"print", "warning", "info", "debug", "warn", "write", "close"}
"""Names of calls that print, or end what would end anyway: without them no number changes."""


@dataclass(frozen=True)
class Edit:
    """A change of one place of a source file."""

    line: int
    old: str
    """Text of the place, with as many lines around it as make it unique in its file."""
    new: str
    """Replacement of `old`."""
    summary: str
    """The expression or statement and its replacement, for a table."""


def drawn(package: Path, count: int, seed: int) -> list[tuple[str, Path, Edit]]:
    """Return `count` faults as (package, file, change), divided among packages by their shares of all
    changes, in an order by lot: a campaign that is cut short has tried a fair sample."""
    rng = random.Random(seed)
    places_of_room = {
        room: [
            (file, node, new)
            for file in sorted((package / room).rglob("*.py"))
            for node, new in changes(file)
        ]
        for room in ROOMS
    }
    total = sum(map(len, places_of_room.values()))
    exact = {room: count * len(places) / total for room, places in places_of_room.items()}
    chosen = {room: int(share) for room, share in exact.items()}
    for room in sorted(exact, key=lambda room: chosen[room] - exact[room])[: count - sum(chosen.values())]:
        chosen[room] += 1
    faults = [
        (room, file, edit_of(file.read_text(), node, new))
        for room, places in places_of_room.items()
        for file, node, new in rng.sample(places, chosen[room])
    ]
    rng.shuffle(faults)
    return faults


def changes(file: Path) -> list[tuple[ast.expr | ast.stmt, str]]:
    """Return every change of a file: the place in its syntax tree, and the replacement text."""
    visitor = _Changes()
    visitor.visit(ast.parse(file.read_text()))
    return visitor.places


class _Changes(ast.NodeVisitor):
    """A collector of possible changes. Messages, annotations and docstrings decide no number and stay."""

    def __init__(self) -> None:
        self.places: list[tuple[ast.expr | ast.stmt, str]] = []

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    visit_JoinedStr = visit_Assert = visit_Import = visit_ImportFrom = visit_Raise  # type: ignore[assignment]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            called = node.value.func
            name = getattr(called, "attr", getattr(called, "id", ""))
            if name in OUTPUT_CALLS:
                return
            self._add(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "pass")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not _is_constant(node.value, None):
            self._add(node, "return None")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._negated(node.test)
        self.generic_visit(node)

    visit_IfExp = visit_While = visit_If  # type: ignore[assignment]

    def visit_Compare(self, node: ast.Compare) -> None:
        changed = copy.deepcopy(node)
        changed.ops[0] = SWAPPED[type(node.ops[0])]()
        self._add(node, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._swapped(node)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, str)
        parts = (getattr(side, "value", side) for side in (node.left, node.right))
        if type(node.op) in SWAPPED and not any(isinstance(part, texts) for part in parts):
            self._swapped(node)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._add(node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, str(node.value + 1))
        elif isinstance(node.value, float):
            self._add(node, str(node.value * 2 or 1.0))

    def _swapped(self, node: Any) -> None:
        changed = copy.deepcopy(node)
        changed.op = SWAPPED[type(node.op)]()
        self._add(node, f"({ast.unparse(changed)})")

    def _negated(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.UnaryOp):  # these are changed by themselves
            self._add(test, f"(not ({ast.unparse(test)}))")

    def _add(self, node: ast.expr | ast.stmt, new: str) -> None:
        self.places.append((node, new))


def _is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def edit_of(source: str, node: ast.expr | ast.stmt, new: str) -> Edit:
    """Return the change of one node as texts: whole lines, as many as make them unique."""
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    first, last = node.lineno - 1, node.end_lineno - 1
    prefix = lines[first].encode()[: node.col_offset].decode()
    suffix = lines[last].encode()[node.end_col_offset :].decode()
    text = "".join(lines[first : last + 1])[len(prefix) :]
    old = text[: len(text) - len(suffix)]
    above, below = 0, 0
    while source.count(block := "".join(lines[first - above : last + 1 + below])) > 1:
        above, below = (above + 1, below) if above <= below and above < first else (above, below + 1)
    start = "".join(lines[first - above : first]) + prefix
    end = suffix + "".join(lines[last + 1 : last + 1 + below])
    return Edit(node.lineno, block, start + new + end, f"{_short(old)} → {_short(new)}")


def _short(text: str) -> str:
    return " ".join(text.split())[:60]


def named_edits(edits: Sequence[tuple[str, Path, Edit]], root: Path) -> Iterator[tuple[str, str, str, Edit]]:
    """Yield (name, package, file, change); the name gives file, line and change, and a number where two of
    one line look alike."""
    occurrences: Counter[str] = Counter()
    for room, path, edit in edits:
        file = path.relative_to(root).as_posix()
        name = f"{file}:{edit.line}: {edit.summary}"
        occurrences[name] += 1
        yield name if occurrences[name] == 1 else f"{name} ({occurrences[name]})", room, file, edit
