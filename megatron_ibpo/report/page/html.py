"""The page of runs, evaluations and studies: one HTML file made of browser/, perhaps with its data.

Data goes in as JSON that cannot end its element, and reaches the page as text nodes only; a content security
policy with the hashes of the page's own script and style lets nothing else run.
"""

import base64
import hashlib
import html
import json
import re
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from megatron_ibpo.report.run_dir import jsonable

_BROWSER = Path(__file__).parent / "browser"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_FORBIDDEN = re.compile("[\ud800-\udfff]")


def page(title: str, data: str | None = None) -> str:
    """The page as text that UTF-8 can hold.

    Args:
        data: `embedded`, what it would ask a server for, by address; None: it asks one.
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
    """The content security policy of the page: its own style and script, and while live its server."""
    source = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; style-src '{_hash(_read('style.css'))}'; script-src '{_hash(page_script())}'; "
        "img-src data:; "
        f"connect-src {source}; base-uri 'none'; form-action 'none'"
    )


@cache
def page_script() -> str:
    """The modules of browser/ in one: each after those that it imports, in one scope, without import and
    export. No two modules have a name in common, so that nothing else has to be done."""
    order: list[str] = []

    def take(name: str) -> None:
        if name in order:
            return
        source = _read(f"{name}.js")
        for imported in _IMPORT.findall(source):
            take(imported)
        order.append(name)

    take("main")
    joined = "".join(
        f"// {name}.js\n" + re.sub(r"^export ", "", _IMPORT.sub("", _read(f"{name}.js")), flags=re.MULTILINE)
        for name in order
    )
    return f"\n{joined}"


def embedded(data: Any) -> str:
    """JSON in which nothing can be taken for markup."""
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
