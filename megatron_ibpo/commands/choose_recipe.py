"""Choose a recipe and layout for a model on the available devices; `examples/run.sh` calls this first.

    python -m megatron_ibpo.commands.choose_recipe --hf-checkpoint MODEL -- FLAGS…

Prints the choice for a shell, one word per line: recipe, nodes, trainers per node, flags of the layout. A
description of the choice, and of how to make another one, goes to stderr. A model of the Hub is downloaded,
on every node on which the script is started.
"""

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ibpo.basics.entry_point import command
from megatron_ibpo.basics.text import counted
from megatron_ibpo.config import ParallelConfig, display_name, path_of_user, read_yaml
from megatron_ibpo.config.paths import hub_id
from megatron_ibpo.data.hub import local_model, pins_of
from megatron_ibpo.models import ModelShape, check_layout, forward_flops, read_hf_config

FOLDER = Path(__file__).resolve().parents[2] / "examples/recipes"
LARGEST_ON_CPUS = 1e9
"""Parameters. On CPUs a step of a larger model takes too long to be useful."""
LARGEST_TINY = 1e8
"""Parameters up to which a model takes the CPU recipe on GPUs too, since its texts are as short there."""
MADE_FOR = 1e7
"""Parameters up to which learning rate and lengths of the CPU recipes serve."""
ROOM = 0.05
"""Share of a GPU's memory to leave free, for the error of a plan's estimates."""
IN_MAIN_MEMORY = ("--use-precision-aware-optimizer", "--optimizer-cpu-offload")
OF_SCRIPT = {"--print-config", "--verify", "--full"}
"""Flags that do not say how to train."""
QUESTIONS = {"-h", "--help", "--help-all"}
"""Flags that `train` answers without a run."""
PER_NODE = 8
"""GPUs per node to plan for if none was found and no count is given."""


@dataclass(frozen=True)
class Recipe:
    """A file of `FOLDER` for GPUs, with the models and GPUs that it is written for."""

    name: str
    mixture: bool
    """True for mixtures of experts, False for dense models."""
    largest: float
    """Largest number of parameters of a model for this recipe."""
    gpus: int
    gpu_memory_gb: int = 80
    """Nominal memory of each GPU."""

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.yaml"

    def fits(self, gpus: float, gpu_memory_gib: float) -> bool:
        """Return whether there are as many GPUs of this size; CUDA reports less than the nominal memory."""
        return self.gpus <= gpus and self.gpu_memory_gb * 0.92 <= gpu_memory_gib

    def __str__(self) -> str:
        kind = "mixtures of experts" if self.mixture else "dense models"
        size = f" up to {self.largest / 1e9:g} B parameters" if self.largest < math.inf else ""
        gpus = f"{counted(self.gpus, 'GPU')} of {self.gpu_memory_gb} GB"
        return f"for {kind}{size}, written for {gpus}"


RECIPES = (
    Recipe("qwen3_4b_ibpo", mixture=False, largest=9e9, gpus=8),
    Recipe("qwen3_0_6b_ibpo", mixture=False, largest=1.2e9, gpus=1),
    Recipe("qwen3_1_7b_one_gpu", mixture=False, largest=2.5e9, gpus=1),
    Recipe("qwen3_4b_one_gpu", mixture=False, largest=9e9, gpus=1),
    Recipe("qwen3_0_6b_one_gpu", mixture=False, largest=9e9, gpus=1, gpu_memory_gb=24),
    Recipe("qwen3_32b_ibpo", mixture=False, largest=math.inf, gpus=32),
    Recipe("qwen3_30b_a3b_ibpo", mixture=True, largest=40e9, gpus=8),
    Recipe("qwen3_next_80b_a3b_ibpo", mixture=True, largest=120e9, gpus=32),
    Recipe("qwen3_235b_a22b_ibpo", mixture=True, largest=math.inf, gpus=64),
)
"""The first one that fits a model and its devices is taken."""


@dataclass(frozen=True)
class Devices:
    """The nodes and GPUs that a run may use."""

    nodes: int
    gpus_per_node: int
    """GPUs per node; 0: CPUs alone."""
    gpu_memory_gib: float

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        if self.gpus == 0:
            return "CPUs alone"
        on_nodes = f" on {counted(self.nodes, 'node')}" if self.nodes > 1 else ""
        return f"{counted(self.gpus, 'GPU')} of {self.gpu_memory_gib:.0f} GiB{on_nodes}"


@dataclass(frozen=True)
class Choice:
    """A recipe and its layout."""

    recipe: Path
    description: str
    """Description of the models that the recipe is written for."""
    trainers_per_node: int
    layout: tuple[str, ...]
    """Flags to append to the recipe."""


def choose(hf_dir: Path, devices: Devices, flags: Sequence[str] = ()) -> Choice:
    """Return the recipe for the model in `hf_dir`, and the first layout whose plan fits the devices.

    The recipe's own layout is tried first, then others by increasing tensor parallelism, since less of it
    sends less between GPUs. Then the same layouts with the optimizer's steps in main memory, which take
    longer. A layout that leaves `ROOM` is preferred.

    Args:
        hf_dir: only config.json is read.
        flags: the user's own, which override recipe and layout. Flags that only ask for output, such as
            --help, are left out.

    Raises:
        ValueError: there is no recipe for such a model on such devices, or none fits.
    """
    shape = read_hf_config(hf_dir)
    parameters = estimated_parameters(shape)
    if devices.gpus == 0 and parameters > LARGEST_ON_CPUS:
        raise ValueError(
            f"about {parameters / 1e9:.1f} B parameters are too many for CPUs, and no GPU was found here. "
            "To plan for a cluster, add --dry-run and give its size by NNODES=… and GPUS_PER_NODE=…"
        )
    if devices.gpus == 0 or parameters <= LARGEST_TINY:
        return _tiny(shape, devices)
    from megatron_ibpo.plan.feasibility import Plan, make_plan, tightest
    from megatron_ibpo.run.settings import parse_config  # slow to import, and for GPUs only

    recipe = choose_recipe(shape, devices.gpus, devices.gpu_memory_gib)
    flags = [] if QUESTIONS & {*flags} else [word for word in flags if word not in OF_SCRIPT]
    problems: list[str] = []
    tight: Choice | None = None
    layouts = list(_layouts(shape, devices))
    for layout in [*layouts, *((*layout, *IN_MAIN_MEMORY) for layout in layouts)]:
        arguments = ["--config", str(recipe.path), *layout, *flags, "--hf-checkpoint", str(hf_dir)]
        config = parse_config(arguments, note=lambda line: None)  # the run itself prints them
        config.run.dry_run_gpus_per_node = devices.gpus_per_node
        config.run.dry_run_gpu_memory_gib = devices.gpu_memory_gib
        plan = make_plan(config, devices.gpus, shape=shape)
        problems = plan.problems
        if isinstance(plan, Plan) and not problems:
            choice = Choice(recipe.path, str(recipe), devices.gpus_per_node, layout)
            if tightest(plan).free_bytes >= ROOM * devices.gpu_memory_gib * 1024**3:
                return choice
            tight = tight or choice
    if tight is not None:
        return tight
    raise ValueError(
        f"{display_name(hf_dir)} (about {parameters / 1e9:.1f} B parameters) does not fit on {devices} with "
        f"{recipe.path.name} ({recipe}): " + "; ".join(problems) + ". More devices: NNODES=… and "
        "GPUS_PER_NODE=…; --dry-run plans without having them"
    )


def choose_recipe(shape: ModelShape, gpus: float = math.inf, gpu_memory_gib: float = math.inf) -> Recipe:
    """Return the first recipe for a model of this kind and size that fits the GPUs. If none does, return the
    one with the lowest demands.

    Args:
        gpus: by default as many as a recipe wants.
        gpu_memory_gib: of each GPU; by default as much as a recipe wants.
    """
    parameters = estimated_parameters(shape)
    for_model = [
        recipe for recipe in RECIPES if recipe.mixture == shape.is_moe and parameters <= recipe.largest
    ]
    fitting = (recipe for recipe in for_model if recipe.fits(gpus, gpu_memory_gib))
    return next(fitting, min(for_model, key=lambda recipe: (recipe.gpus, recipe.gpu_memory_gb)))


def estimated_parameters(shape: ModelShape) -> float:
    """Estimate the number of parameters of a model: those that take part in matrix products."""
    every_expert = replace(shape, experts_per_token=shape.num_experts)
    return forward_flops(every_expert, 1) / 2


def _tiny(shape: ModelShape, devices: Devices) -> Choice:
    """Return a recipe for CPUs, with one trainer or the recipe's own two."""
    if not (shape.is_moe and shape.is_recurrent):
        return Choice(FOLDER / "small_cpu.yaml", f"for small models{_warning(shape)}", 1, ())
    recipe = FOLDER / "tiny_qwen3_next_ibpo.yaml"
    description = f"for tiny models built as Qwen3-Next is{_warning(shape)}"
    two = ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=2, sequence_parallel=True)
    if devices.gpus_per_node != 1 and not check_layout(shape, two, world_size=2):
        return Choice(recipe, description, 2, ())  # the recipe's own layout
    return Choice(recipe, description, 1, _flags(tensor=1, expert=1))


def _warning(shape: ModelShape) -> str:
    """Return what to set where the recipe is for smaller models than this one."""
    parameters = estimated_parameters(shape)
    if parameters <= MADE_FOR:
        return ""
    return (
        f", of a million parameters; this one has about {parameters / 1e6:.0f} million:\n"
        "          give --lr (1e-6 is usual), --rollout-max-response-len and --rollout-max-context-len,\n"
        "          and --apply-chat-template for a model that was trained on chats"
    )


def _layouts(shape: ModelShape, devices: Devices) -> Iterator[tuple[str, ...]]:
    """Yield layouts to try, in order; one without flags is the recipe's own."""
    yield ()
    per_node = devices.gpus_per_node
    heads = shape.num_key_value_heads
    tensor_sizes = [size for size in (1, 2, 4, 8) if per_node % size == 0 and heads % size == 0]
    if not shape.is_moe:
        yield from (_flags(tensor=size, engine=size) for size in tensor_sizes)
        return
    stages = [size for size in (1, 2, 4, 8) if devices.nodes % size == 0]
    yield from (
        _flags(tensor=tensor, expert=per_node, pipeline=pipeline, engine=per_node)
        for pipeline in stages
        for tensor in tensor_sizes[:2]
    )


def _flags(*, tensor: int, expert: int = 1, pipeline: int = 1, engine: int = 1) -> tuple[str, ...]:
    return (
        "--tensor-model-parallel-size", str(tensor),
        "--expert-model-parallel-size", str(expert),
        "--pipeline-model-parallel-size", str(pipeline),
        "--sequence-parallel" if tensor > 1 else "--no-sequence-parallel",
        "--rollout-num-gpus-per-engine", str(engine),
    )  # fmt: skip


def find_devices(nodes: int | None, gpus_per_node: int | None, planned: ModelShape | None) -> Devices:
    """Return the devices that the user named, otherwise those of this machine.

    Args:
        planned: a model to plan for. If no GPU was found and the model is too large for CPUs, return the GPUs
            that its recipe is written for.
    """
    memories = _gpu_memories()
    num_gpus, memory = len(memories), min(memories, default=80.0)
    if planned is not None and not num_gpus and estimated_parameters(planned) > LARGEST_ON_CPUS:
        gpus = choose_recipe(planned).gpus
        per_node = min(gpus, PER_NODE) if gpus_per_node is None else gpus_per_node
        return Devices(nodes or -(-gpus // PER_NODE), per_node, memory)
    return Devices(nodes or 1, num_gpus if gpus_per_node is None else gpus_per_node, memory)


def _gpu_memories() -> list[float]:
    """Return the GiB of each GPU of this machine that CUDA_VISIBLE_DEVICES leaves. nvidia-smi answers faster
    than torch can be imported."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    memories = [float(line) / 1024 for line in done.stdout.splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return memories if visible is None else memories[: len([gpu for gpu in visible.split(",") if gpu])]


def _local(model: Path, load: Path | None, flags: Sequence[str]) -> Path:
    """Return the directory of the model, with its weights if `flags` are those of a run; of a resumed run
    (--load) with the commit that it had."""
    pins = pins_of([] if load is None else [load, *load.parents[:2]])
    runs = not ({*QUESTIONS, "--dry-run", "--print-config"} & {*flags})
    return local_model(model if hub_id(model) else path_of_user(model), pins, weights=runs)


def _demonstration(recipe: Path, hf_dir: Path, flags: Sequence[str]) -> str:
    """Return a line that says that a model of the user's will train on a task of the repository, if so."""
    names = {word.partition("=")[0].replace("_", "-") for word in flags}
    names_prompts = names & {"--prompt-data", "--config", "--load-debug-rollout-data"}
    task = read_yaml(recipe, str(recipe)).get("prompt-data")
    if task is None or hf_dir.is_relative_to(FOLDER.parent) or names_prompts:
        return ""
    return f"No PROMPT_DATA is given: this trains on a demonstration task, {task}, not on your data\n"


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the choice. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="megatron_ibpo.commands.choose_recipe", description=__doc__)
    parser.add_argument("--hf-checkpoint", type=Path, required=True)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument("flags", nargs="*", help="of the training run, after --")
    arguments = parser.parse_args(argv)
    of_run = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    of_run.add_argument("--load", type=path_of_user)
    of_run.add_argument("--dry-run-gpu-memory-gib", "--dry_run_gpu_memory_gib", default="")
    run, _ = of_run.parse_known_args(arguments.flags)
    hf_dir = _local(arguments.hf_checkpoint, run.load, arguments.flags)
    shape = read_hf_config(hf_dir)
    devices = find_devices(
        arguments.nodes, arguments.gpus_per_node, shape if "--dry-run" in arguments.flags else None
    )
    with suppress(ValueError):  # the plan refuses a value that is no number
        devices = replace(devices, gpu_memory_gib=float(run.dry_run_gpu_memory_gib) or devices.gpu_memory_gib)
    choice = choose(hf_dir, devices, arguments.flags)
    layout = " ".join(choice.layout) or "the recipe's own"
    trainers = devices.nodes * choice.trainers_per_node
    demonstration = _demonstration(choice.recipe, hf_dir, arguments.flags)
    print(
        f"{demonstration}{display_name(hf_dir)} on {devices}:\n"
        f"  recipe  {choice.recipe}\n"
        f"          {choice.description}\n"
        "          (any key of it is a flag, --config FILE adds another recipe)\n"
        f"  layout  {counted(trainers, 'trainer')}, {layout}\n"
        "          (flags of yours win; NNODES and GPUS_PER_NODE name other devices)",
        file=sys.stderr,
    )
    print(choice.recipe, devices.nodes, choice.trainers_per_node, *choice.layout, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
