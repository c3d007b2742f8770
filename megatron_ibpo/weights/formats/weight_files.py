"""Names of the files that hold weights in Hugging Face format, and the message where there are none."""

from pathlib import Path

from megatron_ibpo.basics.user_files import read_json_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLED_SINGLE = "pytorch_model.bin"
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
