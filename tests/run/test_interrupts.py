"""Ctrl-C, SIGTERM and a closed terminal, as a program meets them; and the loss of a node, with stand-ins."""

import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from megatron_ibpo.basics.entry_point import FAILED, guarded
from megatron_ibpo.cluster.deaths import ProcessDiedError
from megatron_ibpo.commands import train
from megatron_ibpo.config import Config
from megatron_ibpo.engines.registry import on_device, sampling_precision
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.run import on_cluster
from megatron_ibpo.run import open as run_open
from megatron_ibpo.run.inputs import sampling_settings
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
SAYS = "stopping after this step; once more to stop at once\n"


@pytest.fixture
def stopping(tmp_path):
    with ExitStack() as stack:

        def start(what, **options):
            command = [sys.executable, "-c", STOPPING, str(tmp_path / "hangup.log"), what]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, **options)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout.readline() == "ready\n"
            return process

        yield start


def test_the_first_signal_is_noted_and_the_second_stops_immediately(stopping):
    process = stopping("goes on")
    for _ in range(2):  # as launchers hand it on: it is the same one
        process.send_signal(signal.SIGTERM)
    assert [process.stdout.readline() for _ in range(2)] == [SAYS, "asked True\n"]
    assert process.poll() is None
    time.sleep(1.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(5) != 0


def test_a_signal_cuts_an_evaluation_short(stopping):
    process = stopping("evaluates")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=5) == ("asked True\n", None)
    assert process.returncode == 0


def test_a_run_without_a_terminal_logs_to_a_file(stopping, tmp_path):
    for number, told in ((signal.SIGTERM, ""), (signal.SIGHUP, SAYS)):
        process = stopping("steps")
        process.stdout.close()  # the reader goes with the terminal
        process.send_signal(number)
        assert process.wait(5) == 0
        assert (tmp_path / "hangup.log").read_text() == f"{told}asked True\n"
        (tmp_path / "hangup.log").unlink()


def test_nohup_is_respected(stopping):
    process = stopping("steps", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    assert not eventually(lambda: process.poll() is not None, seconds=0.5)


def test_a_lost_node_is_awaited_during_restarts_within_a_limit(monkeypatch, capsys):
    lost, died = on_cluster.NodeLostError("a node is lost"), ProcessDiedError("engine 1 has ended")
    config, stop = Config(), SimpleNamespace(cuts_short=lambda work: work())
    config.cluster.node_wait = 7.0

    def trained(*happens):
        """What happens at each opening, in order: an error then, or one in the steps, or the exit status."""
        left, waits = [*happens], []

        @contextmanager
        def open_run(config, node_wait, started):
            waits.append(node_wait)
            if isinstance(left[0], ProcessDiedError):
                raise left.pop(0)
            yield SimpleNamespace(config=config, reporter=SimpleNamespace(note=lambda _: None))

        def steps(run, stop):
            if isinstance(end := left.pop(0), Exception):
                raise end
            return end

        monkeypatch.setattr(run_open, "open_run", open_run)
        monkeypatch.setattr(on_cluster, "resume_after_loss", lambda run, asked: run.config)
        monkeypatch.setattr(train, "_steps", steps)
        return guarded(lambda: train._train(config, stop)), waits

    assert trained(lost, train.DONE) == (train.DONE, [0.0, 7.0])
    assert trained(lost, died, died, lost, died, train.DONE) == (train.DONE, [0.0, *[7.0] * 5])
    capsys.readouterr()
    assert trained(lost, died, died, died) == (FAILED, [0.0, 7.0, 7.0, 7.0])
    assert capsys.readouterr().err.count("starting again") == 2
    assert trained(died) == (FAILED, [0.0])


def test_the_journal_serves_a_resumed_run_with_resolved_device_settings():
    asked = Config()
    run = SimpleNamespace(
        config=on_device(asked, read_hf_config(ROOT / "examples/tiny_qwen3_next"), on_gpu=False)
    )
    again = on_cluster.resume_after_loss(run, asked)
    assert (again.run.load, again.model.bf16) == (run.config.run.run_dir, False)
    assert sampling_precision(run.config.rollout).dtype == "bfloat16"
    assert sampling_settings(again) == sampling_settings(asked)
