"""Faults that are planted: those of the list fit the code as it is, and those drawn by lot change it."""

import ast
from collections import Counter

import pytest
from mutants import ROOT, is_in_function, read_mutants
from mutation_sample import at, drawn

PACKAGE = ROOT / "megatron_ibpo"


def test_every_fault_of_the_list_fits_its_file_once():
    for mutant in read_mutants():
        source = (ROOT / mutant.file).read_text()
        assert mutant.planted(source) != source
        assert mutant.lines(source)


@pytest.mark.slow  # a tool for maintainers
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


def test_only_the_body_of_a_function_is_run_by_its_callers_alone():
    source = "LIMIT = 3\n\n\ndef first(\n    most=LIMIT,\n):\n    return most\n"
    assert [line for line in range(1, 8) if is_in_function(source, {line})] == [7]
