"""Faults that are planted: those of the list fit the code as it is, and those drawn by lot change it."""

import ast
from collections import Counter

from mutants import ROOT, in_runs, is_in_function, read_mutants
from mutation_sample import at, drawn, edit_of

PACKAGE = ROOT / "megatron_ibpo"


def test_every_fault_of_the_list_fits_its_file_once():
    for mutant in read_mutants():
        source = (ROOT / mutant.file).read_text()
        assert mutant.planted(source) != source
        assert mutant.lines(source)


def test_drawn_faults_are_those_of_their_seed_and_leave_a_program():
    faults = drawn(PACKAGE, 60, seed=3)
    assert faults == drawn(PACKAGE, 60, seed=3)
    assert len(faults) == len({name for name, *_ in at(faults, ROOT)}) == 60
    assert min(Counter(room for room, *_ in faults).values()) >= 1
    for _, file, edit in faults:
        source = file.read_text()
        assert source.count(edit.old) == 1
        changed = ast.parse(source.replace(edit.old, edit.new))
        assert ast.dump(changed) != ast.dump(ast.parse(source))


def test_a_place_that_occurs_twice_is_told_by_the_lines_around_it():
    source = "a = 1\nb = x < 2\n\nc = 3\nb = x < 2\n"
    statement = ast.parse(source).body[3]
    assert isinstance(statement, ast.Assign)
    edit = edit_of(source, statement.value, "(x <= 2)")
    assert (edit.line, edit.shown) == (5, "x < 2 → (x <= 2)")
    assert source.replace(edit.old, edit.new) == "a = 1\nb = x < 2\n\nc = 3\nb = (x <= 2)\n"


def test_pytest_collects_two_files_first_and_then_more():
    tests = [f"{file}.py::{name}" for name in "ab" for file in "fghijklmno"]
    runs = [*in_runs(tests)]
    assert runs[0] == ["f.py::a", "g.py::a", "f.py::b", "g.py::b"]
    assert [len(run) for run in runs] == [4, 12, 4]
    assert [*in_runs([])] == []


def test_only_the_body_of_a_function_is_run_by_its_callers_alone():
    source = "LIMIT = 3\n\n\ndef first(\n    most=LIMIT,\n):\n    return most\n"
    assert [line for line in range(1, 8) if is_in_function(source, {line})] == [7]
