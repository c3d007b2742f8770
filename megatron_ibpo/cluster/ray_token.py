"""A token for each run, without which its Ray refuses connections.

It is handed on by the path of a file: an environment variable with the token itself would reach every child.
"""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TOKEN_FILE = ".ray_token"
"""Name of the token's file in the private directory of a Ray, and in the run's directory for the other nodes
of a cluster."""
TOKEN_BYTES = 32


def has_token() -> bool:
    """Tell whether the user has set a token."""
    return bool(os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"))


def makes_token() -> bool:
    """Tell whether a run makes a token of its own: not where the user has set one, or wants none."""
    return not has_token() and os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"


def new_token() -> str:
    """Return a random token."""
    return secrets.token_hex(TOKEN_BYTES)


def write_token(directory: Path, token: str) -> Path:
    """Write the token where only this user can read it, in one step, over an older one. Returns the file."""
    descriptor, written = tempfile.mkstemp(dir=directory, prefix=TOKEN_FILE)  # mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return Path(written).replace(directory / TOKEN_FILE)


def read_token(directory: Path) -> str | None:
    """Return the token that `write_token` left there; None where there is none."""
    try:
        return (directory / TOKEN_FILE).read_text() or None
    except OSError:
        return None


def use_token() -> None:
    """Present the token that the user has set. Ray does so for an address only where the mode is set, too."""
    if has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        read_settings_again()


@contextmanager
def own_token(directory: Path, token: str | None = None) -> Iterator[None]:
    """Give this process and its children a token in a file of their own, unless the user has set one. Nothing
    that happens to another copy of it then matters.

    Args:
        directory: where the file is written, private to the user.
        token: a new one if None.
    """
    if not makes_token():
        yield
        return
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(write_token(directory, token or new_token())),
    }
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ |= variables
    read_settings_again()
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ |= before
        read_settings_again()


def read_settings_again() -> None:
    """Let Ray read its environment variables and the token, which it does once for each process."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
