"""Names of models and data sets on the Hugging Face Hub: `owner/name`, `owner/name@revision`, and for data
`owner/name@revision/folder`, as huggingface_hub writes paths on the Hub.

A path that exists always wins, and so does one whose first folder exists, since it is more likely mistyped.
An id with a revision is always the Hub's. Once a command line is parsed, local paths are absolute, so a
relative one is an id.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

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
    """A repository on the Hub, or a part of it."""

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
    """Return the Hub id that `text` is, or None if it is a path.

    Args:
        directories: where relative paths are looked for.
    """
    found = _ID.fullmatch(text)
    if found is None or (not found["revision"] and text.endswith(_FILES) and not found["path"]):
        return None
    if any(os.path.exists(directory / text) for directory in directories):
        return None
    first = text.partition("/")[0]
    if not found["revision"] and any(os.path.isdir(directory / first) for directory in directories):
        return None
    return HubId(found["repo"], found["revision"], found["path"].removeprefix("/"))


def missing_snapshot(path: str) -> HubId | None:
    """Return the id and commit of a snapshot in the Hub's cache that is no longer there, as in the settings
    of a run from another machine; None for other paths."""
    found = _SNAPSHOT.fullmatch(path)
    if found is None or os.path.exists(path):
        return None
    return HubId(f"{found['owner']}/{found['name']}", found["revision"], found["path"] or "")


def display_name(path: Path) -> str:
    """Return the name of a model or data set: of a snapshot in the Hub's cache that of its repository, whose
    folder is called after a commit."""
    found = _SNAPSHOT.fullmatch(str(path))
    return found["name"] if found is not None else path.name
