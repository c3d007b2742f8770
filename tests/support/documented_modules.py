import re

from support.paths import ROOT

PAGES = ("extending.md", "rewards.md", "http_rewards.md", "environments.md")


def write_modules(directory):
    text = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```python") == 15
    for name, code in blocks:
        (directory / name).write_text(code)
