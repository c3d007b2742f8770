"""Settings given as Python objects: stored as files in the run's directory, so that settings stay plain data.

Code becomes an import path. A function or class that a module defines is named where it stands. Any other
object, such as a lambda or what a notebook defines, is pickled by cloudpickle beside a small module that
loads it, and the setting names this module. Rows become a JSONL file. Only the user's own Python writes such
files, never a model's text or a data row; a module loads no pickle but the one it was written for.
"""

import hashlib
import json
import keyword
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from megatron_ibpo.basics.strict_json import json_value
from megatron_ibpo.basics.text import user_files
from megatron_ibpo.config.config_error import ConfigError
from megatron_ibpo.config.paths import path_of_user

CODE = (
    "rm_type", "reward_part", "advantages", "group_filter", "environment", "environment_reward",
    "loss_variant", "ibpo_operator", "token_credit",
)  # fmt: skip
"""Settings that name code, which may be given as an object, as a list with objects, or as a mapping whose
keys are objects."""
PROMPTS = ("prompt_data", "eval_prompt_data")
"""Settings that name prompts, which may be given as rows."""
FOLDER = "from_python"
"""Folder of a run's directory that holds the stored objects."""
_UNNAMED = "stored"
"""Name of a stored object that has none of its own, such as a lambda."""
_PLAIN = (str, bytes, int, float, list, tuple, dict, Path, type(None))
_MODULE = '''\
"""Loads `{setting}`, an object of Python that was stored beside this file when its run was configured."""

import sys
from pathlib import Path

from megatron_ibpo.config.python_objects import load_object

sys.path += [folder for folder in {folders!r} if folder not in sys.path]
{name} = load_object(Path(__file__).with_suffix(".pickle"), {digest!r}, {version!r})
'''


def stored_settings(settings: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return settings as plain data, with objects and rows stored under the run's directory.

    Raises:
        ConfigError: an object cannot be pickled, or a row cannot be written as JSON.
        OSError: the files cannot be written.
    """
    folder, plain = path_of_user(run_dir) / FOLDER, dict(settings)
    for name in CODE:
        if name in plain:
            plain[name] = _stored_code(name, plain[name], folder)
    for name in PROMPTS:
        if name in plain:
            plain[name] = _stored_prompts(name, plain[name], folder)
    return plain


def has_objects(settings: Mapping[str, Any]) -> bool:
    """Return whether `stored_settings` may have something to store."""
    values = map(settings.get, CODE)
    code = [
        item for value in values for item in (value if isinstance(value, list | tuple | dict) else [value])
    ]
    return any(not isinstance(item, _PLAIN) for item in code) or any(
        not isinstance(settings.get(name), str | Path | None) for name in PROMPTS
    )


def import_path_of(setting: str, value: Any, folder: Path) -> str:
    """Return the import path of an object, which is stored in `folder` if no module defines it.

    Raises:
        ConfigError: it cannot be pickled.
        OSError: the files cannot be written.
    """
    import cloudpickle  # only programs in Python need it

    if (path := _defined_in(value)) is not None:
        return path
    try:
        content = cloudpickle.dumps(value)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        named = getattr(value, "__qualname__", None) or f"an object of type {type(value).__name__}"
        raise ConfigError(
            f"{setting}: {named} cannot be copied to the run's processes ({reason}); make what "
            "cannot be copied inside the function, or put the function into a file and name it as "
            "path/to/file.py:name"
        ) from error
    # two runs of one process may store the same object, and modules differ by name alone
    name = _variable_of(value)
    stem = f"{setting}_{_digest(str(folder).encode() + content)[:12]}"
    module = _MODULE.format(
        setting=setting,
        folders=_folders_of_user(),
        name=name,
        digest=_digest(content),
        version=list(sys.version_info[:2]),
    )
    _write(folder / f"{stem}.pickle", content)
    return f"{_write(folder / f'{stem}.py', module.encode())}:{name}"


def load_object(path: Path, digest: str, version: list[int]) -> Any:
    """Return the object of a pickle that `import_path_of` has written.

    Args:
        digest: SHA-256 of the pickle when it was written.
        version: major and minor version of the Python that wrote it.

    Raises:
        ValueError: the file has changed, or another version of Python reads it.
        OSError: it cannot be read.
    """
    if list(sys.version_info[:2]) != version:
        raise ValueError(
            f"{path.name} was stored by Python {'.'.join(map(str, version))}, and code stored by one version "
            "cannot be read by another; run with that one, or give the object again"
        )
    content = path.read_bytes()
    if _digest(content) != digest:
        raise ValueError(f"{path.name} is not the file that was stored; give the object again")
    value = pickle.loads(content)
    if isinstance(value, FunctionType):
        user_files.add(value.__code__.co_filename)
    return value


def store_rows(setting: str, rows: Iterable[Any], folder: Path) -> str:
    """Write rows as a JSONL file in `folder` and return its path.

    Raises:
        ConfigError: there are none, or one is no dictionary or cannot be written as JSON.
        OSError: the file cannot be written.
    """
    lines = [_line(setting, number, row) for number, row in enumerate(rows)]
    if not lines:
        raise ConfigError(f"{setting}: there are no rows")
    content = "".join(lines).encode()
    return str(_write(folder / f"{setting}_{_digest(content)[:12]}.jsonl", content))


def _stored_code(name: str, value: Any, folder: Path) -> Any:
    def path(item: Any) -> Any:
        return item if isinstance(item, _PLAIN) else import_path_of(name, item, folder)

    if isinstance(value, dict):
        return {path(item): weight for item, weight in value.items()}
    if name == "environment_reward" and not isinstance(value, _PLAIN):
        value = [value]
    return [path(item) for item in value] if isinstance(value, list | tuple) else path(value)


def _stored_prompts(name: str, value: Any, folder: Path) -> Any:
    if isinstance(value, list | tuple) and not _are_rows(value):
        return [_stored_source(name, item, folder) for item in value]
    return _stored_source(name, value, folder)


def _stored_source(name: str, value: Any, folder: Path) -> Any:
    if _is_table(value):
        return store_rows(name, _rows_of(value), folder)
    if isinstance(value, dict) and any(map(_is_table, value.values())):
        raise ConfigError(
            f"{name}: a DatasetDict has several splits; give one of {', '.join(map(repr, value))}"
        )
    return store_rows(name, value, folder) if _are_rows(value) else value


def _rows_of(table: Any) -> Iterator[Any]:
    """Yield the rows of a `datasets.Dataset` as its files have them, whatever its format."""
    for row in table.with_format(None):
        yield {name: json_value(value) for name, value in row.items()}


def _is_table(value: Any) -> bool:
    """Return whether a value is a `datasets.Dataset`, streamed or not."""
    return hasattr(value, "features") and hasattr(value, "with_format")


def _are_rows(value: Any) -> bool:
    """Return whether a value is a list of rows. A mapping with `path` is a source, as in recipes."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(row, dict) and "path" not in row for row in value)
    )


def _line(setting: str, number: int, row: Any) -> str:
    if not isinstance(row, dict):
        raise ConfigError(f"{setting}, row {number}: expected a dictionary, found {type(row).__name__}")
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{setting}, row {number}: cannot be written as JSON: {error}") from error


def _defined_in(value: Any) -> str | None:
    """Return the import path of a function or class that a module defines; None for other objects."""
    name = getattr(value, "__qualname__", "")
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not value:
        return None
    file = getattr(module, "__file__", None) or ""
    is_single_file = file.endswith(".py") and Path(file).stem == module.__name__
    return f"{os.path.abspath(file) if is_single_file else module.__name__}:{name}"


def _folders_of_user() -> list[str]:
    """Return where this process finds modules that are not installed, for what a stored object imports."""
    folders = map(os.path.abspath, sys.path)
    installed = (sys.prefix, sys.base_prefix)
    return [folder for folder in folders if os.path.isdir(folder) and not folder.startswith(installed)]


def _variable_of(value: Any) -> str:
    """Return the name of an object in its module: its own, which metrics and messages then show."""
    name = getattr(value, "__name__", "")
    is_free = (
        name.isidentifier() and not keyword.iskeyword(name) and name not in ("sys", "Path", "load_object")
    )
    return name if is_free else _UNNAMED


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(path: Path, content: bytes) -> Path:
    """Write a file whose name tells its content, unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_bytes(content)
        unfinished.replace(path)
    return path
