"""Code that a setting names: by an import path, or given as a Python object. Objects and rows are stored as
files in the run's directory, so that settings stay plain data. Only the user's own Python writes such files,
never a model's text or a data row; a stored module loads no pickle but the one it was written for."""

import hashlib
import importlib
import json
import keyword
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from megatron_ibpo.basics.strict_json import json_value
from megatron_ibpo.basics.text import fault_place, user_files
from megatron_ibpo.config.config_error import ConfigError, nearest, nearest_value
from megatron_ibpo.config.paths import path_in_recipe, path_of_user, searched, user_directory

T = TypeVar("T")

IMPORT_PATH = "package.module:name or path/to/file.py:name"
"""Forms of an import path, for messages."""


def is_import_path(text: str) -> bool:
    """Return whether `text` has the form of an import path."""
    return all(text.partition(":"))


def known_or_path(flag: str, name: str, known: Mapping[str, T], what: str) -> T | None:
    """Return known[name], or None if `name` is an import path, for `load_hook`.

    Args:
        flag: source of the name, for messages.
        what: kind of the known entries, for messages.

    Raises:
        ConfigError: neither; the message lists the known names and suggests the nearest.
    """
    if name not in known and not is_import_path(name):
        raise ConfigError(
            f"{flag} {name}: unknown {what}; there are {', '.join(known)}, or give an import path "
            f"{IMPORT_PATH}{nearest_value(flag, name, known)}"
        )
    return known.get(name)


def load_hook(flag: str, path: str, *, called_with: str | None = None) -> Any:
    """Return the object `name` from the module of an import path.

    Args:
        flag: source of the path, for messages.
        called_with: for a function, its arguments in words, for messages; None accepts any object.

    Raises:
        ConfigError: as `load_module`; or the module has no such name, or the object is not callable.
    """
    module = load_module(flag, path)
    name = path.partition(":")[2]
    if not hasattr(module, name):
        place = getattr(module, "__file__", None) or module.__name__
        raise ConfigError(f"{flag} {path}: {place} defines no {name!r}{nearest(name, vars(module))}")
    hook = getattr(module, name)
    if called_with and not callable(hook):
        kind = type(hook).__name__
        raise ConfigError(f"{flag} {path}: is of type {kind}, but must be callable with {called_with}")
    return hook


def load_module(flag: str, path: str) -> ModuleType:
    """Import the module of an import path and return it.

    Modules are looked up first in the user's directory. Files are found as paths in recipes are, and imported
    as Python imports a script's neighbours: under their own name, with their directory on `sys.path`. The
    directory stays there, since a module may import others while it runs.

    Args:
        flag: source of the path, for messages.

    Raises:
        ConfigError: no import path, no such module or file, or the module fails when imported.
    """
    if not is_import_path(path):
        raise ConfigError(f"{flag} {path}: expected an import path {IMPORT_PATH}")
    module = path.partition(":")[0]
    if not module.endswith(".py"):
        return _noted(_imported(flag, path, module, user_directory()))
    file = path_in_recipe(module)
    if not file.is_file():
        raise ConfigError(f"{flag} {path}: no file {file}{searched(file)}")
    imported = _imported(flag, path, file.stem, file.parent)
    origin = getattr(imported, "__file__", None)
    if origin is None or not file.samefile(origin):
        raise ConfigError(
            f"{flag} {path}: a module {file.stem!r} is imported already from {origin or 'Python itself'}; "
            "rename the file"
        )
    return _noted(imported)


def _noted(module: ModuleType) -> ModuleType:
    """Remember the file of a module of the user, so that an error in it is not taken for one of ours."""
    if not module.__name__.startswith("megatron_ibpo.") and (file := getattr(module, "__file__", None)):
        user_files.add(file)
    return module


def _imported(flag: str, path: str, module: str, directory: Path) -> ModuleType:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(flag, path, error) from error
        raise ConfigError(
            f"{flag} {path}: no module {error.name!r} in {directory} or among the installed packages; "
            "PYTHONPATH adds further directories"
        ) from error
    except (Exception, SystemExit) as error:
        raise _failed(flag, path, error) from error


def _failed(flag: str, path: str, error: BaseException) -> ConfigError:
    text = str(error).strip().partition("\n")[0]
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = "" if isinstance(error, SyntaxError) else fault_place(error, os.path.dirname(__file__))
    return ConfigError(f"{flag} {path}: its module cannot be imported: {message}{place}")


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

from megatron_ibpo.config.hooks import load_object

sys.path += [folder for folder in {folders!r} if folder not in sys.path]
{name} = load_object(Path(__file__).with_suffix(".pickle"), {digest!r}, {version!r})
'''


def stored_settings(settings: Mapping[str, Any], run_dir: Callable[[], Path]) -> dict[str, Any]:
    """Return settings as plain data, with objects and rows stored under the run's directory.

    Args:
        run_dir: returns that directory; called if there is something to store.

    Raises:
        ConfigError: an object cannot be pickled, or a row cannot be written as JSON.
        OSError: the files cannot be written.
    """

    @cache
    def folder() -> Path:
        return path_of_user(run_dir()) / FOLDER

    code = {name: _stored_code(name, settings[name], folder) for name in CODE if name in settings}
    prompts = {name: _stored_prompts(name, settings[name], folder) for name in PROMPTS if name in settings}
    return {**settings, **code, **prompts}


def _import_path_of(setting: str, value: Any, folder: Callable[[], Path]) -> str:
    """Return the import path of an object, which is stored in the folder if no module defines it."""
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
    stem = f"{setting}_{_digest(str(folder()).encode() + content)[:12]}"
    module = _MODULE.format(
        setting=setting,
        folders=_folders_of_user(),
        name=name,
        digest=_digest(content),
        version=list(sys.version_info[:2]),
    )
    _write(folder() / f"{stem}.pickle", content)
    return f"{_write(folder() / f'{stem}.py', module.encode())}:{name}"


def load_object(path: Path, digest: str, version: list[int]) -> Any:
    """Return the object of a pickle of an object that was stored.

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


def _stored_rows(setting: str, rows: Iterable[Any], folder: Callable[[], Path]) -> str:
    """Write rows as a JSONL file in the folder and return its path."""
    lines = [_line(setting, number, row) for number, row in enumerate(rows)]
    if not lines:
        raise ConfigError(f"{setting}: there are no rows")
    content = "".join(lines).encode()
    return str(_write(folder() / f"{setting}_{_digest(content)[:12]}.jsonl", content))


def _stored_code(name: str, value: Any, folder: Callable[[], Path]) -> Any:
    def path(item: Any) -> Any:
        return item if isinstance(item, _PLAIN) else _import_path_of(name, item, folder)

    if isinstance(value, dict):
        return {path(item): weight for item, weight in value.items()}
    if name == "environment_reward" and not isinstance(value, _PLAIN):
        value = [value]
    return [path(item) for item in value] if isinstance(value, list | tuple) else path(value)


def _stored_prompts(name: str, value: Any, folder: Callable[[], Path]) -> Any:
    if isinstance(value, list | tuple) and not _are_rows(value):
        return [_stored_source(name, item, folder) for item in value]
    return _stored_source(name, value, folder)


def _stored_source(name: str, value: Any, folder: Callable[[], Path]) -> Any:
    if _is_table(value):
        return _stored_rows(name, _rows_of(value), folder)
    if isinstance(value, dict) and any(map(_is_table, value.values())):
        raise ConfigError(
            f"{name}: a DatasetDict has several splits; give one of {', '.join(map(repr, value))}"
        )
    return _stored_rows(name, value, folder) if _are_rows(value) else value


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
