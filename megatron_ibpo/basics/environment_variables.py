"""Numbers from environment variables, which launchers set."""

import os


def environment_number(name: str, default: int, *, least: int = 0, most: int = 2**31 - 1) -> int:
    """Return the variable's value; `default` if it is not set.

    Raises:
        ValueError: the value is not a whole number from `least` to `most`.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ValueError(
            f"{name}={text[:40]!r} in the environment: must be a whole number between {least} and {most}"
        )
    return value
