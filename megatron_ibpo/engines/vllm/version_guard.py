"""A guard of changes to vLLM's own functions: they are made to the version that they were written for."""

from collections.abc import Callable
from functools import wraps

from vllm.version import __version__ as VERSION


def written_for(version: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a decorator of a function that changes vLLM.

    Args:
        version: beginning of the version that it was written for. With another one the function raises
            RuntimeError and changes nothing.
    """

    def guard(change: Callable[[], None]) -> Callable[[], None]:
        @wraps(change)
        def guarded() -> None:
            if not f"{VERSION}.".startswith(f"{version}."):
                raise RuntimeError(
                    f"vLLM {VERSION}: {change.__module__}.{change.__name__} was written for vLLM {version}, "
                    f"and without it {VERSION} may sample wrongly; install {version}, or read what it fixes"
                )
            change()

        return guarded

    return guard
