"""Ending a process whose own Ray has died: without Ray's servers, no orderly shutdown is possible."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from megatron_ibpo.basics.entry_point import FAILED

LOOK_EVERY_S = 0.2
ASK_EVERY_S = 5.0
MOST_UNANSWERED = 4
"""Calls in a row without an answer that end this process; each takes a wait and a time-out of `ASK_EVERY_S`.
Ray ends the process after 60 s, in its own words."""


@contextmanager
def ended_with_ray() -> Iterator[None]:
    """End this process with one line and status 1 as soon as a server of the Ray that it started dies, or
    once its GCS server no longer answers: after a SIGTERM the GCS server of Ray 2.60 hangs instead of ending.

    Without the raylet Ray ends its processes itself, and prints twenty lines. Without the GCS server calls go
    on for a minute before Ray ends this process. The rest of Ray is cleaned up after its end.
    """
    from ray._private import ray_constants, worker
    from ray.exceptions import RayError

    node: Any = worker._global_node
    servers = {
        ray_constants.PROCESS_TYPE_GCS_SERVER: "GCS server",
        ray_constants.PROCESS_TYPE_RAYLET: "raylet",
    }
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            dead = [servers[kind] for kind, _ in node.dead_processes() if kind in servers]
            if dead and not over.is_set():
                _end(f"error: Ray's {' and '.join(dead)} on this machine has died; start the run again")

    def ask() -> None:
        global_worker: Any = worker.global_worker
        unanswered = 0
        while unanswered < MOST_UNANSWERED:
            if over.wait(ASK_EVERY_S):
                return
            try:
                global_worker.gcs_client.internal_kv_get(b"any key", None, timeout=ASK_EVERY_S)
                unanswered = 0
            except RayError:
                unanswered += 1  # not seconds: those go on while this process is stopped
        if not over.is_set():
            _end("error: Ray's GCS server on this machine no longer answers; start the run again")

    watchers = [threading.Thread(target=target, name="Ray's servers", daemon=True) for target in (watch, ask)]
    for watcher in watchers:
        watcher.start()
    try:
        yield
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()


def _end(text: str) -> None:
    with suppress(Exception):
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
    os._exit(FAILED)
