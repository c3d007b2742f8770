"""Ctrl-C, SIGTERM and a closed terminal, as a program that listens for them meets them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from support.paths import ROOT
from support.waiting import eventually

STOPPING = """
import sys, time
from pathlib import Path
from megatron_ibpo.run.stop_request import StopRequest
stop = StopRequest(Path(sys.argv[1]))
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
    started = []

    def start(what, **options):
        command = [sys.executable, "-c", STOPPING, str(tmp_path / "hangup.log"), what]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, **options)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)


def test_the_first_signal_is_noted_and_a_second_one_stops_at_once(stopping):
    process = stopping("goes on")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # as launchers hand it on: it is the same one
    assert process.stdout.readline() == "stopping after this step; once more to stop at once\n"
    assert process.stdout.readline() == "asked True\n"
    assert process.poll() is None
    time.sleep(2.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(5) != 0


def test_a_signal_cuts_an_evaluation_short(stopping):
    process = stopping("evaluates")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=5)
    assert process.returncode == 0
    assert output == "asked True\n"


def test_a_run_goes_on_when_nothing_reads_what_it_says(stopping, tmp_path):
    process = stopping("steps")
    process.stdout.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0
    assert (tmp_path / "hangup.log").read_text() == "asked True\n"


def test_after_the_terminal_has_gone_a_run_speaks_to_a_file(stopping, tmp_path):
    process = stopping("steps")
    process.stdout.close()  # whoever reads goes with the terminal
    process.send_signal(signal.SIGHUP)
    assert process.wait(5) == 0
    said = (tmp_path / "hangup.log").read_text()
    assert said == "stopping after this step; once more to stop at once\nasked True\n"


def test_nohup_is_respected(stopping):
    process = stopping("steps", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    assert not eventually(lambda: process.poll() is not None, seconds=0.5)
