"""Search the layouts of a run before it is started: print those that fit on a number of GPUs, fastest first.

    bash tools/ibpo.sh search --gpus 64 --hardware h100 --hf-checkpoint DIR

Only config.json of the checkpoint is read. docs/planner.md gives the accuracy of the predictions.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ibpo.basics.entry_point import command, parsed
from megatron_ibpo.commands.choose_recipe import choose_recipe
from megatron_ibpo.config import write_config
from megatron_ibpo.data.hub import local_model
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.plan.prediction import FittingLayout, lines, search
from megatron_ibpo.run.settings import check_settings, parse_config


@dataclass
class Arguments:
    gpus: int
    """Total GPUs of trainers and engines."""
    hardware: str
    """GPU type; docs/planner.md lists them."""
    hf_checkpoint: Path
    """Directory with the model's config.json, or a model of the Hugging Face Hub."""
    config: Path | None = None
    """Recipe with batch and lengths; None: the recipe for the model and the GPUs."""
    response_len: int | None = None
    """Mean tokens per response; None: half of the limit."""
    top: int = 8
    """Number of layouts to show."""
    save: Path | None = None
    """File for the best layout as a recipe."""


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the layouts that fit, and write the best as a recipe."""
    arguments: Arguments = parsed(Arguments, __doc__, argv, program="ibpo search")
    hf_dir = local_model(arguments.hf_checkpoint, weights=False)
    shape = read_hf_config(hf_dir)
    recipe = arguments.config or choose_recipe(shape, arguments.gpus).path
    config = parse_config(["--config", str(recipe), "--hf-checkpoint", str(hf_dir)])
    config.run.dry_run_response_len = arguments.response_len
    planned = replace(config.run, dry_run=True, dry_run_world_size=arguments.gpus)
    check_settings(replace(config, run=planned))
    layouts = search(config, arguments.gpus, arguments.hardware, arguments.top)
    for place, layout in enumerate(layouts, 1):
        print(f"{place}. {layout.seconds:,.1f} s per step: {described(layout)}")
    best = layouts[0]
    print("\nThe first:")
    print("\n".join(lines(best.setting, best.config.run.num_rollout)))
    if arguments.save is not None:
        write_config(best.config, arguments.save)
        print(f"its recipe is in {arguments.save}")


def described(fitting: FittingLayout) -> str:
    """Return a line that describes a layout."""
    setting = fitting.setting
    layout, engine, task = setting.layout, setting.engine, setting.task
    shared = f" CP{layout.context}" if layout.context > 1 else ""
    words = [f"TP{layout.tensor} PP{layout.pipeline}{shared} EP{layout.expert} DP{layout.data}"]
    if layout.recompute != "none":
        words.append("recomputed")
    if layout.offload_optimizer:
        words.append("optimizer in main memory")
    placement = "on the same GPUs" if setting.colocated else f"on {setting.engine_gpus} GPUs of their own"
    words.append(f"engines of {engine.tensor} {placement}")
    if task.staleness:
        words.append(f"staleness {task.staleness}")
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
