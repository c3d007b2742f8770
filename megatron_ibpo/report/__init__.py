"""The output of a run: metrics, progress, curves, summary, recorded rollouts."""

from megatron_ibpo.report.alarms import RewardErrorRateError, check_reward_errors, rounding_bound, step_alarms
from megatron_ibpo.report.display import Size, run_sizes
from megatron_ibpo.report.metrics_log import (
    load_outcomes,
    metrics_by_task,
    outcomes_path,
    read_rows,
    save_outcomes,
)
from megatron_ibpo.report.rollout_data import load_step, rollout_path, save_groups
from megatron_ibpo.report.run_dir import jsonable, prepare_run_dir
from megatron_ibpo.report.run_report import Report
from megatron_ibpo.report.stages import Stages

__all__ = [
    "Report",
    "RewardErrorRateError",
    "Size",
    "Stages",
    "check_reward_errors",
    "jsonable",
    "load_outcomes",
    "load_step",
    "metrics_by_task",
    "outcomes_path",
    "prepare_run_dir",
    "read_rows",
    "rollout_path",
    "rounding_bound",
    "run_sizes",
    "save_groups",
    "save_outcomes",
    "step_alarms",
]
