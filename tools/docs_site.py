"""Hook of mkdocs.yml: what pages of docs/ say of files outside docs/.

On the site such files are links into the repository, if `repo_url` says where it is, and names otherwise.
"""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the page's text with its links out of docs/ mapped."""

    def mapped(link: re.Match[str]) -> str:
        text, target, anchor = link[1], posixpath.normpath(link[2].removeprefix("../")), link[3] or ""
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{target}{anchor})"
        return text if target in text else f"{text} (`{target}`)"

    return LINK.sub(mapped, markdown)
