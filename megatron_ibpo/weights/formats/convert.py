"""Hugging Face checkpoints ⇄ Megatron's distributed checkpoints, file to file. No model is built: tensors are
read, rearranged by the weight map and written one at a time, by a few threads on every rank, each of which
writes files of its own."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.models import ModelShape, check_layout, least_world, padded_vocab_size, read_hf_config
from megatron_ibpo.models.weight_map import Entry, is_carried
from megatron_ibpo.weights import CheckpointError, listed
from megatron_ibpo.weights.formats import directories
from megatron_ibpo.weights.formats.directories import Item, Job, Result, WorkingMemory
from megatron_ibpo.weights.formats.hugging_face import (
    Checkpoint,
    SafetensorsFile,
    copy_all_but_weights,
    file_names,
    model_entries,
    write_index,
)
from megatron_ibpo.weights.formats.run_state import HF_FILES, LAYOUT, RUN_STATE, load_run_state, read_layout
from megatron_ibpo.weights.formats.torch_dist import DistcpFile, Record, StoredCheckpoint, write_metadata
from megatron_ibpo.weights.layout.export import Holding, holdings_of, shard_holders
from megatron_ibpo.weights.layout.regions import TensorMeta, consecutive_runs

logger = logging.getLogger(__name__)

FILES_PER_RANK = 2
"""Files per rank of a Megatron checkpoint, as megatron-core writes it."""
HF_FILE_BYTES = 1000**3
"""Largest safetensors file: several threads write, each a file of its own."""

Report = Callable[[int, int], None]
"""Called after each parameter with (bytes it had, bytes that this rank converts in all), from any thread."""


def hf_to_megatron(
    hf_dir: Path,
    target: Path,
    parallel: ParallelConfig,
    world: World,
    *,
    virtual_stages: int = 1,
    allow_pickle: bool = False,
    report: Report = lambda num_bytes, total: None,
) -> None:
    """Write the weights in `hf_dir` as a torch_dist checkpoint at `target`. Collective over `world`, whose
    ranks share the work.

    Megatron reads it under any layout. `parallel` and `virtual_stages` (model chunks of a rank in an
    interleaved pipeline) determine its pieces and files, so that a run in that layout reads whole pieces.
    Rows that pad the vocabulary are not written: Megatron sets them to 0 when it loads. Dtypes are kept.

    Raises:
        CheckpointError, ModelConfigError: `hf_dir` is not a checkpoint of a known model.
        ValueError: the layout cannot hold the model.
        FileExistsError: `target` exists.
        DiskSpaceError: the disk is or becomes full.
    """
    world.on_rank_0(lambda: _check_target(target))
    shape = read_hf_config(hf_dir)
    if problems := check_layout(shape, parallel, least_world(parallel), virtual_stages):
        raise ValueError("this layout cannot hold the model:\n  " + "\n  ".join(problems))
    checkpoint = Checkpoint(hf_dir, allow_pickle=allow_pickle)
    entries = model_entries(shape, checkpoint, padded_vocab_size(shape, parallel))
    if ignored := checkpoint.check(shape, entries):
        logger.warning("%s: not converted: %s", hf_dir, listed(ignored))
    dtypes = _stored_dtypes(checkpoint, entries)
    shares = _shares(entries, holdings_of(shape, parallel, virtual_stages))
    jobs = [
        Job(f"__{rank}_{number}.distcp", half, sum(s.numel * dtypes[s.entry.name].itemsize for s in half))
        for rank, mine in shares.items()
        for number, half in enumerate(_in_parts(mine, FILES_PER_RANK))
    ]

    def finish(directory: Path, parts: list[dict[str, tuple[list[Record], str]]]) -> dict[str, str]:
        written = {name: outcome for part in parts for name, outcome in part.items()}
        digests = write_metadata(directory, [record for records, _ in written.values() for record in records])
        (directory / HF_FILES).mkdir()
        copy_all_but_weights(hf_dir, directory / HF_FILES, dtypes["embedding.word_embeddings.weight"])
        layout = {"optimizer": False, "parallel": asdict(parallel), "virtual_stages": virtual_stages}
        (directory / LAYOUT).write_text(json.dumps(layout))
        (directory / RUN_STATE).write_text(json.dumps({"step": 0}))
        return digests | {name: digest for name, (_, digest) in written.items()}

    overhead = 2048 * sum(len(share.entry.blocks()) for mine in shares.values() for share in mine)
    write = partial(_run_share, jobs, world, report, partial(_write_distcp, checkpoint))
    directories.write_directory(target, world, sum(job.num_bytes for job in jobs) + overhead, write, finish)


def megatron_to_hf(
    stored_dir: Path,
    target: Path,
    world: World,
    *,
    origin: Path | None = None,
    report: Report = lambda num_bytes, total: None,
) -> None:
    """Write the weights of the torch_dist checkpoint `stored_dir` in Hugging Face format: sharded safetensors
    with one tensor per expert. Dtypes are kept; optimizer state and the like are dropped. Collective.

    Args:
        origin: Hugging Face checkpoint with the configuration and tokenizer; None: the checkpoint's own.
            Tensors beside the policy (multi-token prediction layers, a vision tower) are taken from its
            weights if `stored_dir` has none.

    Raises:
        CheckpointError: tensors declared in config.json beside the policy are missing from both.
        others: see `hf_to_megatron`.
    """
    world.on_rank_0(lambda: _check_target(target))
    origin, shape = model_of(stored_dir, origin)
    stored = StoredCheckpoint(stored_dir)
    entries = model_entries(shape, stored)
    stored.check(entries)
    # `hf_to_megatron` leaves nothing out
    converted = (stored_dir / RUN_STATE).is_file() and load_run_state(stored_dir)["step"] == 0
    carried, source = _carried(origin, shape, entries, converted=converted)
    from_origin = {entry.name for entry in carried}
    if carried:
        names = listed(sorted(piece.name for entry in carried for piece in entry.pieces))
        logger.warning("%s: not trained and taken from %s: %s", stored_dir, origin, names)

    def metas_of(entry: Entry) -> list[TensorMeta]:
        """Return, for each piece, the tensor that it is stored in."""
        if source is not None and entry.name in from_origin:
            return [TensorMeta(piece.name, source.dtype(piece), piece.shape) for piece in entry.pieces]
        dtype = stored.dtype(entry.blocks()[0])
        return [TensorMeta(name, dtype, size) for name, size in (piece.stored for piece in entry.pieces)]

    def parameter(entry: Entry, memory: WorkingMemory) -> AbstractContextManager[Tensor]:
        if source is not None and entry.name in from_origin:
            return _assembled(source, _Share(entry, 0, 1), memory)
        return _stored(stored, entry, memory)

    metas = {entry.name: metas_of(entry) for entry in (*entries, *carried)}
    jobs = _hf_files([*entries, *carried], metas)
    files = {job.file: _tensors(job.items, metas) for job in jobs}

    def finish(directory: Path, parts: list[dict[str, str]]) -> dict[str, str]:
        copy_all_but_weights(origin, directory, metas["embedding.word_embeddings.weight"][0].dtype)
        write_index(directory, files)
        return {name: digest for part in parts for name, digest in part.items()}

    write = partial(_run_share, jobs, world, report, partial(_write_safetensors, metas, parameter))
    directories.write_directory(target, world, sum(job.num_bytes for job in jobs), write, finish)


def model_of(stored_dir: Path, origin: Path | None = None) -> tuple[Path, ModelShape]:
    """Return the directory with configuration and tokenizer of a Megatron checkpoint, and the model's
    dimensions. Raises CheckpointError if the checkpoint has neither and no `origin` is given, or if it holds
    only adapters."""
    if read_layout(stored_dir).get("lora"):
        raise CheckpointError(
            f"{stored_dir} holds adapters only. Its run exports merged weights (every --export-interval, "
            "and into hf at the end); PEFT merges the files in adapter"
        )
    if origin is None:
        origin = stored_dir / HF_FILES
        if not origin.is_dir():
            raise CheckpointError(
                f"{stored_dir} holds no {HF_FILES}/config.json: give --origin-hf-checkpoint, "
                "the Hugging Face checkpoint that training started from"
            )
    return origin, read_hf_config(origin)


def differing_tensors(
    hf_dir: Path,
    stored_dir: Path,
    world: World,
    *,
    allow_pickle: bool = False,
    report: Report = lambda num_bytes, total: None,
) -> list[str]:
    """Return the names of HF tensors that differ in any bit from the Megatron checkpoint; both are read from
    disk. Collective: the ranks divide the work. Raises CheckpointError if one of the two lacks tensors of the
    model that `hf_dir`'s config.json describes."""
    shape = read_hf_config(hf_dir)
    checkpoint, stored = Checkpoint(hf_dir, allow_pickle=allow_pickle), StoredCheckpoint(stored_dir)
    entries = model_entries(shape, stored)
    checkpoint.check(shape, entries)
    stored.check(entries)
    mine = entries[world.rank :: world.size]
    sizes = {entry.name: math.prod(entry.shape) * stored.dtype(entry.blocks()[0]).itemsize for entry in mine}
    total = sum(sizes.values())
    differing = []
    for entry in mine:
        pieces = entry.part(stored.read(entry))
        for piece, tensor in zip(entry.pieces, pieces, strict=True):
            if not _same_bits(checkpoint.read(piece), tensor):
                differing.append(piece.name)
        report(sizes[entry.name], total)
    return sorted(name for names in world.all_gather(differing) for name in names)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    integers = {2: torch.int16, 4: torch.int32}[first.dtype.itemsize]  # integers, because NaNs have bits too
    return torch.equal(first.contiguous().view(integers), second.contiguous().view(integers))


# ----------------------------------------------------------------------------------------------------- checks


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists; nothing is overwritten: remove it or choose another --save")


def _stored_dtypes(checkpoint: Checkpoint, entries: list[Entry]) -> dict[str, torch.dtype]:
    """Return the dtype of every entry. Raises CheckpointError if a stored tensor would have two."""
    by_key: dict[str, tuple[torch.dtype, str]] = {}
    dtypes = {}
    for entry in entries:
        key = entry.blocks()[0].key
        for piece in entry.pieces:
            dtype = checkpoint.dtype(piece)
            first, name = by_key.setdefault(key, (dtype, piece.name))
            if dtype != first:
                raise CheckpointError(
                    f"{checkpoint.directory}: {piece.name} is {dtype} and {name} is {first}, but Megatron "
                    f"stores both in {key}"
                )
        dtypes[entry.name] = by_key[key][0]
    return dtypes


def _carried(
    origin: Path, shape: ModelShape, entries: list[Entry], *, converted: bool
) -> tuple[list[Entry], Checkpoint | None]:
    """Return the entries beside the policy that only the origin's weights hold."""
    if not any(origin.glob("*.safetensors")):
        has_carried = any(entry.name.startswith(shape.carried) for entry in entries)
        if shape.carried and not has_carried and not converted:
            raise CheckpointError(
                f"training keeps no {', '.join(shape.carried)}*, which the model's checkpoints hold: give "
                "--origin-hf-checkpoint, the Hugging Face checkpoint that training started from"
            )
        return [], None
    source = Checkpoint(origin)
    everything = model_entries(shape, source)
    source.check(shape, everything)
    present = {entry.name for entry in entries}
    carried = [entry for entry in everything if entry.name not in present and is_carried(shape, entry.name)]
    return carried, source


def _warn_of_nan(tensor: Tensor, name: str) -> None:
    if tensor.numel() and torch.isnan(tensor.amax()):  # amax propagates NaN, and is faster than isnan
        logger.warning("%s holds NaN", name)


# ---------------------------------------------------------------------------------------------------- writing


def _run_share(
    jobs: list[Job[Item]],
    world: World,
    report: Report,
    work: Callable[[Path, Job[Item], WorkingMemory, Callable[[int], None]], Result],
    directory: Path,
) -> dict[str, Result]:
    """Return the result of `work` for each of this rank's files, by name. `work` also gets a function to call
    with the bytes of each finished parameter."""
    mine = jobs[world.rank :: world.size]
    total = sum(job.num_bytes for job in mine)
    results = directories.run_jobs(
        mine, lambda job, memory: work(directory, job, memory, lambda num_bytes: report(num_bytes, total))
    )
    return {job.file: result for job, result in zip(mine, results, strict=True)}


def _write_distcp(
    checkpoint: Checkpoint,
    directory: Path,
    job: Job[_Share],
    memory: WorkingMemory,
    report: Callable[[int], None],
) -> tuple[list[Record], str]:
    """Write one file of a Megatron checkpoint; return its records and its digest."""
    file = DistcpFile(directory / job.file)
    for share in job.items:
        with _assembled(checkpoint, share, memory) as shard:
            blocks = share.entry.blocks(share.rank, share.ranks)
            sizes = [block.sizes[share.dim - shard.dim()] for block in blocks]
            for block, part in zip(blocks, shard.split(sizes, dim=share.dim), strict=True):
                file.add(block, part)
            report(shard.nbytes)
    return file.records, file.close()


def _write_safetensors(
    metas: dict[str, list[TensorMeta]],
    parameter: Callable[[Entry, WorkingMemory], AbstractContextManager[Tensor]],
    directory: Path,
    job: Job[Entry],
    memory: WorkingMemory,
    report: Callable[[int], None],
) -> str:
    """Write one file of a Hugging Face checkpoint; return its digest."""
    file = SafetensorsFile(directory / job.file, _tensors(job.items, metas))
    for entry in job.items:
        with parameter(entry, memory) as tensor:
            for number, meta in enumerate(metas[entry.name]):
                file.write(meta.name, *_parts(entry, number, tensor))
            report(tensor.nbytes)
    return file.close()


def _tensors(entries: Sequence[Entry], metas: dict[str, list[TensorMeta]]) -> list[TensorMeta]:
    """Return the tensors of a file with these entries, each once."""
    return list(dict.fromkeys(meta for entry in entries for meta in metas[entry.name]))


def _parts(entry: Entry, number: int, tensor: Tensor) -> list[Tensor]:
    """Return consecutive rows of the tensor that piece `number` of a parameter is stored in."""
    if not entry.by_rows:
        return [part[None] for part in entry.part(tensor)]
    spans = sorted(span for span in entry.spans() if span.piece == number)
    return [tensor[span.shard_row :][: span.rows] for span in spans]


@contextmanager
def _assembled(checkpoint: Checkpoint, share: _Share, memory: WorkingMemory) -> Iterator[Tensor]:
    """Yield a shard, contiguous. It is a view of the file if nothing has to be moved."""
    entry = share.entry
    cuts = checkpoint.read_shard(entry, share.rank, share.ranks)
    spans = entry.spans(share.rank, share.ranks) if entry.by_rows else []
    for piece, part in zip(entry.pieces, cuts, strict=True):
        memory.check()
        _warn_of_nan(part, f"{checkpoint.directory}: {piece.name}")
    if len(spans) == 1 and cuts[spans[0].piece].is_contiguous():
        yield cuts[spans[0].piece]
        return
    with memory(share.shape, cuts[0].dtype) as shard:
        if not entry.by_rows:
            shard.copy_(entry.join(cuts))
        for span in spans:
            rows = cuts[span.piece][span.piece_row :][: span.rows]
            shard[span.shard_row :][: span.rows].copy_(rows)
        yield shard


@contextmanager
def _stored(stored: StoredCheckpoint, entry: Entry, memory: WorkingMemory) -> Iterator[Tensor]:
    """Yield a parameter of a Megatron checkpoint, contiguous. It is a view of the file if stored in one
    piece."""
    view = stored.view(entry)
    with (
        nullcontext(view) if view is not None else memory(entry.shape, stored.dtype(entry.blocks()[0])) as out
    ):
        memory.check()
        if view is None:
            stored.read(entry, out)
        _warn_of_nan(out, f"{stored.directory}: {entry.name} ({entry.pieces[0].name})")
        yield out


# --------------------------------------------------------------------------------------------------- planning


@dataclass(frozen=True)
class _Share:
    """A shard of a parameter."""

    entry: Entry
    rank: int
    ranks: int

    @property
    def dim(self) -> int:
        """Dimension along which the parameter is divided."""
        return self.entry.cut.dim if self.entry.cut else 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shard_shape(self.rank, self.ranks)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _shares(entries: list[Entry], holdings: list[Holding]) -> dict[int, list[_Share]]:
    """Return each rank's shards. Every shard appears once, on the first rank that holds it."""
    shares: dict[int, list[_Share]] = defaultdict(list)
    for entry, holders in zip(entries, shard_holders(entries, holdings), strict=True):
        for shard, ranks in enumerate(holders if entry.cut else holders[:1]):
            shares[ranks[0]].append(_Share(entry, shard, len(holders)))
    return dict(sorted(shares.items()))


def _in_parts(shares: list[_Share], parts: int) -> list[list[_Share]]:
    """Split into consecutive runs of about equal size; none is empty."""
    total = sum(share.numel for share in shares)
    runs: list[list[_Share]] = [[] for _ in range(parts)]
    num_placed = 0
    for share in shares:
        runs[min(parts - 1, num_placed * parts // total)].append(share)
        num_placed += share.numel
    return [run for run in runs if run]


def _hf_files(entries: list[Entry], metas: dict[str, list[TensorMeta]]) -> list[Job[Entry]]:
    """Group entries into files. Entries whose pieces are stored in one tensor share a file."""
    groups: list[list[Entry]] = [[]]
    for entry in entries:
        groups[-1].append(entry)
        if entry.pieces[-1].ends_stored:
            groups.append([])
    groups.pop()
    sizes = [sum(meta.num_bytes for meta in _tensors(group, metas)) for group in groups]
    runs = consecutive_runs(sizes, HF_FILE_BYTES)
    return [
        Job(name, list(chain.from_iterable(groups[run.start : run.stop])), sum(sizes[run.start : run.stop]))
        for name, run in zip(file_names(len(runs)), runs, strict=True)
    ]
