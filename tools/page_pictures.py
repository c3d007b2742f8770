"""The pictures of docs/reading_a_run.md, of two runs on this machine: three minutes each on two cores.

FLAGS="--rollout-backend lean --eval-num-prompts 0 --num-rollout 40 --save-debug-rollout-data"
STUDY="--config examples/recipes/tiny_qwen3_study.yaml"
bash tools/ibpo.sh train $STUDY $FLAGS --advantage-estimator ibpo --run-dir runs/a
bash tools/ibpo.sh train $STUDY $FLAGS --advantage-estimator gspo --run-dir runs/b
PYTHONPATH=.:tests python tools/page_pictures.py runs/a runs/b
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from PIL import Image

from megatron_ibpo.report.page.static import build_page
from support.browser import open_page
from support.paths import ROOT

DOCS = ROOT / "docs"
COLOURS = 128


@dataclass
class Arguments:
    run: tyro.conf.Positional[Path]
    """One with recorded rollouts and corrections."""
    other: tyro.conf.Positional[Path]
    """One to compare it with."""


def main(arguments: Arguments) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "page.html"
        path.write_text(build_page([arguments.run, arguments.other]), encoding="utf-8")
        with open_page(path, size=(1280, 820)) as page:
            page.wait_until("document.querySelector('figure')")
            picture(page, "reading_curves.png")
            page.press("2")
            page.wait_until("document.querySelector('.pane')")
            page.press("f")  # corrected
            page.wait_until("document.querySelector('.kind')?.textContent === 'corrected'")
            picture(page, "reading_samples.png")


def picture(page, name: str) -> None:
    path = DOCS / name
    page.screenshot(path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS).save(path, optimize=True)
    print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
