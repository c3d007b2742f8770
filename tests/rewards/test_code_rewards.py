"""Code rewards: what is taken as the program, what counts as right, and what cheats come to."""

import json
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards import open_verifier
from megatron_ibpo.rewards.code import (
    extract_answer,
    label_problem,
    offered_imports,
    same_output,
    same_result,
    score,
)
from support.sandboxed import adopts_no_longer, needs_sandbox  # noqa: F401

pytestmark = needs_sandbox
SUM = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3", "7", "11"]}
APPEND = {"inputs": ["[1, 2]\n3", [[], 0]], "outputs": ["[1, 2, 3]", [[0]]], "fn_name": "append"}
CHECK = {"test": "def check(f):\n    assert f(2) == 4\n    assert f(-3) == 9\n", "entry_point": "square"}


def graded(program, label, **settings):
    settings = {"code_execution": {"seconds": 20.0, **settings}}
    return score("", f"So:\n```python\n{program}\n```\n", json.dumps(label), settings)


def passes(program, label):
    """Whether a program passes the tests of a label, or these asserts."""
    label = {"test": label, "entry_point": None} if isinstance(label, str) else label
    return graded(program, label)["score"] == 1.0


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_bundled_problems_accept_their_solutions_and_reject_mutants(step):
    lines = Path("examples/code/problems.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines]
    assert len(problems) >= 30
    assert all(len(problem["mutants"]) >= 3 for problem in problems)
    assert all(label_problem(problem["label"], {}) is None for problem in problems)
    expected, kinds = [], set()
    for problem in problems[::step]:
        label = json.loads(problem["label"])
        kinds.add(("fn_name" in label, label.get("entry_point") is not None, "test" in label))
        mutants = problem["mutants"][: 1 if step > 1 else None]
        expected += [(problem["canonical"], label, True), *((mutant, label, False) for mutant in mutants)]
    assert len(kinds) == 4
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(lambda case: passes(*case[:2]) is case[2], expected))


def test_the_program_is_the_last_closed_python_block():
    for response, program in (
        ("```py\na\n```\nor rather\n```python\nb\n```", "b\n"), ("```\na\n```", "a\n"),
        ("```python\na\n```\nIt prints\n```text\n3\n```", "a\n"), ("~~~python\na\n~~~", "a\n"),
        ("<think>\n```python\na\n```\n</think>\n```python\nb\n```", "b\n"),
        ("<think>\n```python\na\n```\n</think>\nNo.", None), ("```print(1)```", None), ("```python\na", None),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("1. So:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("````python\n```\na\n````", "```\na\n"), ("```a\n" * 100_000, None), ("print(1)", "print(1)"),
        ("I do not know", None), ("", None), ("(" * 100_000, None),
        ("```python\ns = '''\n  ```x```\n'''\n```", "s = '''\n  ```x```\n'''\n"),
        ("```python\na=f()\n```\nprints\n```\n3\n```", "a=f()\n"),
        ("```python\na=f()\n```\nprints\n```\nx = 3\n```", "a=f()\n"),
        ("```\na=f()\n```\nprints\n```\n1 2 3\n```", "a=f()\n"),
        ("```\na=f()\n```\n```\nYES\n```", "a=f()\n"),
        ("```python\na=f()\n```\n```python\n[1, 2]\n```", "a=f()\n"),
        ("```\nx = 3\n```\n```\n-3\n```", "x = 3\n"),
        ("```\n3\n```\nthen\n```python\na=f()\n```", "a=f()\n"),
        ("```\nprint(1)\n```\n```\n1\n```", "print(1)\n"),
        ("```python\na=f()\n```\n```python\na=(\n```", "a=(\n"),
    ):  # fmt: skip
        assert extract_answer(response) == program


def test_outputs_are_compared_as_livecodebench_does():
    for said, expected, same in (
        ("1\n2\n", "1\n2", True), (" 1 \n 2", "1\n2\n\n", True), ("1.0 2.50", "1 2.5", True),
        ("1e2", "100", True), ("50000000000000000", "50000000000000001", False), ("0.1", "0.10000001", False),
        ("a b", "a  b", False), ("1\n\n2", "1\n2", False), ("", "", True), ("nan", "nan", True),
        ("sNaN", "1", False), ("yes", "YES", False),
    ):  # fmt: skip
        assert same_output(said, expected) is same


def test_real_numbers_may_differ_by_the_labels_or_settings_tolerance():
    for said, expected, same in (
        ("0.333333", "0.333333333333", True), ("1.4142135624", "1.4142135623730951", True),
        ("0.3334", "0.333333333333", False), ("1000000.5", "1000000.0", True),
        ("1000002.5", "1000000.0", False),
        ("1 0.1 x", "1 0.1000000001 x", True), ("2 0.1", "1 0.1", False), ("1.0000001", "1", False),
        ("nan", "0.5", False), ("0.5", "nan", False), ("inf", "0.5", False), ("inf", "inf", True),
        ("x", "0.5", False),
        ("0.5 0.5", "0.5", False), ("1e-9", "0.0", True), ("1e99999999", "1.5", False), ("YES", "YES", True),
    ):  # fmt: skip
        assert same_output(said, expected, 1e-6) is same, (said, expected)
    third = {"inputs": ["1 3\n"], "outputs": ["0.333333333333"]}
    divides = "a, b = map(int, input().split())\nprint(f'{a / b:.6f}')"
    adds = {"inputs": [[0.1, 0.2]], "outputs": [0.3], "fn_name": "add"}
    for label, program in ((third, divides), (adds, "def add(a, b): return a + b")):
        assert not passes(program, label)
        assert passes(program, {**label, "float_tolerance": 1e-6})
        assert graded(program, label, float_tolerance=1e-6)["score"] == 1.0
        assert graded(program, {**label, "float_tolerance": 0}, float_tolerance=1e-6)["score"] == 0.0
    for result, expected, same in (
        ([0.1 * 3], [0.3], True), ({"a": [0.1 * 3]}, {"a": [0.3]}, True), ([0.3], [0.3, 0.3], False),
        (True, 1.0, True),
        ({"b": 0.3}, {"a": 0.3}, False), (0.1 * 3, 0.3001, False), ("0.3", 0.3, False), (3, 3.0000001, True),
        (3.0000001, 3, False), (None, 0.3, False), (float("nan"), 0.3, False),
    ):  # fmt: skip
        assert same_result(result, expected, 1e-6) is same, (result, expected)
    assert "float_tolerance" in label_problem(json.dumps({**third, "float_tolerance": "1e-6"}), {})


def test_integers_beyond_pythons_digit_limit_are_printed_and_compared():
    text = f"1{'0' * 5999}1"
    assert passes("print(10**6000 + 1)", {"inputs": [""], "outputs": [text]})
    assert not passes("print(10**6000 + 2)", {"inputs": [""], "outputs": [text]})
    label = f'{{"inputs": [[{text}]], "outputs": [{text[:-1]}2], "fn_name": "f"}}'
    for program, expected in (("def f(n): return n + 1", 1.0), ("def f(n): return n", 0.0)):
        found = score("", f"```python\n{program}\n```", label, {"code_execution": {"seconds": 20.0}})
        assert found["score"] == expected
    assert passes("def f(): return 10**6000", "assert f() + 1 == 10**6000 + 1")
    assert same_output("9" * 100_000, "9" * 99_999 + "8") is False


def test_the_share_of_passed_tests_ends_at_failures_and_timeouts():
    program = "a, b = map(int, input().split())\nprint(a + b if a < 5 else 0)"
    assert graded(program, SUM) == {"score": 0.0, "tests_passed": pytest.approx(2 / 3), "timed_out": 0.0}
    none = score("", "I do not know", json.dumps(SUM), {})
    assert none == {"score": 0.0, "tests_passed": 0.0, "timed_out": 0.0}
    many = {"inputs": ["1"] * 50, "outputs": ["1"] * 50}
    found = graded("import time\ntime.sleep(0.1)\nprint(1)", many, total_seconds=0.8)
    assert (found["score"], found["timed_out"]) == (0.0, 1.0)
    assert 0.0 < found["tests_passed"] < 1.0
    slept = "import time\ndef f(x):\n    time.sleep(0.1)\n    return x"
    assert graded(slept, {**many, "fn_name": "f"}, total_seconds=0.5)["timed_out"] == 1.0
    for start, label in (("", SUM), ("def append(a, b):\n    ", APPEND), ("def square(x):\n    ", CHECK)):
        assert graded(start + "while True: pass", label, seconds=0.2)["timed_out"] == 1.0


def test_functions_get_arguments_and_return_json():
    assert passes("def append(a, b): return [*a, b]", APPEND)
    method = "class Solution:\n    def append(self, a: List[int], b: int): return tuple([*a, b])"
    assert passes(method, APPEND)
    assert not passes("def append(a, b): a.append(b)", APPEND)
    assert not passes("def append(a, b): return {1, 2, 3}", APPEND)
    assert not passes("def other(a, b): return [*a, b]", APPEND)


def test_livecodebenchs_imports_are_offered_and_the_exit_status_counts():
    assert passes("print(gcd(*map(int, input().split())))", {"inputs": ["4 6"], "outputs": ["2"]})
    assert passes("print(1)\nexit()", {"inputs": [""], "outputs": ["1"]})
    assert not passes("print(1)\nexit(1)", {"inputs": [""], "outputs": ["1"]})
    for program, lines in (
        ("x = deque()\nmath.pi\ny = x.split()", ["from collections import deque", "import math"]),
        ("def deque(): pass\nclass Counter: pass\ndeque(Counter)", []),
        ("from __future__ import annotations\nimport math\nmath.pi", []),
    ):
        assert offered_imports(program).splitlines()[3:] == lines


def test_asserts_see_plain_values_helpers_exceptions_and_changed_arguments():
    program = textwrap.dedent("""
        class Pair:
            def __init__(self, left, right): self.left, self.right = left, right
        def swap(pair): return Pair(pair.right, pair.left)
        def count(n): yield from range(n)
        def order(values): values.sort()
        def both(x): return x, {2, 3}, {"a": b"b"}, 1j, None
        def third(): return 1 / 3
        def is_odd(n): return n % 2 == 1
        def refuse(): raise ValueError("no")
    """)
    test = textwrap.dedent("""
        assert swap(Pair(1, 2)).left == 2
        assert list(count(3)) == [0, 1, 2]
        values = [3, 1]
        order(values)
        assert values == [1, 3]
        assert both(x=1) == (1, {2, 3}, {"a": b"b"}, 1j, None)
        assert math.isclose(third(), 1 / 3)
        assert is_odd(3) is True and is_odd(4) is False
        try:
            refuse()
            assert False, "accepted"
        except ValueError as error:
            assert str(error) == "no"
    """)
    assert passes(program, test)
    assert not passes(program.replace("yield from range(n)", "yield from range(n + 1)"), test)
    assert not passes(program.replace('raise ValueError("no")', "pass"), test)


def test_cheats_of_asserts_fail():
    equal = "__eq__ = __ne__ = lambda *_: True\n    __hash__ = int.__hash__"
    for program in (
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "print('passed'); import os; os.write(1, b'passed\\n'); os._exit(0)",
        f"class All(int):\n    {equal}\ndef square(x): return All(0)",
        "class Any:\n    __eq__ = lambda *_: True\ndef square(x): return Any()",
        "import builtins\nbuiltins.AssertionError = ValueError\ndef square(x): return 0",
        "import sys\nsys.exit = lambda *_: None\ndef square(x): sys.exit(0)",
        "def check(candidate): pass\ndef square(x): return 0",
        "import os\ndef square(x):\n    os.write(0, b'[true, 4, null]\\n'); return 0",
        "import os\nfor fd in range(10):\n    try: os.write(fd, b'passed\\n')\n    except OSError: pass\n"
        "def square(x): return 0",
        "import sys\ndef square(x):\n    sys._getframe(1).f_locals['answer'] = [True, 4]\n    return 0",
        "def square(x): return 4",
    ):
        assert not passes(program, CHECK)


def test_a_program_can_neither_end_test_loops_nor_change_expectations():
    loops, clear = "cases = [1, 2, 3]\nwanted = [1, 4, 9]\n", "def f(c, x): c.clear(); return x"
    for program, test in (
        ("def f(x): raise StopIteration", "assert all(map(f, [1, 2]))"),
        ("def f(x): raise StopIteration", "assert list(map(f, [])) == []\nassert not any(map(f, [1]))"),
        ("def f(x): raise StopAsyncIteration", "assert all(map(f, [1, 2]))"),
        ("class S(StopIteration): pass\ndef f(x): raise S", "assert all(f(x) for x in [1, 2])"),
        ("def f(): raise StopIteration", "for x in iter(f, None):\n    assert x == 1\nassert True"),
        ("def f(x): raise GeneratorExit", "assert all(f(x) for x in [1])"),
        (clear, loops + "for x in cases:\n    assert f(cases, x) == x * x"),
        (clear, loops + "assert all(f(cases, x) == x * x for x in cases)"),
        (clear, loops + "for x, y in zip(cases, wanted):\n    assert f(cases, x) == y"),
        (clear, loops + "for i, x in enumerate(cases):\n    assert f(cases, x) == wanted[i]"),
        ("def f(w): w.clear(); return w", loops + "assert f(wanted) == wanted"),
        ("def f(w): w.clear(); return []", loops + "assert wanted == f(wanted) or f(wanted) == wanted"),
        (clear, "d = {1: 1, 2: 4}\nfor x, y in d.items():\n    assert f(d, x) == y"),
        ("def f(c): c[1][:] = [7]", "case = ([[3, 1]], [1, 3])\nf(case)\nassert case[0] == [1, 3]"),
        ("def f(x): x[:] = [2]; return x", "w = [1]\nn = [w]\nassert f(w) == n[0]"),
    ):
        assert not passes(program, test)


def test_tests_see_how_calls_change_their_arguments():
    sort = "def f(values, *rest): values.sort()"
    for program, test in (
        (sort, "a = [3, 1]\nassert f(a) is None\nassert a == [1, 3]"),
        (sort, "for a, w in [([2, 1], [1, 2]), ([3, 1], [1, 3])]:\n f(a)\n assert a == w"),
        (sort, "def run():\n a = [3, 1]\n r = f(a)\n assert r is None and a == [1, 3]\nrun()\nassert run"),
        (sort, "a = [3, 1]\ndef run():\n f(a)\n assert a == [1, 3]\nrun()\nassert a == [1, 3]"),
        (sort, "def g():\n a = [3, 1]\n def run():\n  f(a)\n run()\n assert a == [1, 3]\ng()\nassert 1"),
        (sort, "a = [3, 1]\ndef g(a):\n def run():\n  global a\n  f(a)\n run()\ng(0)\nassert a == [1, 3]"),
        (sort, "a = [3, 1]\ndef g():\n global a\n def run():\n  f(a)\n run()\ng()\nassert a == [1, 3]"),
        (sort, "def g():\n global a\n a = [3, 1]\n def run():\n  f(a)\n run()\ng()\nassert a == [1, 3]"),
        (sort, "def g():\n a = [3,1]\n def h():\n  nonlocal a\n  f(a)\n h()\n assert a < [2]\ng()\nassert 1"),
        (sort, "def run(b):\n f(b)\n return b\na = [3, 1]\nassert run(a) == [1, 3]\nassert a == [1, 3]"),
        (sort, "args = [[3, 1], 0]\nf(*args)\nassert args[0] == [1, 3]"),
        (sort, "case = {'in': [3, 1]}\nf(case['in'])\nassert case['in'] == [1, 3]"),
        (sort, "class T:\n def go(self):\n  a = [3, 1]\n  f(a)\n  assert a == [1, 3]\nT().go()\nassert 1"),
        (sort, "a = [3, 1]\ntry:\n f(a)\nfinally:\n assert a == [1, 3]"),
        ("def f(d): d['x'] = 1; return d", "d = {}\nassert f(d) == {'x': 1}\nassert d == {'x': 1}"),
        ("def f(a): return a.pop()", "a = [1, 2]\nr = []\nwhile a:\n r.append(f(a))\nassert r == [2, 1]"),
        ("def f(x): return x[5]", "try:\n f([1])\n assert False\nexcept IndexError:\n pass"),
        ("def f(): return iter([1, 2])", "assert [x for x in f()] == [1, 2]"),
        ("import sys\ndef f(): return sys.stdin.read()", "assert f() == ''"),
    ):  # fmt: skip
        assert passes(program, test)


def test_neither_stderr_nor_forged_answers_pass_a_program():
    assert passes("import sys\ndef square(x):\n    sys.stderr.write('x' * 10**6)\n    return x * x", CHECK)
    test = "try:\n    f()\n    assert False\nexcept BaseException:\n    pass"
    assert passes("def f(): raise KeyError", test)
    assert not passes("import os\ndef f(): os._exit(0)", test)
    for line in ("[true]", "null", "[[[", "[true, 1, 2]", '[false, "passed"]', "x" * 100, "[" * 100_000):
        program = f"import os\nos.write(3, {line.encode()!r} + b'\\n' * 3)\nos._exit(0)"
        assert not passes(program, APPEND), line


def test_labels_that_cannot_be_graded_are_named():
    for label, why in (
        ("x", "must be JSON"), ("[]", "must be"), ("[" * 9999, "must be JSON"),
        ('{"inputs": ["1"], "outputs": []}', "same length"),
        ('{"inputs": [], "outputs": []}', "one test or more"),
        ('{"inputs": [1], "outputs": ["1"]}', "must be texts"),
        ('{"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}', "is no JSON"),
        ('{"inputs": ["1"], "outputs": ["1"], "fn_name": "a b"}', "name of a function"),
        ('{"test": "def", "entry_point": null}', "is no Python"),
        (json.dumps({"test": "-" * 99999 + "1"}), "is no Python: nested too deeply"),
        ('{"test": "x = 1", "entry_point": null}', "asserts nothing"),
        ('{"test": "assert True", "entry_point": "f"}', "must define check"),
    ):  # fmt: skip
        assert why in label_problem(label, {})
    with pytest.raises(ValueError, match="must define check"):
        score("", "```python\n1\n```", label, {})


def test_programs_of_every_kind_run_sandboxed_without_this_machines_files(tmp_path):
    seen = f"import os\ndef seen(): return os.path.exists({str(tmp_path)!r})\n"
    assert passes(seen + "print(seen())", {"inputs": [""], "outputs": ["False"]})
    assert passes(seen, {"inputs": [[]], "outputs": [False], "fn_name": "seen"})
    assert passes(seen, "assert seen() is False")


def test_a_run_refuses_to_start_without_a_sandbox_unless_told(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'no user namespaces here' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    data = DataConfig(rm_type="code", reward_workers=1, reward_timeout=60.0)
    with pytest.raises(ValueError, match=r"no user namespaces here.*bubblewrap.*--unsafe-code-execution"):
        open_verifier(data)
    prompt = Prompt(0, token_ids([1]), 1, json.dumps(CHECK), "t", "?")
    with open_verifier(replace(data, unsafe_code_execution=True)) as verifier:
        right, wrong = verifier.score([(prompt, "def square(x): return x * x"), (prompt, "no")])
    assert (right.reward, right.correct, right.details["tests_passed"]) == (1.0, True, 1.0)
    assert (wrong.reward, wrong.error) == (0.0, None)
