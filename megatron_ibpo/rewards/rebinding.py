"""Tests that see what a program changes in their arguments, and no other change it makes.

The program runs in another process, and sorts a copy in place. In the tests' own list it could clear what
they loop over or compare with. So each statement of the tests is followed by `a = __changed__(a)` for every
name among the arguments of its calls; loops already begun, and other names, keep the original list."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megatron_ibpo.rewards.sandbox.inside import CHANGED

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Nodes with scopes of their own, which no assignment outside reaches."""


def with_rebinding(tests: str) -> str:
    """Return the tests with an assignment after each statement that passes a name to a call. Raises
    SyntaxError if the tests are not Python."""
    tree = ast.parse(tests)
    _rebind(tree.body, [_bound_in(tree)], set())
    return ast.unparse(ast.fix_missing_locations(tree))


_Scope = dict[str, bool]
"""Name bound in a scope → whether it is a global one."""


def _rebind(body: list[ast.stmt], scopes: list[_Scope], outer: set[str]) -> None:
    """Add the assignments to a list of statements, in place. `scopes` are those of the module and of each
    function around these; `outer` collects the names that the innermost of these does not bind itself."""
    written: list[ast.stmt] = []
    for statement in body:
        written.append(statement)
        if isinstance(statement, _Function):
            _rebind_function(statement, scopes)
            continue
        if isinstance(statement, ast.ClassDef):
            for member in statement.body:
                if isinstance(member, _Function):
                    _rebind_function(member, scopes)
            continue
        names = [name for name in _arguments(statement) if any(name in scope for scope in scopes)]
        outer |= {name for name in names if name not in scopes[-1]}
        rebindings = [ast.parse(f"{name} = {CHANGED}({name})").body[0] for name in names]
        blocks = list(_blocks(statement))
        for block in blocks:
            _rebind(block, scopes, outer)
            if rebindings and block:
                block[:0] = rebindings
        if not blocks:
            written += rebindings
        elif isinstance(statement, ast.If | ast.For | ast.AsyncFor | ast.While) and not statement.orelse:
            statement.orelse = rebindings
    body[:] = written


def _rebind_function(function: _Function, scopes: list[_Scope]) -> None:
    outer: set[str] = set()
    _rebind(function.body, [*scopes, _bound_in(function)], outer)
    for name in sorted(outer):
        is_global = next(scope[name] for scope in reversed(scopes) if name in scope)
        function.body.insert(0, ast.Global([name]) if is_global else ast.Nonlocal([name]))


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the statements within a compound statement."""
    for field in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(statement, field, None), list) and block:
            yield block
    for handler in getattr(statement, "handlers", []):
        yield handler.body
    for case in getattr(statement, "cases", []):
        yield case.body


def _arguments(statement: ast.stmt) -> list[str]:
    """Return the root names of the arguments of the calls in a statement, without its blocks."""
    names: dict[str, None] = {}
    for node in _expressions(statement):
        if isinstance(node, ast.Call):
            for argument in node.args:
                while isinstance(argument, ast.Starred | ast.Subscript | ast.Attribute):
                    argument = argument.value
                if isinstance(argument, ast.Name):
                    names[argument.id] = None
    return list(names)


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions that a statement evaluates itself: no blocks, no inner scopes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case, *_SCOPES, *_COMPREHENSIONS)):
            yield child
            yield from _expressions(child)


def _bound_in(scope: ast.Module | _Function) -> _Scope:
    """Return the names that a function or a module binds, without those of inner scopes."""
    declared: set[str] = set()
    arguments = [] if isinstance(scope, ast.Module) else ast.walk(scope.args)
    bound = {argument.arg for argument in arguments if isinstance(argument, ast.arg)}
    nodes: list[ast.AST] = list(scope.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.Global):
            declared |= set(node.names)
        if not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)):
            nodes += ast.iter_child_nodes(node)
    return {name: isinstance(scope, ast.Module) or name in declared for name in bound | declared}
