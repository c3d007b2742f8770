"""The page of runs, evaluations and studies: one HTML file made of browser/, which asks a server for its data
or holds it, small enough to open at once.

Data is embedded as JSON that cannot end its element, and reaches the page as text nodes only. A content
security policy with the hashes of the page's own script and style blocks all other code.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from megatron_ibpo.data import Tokenizer
from megatron_ibpo.report.page.directories import RunSource, Source, open_source
from megatron_ibpo.report.run_dir import jsonable

_BROWSER = Path(__file__).parent / "browser"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_FORBIDDEN = re.compile("[\ud800-\udfff]")


def page(title: str, data: str | None = None) -> str:
    """Return the page as text that UTF-8 can represent.

    Args:
        data: `embedded` answers that the page would request from a server, by address; None: it requests
            them.
    """
    style, script = _read("style.css"), page_script()
    return Template(_read("page.html")).substitute(
        TITLE=html.escape(_FORBIDDEN.sub("\ufffd", title)),
        POLICY=policy(live=data is None),
        STYLE=style,
        SCRIPT=script,
        DATA="null" if data is None else data,
    )


def policy(*, live: bool) -> str:
    """Return the content security policy of the page: its own style and script, and while live its server."""
    source = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; style-src '{_hash(_read('style.css'))}'; script-src '{_hash(page_script())}'; "
        "img-src data:; "
        f"connect-src {source}; base-uri 'none'; form-action 'none'"
    )


@cache
def page_script() -> str:
    """Return the modules of browser/ as one script: each after its imports, in one scope, without import and
    export. No two modules share a name, so that no more is needed."""
    order: list[str] = []

    def take(name: str) -> None:
        if name in order:
            return
        source = _read(f"{name}.js")
        for imported in _IMPORT.findall(source):
            take(imported)
        order.append(name)

    take("main")
    script = "".join(
        f"// {name}.js\n" + re.sub(r"^export ", "", _IMPORT.sub("", _read(f"{name}.js")), flags=re.MULTILINE)
        for name in order
    )
    return f"\n{script}"


def embedded(data: Any) -> str:
    """Return JSON in which nothing can be taken for markup."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError):  # it holds what JSON has no word for; to look for that takes longer
        text = json.dumps(jsonable(data), separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _read(name: str) -> str:
    return (_BROWSER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_PLACES = {"run-dir", "load"}
"""Settings with a run's location: they differ between any two runs."""


def comparison(overviews: Sequence[Mapping[str, Any]]) -> dict[str, list[list[Any]]]:
    """Return, for the runs among the overviews, rows of a name and one value per overview (None if it has
    none).

    Returns:
        "settings": those that differ between runs. "numbers": all of the last numbers.
    """
    runs = [overview for overview in overviews if overview["kind"] == "run"]

    def rows(part: str) -> list[list[Any]]:
        names = dict.fromkeys(name for run in runs for name in run[part])
        return [[name, *(overview[part].get(name) for overview in overviews)] for name in names]

    def differs(row: list[Any]) -> bool:
        values = [
            value for value, overview in zip(row[1:], overviews, strict=True) if overview["kind"] == "run"
        ]
        return any(value != values[0] for value in values)

    settings = [row for row in rows("settings") if row[0] not in _PLACES and differs(row)]
    return {"settings": settings, "numbers": rows("last")}


MOST_BYTES = 32 * 2**20
"""Bytes of samples in a page: above this, browsers take seconds to open the file."""


def build_page(
    directories: Sequence[Path],
    *,
    steps: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    most_bytes: int = MOST_BYTES,
) -> str:
    """Return the page of these runs and evaluations.

    Samples are added up to `most_bytes`; the page says what was left out. The last step comes first, then the
    first, then those that halve the gaps.

    Args:
        steps: recorded steps to include from every run; None: all.
        tokenizer: tokenizer of the runs; None: their own.

    Raises:
        ValueError: a directory holds neither a run nor an evaluation, a step was not recorded, or a record
            cannot be read.
    """
    sources = [open_source(directory, tokenizer=tokenizer) for directory in directories]
    overviews = [source.overview() for source in sources]
    replies: dict[str, str] = {}
    for number, (source, overview) in enumerate(zip(sources, overviews, strict=True)):
        replies[f"runs/{number}/series"] = embedded(source.series(None, None))
        keys = _section_keys(source, overview, steps)
        included = _add_samples(replies, number, source, keys, most_bytes // len(sources))
        if left_out := len(overview["sections"]) - len(included):
            many = f"{left_out} of {len(overview['sections'])}"
            overview["left_out"] = (
                f"{many} recorded steps are not in this file; --steps chooses others, and `serve` shows all"
                if overview["kind"] == "run"
                else f"{many} sets are too large for this file; `serve` shows all"
            )
        overview["sections"] = [section for section in overview["sections"] if section["key"] in included]
    runs = {"version": "", "runs": overviews, "comparison": comparison(overviews)}
    replies["runs"] = embedded(runs)
    data = ",".join(f"{embedded(address)}:{reply}" for address, reply in replies.items())
    title = ", ".join(f"{overview['title']}: {overview['name']}" for overview in overviews)
    return page(title, f"{{{data}}}")


def _section_keys(source: Source, overview: dict[str, Any], steps: Sequence[int] | None) -> list[int]:
    keys = [section["key"] for section in overview["sections"]]
    if steps is None or not isinstance(source, RunSource):
        return keys
    if missing := sorted(set(steps) - set(keys)):
        raise ValueError(f"{source.name} holds no records of step {', '.join(map(str, missing))}")
    return sorted(set(steps))


def _add_samples(
    replies: dict[str, str], number: int, source: Source, keys: Sequence[int], most_bytes: int
) -> set[int]:
    """Add sections to the replies while there is room. Returns the keys added."""
    included: set[int] = set()
    size = 0
    for key in _spread(keys):
        address = f"runs/{number}/sections/{key}"
        groups = source.section(key)
        section_replies = {address: embedded(groups)}
        for group in range(len(groups)):
            section_replies[f"{address}/groups/{group}"] = embedded(source.group(key, group))
            size += len(section_replies[f"{address}/groups/{group}"])
            if size > most_bytes:
                return included
        replies |= section_replies
        included.add(key)
    return included


def _spread(keys: Sequence[int]) -> Iterable[int]:
    """Yield the last, the first, then the middle of each gap, widest gaps first."""
    if keys:
        yield keys[-1]
    if len(keys) > 1:
        yield keys[0]
    gaps = [(0, len(keys) - 1)]
    while gaps:
        first, last = gaps.pop(0)
        if (middle := (first + last) // 2) > first:
            yield keys[middle]
            gaps += [(first, middle), (middle, last)]
