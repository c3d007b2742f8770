import json

import pytest
from mutants import ROOT
from plant_faults import LIST, RESULTS, Arguments, main, read_trials, table


def test_every_published_fault_fits_its_file_once():
    faults = [trial.mutant for trial in read_trials() if trial.caught_by]
    for fault in faults:
        source = (ROOT / fault.file).read_text()
        assert fault.planted(source) != source
        compile(fault.planted(source), fault.file, "exec")


def test_faults_of_the_list_name_their_issue_or_none():
    issues = [line for line in LIST.read_text().splitlines() if line.startswith("  issue:")]
    assert sum("#" in line for line in issues) >= 24
    assert {line for line in issues if "#" not in line} == {"  issue: []"}


def test_the_fault_record_is_complete_and_documented():
    trials = {trial["name"]: trial for trial in json.loads(RESULTS.read_text())["trials"]}
    assert {trial.name for trial in read_trials() if trial.caught_by} - trials.keys() == set()
    assert [name for name, trial in trials.items() if not trial["as_expected"]] == []
    document = (ROOT / "docs/verify.md").read_text()
    assert [line for line in table(trials) if line not in document] == []


@pytest.mark.slow
def test_verify_sees_faults_that_are_planted(tmp_path):
    """One of the loss and one of a reward, whose checks need no engine: the record has all of them."""
    faults = ("gradients shrink by the number of micro-batches", "no answer is right")
    assert main(Arguments(only=faults, save=tmp_path / "results.json")) == 0
    results = json.loads((tmp_path / "results.json").read_text())["trials"]
    assert {result["name"]: bool(result["wrong"]) for result in results} == dict.fromkeys(faults, True)
