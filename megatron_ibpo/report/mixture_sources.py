"""Metrics of each source in a mixture."""

from collections.abc import Sequence

from megatron_ibpo.basics.records import Group


def metrics_by_task(groups: Sequence[Group]) -> dict[str, float]:
    """Return `prompts/TASK` and `accuracy/TASK` (share of scored responses that are correct) for every task
    of a step."""
    by_task: dict[str, list[Group]] = {}
    for group in groups:
        by_task.setdefault(group.prompt.task, []).append(group)
    metrics: dict[str, float] = {}
    for task, own in sorted(by_task.items()):
        scored = [
            response.correct for group in own for response in group.responses if response.reward is not None
        ]
        metrics[f"prompts/{task}"] = float(len(own))
        if scored:
            metrics[f"accuracy/{task}"] = sum(scored) / len(scored)
    return metrics
