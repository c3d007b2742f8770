"""Ctrl-C, SIGTERM and a closed terminal, as a program that listens for them meets them."""

import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from support.paths import ROOT
from support.waiting import eventually

STOPPING = """
import sys, time
from pathlib import Path
from megatron_ibpo.run import stop_request
stop_request.REPEAT_AFTER_S = 1.0
stop = stop_request.StopRequest(Path(sys.argv[1]))
def ready():
    print("ready", flush=True)
if sys.argv[2] == "evaluates":
    ended = stop.cuts_short(lambda: (ready(), time.sleep(20)))
else:
    ready()
    deadline = time.monotonic() + 20
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.02)
print("asked", stop.requested, flush=True)
if sys.argv[2] == "goes on":
    time.sleep(20)
"""


@pytest.fixture
def stopping(tmp_path):
    """Starts a program that listens for signals, and ends it."""
    with ExitStack() as stack:

        def start(what, **options):
            command = [sys.executable, "-c", STOPPING, str(tmp_path / "hangup.log"), what]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, **options)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout.readline() == "ready\n"
            return process

        yield start


def test_the_first_signal_is_noted_and_a_second_one_stops_at_once(stopping):
    process = stopping("goes on")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # as launchers hand it on: it is the same one
    assert process.stdout.readline() == "stopping after this step; once more to stop at once\n"
    assert process.stdout.readline() == "asked True\n"
    assert process.poll() is None
    time.sleep(1.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(5) != 0


def test_a_signal_cuts_an_evaluation_short(stopping):
    process = stopping("evaluates")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=5) == ("asked True\n", None)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("number", "told"),
    [(signal.SIGTERM, ""), (signal.SIGHUP, "stopping after this step; once more to stop at once\n")],
    ids=["nothing reads what it says", "its terminal has gone"],
)
def test_a_run_goes_on_and_speaks_to_a_file_when(stopping, tmp_path, number, told):
    process = stopping("steps")
    process.stdout.close()  # the reader goes with the terminal
    process.send_signal(number)
    assert process.wait(5) == 0
    assert (tmp_path / "hangup.log").read_text() == f"{told}asked True\n"


def test_nohup_is_respected(stopping):
    process = stopping("steps", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    assert not eventually(lambda: process.poll() is not None, seconds=0.5)
