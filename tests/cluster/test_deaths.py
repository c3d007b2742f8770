"""The message about a process that has ended says how it ended."""

import os

from megatron_ibpo.cluster.deaths import how_it_ended, record_peak_memory
from support.waiting import eventually

WHO = "The actor died.\n\tclass_name: P\n\tpid: 4711\n\tnamespace: n\n\tip: 10.0.0.7\n"
NO_WORD = WHO + "The actor is dead. Worker unexpectedly exits with a connection error code 2. End of file."
"""As Ray 2.60 writes it."""


def test_a_process_that_has_ended_is_said_to_have_been_killed_or_to_have_crashed(tmp_path):
    of_worker = tmp_path / "worker-1-2-4711.err"
    of_worker.write_text(":actor_name:P\n")
    (tmp_path / "peak-4711").write_text(str(3 * 1024**2))
    said = how_it_ended(NO_WORD, tmp_path)
    assert said.startswith(
        "was killed by SIGKILL (process 4711 on 10.0.0.7). Most often that is the kernel's"
    )
    assert "its memory had reached 3.0 of " in said
    of_worker.write_text("*** SIGSEGV received at time=1 on cpu 1 ***\n")
    assert how_it_ended(NO_WORD, tmp_path) == "crashed with SIGSEGV (process 4711 on 10.0.0.7)"
    there = how_it_ended(NO_WORD, None)  # of another node less is known
    assert there.startswith("was killed by SIGKILL, or crashed in native code (process 4711 on 10.0.0.7).")
    assert there.endswith("see dmesg on that node")
    asked = how_it_ended(WHO + "exit code 1. The process receives a SIGTERM.", None)
    assert asked == "was ended by SIGTERM (process 4711 on 10.0.0.7)"
    of_node = "The actor died.\nThe actor died because its node has died."
    assert how_it_ended(of_node, None).startswith("has ended: The actor died because its")
    assert how_it_ended("", None) == "has ended: the reason is not known"


def test_a_process_notes_how_much_memory_it_has_had(tmp_path):
    record_peak_memory(tmp_path, os.getpid())
    peak = tmp_path / f"peak-{os.getpid()}"
    assert eventually(lambda: peak.exists() and int(peak.read_text()) > 10 * 1024, seconds=5)
