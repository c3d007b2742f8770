"""Resolving what a flag names: a part of this package by its name, or the user's code by an import path."""

import importlib
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from megatron_ibpo.basics.text import user_files
from megatron_ibpo.config.config_error import ConfigError, nearest, nearest_value
from megatron_ibpo.config.paths import path_in_recipe, searched, user_directory

T = TypeVar("T")

IMPORT_PATH = "package.module:name or path/to/file.py:name"
"""Forms of an import path, for messages."""
MOVED = {
    "megatron_ibpo.data.study_tasks": "examples/tasks/study_tasks.py",
    "megatron_ibpo.rewards.study_tasks": "examples/tasks/study_rewards.py",
}
"""Former modules of the package → the files that hold their code now."""
MOVED_CHOICES = {
    "agreement": "examples/credit/agreement.py:Agreement",
    "reset-groups": "examples/credit/resets.py:ResetGroups",
    "random-window": "examples/credit/random_window.py:RandomWindow",
}
"""Former names of choices → the equivalent import paths."""
MOVED_PARAMETERS = {"ibpo_gate": "--ibpo-operator examples/credit/gated.py:Gated"}
"""Former parameters → the equivalent choices."""


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
    if name in MOVED_CHOICES:
        raise ConfigError(f"{flag} {name}: moved out of the package; use {MOVED_CHOICES[name]}")
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
    module, _, name = path.partition(":")
    if module in MOVED:
        raise ConfigError(f"{flag} {path}: moved out of the package; use {MOVED[module]}:{name}")
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
    return ConfigError(f"{flag} {path}: its module cannot be imported: {message}{_line_of_user(error)}")


def _line_of_user(error: BaseException) -> str:
    """Return the innermost line outside of this package, Python and libraries; syntax errors name theirs."""
    ours = (str(Path(__file__).parents[1]), sys.prefix, sys.base_prefix, "<")
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith(ours)]
    if isinstance(error, SyntaxError) or not frames:
        return ""
    return f" ({frames[-1].filename}, line {frames[-1].lineno})"
