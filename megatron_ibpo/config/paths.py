"""Places of models and data: relative paths, names on the Hugging Face Hub, and sources of held-out prompts.

Paths that the user types start at the working directory, which the scripts in `examples/` pass on as
$IBPO_CWD; those in a recipe also at the repository's root, so that its recipes work from anywhere. A path
that exists always wins over a name on the Hub, and so does one whose first folder exists, as more likely
mistyped.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from megatron_ibpo.config.config_error import ConfigError, nearest

_PART = r"[A-Za-z0-9_][\w.-]*"
_REVISION = r"refs/pr/\d+|refs/convert/[\w.-]+|[\w.-]+"
_ID = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_REVISION}))?(?P<path>(?:/[\w.=+ -]+)*)", re.ASCII
)
_SNAPSHOT = re.compile(
    r".*/(?P<kind>models|datasets)--(?P<owner>.+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})"
    r"(?:/(?P<path>.*))?"
)
_FILES = (".jsonl", ".gz", ".parquet", ".arrow", ".json", ".csv", ".txt", ".yaml", ".py", ".model")
"""Endings of a file's name, which `owner/name` is not taken for."""


@dataclass(frozen=True)
class HubId:
    """A repository on the Hub, owner/name or owner/name@revision, or a folder of a data set in it,
    owner/name@revision/folder."""

    repo: str
    """owner/name."""
    revision: str | None = None
    """Branch, tag or commit; None: the newest commit of the default branch."""
    path: str = ""
    """Folder or file inside; empty for all."""

    @property
    def name(self) -> str:
        """The name without its owner."""
        return self.repo.partition("/")[2]

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f"/{self.path}" if self.path else "")


def read_hub_id(text: str, *directories: Path) -> HubId | None:
    """Return the Hub id that `text` is, or None if it is a path; relative ones are looked for in these
    directories."""
    match = _ID.fullmatch(text)
    if match is None or (not match["revision"] and text.endswith(_FILES) and not match["path"]):
        return None
    if any(os.path.exists(directory / text) for directory in directories):
        return None
    first = text.partition("/")[0]
    if not match["revision"] and any(os.path.isdir(directory / first) for directory in directories):
        return None
    return HubId(match["repo"], match["revision"], match["path"].removeprefix("/"))


def missing_snapshot(path: str) -> HubId | None:
    """Return the id and commit of a snapshot in the Hub's cache that is no longer there, as in the settings
    of a run from another machine; None for other paths."""
    match = _SNAPSHOT.fullmatch(path)
    if match is None or os.path.exists(path):
        return None
    return HubId(f"{match['owner']}/{match['name']}", match["revision"], match["path"] or "")


def display_name(path: Path) -> str:
    """Return the name of a model or data set. For a snapshot in the Hub's cache it is the name of the
    repository, since the folder is named after a commit."""
    match = _SNAPSHOT.fullmatch(str(path))
    return match["name"] if match is not None else path.name


REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = (Path(__file__).parents[1] / "recipes").resolve()
"""Recipes of the package: examples/recipes in a clone, through a link."""


class Kind(Enum):
    """The kind of path that a field holds, where its type does not tell."""

    FILE_OR_URL = "text that is a path or Hub id unless it has a scheme such as reasoning_gym://"
    MODEL = "a directory or a Hub id"
    WRITTEN = "a path that need not exist yet, so that it is not looked for"


def user_directory() -> Path:
    """Return the user's working directory."""
    return Path(os.environ.get("IBPO_CWD") or Path.cwd())


def path_of_user(path: Path | str) -> Path:
    """Return the absolute path for a path on the command line."""
    return user_directory() / path


def path_in_recipe(path: Path | str) -> Path:
    """Return the absolute path for a path in a recipe that should exist already."""
    candidates = [path_of_user(path), REPOSITORY / path]
    # os.path instead of pathlib: it accepts names that no file can have
    return next((candidate for candidate in candidates if os.path.exists(candidate)), candidates[0])


def recipe_file(text: Path | str, locate: Callable[[str], Path]) -> Path:
    """Return the absolute path of a recipe: a file, or a recipe of the package by its name alone. Raises
    ConfigError if the name has no ending, and neither a file nor a recipe is called so."""
    name, path = Path(text), locate(str(text))
    if os.path.exists(path) or name.name != str(text) or name.suffix not in ("", ".yaml"):
        return path
    recipes = {file.stem: file for file in sorted(RECIPES.glob("*.yaml"))}
    if name.stem in recipes or name.suffix:
        return recipes.get(name.stem, path)
    raise ConfigError(
        f"--config {text}: no file {path}, and no recipe of that name; there are {', '.join(recipes)}"
        f"{nearest(name.stem, recipes)}"
    )


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
    """Return the end of a message that `path` is missing, if its folder hides that it may be an id."""
    text = str(path.relative_to(user_directory())) if path.is_relative_to(user_directory()) else ""
    return "" if read_hub_id(text) is None else f"; {text}@main would name it on the Hugging Face Hub"


_NAMED = re.compile(r"([A-Za-z0-9_][\w.-]*)=(.*)", re.DOTALL | re.ASCII)
"""Names have no slash or colon, so that the parameters of a URL are not mistaken for a name."""


@dataclass(frozen=True)
class EvalSpec:
    """One set of held-out prompts, as the user named it."""

    name: str | None
    """None if the user gave no name."""
    spec: str

    def __str__(self) -> str:
        return self.spec if self.name is None else f"{self.name}={self.spec}"


def as_specs(value: str | Sequence[str] | None) -> list[EvalSpec]:
    """Parse the value of --eval-prompt-data."""
    texts = [value] if isinstance(value, str) else value or ()
    matches = [(text, _NAMED.fullmatch(text)) for text in texts]
    return [EvalSpec(None, text) if named is None else EvalSpec(*named.groups()) for text, named in matches]


def relocated(value: str | tuple[str, ...], locate: Callable[[str], str]) -> str | tuple[str, ...]:
    """Return the same sources with `locate` applied to the part after the name."""
    # an empty one is refused later; here it would become the user's directory
    moved = [str(replace(spec, spec=spec.spec and locate(spec.spec))) for spec in as_specs(value)]
    return moved[0] if isinstance(value, str) else tuple(moved)


def are_distinct(specs: Sequence[EvalSpec]) -> bool:
    """Return whether every spec names a source and all names differ."""
    names = [spec.name for spec in specs if spec.name is not None]
    return all(spec.spec for spec in specs) and len(names) == len(set(names))
