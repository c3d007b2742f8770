"""The files that hold weights in Hugging Face format, and the message where there are none. Needs no
torch."""

from collections.abc import Mapping
from pathlib import Path

from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import read_json_file
from megatron_ibpo.weights.formats.integrity import is_inside
from megatron_ibpo.weights.weight_errors import CheckpointError, listed

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLED_SINGLE = "pytorch_model.bin"
_PARTS_OF = {SINGLE: "model-*-of-*.safetensors", PICKLED_SINGLE: "pytorch_model-*-of-*.bin"}
"""Single file → pattern of the files of a checkpoint in several."""
RECIPE = "warm_start.json"
"""Record of how a tiny policy was made. Its `make` is the command that writes the weights."""


def has_weights(hf_dir: Path) -> bool:
    """Return whether the directory holds weights of any format that is read."""
    return any((hf_dir / name).is_file() for name in (INDEX, SINGLE, PICKLED_INDEX, PICKLED_SINGLE))


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
    """Return (name of the index, or of the single file; tensor → its file, None without an index).

    Args:
        allow_pickle: also take `pytorch_model*.bin`.

    Raises:
        CheckpointError: no weights are there, the index is malformed, files that it names are missing, or
            there is a second set of weights.
    """
    names = (INDEX, SINGLE, PICKLED_INDEX, PICKLED_SINGLE)
    present = next((name for name in names if (hf_dir / name).is_file()), None)
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
