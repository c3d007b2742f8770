"""Show how far bfloat16 moves a run's log-probs, step by step: by rounded weights alone, and in total.

    "$(bash tools/bootstrap.sh)" tools/check_precision.py --run runs/a

The run needs `--save-debug-rollout-data`, `--save-interval 1` and as many `--keep-checkpoints` as steps.
transformers reads its tokens again, with the initial weights of a step in several roundings. All figures are
mean |Δ log-prob| per token against transformers with those weights in float32.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from megatron_ibpo.basics.records import Group
from megatron_ibpo.report.rollout_data import load_step, rollout_path
from megatron_ibpo.report.run_dir import run_settings


@dataclass
class Arguments:
    run: Path
    """Directory of the run."""
    groups: int = 4
    """Number of first groups of each step that are read."""
    save: Path | None = None
    """JSON file for the results."""


def main(arguments: Arguments) -> int:
    from megatron_ibpo.basics.versions import machine

    rows, before = [], None
    with tempfile.TemporaryDirectory() as scratch:
        for step, hf_dir in policies(arguments.run, Path(scratch)):
            row = {"step": step, **measured(arguments, step, hf_dir, before)}
            before = hf_dir
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.save:
        found = {"machine": machine(), "steps": rows}
        arguments.save.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def policies(run: Path, scratch: Path) -> Iterator[tuple[int, Path]]:
    """Yield (step, directory in Hugging Face format with the initial weights of the step)."""
    from megatron_ibpo.basics.distributed import World
    from megatron_ibpo.weights.formats.convert import megatron_to_hf

    alone = World(0, 1, torch.device("cpu"), None)
    step, hf_dir = 1, Path(run_settings(run)["hf-checkpoint"])
    while rollout_path(run / "rollouts", step).exists():
        yield step, hf_dir
        stored, hf_dir = run / "checkpoints" / f"step_{step:06d}", scratch / str(step)
        megatron_to_hf(stored, hf_dir, alone)
        step += 1


@torch.no_grad()
def measured(arguments: Arguments, step: int, hf_dir: Path, before: Path | None) -> dict[str, float]:
    """
    Args:
        before: initial weights of the previous step.
    """
    _, groups, trained = load_step(rollout_path(arguments.run / "rollouts", step))
    groups = groups[: arguments.groups]
    temperature = float(run_settings(arguments.run)["rollout-temperature"])

    def read(model: Any) -> list[np.ndarray]:
        return [found for group in groups for found in logprobs(model, group, temperature)]

    model = load(hf_dir)
    exact = read(model)
    engine = [sample.logprobs for group in groups for sample in group.responses]
    keys = [(g, "response", i) for g, group in enumerate(groups) for i in range(len(group.responses))]
    # responses without an advantage were not trained on, and the trainer has no log-probs of them
    own = [None if key not in trained else trained[key].old_logprobs for key in keys]
    both = [(ours, theirs) for ours, theirs in zip(own, exact, strict=True) if ours is not None]
    found = {
        "tokens": sum(map(len, exact)),
        "trainer": mean_difference(*zip(*both, strict=True)),
        "engine": mean_difference(engine, exact),
    }
    if before is not None:
        old = load(before)
        found["weights_before"] = mean_difference(read(old), exact)
        found |= changed(old, model)
        for ours, new in zip(old.parameters(), model.parameters(), strict=True):
            ours += rounded(new) - rounded(ours)
        found["update_of_rounded_weights"] = mean_difference(read(old), exact)
        del old
    for parameter in model.parameters():
        parameter.copy_(rounded(parameter))
    found["rounded_weights"] = mean_difference(read(model), exact)
    coarse = read(load(hf_dir, torch.bfloat16))
    found["all_bfloat16"] = mean_difference(coarse, exact)
    found["engine_against_all_bfloat16"] = mean_difference(engine, coarse)
    return found


def load(hf_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(hf_dir, dtype=dtype).eval()


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().float()


def changed(before: Any, after: Any) -> dict[str, float]:
    """Return the shares of the weights' elements that an update changed, in each precision."""
    pairs = list(zip(before.parameters(), after.parameters(), strict=True))
    elements = sum(new.numel() for _, new in pairs)
    return {
        "changed_float32": sum(int((old != new).sum()) for old, new in pairs) / elements,
        "changed_bfloat16": sum(int((rounded(old) != rounded(new)).sum()) for old, new in pairs) / elements,
    }


def logprobs(model: Any, group: Group, temperature: float) -> list[np.ndarray]:
    """Return the log-probs of every token of each response."""
    prompt = group.prompt.token_ids.tolist()
    responses = [sample.token_ids.tolist() for sample in group.responses]
    longest = max(map(len, responses))
    ids = torch.tensor([prompt + ids + [0] * (longest - len(ids)) for ids in responses])
    logits = model(ids, logits_to_keep=longest + 1).logits[:, :-1].float() / temperature
    found = logits.log_softmax(-1).gather(2, ids[:, len(prompt) :, None])[..., 0]
    return [row[: len(ids)].numpy() for row, ids in zip(found, responses, strict=True)]


def mean_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    return float(np.abs(np.concatenate(ours) - np.concatenate(theirs)).mean())


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
