import json

import pytest
from mutants import ROOT
from plant_faults import LIST, Arguments, main, read_trials


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


@pytest.mark.slow
def test_verify_sees_published_faults_and_nothing_where_there_is_none(tmp_path):
    main(Arguments(save=tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())["trials"]
    faults = [result for result in results if result["caught_by"]]
    assert all(result["as_expected"] for result in results if not result["caught_by"])
    assert sum(result["as_expected"] for result in faults) >= 0.95 * len(faults)
