"""Show a checkpoint's content, the layout it was written for, and what is missing. Reads headers, not
weights.

    bash tools/ibpo.sh inspect Qwen3-30B-A3B                    # Hugging Face format
    bash tools/ibpo.sh inspect runs/a --checksums               # Megatron's, a run's newest step

The exit status is 0 for a whole checkpoint, 1 if something is missing, superfluous or changed, 2 if there is
no checkpoint.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro
from rich.console import Console

from megatron_ibpo.basics.entry_point import command, parsed
from megatron_ibpo.models import ModelConfigError, ModelShape, read_hf_config
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats.checkpoint_files import MANIFEST, changed_files
from megatron_ibpo.weights.formats.hugging_face import Checkpoint, model_entries
from megatron_ibpo.weights.formats.run_state import (
    HF_FILES,
    RUN_STATE,
    find_stored,
    load_run_state,
    read_layout,
)
from megatron_ibpo.weights.formats.torch_dist import StoredCheckpoint, is_weight


@dataclass
class Arguments:
    directory: tyro.conf.Positional[Path]
    """A checkpoint in either format, or a training run's directory."""
    origin_hf_checkpoint: Path | None = None
    """Source of a Megatron checkpoint's config.json, if it has none of its own."""
    checksums: bool = False
    """Read all files and compare them with the manifest."""
    allow_pickle: bool = False
    """Read pytorch_model.bin, by torch's weights-only unpickler."""


@dataclass
class Findings:
    """Lines to print, and problems."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def say(self, label: str, value: object) -> None:
        self.lines.append((label, str(value)))

    def attempt(self, check: Callable[[], object]) -> None:
        try:
            check()
        except (CheckpointError, ModelConfigError) as error:
            self.problems.append(str(error))


def inspect_hf(directory: Path, allow_pickle: bool) -> Findings:
    findings = Findings()
    checkpoint = Checkpoint(directory, allow_pickle=allow_pickle)
    findings.say("format", "Hugging Face")
    files = sorted(set(checkpoint.file_of.values()))
    findings.say("files", f"{len(files)}, {gigabytes(sum((directory / f).stat().st_size for f in files))}")

    def compare() -> None:
        shape = read_hf_config(directory)
        say_model(findings, shape)
        if any(name.endswith(".experts.gate_up_proj") for name in checkpoint):
            findings.say("experts", "fused, one tensor a layer")
        entries = model_entries(shape, checkpoint)
        ignored = checkpoint.check(shape, entries)
        pieces = {piece.name: piece for entry in entries for piece in entry.pieces}
        say_tensors(findings, [(checkpoint.dtype(p), torch.Size(p.shape).numel()) for p in pieces.values()])
        if any(name.startswith("mtp.") for name in pieces):
            findings.say("multi-token prediction", "one layer")
        if carried := [name for name in pieces if name.startswith(shape.carried)]:
            findings.say("kept and not trained", f"{len(carried)} tensors of {', '.join(shape.carried)}*")
        if ignored:
            findings.say("not part of the policy", ", ".join(ignored))

    findings.attempt(compare)
    return findings


def inspect_megatron(directory: Path, origin: Path | None) -> Findings:
    findings = Findings()
    stored = StoredCheckpoint(directory)
    findings.say("format", "Megatron torch_dist")
    findings.say("directory", directory)
    files = {place.relative_path for place in stored.places.values()}
    findings.say("files", f"{len(files)}, {gigabytes(sum((directory / f).stat().st_size for f in files))}")
    weights = {key: meta for key, meta in stored.tensors.items() if is_weight(key)}
    say_tensors(findings, [(meta.properties.dtype, meta.size.numel()) for meta in weights.values()])
    num_other_tensors = len(stored.tensors) - len(weights)
    findings.say("optimizer", f"{num_other_tensors} tensors" if num_other_tensors else "none: weights only")
    if (directory / RUN_STATE).is_file():
        findings.say("step", load_run_state(directory)["step"])
    findings.say("layout", written_layout(directory) or f"{suggested_layout(stored)}, as its pieces suggest")

    def compare() -> None:
        source = origin or directory / HF_FILES
        if not source.is_dir():
            findings.say("model", "not known: give --origin-hf-checkpoint to compare with it")
            return
        shape = read_hf_config(source)
        say_model(findings, shape)
        stored.check(model_entries(shape, stored))

    findings.attempt(compare)
    return findings


def say_model(findings: Findings, shape: ModelShape) -> None:
    experts = f", {shape.num_experts} experts" if shape.is_moe else ""
    tied = ", tied embeddings" if shape.tie_word_embeddings else ""
    findings.say("model", f"{shape.family}, {shape.num_layers} layers of {shape.hidden_size}{experts}{tied}")


def say_tensors(findings: Findings, tensors: list[tuple[torch.dtype, int]]) -> None:
    findings.say("weights", f"{len(tensors)} tensors, {sum(count for _, count in tensors):,} parameters")
    share: Counter[str] = Counter()
    for dtype, count in tensors:
        share[str(dtype).removeprefix("torch.")] += count
    findings.say("dtypes", ", ".join(f"{dtype} ({count:,})" for dtype, count in share.most_common()))


def written_layout(directory: Path) -> str:
    """Return the layout that checkpoints of this project record."""
    if not (layout := read_layout(directory)):
        return ""
    names = {"TP": "tensor_model", "PP": "pipeline_model", "EP": "expert_model", "ETP": "expert_tensor"}
    sizes = [f"{short} {layout['parallel'][f'{name}_parallel_size']}" for short, name in names.items()]
    for which in ("first", "last"):
        layers = layout["parallel"][f"decoder_{which}_pipeline_num_layers"]
        sizes += [f"{layers} layers on the {which} stage"] if layers else []
    if layout.get("virtual_stages", 1) > 1:
        sizes.append(f"{layout['virtual_stages']} virtual stages")
    return ", ".join(sizes)


def suggested_layout(stored: StoredCheckpoint) -> str:
    """Return the sizes suggested by the pieces and by the ranks that wrote them (`__RANK_N.distcp`)."""
    layers: dict[str, set[object]] = defaultdict(set)
    experts: dict[str, set[int]] = defaultdict(set)
    expert_columns = set()
    for index, place in stored.places.items():
        if index.fqn not in stored.tensors or not is_weight(index.fqn) or index.offset is None:
            continue
        rank = place.relative_path.removeprefix("__").partition("_")[0]
        if ".experts.linear_fc2" in index.fqn:
            *_, expert, _row, column = index.offset
            experts[rank].add(expert)
            expert_columns.add(column)
        elif index.fqn.startswith("decoder.layers."):
            layer = index.fqn.split(".")[2]  # or the first axis, if layers are stacked
            layers[rank].add(layer if layer.isdecimal() else index.offset[0])
    embeddings = stored.tensors.get("embedding.word_embeddings.weight")
    sizes = {
        "TP": len(embeddings.chunks) if embeddings else 1,
        "PP": len({frozenset(of_rank) for of_rank in layers.values()}),
        "EP": len({frozenset(of_rank) for of_rank in experts.values()}) or 1,
        "ETP": len(expert_columns) or 1,
    }
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.3f} GB"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Show one checkpoint. Return 1 if something is missing, superfluous or changed."""
    arguments: Arguments = parsed(Arguments, __doc__, argv, program="ibpo inspect")
    directory = arguments.directory
    if (directory / "config.json").is_file() and not (directory / "metadata.json").is_file():
        findings = inspect_hf(directory, arguments.allow_pickle)
    else:
        directory = find_stored(directory)
        findings = inspect_megatron(directory, arguments.origin_hf_checkpoint)
    if arguments.checksums:
        changed = changed_files(directory)
        findings.say("checksums", f"{len(changed)} files differ" if changed else "all files as written")
        findings.problems += changed
    else:
        findings.say("manifest", "yes; --checksums compares" if (directory / MANIFEST).is_file() else "none")
    console = Console(soft_wrap=True, highlight=False)
    for label, value in findings.lines:
        console.print(f"{label:>24}  {value}", markup=False)
    for problem in findings.problems:
        console.print(f"problem: {problem}", style="red", markup=False)
    return int(bool(findings.problems))


if __name__ == "__main__":
    sys.exit(main())
