"""Code of the user's own, named by an import path `package.module:name`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from megatron_ibpo.config.errors import ConfigError
from megatron_ibpo.config.names import nearest
from megatron_ibpo.config.paths import user_directory

__all__ = ["is_import_path", "load_hook"]


def is_import_path(text: str) -> bool:
    """Whether `text` has the form package.module:name."""
    return all(text.partition(":"))


def load_hook(flag: str, path: str) -> Any:
    """What is called `name` in the module of `path`, package.module:name.

    The module is looked for first where the user stands, which stays on the import path, since a module may
    import others while it runs.

    Args:
        flag: that gave the path, for messages.

    Raises:
        ConfigError: no import path, no such module, no such name in it, or the module fails when imported.
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
    return getattr(module, name)


def _failed(flag: str, path: str, error: Exception) -> ConfigError:
    return ConfigError(f"{flag} {path}: its module cannot be imported: {type(error).__name__}: {error}")
