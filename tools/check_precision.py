"""Show how far bfloat16 moves a run's log-probs, step by step: by rounded weights alone, and by all of it.

    "$(bash tools/bootstrap.sh)" tools/check_precision.py --run runs/a

The run needs `--save-debug-rollout-data`, `--save-interval 1` and as many `--keep-checkpoints` as steps. Its
own tokens are read again by transformers with the weights that each step began with: in float32, in float32
on weights rounded to bfloat16, and with weights and activations in bfloat16.
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
from safetensors.torch import load_file

from megatron_ibpo.records import Group
from megatron_ibpo.report.rollout_data import load_step, rollout_path
from megatron_ibpo.report.run_dir import run_settings


@dataclass
class Arguments:
    run: Path
    """Directory of the run."""
    groups: int = 4
    """So many first groups of each step are read."""
    save: Path | None = None
    """Write what was found to this file, as JSON."""


def main(arguments: Arguments) -> int:
    from megatron_ibpo.versions import machine

    rows, before = [], None
    temperature = float(run_settings(arguments.run)["rollout-temperature"])
    for step, hf_dir in policies(arguments.run):
        weights = tensors_of(hf_dir)
        row = {"step": step, **differences(arguments, hf_dir, step, temperature)}
        row |= {} if before is None else changed(before, weights)
        before = weights
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.save:
        found = {"machine": machine(), "run": str(arguments.run), "steps": rows}
        arguments.save.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def policies(run: Path) -> Iterator[tuple[int, Path]]:
    """(step, directory in Hugging Face format of the weights that it sampled from and began with)."""
    from megatron_ibpo.weights.formats.convert import megatron_to_hf
    from megatron_ibpo.world import World

    yield 1, Path(run_settings(run)["hf-checkpoint"])
    step = 2
    while rollout_path(run / "rollouts", step).exists():
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / "hf"
            megatron_to_hf(
                run / "checkpoints" / f"step_{step - 1:06d}", target, World(0, 1, torch.device("cpu"), None)
            )
            yield step, target
        step += 1


def tensors_of(hf_dir: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(hf_dir.glob("*.safetensors")) for name, t in load_file(file).items()}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, float]:
    """Shares of the elements that the update before this step changed, in each precision."""
    counts = {torch.float32: 0, torch.bfloat16: 0}
    for name, tensor in after.items():
        for dtype in counts:
            counts[dtype] += int((tensor.to(dtype) != before[name].to(dtype)).sum())
    elements = sum(tensor.numel() for tensor in after.values())
    return {f"changed_{str(dtype)[6:]}": count / elements for dtype, count in counts.items()}


@torch.no_grad()
def differences(arguments: Arguments, hf_dir: Path, step: int, temperature: float) -> dict[str, float]:
    """Mean |Δ log-prob| per token against transformers in float32, of everything that computed it."""
    from transformers import AutoModelForCausalLM

    _, groups, trained = load_step(rollout_path(arguments.run / "rollouts", step))
    groups = groups[: arguments.groups]
    model: Any = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()

    def read(model: Any) -> list[np.ndarray]:
        return [found for group in groups for found in logprobs(model, group, temperature)]

    exact = read(model)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    rounded = read(model)
    coarse = read(AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.bfloat16).eval())
    engine = [sample.logprobs for group in groups for sample in group.responses]
    keys = [(g, "response", i) for g, group in enumerate(groups) for i in range(len(group.responses))]
    # responses without an advantage were not trained on, and the trainer has nothing of them
    own = [None if key not in trained else trained[key].old_logprobs for key in keys]
    both = [(ours, theirs) for ours, theirs in zip(own, exact, strict=True) if ours is not None]
    return {
        "tokens": sum(map(len, exact)),
        "trainer": mean_difference(*zip(*both, strict=True)),
        "engine": mean_difference(engine, exact),
        "rounded_weights": mean_difference(rounded, exact),
        "all_bfloat16": mean_difference(coarse, exact),
        "engine_against_all_bfloat16": mean_difference(engine, coarse),
    }


def logprobs(model: Any, group: Group, temperature: float) -> list[np.ndarray]:
    """Those of every token of each response."""
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
