"""Ending a process whose own Ray has died: without Ray's servers, no orderly shutdown is possible."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from megatron_ibpo.basics.entry_point import FAILED

LOOK_EVERY_S = 0.2


@contextmanager
def ended_with_ray() -> Iterator[None]:
    """End this process with one line and status 1 as soon as a server of the Ray that it started dies.

    Without the raylet Ray ends its processes itself, and prints twenty lines. Without the GCS server calls go
    on for a minute before Ray ends this process. The rest of Ray is cleaned up after its end.
    """
    from ray._private import ray_constants, worker

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

    watcher = threading.Thread(target=watch, name="Ray's servers", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _end(text: str) -> None:
    with suppress(Exception):
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
    os._exit(FAILED)
