"""A Ray cluster on this machine: each node has one CPU, so that no two processes that take one share it."""

import subprocess
import sys
from contextlib import contextmanager

PROGRAM = """
import os, sys
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
from ray._private.node import Node
from ray.cluster_utils import Cluster
Node.start_log_monitor = Node.start_monitor = Node.start_api_server = lambda *_, **__: None  # slow to start
node = {"num_cpus": 1, "object_store_memory": 128 * 1024**2}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
more = [cluster.add_node(**node) for _ in range(int(sys.argv[1]) - 1)]
print(cluster.address, flush=True)
for asked in sys.stdin:
    if asked.strip() == "add":
        more.append(cluster.add_node(**node))
    else:
        cluster.remove_node(more.pop(), allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""


class SimulatedCluster:
    def __init__(self, process):
        self.process, self.address = process, process.stdout.readline().strip()

    def remove_node(self):
        """Kill the last node that is left, never the first."""
        self._ask("remove")

    def add_node(self):
        self._ask("add")

    def _ask(self, what):
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextmanager
def simulated_cluster(num_nodes, environment=None):
    command = [sys.executable, "-c", PROGRAM, str(num_nodes)]
    pipes: dict = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, start_new_session=True, env=environment)
    try:
        yield SimulatedCluster(process)
    finally:
        process.stdin.close()
        process.wait(60)
