from dataclasses import replace

import pytest
from mutants import ROOT
from plant_faults import LIST, RESULTS, Arguments, changed_model, main, read_results, read_trials, table

from megatron_ibpo.run.settings import parse_config


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
    results = read_results(RESULTS)
    assert {trial.name for trial in read_trials() if trial.caught_by} - results.keys() == set()
    assert [name for name, result in results.items() if not result["as_expected"]] == []
    document = (ROOT / "docs/verify.md").read_text()
    assert [line for line in table(results) if line not in document] == []


@pytest.mark.slow
def test_four_dense_recipes_share_one_small_run(tmp_path):
    """What verify says of the first, cut down, it says of the other three."""
    from megatron_ibpo.verify.small_run import small_run  # imports torch

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "build").mkdir()
    trials = {trial.name: trial for trial in read_trials()}
    runs, weights = [], set()
    for name in ("qwen3_0_6b_one_gpu", "qwen3_0_6b_ibpo", "qwen3_4b_one_gpu", "qwen3_4b_ibpo"):
        model, scratch = changed_model(tmp_path, trials[name].model), tmp_path / "small"
        small = small_run(
            parse_config([*trials[name].flags, "--hf-checkpoint", str(model)]), scratch, full=False
        )
        weights.add((scratch / "model/model.safetensors").read_bytes())
        parameters = {**small.rollout.parameters, "vllm_gpu_memory_utilization": None}
        runs.append(
            replace(
                small,
                model=replace(small.model, max_tokens_per_gpu=1),
                rollout=replace(small.rollout, rollout_max_context_len=1, parameters=parameters),
            )
        )
    assert len(weights) == 1
    assert [run == runs[0] for run in runs] == [True] * 4


@pytest.mark.slow
def test_verify_sees_faults_that_are_planted(tmp_path):
    """One of the loss and one of a reward, whose checks need no engine: the record has all of them."""
    faults = ("gradients shrink by the number of micro-batches", "no answer is right")
    assert main(Arguments(only=faults, save=tmp_path)) == 0
    results = read_results(tmp_path)
    assert {name: bool(result["wrong"]) for name, result in results.items()} == dict.fromkeys(faults, True)
