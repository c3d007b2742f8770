"""End-of-sequence tokens of a checkpoint."""

from pathlib import Path
from typing import Any

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import JSON_BYTES, UserFileError, read_user_file


def read_eos_token_ids(hf_dir: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids: those of generation_config.json if it names any, otherwise those of
    config.json.

    Raises:
        ValueError: neither file names one.
    """
    for name in ("generation_config.json", "config.json"):
        if not (hf_dir / name).exists():
            continue
        config = _read_json(hf_dir / name)
        text = config.get("text_config")  # a wrapped text model has its own
        found = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(number) is int and 0 <= number < 2**31 for number in ids):
            raise ValueError(
                f"{hf_dir / name}: eos_token_id must be an id or a list of ids, is {shown(found)}"
            )
        if ids:
            return tuple(ids)
    raise ValueError(
        f"{hf_dir}: neither generation_config.json nor config.json names eos_token_id, so sampling would "
        "never stop; add it to config.json"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(read_user_file(path, JSON_BYTES))
    except UserFileError:
        raise
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, holds a {type(content).__name__}")
    return content
