"""Names say what a value is: few are participles or pronouns alone, and their number only falls.

The name of a test is a short statement about the system.
"""

import ast
import re
from collections import Counter

import pytest

from support.paths import ROOT, TESTS

pytestmark = pytest.mark.lint
BOUND = 4.5
"""Most vague names of 1,000. Lower it when names get better."""
VAGUE = set(
    """
    own found given asked said told there here known wanted kept left made shown taken seen others other
    one ones each again whole rest more most before after now then alone apart beside away back what why
    where how such lent joined parted filled judged begun ended held twice together going on of by it
    its this that these those both any none all some same further answered answers asks says gone had
    has was is are be been went come came goes put
    """.split()  # noqa: SIM905
)
FOLDERS = ("megatron_ibpo", "kernels", "tools", "examples")
EXEMPT = {"__all__"}


def bindings(path):
    """Yield every name that a file binds: assignments, parameters, functions and classes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def words(name):
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def is_vague(name):
    return name not in EXEMPT and bool(parts := words(name)) and VAGUE.issuperset(parts)


def test_a_name_is_vague_when_all_its_words_are():
    names = ("found", "_asked", "MOST", "isOwn", "__all__", "own_rank", "x_BLD")
    assert [is_vague(name) for name in names] == [True] * 4 + [False] * 3


def test_few_names_are_vague():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    names = [name for path in files for name in bindings(path)]
    vague = Counter(filter(is_vague, names))
    assert len(names) > 30_000
    assert 1000 * vague.total() / len(names) <= BOUND, vague.most_common(20)


def has_short_statement(name):
    """Tell whether the name of a test has at most ten words and one "and", and no "what"."""
    statement = name.split("_")[1:]
    return len(statement) <= 10 and statement.count("and") <= 1 and "what" not in statement


def test_names_of_tests_are_short_statements():
    names = [name for path in TESTS.rglob("*.py") for name in bindings(path) if name.startswith("test_")]
    assert len(names) > 1000
    assert [name for name in names if not has_short_statement(name)] == []
