"""What is said of a configuration that cannot work."""

import difflib
from collections.abc import Iterable, Mapping

_RESEMBLANCE = 0.5
"""Share of equal letters below which a suggestion would only puzzle."""


class ConfigError(ValueError):
    """A configuration that cannot work; the text names every problem and what to do."""


def broken(rules: Mapping[str, bool]) -> list[str]:
    """Return the problems of those rules that do not hold.

    Args:
        rules: problem → whether it is there.
    """
    return [problem for problem, is_there in rules.items() if is_there]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: `; did you mean 'lr'?`, or nothing if none resembles it.

    Args:
        known: names as the user types them; dashes and underscores count as equal.
    """
    spellings = {str(other).replace("_", "-"): other for other in known}
    close = difflib.get_close_matches(str(name).replace("_", "-"), spellings, n=1, cutoff=_RESEMBLANCE)
    return f"; did you mean {spellings[close[0]]!r}?" if close else ""
