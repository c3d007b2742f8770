import re

from support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = [DOCS / "extending.md", DOCS / "rewards.md", DOCS / "http_rewards.md", DOCS / "environments.md"]


def write_modules(directory, pages=PAGES, count=15):
    text = "".join(page.read_text() for page in pages)
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```python") == count
    for name, code in blocks:
        (directory / name).write_text(code)
