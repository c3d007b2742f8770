"""Resolving relative paths.

Paths that the user types are relative to the user's working directory. The scripts in `examples/` change to
the repository's root and pass the user's directory on as $IBPO_CWD. Paths in a recipe are relative to the
same directory, or to the repository's root if nothing exists there, so that the repository's recipes work
from anywhere.
"""

import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from megatron_ibpo.config.hub_ids import HubId, missing_snapshot, read_hub_id

REPOSITORY = Path(__file__).resolve().parents[2]


class Kind(Enum):
    """The kind of path that a field holds, where its type does not tell."""

    FILE_OR_URL = "text that is a path or Hub id unless it has a scheme such as reasoning_gym://"
    MODEL = "a directory or a Hub id"
    WRITTEN = "a path that need not exist yet, so that it is not looked for"
    NAME_OR_YAML = "a name, or the path of a file that ends in .yaml"


def user_directory() -> Path:
    """Return the user's working directory."""
    return Path(os.environ.get("IBPO_CWD") or Path.cwd())


def path_of_user(path: Path | str) -> Path:
    """Return the absolute path for one on the command line."""
    return user_directory() / path


def path_in_recipe(path: Path | str) -> Path:
    """Return the absolute path for one in a recipe that should exist already."""
    candidates = [path_of_user(path), REPOSITORY / path]
    # os.path instead of pathlib: it accepts names that no file can have
    return next((found for found in candidates if os.path.exists(found)), candidates[0])


def hub_id(text: Path | str) -> HubId | None:
    """Return the Hub id that a path of the user's or of a recipe means; None if it is a path."""
    return read_hub_id(str(text), user_directory(), REPOSITORY) or missing_snapshot(str(text))


def source_located(spec: str, locate: Callable[[str], Path]) -> str:
    """Return a source of prompts with its path made absolute. A path may be followed by ?name=value settings;
    a source with a scheme such as reasoning_gym:// and a Hub id have no path."""
    path, mark, settings = spec.partition("?")
    if "://" in path or hub_id(path) is not None:
        return spec
    return f"{locate(path)}{mark}{settings}"


def searched(path: Path) -> str:
    """Return the end of a message that `path` is missing: the directories that were searched."""
    if not path.is_relative_to(user_directory()):
        return ""
    return f" (relative paths count from {user_directory()}, and those of recipes from {REPOSITORY} too)"


def missing_directory(flag: str, path: Path | None) -> list[str]:
    """Return an error message if `path` is given but is not a directory."""
    if path is None or os.path.isdir(path):  # pathlib's raises where a name is too long
        return []
    return [f"{flag}: {path} is not a directory{searched(path)}"]


def missing_model(flag: str, path: Path | None) -> list[str]:
    """Return an error message if `path` is given but is neither a directory nor a Hub id."""
    if path is None or hub_id(path) is not None:
        return []
    return [f"{error}{or_on_hub(path)}" for error in missing_directory(flag, path)]


def or_on_hub(path: Path) -> str:
    """Return the end of a message that `path` is missing, if its folder exists and hides that it may be an
    id."""
    text = str(path.relative_to(user_directory())) if path.is_relative_to(user_directory()) else ""
    return "" if read_hub_id(text) is None else f"; {text}@main would name it on the Hugging Face Hub"
