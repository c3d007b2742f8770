"""The page of runs, evaluations and studies: one HTML file made of browser/, with its data if wanted.

Data is embedded as JSON that cannot end its element, and reaches the page as text nodes only. A content
security policy with the hashes of the page's own script and style blocks all other code.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

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
