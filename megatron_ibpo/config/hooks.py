"""What a flag names: something of ours by its name, or code of the user's own by an import path."""

import importlib
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from megatron_ibpo.config.config_error import ConfigError, nearest
from megatron_ibpo.config.paths import user_directory

T = TypeVar("T")


def is_import_path(text: str) -> bool:
    """Whether `text` has the form package.module:name."""
    return all(text.partition(":"))


def known_or_path(flag: str, name: str, known: Mapping[str, T], what: str) -> T | None:
    """known[name]; None where `name` is an import path, for `load_hook`.

    Args:
        flag: that gave the name, for messages.
        what: the known ones are called.

    Raises:
        ConfigError: neither; says what is known, and the nearest.
    """
    if name not in known and not is_import_path(name):
        raise ConfigError(
            f"{flag} {name}: unknown {what}; there are {', '.join(known)}, or give an import path "
            f"package.module:name{nearest(name, known)}"
        )
    return known.get(name)


def load_hook(flag: str, path: str, *, called_with: str | None = None) -> Any:
    """What is called `name` in the module of `path`, package.module:name.

    The module is looked for first where the user stands, which stays on the import path, since a module may
    import others while it runs.

    Args:
        flag: that gave the path, for messages.
        called_with: what it will be called with, for messages, where it must be a function.

    Raises:
        ConfigError: no import path, no such module, no such name in it, no function, or the module fails when
            imported.
    """
    module_name, _, name = path.partition(":")
    if not is_import_path(path):
        raise ConfigError(f"{flag} {path}: expected an import path package.module:name")
    here = str(user_directory())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _failed(flag, path, error) from error
        raise ConfigError(
            f"{flag} {path}: no module {error.name!r} in {here} or among the installed packages; PYTHONPATH "
            "adds further directories"
        ) from error
    except Exception as error:
        raise _failed(flag, path, error) from error
    if not hasattr(module, name):
        where = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"{flag} {path}: {where} defines no {name!r}{nearest(name, vars(module))}")
    found = getattr(module, name)
    if called_with and not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"{flag} {path}: a {kind}, which cannot be called with {called_with}")
    return found


def _failed(flag: str, path: str, error: Exception) -> ConfigError:
    return ConfigError(f"{flag} {path}: its module cannot be imported: {type(error).__name__}: {error}")
