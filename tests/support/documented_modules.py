"""The Python files that pages have users write."""

import re
from pathlib import Path

from support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = [DOCS / "extending.md", DOCS / "rewards.md", DOCS / "http_rewards.md", DOCS / "environments.md"]


def write_modules(directory: Path) -> None:
    text = "".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```python") == 14
    for name, code in blocks:
        (directory / name).write_text(code)
