"""A process whose own Ray has died ends soon, in a line, and leaves nothing behind."""

import signal
import subprocess
import sys

import psutil
import pytest

from support.waiting import eventually

pytestmark = pytest.mark.ray

HOLDS_RAY = """
import time
from megatron_ibpo.cluster import orphan_watch
from megatron_ibpo.cluster.ray_session import open_ray
orphan_watch.ASK_EVERY_S = 1.0
with open_ray(None, num_cpus=2, object_store_bytes=128 * 1024**2):
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("server", "signal_sent", "words"),
    [
        ("gcs_server", signal.SIGKILL, "GCS server on this machine has died"),
        pytest.param(
            *("gcs_server", signal.SIGSTOP, "GCS server on this machine no longer answers"),
            marks=pytest.mark.slow,
        ),
        pytest.param("raylet", signal.SIGKILL, "raylet on this machine has died", marks=pytest.mark.slow),
    ],
)
def test_when_a_server_of_its_ray_dies_or_hangs_a_process_ends_with_status_1_and_a_line(
    server, signal_sent, words
):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_RAY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "up\n"
        below = psutil.Process(process.pid).children(recursive=True)
        [victim] = [one for one in below if one.name() == server]
        victim.send_signal(signal_sent)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert said == f"error: Ray's {words}; start the run again\n"
    assert eventually(lambda: not any(one.is_running() for one in below), 30)
