"""Samples of top-p and top-k have one probability in engine and trainer: whole runs of the lean back end."""

import os
import shutil

import pytest

from megatron_ibpo.commands import train
from megatron_ibpo.journal import read_journal
from support.example_runs import rows_of
from support.paths import ROOT

FLAGS = (
    "--config", "examples/recipes/tiny_qwen3_study.yaml", "--rollout-backend", "lean",
    "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "24",
    "--rollout-temperature", "2.4", "--rollout-top-p", "0.8", "--tis-clip", "1000", "--eval-num-prompts", "0",
    "--operator-skill-prompts", "0", "--reward-workers", "1", "--seed", "0",
)  # fmt: skip


def trained(run_dir, *flags):
    os.chdir(ROOT)
    assert train.main([*FLAGS, "--run-dir", str(run_dir), *flags]) == 0
    return rows_of(run_dir)


@pytest.mark.slow
@pytest.mark.forked
@pytest.mark.parametrize("flags", [
    ("--use-tis", "--rollout-top-p-cycle", "1", "0.8", "0.5", "--rollout-top-k-cycle", "-1", "-1", "4", "4"),
    ("--use-tis",),
    ("--old-logprobs", "engine", "--num-steps-per-rollout", "1"),
])  # fmt: skip
def test_engine_ratios_are_1_before_the_first_update(flags, tmp_path):
    """Without the replay of masks the first mean was .898 (tools/results/sampling_mask.json)."""
    (row,) = trained(tmp_path, *flags, "--num-rollout", "1")
    ratio = row["importance_weight_mean" if "--use-tis" in flags else "ratio_mean"]
    assert ratio == pytest.approx(1, abs=1e-4)
    assert row["logprob_diff_abs_max"] < 1e-3
    assert row["logprob_diff_abs_mean"] < row["logprob_diff_bound"], "the alarm is on"
    assert row["corrections"] > 0
    masks = [sample.sampling_mask for sample in read_journal(tmp_path / "journal", 0).samples.values()]
    assert any(mask is not None and mask.counts.any() for mask in masks)


@pytest.mark.slow
@pytest.mark.forked
def test_a_resumed_run_trains_on_journal_masks_to_equal_weights(tmp_path):
    flags = ("--use-tis", "--num-rollout", "2", "--save", "--save-interval", "1")
    first, again = tmp_path / "first", tmp_path / "again"
    if (pid := os.fork()) == 0:  # each run is the only one of its process
        trained(first, *flags)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    shutil.copytree(first, again)
    shutil.rmtree(again / "checkpoints/step_000002")
    shutil.rmtree(again / "hf")
    rows = trained(again, *flags, "--load", str(again))
    assert "engine_requests_max" not in rows[-1], "what was sampled is read from the journal"
    assert rows[-1]["loss"] == rows_of(first)[-1]["loss"]
    exported = [run / "hf/model.safetensors" for run in (first, again)]
    assert exported[0].read_bytes() == exported[1].read_bytes()
