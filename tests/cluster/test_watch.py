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
    ("server", "sent", "words"),
    [
        ("gcs_server", "SIGKILL", "GCS server on this machine has died"),
        pytest.param(
            *("gcs_server", "SIGSTOP", "GCS server on this machine no longer answers"), marks=pytest.mark.slow
        ),
        pytest.param("raylet", "SIGKILL", "raylet on this machine has died", marks=pytest.mark.slow),
    ],
)
def test_when_a_server_of_its_ray_dies_or_hangs_a_process_ends_with_a_line(server, sent, words):
    command, pipe = [sys.executable, "-c", HOLDS_RAY], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout.readline() == "up\n"
        below = psutil.Process(process.pid).children(recursive=True)
        [victim] = [one for one in below if one.name() == server]
        victim.send_signal(getattr(signal, sent))
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, said) == (1, f"error: Ray's {words}; start the run again\n")
    assert eventually(lambda: not any(one.is_running() for one in below), 30)
