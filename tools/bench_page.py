"""Measure the page of a large run: 10,000 steps of metrics, recorded steps of hundreds of megabytes.

    PYTHONPATH=.:tests:examples/tasks python tools/bench_page.py --directory runs --save page_load.json

The run is made up, with the metrics of a real one. Times are what a reader waits, measured in Chromium.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from megatron_ibpo.basics.records import Group, Prompt, TrainSequence, token_ids
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.report import rollout_path, save_groups
from megatron_ibpo.report.page.static import build_page
from support.browser import Page, open_page
from support.paths import ROOT
from support.run_pages import TOKENIZER, response, write_run

METRICS = 80


@dataclass
class Arguments:
    directory: Path = Path(".")
    """Directory for the run; it is deleted again."""
    save: Path | None = None
    """JSON file for the results."""
    steps: int = 10_000
    """Rows of the metrics log."""
    recorded: int = 20
    """Steps with samples."""
    groups: int = 32
    """Groups per step."""
    responses: int = 8
    """Responses per group."""
    tokens: int = 2000
    """Tokens per response."""


def make_run(run: Path, arguments: Arguments) -> None:
    draw = np.random.default_rng(0)
    write_run(run, [], steps=())
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, arguments.steps + 1):
            values = {
                f"metric_{n}": float(value) for n, value in enumerate(draw.standard_normal(METRICS - 4))
            }
            values |= {"reward": step / 1e4, "entropy": 0.1, "accuracy": step / 1e4, "response_length": 20.0}
            file.write(
                json.dumps({"kind": "step", "step": step, **values, "seconds": {"sample": 2.0}}) + "\n"
            )
    step_of = np.linspace(1, arguments.steps, arguments.recorded).astype(int)
    groups, trained = make_step(draw, arguments)
    logprobs = [np.asarray(-draw.random(arguments.tokens), np.float32) for _ in trained]
    paths = [rollout_path(run / "rollouts", int(step)) for step in step_of]
    save_groups(paths[0], int(step_of[0]), groups, TOKENIZER.decode, trained, old_logprobs=logprobs,
                new_logprobs=logprobs)  # fmt: skip
    for path in paths[1:]:
        path.write_bytes(paths[0].read_bytes())


def make_step(draw: np.random.Generator, arguments: Arguments) -> tuple[list[Group], list[TrainSequence]]:
    groups, trained = [], []
    for number in range(arguments.groups):
        prompt = Prompt(number, token_ids([1, 5]), 2, "7", "sum", f"problem {number}")
        responses = [
            response(
                "",
                index % 2 == 1,
                prompt=prompt.token_ids,
                token_ids=draw.integers(5, TOKENIZER.vocab_size, arguments.tokens, dtype=np.int32),
                logprobs=np.asarray(-draw.random(arguments.tokens), np.float32),
                finish_reason="length",
                loss_mask=np.ones(arguments.tokens, bool),
            )
            for index in range(arguments.responses)
        ]
        groups.append(Group(prompt, responses))
        trained += [
            TrainSequence(prompt.token_ids, r.token_ids, r.loss_mask, 1.0, 1.0, number, number, index)
            for index, r in enumerate(responses)
        ]
    return groups, trained


def seconds(page: Page, expression: str, since: float) -> float:
    page.wait_until(expression)
    return round(time.perf_counter() - since, 2)


def measure(run: Path) -> dict[str, float]:
    found: dict[str, float] = {
        "metrics_mb": round((run / "metrics.jsonl").stat().st_size / 1e6, 1),
        "rollouts_mb": round(sum(path.stat().st_size for path in (run / "rollouts").iterdir()) / 1e6, 1),
    }
    start = time.perf_counter()
    command = [sys.executable, "-m", "megatron_ibpo.commands.page", "serve", str(run), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        found["server_starts_s"] = round(time.perf_counter() - start, 2)
        with open_page("about:blank") as page:
            start = time.perf_counter()
            page.call("Page.navigate", url=address)
            found["curves_drawn_s"] = seconds(page, "document.querySelector('figure')", start)
            found["megabytes_of_curves"] = page.evaluate(
                "Math.round(performance.getEntriesByType('resource')"
                ".reduce((sum, one) => sum + one.transferSize, 0) / 1e4) / 100"
            )
            start = time.perf_counter()
            row = {"kind": "step", "step": 10_001, "reward": 2.0, "seconds": {}}
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            found["new_row_drawn_s"] = seconds(
                page,
                "document.querySelector('[data-metric=reward] .values').textContent.includes('2')",
                start,
            )
            start = time.perf_counter()
            page.click('[data-group="Sampling and processes"] summary')
            found["group_of_76_curves_opened_s"] = seconds(
                page, "document.querySelectorAll('figure').length > 70", start
            )
            start = time.perf_counter()
            page.press("2")
            found["samples_of_a_step_shown_s"] = seconds(
                page, "document.querySelector('.pane .token')", start
            )
            start = time.perf_counter()
            page.press("j")
            found["next_response_shown_s"] = seconds(
                page, "document.getElementById('count').textContent.startsWith('2 of')", start
            )
            assert page.problems() == [], page.problems()
    finally:
        server.kill()
        server.wait(10)
    start = time.perf_counter()
    path = run / "page.html"
    path.write_text(build_page([run]), encoding="utf-8")
    found["file_written_s"] = round(time.perf_counter() - start, 2)
    found["file_mb"] = round(path.stat().st_size / 1e6, 1)
    with open_page("about:blank") as page:
        start = time.perf_counter()
        page.call("Page.navigate", url=path.resolve().as_uri())
        found["file_opened_s"] = seconds(page, "document.querySelector('figure')", start)
    return found


def main(arguments: Arguments) -> None:
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        run = Path(directory) / "run"
        make_run(run, arguments)
        found = measure(run)
    print(json.dumps(found, indent=2))
    if arguments.save is not None:
        sizes = {
            "steps": arguments.steps, "metrics": METRICS, "recorded_steps": arguments.recorded,
            "tokens_per_step": arguments.groups * arguments.responses * arguments.tokens,
        }  # fmt: skip
        content = {"machine": machine("starlette", "uvicorn"), "run": sizes, "results": found}
        arguments.save.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
