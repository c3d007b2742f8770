"""The files of a checkpoint's directory: those that hold weights in Hugging Face format, and
`integrity.json`, SHA-256 of every file, also in folders, in the format of megatron-core's
`dist_checkpointing.save(verify_integrity=True)`. Needs no torch."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypeVar

from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import JSON_BYTES, UserFileError, check_user_file, read_json_file
from megatron_ibpo.weights import CheckpointError, listed

MANIFEST = "integrity.json"
ALGORITHM = "sha256"
MAX_THREADS = 8
"""Hashing holds no lock of Python's; more threads than a disk has channels only seek."""

T = TypeVar("T")


def write_integrity(directory: Path, known_digests: Mapping[str, str] | None = None) -> None:
    """Write the manifest of all files in `directory`. `known_digests` are already computed, by file name:
    these files are not read."""
    digests = known_digests or {}
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    names = sorted(name for name in names if name != MANIFEST)
    files = _in_threads(lambda name: digests.get(name) or file_digest(directory / name), names)
    manifest = {"algorithm": ALGORITHM, "files": dict(zip(names, files, strict=True))}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def check_integrity(directory: Path, part: int = 0, parts: int = 1) -> None:
    """Compare the files of `directory` with its manifest. Without a manifest, nothing is checked or refused.

    Args:
        part, parts: each of several processes may take its part of the files.

    Raises:
        CheckpointError: a file is missing or was changed, or the manifest is malformed.
    """
    try:
        wrong = changed_files(directory, part, parts)
    except FileNotFoundError:
        return
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{error}; take another copy of the checkpoint") from None
    if wrong:
        raise CheckpointError(f"{listed(wrong)}; take another copy of the checkpoint, or an earlier one")


def changed_files(directory: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Return the problems of the files that the manifest of `directory` lists; empty if there are none.
    Raises FileNotFoundError if there is no manifest, and ValueError if it is malformed."""
    digests = _read(directory / MANIFEST)

    def problem(name: str) -> str | None:
        path = directory / name
        try:
            # before its digest is computed, which takes as long as the file is
            check_user_file(path, JSON_BYTES if path.suffix == ".json" else float("inf"))
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:  # such as a link to itself: reported with the other problems
            return f"{path}: {error.strerror}"
        except UserFileError as error:
            return str(error)
        matches = file_digest(path) == digests[name]
        return None if matches else f"{path} is not what was written: its checksum differs"

    return [text for text in _in_threads(problem, sorted(digests)[part::parts]) if text is not None]


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, ALGORITHM).hexdigest()


def _read(path: Path) -> dict[str, str]:
    """Return the digests by name."""
    try:
        manifest = read_json_file(path)
        files, algorithm = dict(manifest["files"]), manifest["algorithm"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is malformed: {type(error).__name__}: {error}") from None
    if algorithm != ALGORITHM:
        raise ValueError(f"{path}: algorithm {shown(algorithm)} is not {ALGORITHM!r}")
    for name, digest in files.items():
        if not is_inside(name) or not isinstance(digest, str):
            raise ValueError(
                f"{path} is malformed: {shown(name)}: {shown(digest)} is not a file of the checkpoint"
            )
    return files


def is_inside(name: object) -> bool:
    """Return whether a name in a checkpoint's file means a file in its directory, judged as text alone."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts)


def _in_threads(work: Callable[[str], T], names: Sequence[str]) -> Iterable[T]:
    with ThreadPoolExecutor(min(MAX_THREADS, max(1, 2 * (os.cpu_count() or 1)))) as pool:
        return list(pool.map(work, names))


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED_INDEX, PICKLED_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
_WEIGHT_FILES = (INDEX, SINGLE, PICKLED_INDEX, PICKLED_SINGLE)
_PARTS_OF = {SINGLE: "model-*-of-*.safetensors", PICKLED_SINGLE: "pytorch_model-*-of-*.bin"}
"""Single file → pattern of the files of a checkpoint in several."""
RECIPE = "warm_start.json"
"""Record of how a tiny policy was made. Its `make` is the command that writes the weights."""


def has_weights(hf_dir: Path) -> bool:
    """Return whether the directory holds weights of any format that is read."""
    return any((hf_dir / name).is_file() for name in _WEIGHT_FILES)


def without_weights(hf_dir: Path) -> str:
    """Return the message that a directory holds no weights, with the command that makes them if its
    `warm_start.json` names one."""
    message = f"{hf_dir} holds neither {SINGLE} nor {INDEX}"
    try:
        recipe = read_json_file(hf_dir / RECIPE)
        return f"{message}; make it: {recipe['make']}"
    except (OSError, ValueError, KeyError, TypeError):
        return message


def find_weights(hf_dir: Path, *, allow_pickle: bool = False) -> tuple[str, dict[str, str] | None]:
    """Return (name of the index, or of the single file; tensor → its file, None without an index). With
    `allow_pickle` also take `pytorch_model*.bin`. Raises CheckpointError if no weights are there, the index
    is malformed, files that it names are missing, or there is a second set of weights."""
    present = next((name for name in _WEIGHT_FILES if (hf_dir / name).is_file()), None)
    if present is None:
        raise CheckpointError(without_weights(hf_dir))
    single = SINGLE if present in (INDEX, SINGLE) else PICKLED_SINGLE
    if single == PICKLED_SINGLE and not allow_pickle:
        raise CheckpointError(
            f"{hf_dir} holds its weights as pickles only ({present}), a format that can run code; "
            "take a safetensors version of the model, or --allow-pickle to read them weights-only"
        )
    file_of: dict[str, str] | None = None
    if present != single:
        try:
            file_of = dict(read_json_file(hf_dir / present)["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{hf_dir / present} is malformed: {type(error).__name__}: {error}"
            ) from None
        _check_index(hf_dir, present, file_of)
    _refuse_others(hf_dir, present, single, file_of)
    return present, file_of


def _check_index(hf_dir: Path, index: str, file_of: Mapping[str, str]) -> None:
    """Refuse an index that names files outside the directory, or files that are not there."""
    ending = ".bin" if index == PICKLED_INDEX else ".safetensors"
    for name, file in file_of.items():
        if not is_inside(file) or not file.endswith(ending):
            raise CheckpointError(
                f"{hf_dir / index}: {name[:200]} should be in {shown(file)}, which is not a {ending} file of "
                "this directory; download the checkpoint again, or rebuild its index"
            )
    missing = sorted({file for file in file_of.values() if not (hf_dir / file).is_file()})
    if missing:
        raise CheckpointError(
            f"{hf_dir}: {listed(missing)} named in {index} but missing; download the checkpoint again"
        )


def _refuse_others(hf_dir: Path, present: str, single: str, file_of: Mapping[str, str] | None) -> None:
    """Refuse a directory that programs read differently: beside an index that does not name it, transformers
    reads the single file; beside a single file without an index, vLLM reads all parts."""
    others = [hf_dir / single] if file_of is not None else hf_dir.glob(_PARTS_OF[single])
    named = {single} if file_of is None else {*file_of.values()}
    stale = sorted({path.name for path in others if path.is_file()} - named)
    if stale:
        raise CheckpointError(
            f"{hf_dir}: {listed(stale)} beside {present}, which does not name "
            f"{'it' if len(stale) == 1 else 'them'}: two sets of weights; remove the older one"
        )
