"""The message about a process that has ended says how it ended."""

import os

import pytest

from megatron_ibpo.cluster.deaths import how_it_ended, record_peak_memory
from support.waiting import eventually

WHO = "The actor died.\n\tclass_name: P\n\tpid: 4711\n\tnamespace: n\n\tip: 10.0.0.7\n"
NO_WORD = WHO + "The actor is dead. Worker unexpectedly exits with a connection error code 2. End of file."
"""As Ray 2.60 writes it."""


def test_a_kill_is_named_with_the_likely_reason_and_the_memory(tmp_path):
    (tmp_path / "worker-1-2-4711.err").write_text(":actor_name:P\n")
    (tmp_path / "peak-4711").write_text(str(3 * 1024**2))
    said = how_it_ended(NO_WORD, tmp_path)
    assert said.startswith(
        "was killed by SIGKILL (process 4711 on 10.0.0.7). Most often that is the kernel's"
    )
    assert "its memory had reached 3.0 of " in said


def test_a_crash_is_told_from_a_kill(tmp_path):
    (tmp_path / "worker-1-2-4711.err").write_text("*** SIGSEGV received at time=1 on cpu 1 ***\n")
    assert how_it_ended(NO_WORD, tmp_path) == "crashed with SIGSEGV (process 4711 on 10.0.0.7)"


def test_of_another_node_less_is_known():
    said = how_it_ended(NO_WORD, None)
    assert said.startswith("was killed by SIGKILL, or crashed in native code (process 4711 on 10.0.0.7).")
    assert said.endswith("see dmesg on that node")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            WHO + "exit code 1. The process receives a SIGTERM.",
            "was ended by SIGTERM (process 4711 on 10.0.0.7)",
        ),
        (
            "The actor died.\nThe actor died because its node has died.",
            "has ended: The actor died because its",
        ),
        ("", "has ended: the reason is not known"),
    ],
)
def test_other_ends_are_told_as_ray_tells_them(message, said):
    assert how_it_ended(message, None).startswith(said)


def test_a_process_notes_how_much_memory_it_has_had(tmp_path):
    record_peak_memory(tmp_path, os.getpid())
    peak = tmp_path / f"peak-{os.getpid()}"
    assert eventually(lambda: peak.exists() and int(peak.read_text()) > 10 * 1024, seconds=5)
