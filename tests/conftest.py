"""Programs that keep one core busy for long, and that a test looks at only when they have ended: they start
with the first test, one after the other, and take what the others leave of the processors.

    @pytest.mark.parametrize("beside", [(sys.executable, "-c", "print(1)")], indirect=True)
    def test_it(beside):
        status, output, errors = beside()      # waits
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("here", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("here")

ROOT = Path(__file__).resolve().parents[1]
Command = tuple[str, ...]
Ended = tuple[int, str, str]


@pytest.fixture(scope="session", autouse=True)
def programs_beside(request: pytest.FixtureRequest) -> Iterator[dict[Command, Future[Ended]]]:
    """Those of all tests that were chosen, by their command lines."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    commands = [spec.params["beside"] for spec in chosen if spec is not None and "beside" in spec.params]
    running: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(1) as thread:
        try:
            yield {command: thread.submit(_run, command, running) for command in commands}
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.kill()


def _run(command: Command, running: list[subprocess.Popen[str]]) -> Ended:
    # not so nice that it would starve where others keep all processors busy
    process = subprocess.Popen(
        ["nice", "-n", "5", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    running.append(process)
    output, errors = process.communicate()
    return process.returncode, output, errors


@pytest.fixture
def beside(
    request: pytest.FixtureRequest, programs_beside: dict[Command, Future[Ended]]
) -> Callable[[], Ended]:
    """Waits for the program whose command line is the parameter: (exit status, output, errors)."""
    return programs_beside[request.param].result
