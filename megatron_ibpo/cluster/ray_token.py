"""A token for each run, which its Ray requires for connections.

It is passed on as the path of a file: an environment variable with the token itself would reach every child.
"""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ibpo.basics.rendezvous import variables_set

TOKEN_FILE = ".ray_token"
"""Name of the token's file, in the private directory of a Ray, and in the run's directory for the other nodes
of a cluster."""
TOKEN_BYTES = 32


def has_token() -> bool:
    """Return whether the user has set a token."""
    return bool(os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"))


def makes_token() -> bool:
    """Return whether a run makes its own token: not if the user has set one, or wants none."""
    return not has_token() and os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"


def new_token() -> str:
    """Return a random token."""
    return secrets.token_hex(TOKEN_BYTES)


def write_token(directory: Path, token: str) -> Path:
    """Write the token atomically where only this user can read it, over an older one. Return the file."""
    descriptor, written = tempfile.mkstemp(dir=directory, prefix=TOKEN_FILE)  # mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return Path(written).replace(directory / TOKEN_FILE)


def read_token(directory: Path) -> str | None:
    """Return the token that `write_token` left there, or None."""
    try:
        return (directory / TOKEN_FILE).read_text() or None
    except OSError:
        return None


def use_token() -> None:
    """Present the token that the user has set. Ray does so for an address only if the mode is set too."""
    if has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        read_settings_again()


@contextmanager
def own_token(directory: Path, token: str | None = None) -> Iterator[None]:
    """Give this process and its children a token in their own file, unless the user has set one. Changes to
    other copies of it then do not matter.

    Args:
        directory: where the file is written, private to the user.
        token: None makes a new one.
    """
    if not makes_token():
        yield
        return
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(write_token(directory, token or new_token())),
    }
    try:
        with variables_set(variables):
            read_settings_again()
            yield
    finally:
        read_settings_again()


def read_settings_again() -> None:
    """Make Ray read its environment variables and the token again; it reads them only once per process."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
