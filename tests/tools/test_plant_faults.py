import pytest
from mutants import ROOT
from plant_faults import LIST, RESULTS, Arguments, main, read_results, read_trials, table


def test_every_published_fault_fits_its_file_once():
    faults = [trial.mutant for trial in read_trials() if trial.caught_by]
    for fault in faults:
        source = (ROOT / fault.file).read_text()
        assert fault.planted(source) != source
        compile(fault.planted(source), fault.file, "exec")


def test_most_faults_of_the_list_were_reported_and_the_others_say_that_they_were_not():
    issues = [line for line in LIST.read_text().splitlines() if line.startswith("  issue:")]
    assert sum("#" in line for line in issues) >= 24
    assert {line for line in issues if "#" not in line} == {"  issue: []"}


def test_the_record_has_every_fault_and_nothing_wrong_without_one_and_the_document_shows_it():
    results = read_results(RESULTS)
    assert {trial.name for trial in read_trials() if trial.caught_by} - results.keys() == set()
    assert [name for name, result in results.items() if not result["as_expected"]] == []
    document = (ROOT / "docs/verify.md").read_text()
    assert [line for line in table(results) if line not in document] == []


@pytest.mark.slow
def test_verify_sees_faults_that_are_planted(tmp_path):
    """One of the loss and one of a reward, whose checks need no engine: the record has all of them."""
    faults = ("gradients shrink by the number of micro-batches", "no answer is right")
    assert main(Arguments(only=faults, save=tmp_path)) == 0
    results = read_results(tmp_path)
    assert {name: bool(result["wrong"]) for name, result in results.items()} == dict.fromkeys(faults, True)
