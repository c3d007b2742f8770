"""From which directory a relative path counts.

What the user types counts from the directory where the user stands, as everywhere. The scripts in
`examples/` work in the repository's root and hand that directory over as $IBPO_CWD. A path in a recipe counts
from the same directory; where nothing is there, from the repository's root, so that the recipes of the
repository work from anywhere.
"""

import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


class Kind(Enum):
    """What a field with a path is, where its type does not say it."""

    FILE_OR_URL = "text that is a path unless it has a scheme such as reasoning_gym://"
    WRITTEN = "a path that need not exist yet, so that it is not looked for"
    NAME_OR_YAML = "a name, or the path of a file that ends in .yaml"


def user_directory() -> Path:
    """The directory where the user stands."""
    return Path(os.environ.get("IBPO_CWD") or Path.cwd())


def path_of_user(path: Path | str) -> Path:
    """The absolute path that is meant by one on the command line."""
    return user_directory() / path


def path_in_recipe(path: Path | str) -> Path:
    """The absolute path that is meant by one in a recipe, for something that exists."""
    candidates = [path_of_user(path), REPOSITORY / path]
    # os.path and not pathlib: it takes names that no file can have
    return next((found for found in candidates if os.path.exists(found)), candidates[0])


def source_located(spec: str, locate: Callable[[str], Path]) -> str:
    """A source of prompts with an absolute path where it is one: a path may be followed by ?name=value
    settings, and what has a scheme such as reasoning_gym:// is none."""
    if "://" in spec.partition("?")[0]:
        return spec
    path, mark, settings = spec.partition("?")
    return f"{locate(path)}{mark}{settings}"


def searched(path: Path) -> str:
    """The end of a message that `path` is missing: where a relative one was looked for."""
    if not path.is_relative_to(user_directory()):
        return ""
    return f" (relative paths count from {user_directory()}, and those of recipes from {REPOSITORY} too)"


def missing_directory(flag: str, path: Path | None) -> list[str]:
    """Return what to say where `path` is given and is no directory."""
    if path is None or os.path.isdir(path):  # pathlib's raises where a name is too long
        return []
    return [f"{flag}: {path} is not a directory{searched(path)}"]
