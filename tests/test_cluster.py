"""Ray around a run: its own on one machine, a cluster of several nodes, and what is left when it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from waiting import eventually

from megatron_ibpo.cluster.host import listening_on
from megatron_ibpo.cluster.nodes import numeric_address
from megatron_ibpo.cluster.session import ClusterError

ROOT = Path(__file__).resolve().parents[1]

OWN_RAY = """
import sys, time
from megatron_ibpo.cluster.session import open_ray
with open_ray(None, num_cpus=2, object_store_bytes=128 * 1024**2):
    import ray
    print(*[node["NodeManagerAddress"] for node in ray.nodes()], flush=True)
    time.sleep(float(sys.argv[1]))
"""


def python(*arguments, **options):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment | options.pop("env", {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    )


def rays(directory):
    """Processes that have files of a Ray below `directory` open."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(file.path.startswith(str(directory)) for file in process.open_files()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def scratch():
    """A short path: the sockets of a Ray lie in it."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        yield Path(directory)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_ray_of_the_runs_own_listens_on_loopback_and_leaves_nothing(scratch):
    process = python("-c", OWN_RAY, "0", env={"TMPDIR": str(scratch)})
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert output.split() == ["127.0.0.1"]
    assert rays(scratch) == []
    assert list(scratch.iterdir()) == []


def test_a_killed_driver_leaves_nothing_of_its_ray(scratch):
    process = python("-c", OWN_RAY, "60", env={"TMPDIR": str(scratch)})
    assert process.stdout.readline().split() == ["127.0.0.1"]
    assert len(rays(scratch)) > 3
    process.kill()
    process.wait(10)
    assert eventually(lambda: list(scratch.iterdir()) == [], seconds=20)
    assert rays(scratch) == []


def test_there_is_no_cluster_to_join():
    program = (
        "from megatron_ibpo.cluster.session import open_ray\nwith open_ray('127.0.0.1:%d', num_cpus=1): pass"
    )
    process = python("-c", program % free_port(), env={"RAY_raylet_start_wait_time_s": "2"})
    output, _ = process.communicate(timeout=90)
    assert "ClusterError: --ray-address 127.0.0.1" in output
    assert "nothing answers there; start a cluster with `ray start --head`" in output


OTHER_VERSION = """
import sys
import ray
ray.__version__ = "2.55.1"
from ray.cluster_utils import Cluster
head = {"num_cpus": 1, "object_store_memory": 128 * 1024**2, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_cluster_of_another_version_is_refused_with_both_versions_and_what_to_do(tmp_path):
    """Of a real cluster, which tells that its Ray is another."""
    cluster = python("-c", OTHER_VERSION, stdin=subprocess.PIPE, env={"RAY_AUTH_MODE": "disabled"})
    try:
        address = cluster.stdout.readline().strip()
        recipe = ROOT / "examples/recipes/tiny_qwen3_next_ibpo.yaml"
        flags = ["--config", str(recipe), "--run-dir", str(tmp_path / "run"), "--ray-address", address]
        output, _ = (process := python("-m", "megatron_ibpo.train", *flags)).communicate(timeout=120)
    finally:
        cluster.communicate(timeout=60)
    assert process.returncode == 2, output
    assert f"error: --ray-address {address}: Version mismatch" in output
    assert re.search(r"cluster was started with: Ray: 2\.55\.1 Python: ", output)
    assert re.search(rf"This process .* was started with: Ray: {re.escape(metadata.version('ray'))} ", output)
    assert "start both from the same environment" in output
    assert "Traceback" not in output


def nodes(rank, port, scratch, *command, num_nodes=2):
    return python(
        "-m",
        "megatron_ibpo.cluster.nodes",
        *("--num-nodes", str(num_nodes), "--node-rank", str(rank), "--address", f"127.0.0.1:{port}"),
        "--",
        *command,
        env={"TMPDIR": str(scratch)},
    )


def test_nodes_form_a_cluster_for_one_command_and_all_end_with_it(scratch):
    port = free_port()
    count = (
        "import os, ray; ray.init(log_to_driver=False); print('nodes', sum(n['Alive'] for n in ray.nodes()))"
    )
    lead = nodes(0, port, scratch, sys.executable, "-c", count)
    said = lead.stdout.readline()
    assert said == f"waiting for 1 more node at 127.0.0.1:{port}\n"
    follower = nodes(1, port, scratch)
    output, _ = lead.communicate(timeout=120)
    assert lead.returncode == 0, output
    assert re.search(r"nodes 2\b", output)
    output, _ = follower.communicate(timeout=60)
    assert follower.returncode == 0, output
    assert eventually(lambda: rays(scratch) == [], seconds=20)
    assert list(scratch.iterdir()) == []


def test_a_name_of_node_0_becomes_an_address_that_other_nodes_reach(monkeypatch):
    known = {"node0": ["fd00::7", "127.0.1.1", "10.0.0.7"], "alone": ["127.0.1.1"]}

    def resolve(host, port, **_):
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, None, (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert numeric_address("node0", 2) == "10.0.0.7"
    assert numeric_address("alone", 1) == "127.0.1.1"
    assert numeric_address("127.0.0.1", 2) == "127.0.0.1", "nodes that are simulated on one machine"
    with pytest.raises(ClusterError, match=r"MASTER_ADDR=alone means 127\.0\.1\.1 here, which other"):
        numeric_address("alone", 2)
    with pytest.raises(ClusterError, match="MASTER_ADDR=nowhere: no such host is known here"):
        numeric_address("nowhere", 2)


def test_libraries_listen_on_the_interface_of_the_nodes_address(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP", "IBPO_NODE_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    loopback = {"IBPO_NODE_ADDRESS": "127.0.0.1", "VLLM_HOST_IP": "127.0.0.1"}
    loopback |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert listening_on("127.0.0.1", "127.0.0.1:6379") == loopback
    assert listening_on("node0.example", "127.0.0.1:6379") == loopback, "by the way to the head"
    assert listening_on("203.0.113.9", "127.0.0.1:6379") == loopback, "that no interface here has"
    nowhere = {"IBPO_NODE_ADDRESS": "203.0.113.9", "VLLM_HOST_IP": "203.0.113.9"}
    assert listening_on("203.0.113.9", "no-such-host.invalid:6379") == nowhere
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert listening_on("127.0.0.1", "127.0.0.1:6379")["NCCL_SOCKET_IFNAME"] == "ib0", "the user's stays"


def test_a_port_that_is_taken_is_said_at_once(scratch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = nodes(0, port, scratch, "true")
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"port {port} is in use on 127.0.0.1: set MASTER_PORT" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_ctrl_c_while_waiting_for_nodes_ends_everything(scratch):
    port = free_port()
    lead = nodes(0, port, scratch, "true")
    assert "waiting for 1 more node" in lead.stdout.readline()
    os.killpg(lead.pid, signal.SIGTERM)
    lead.communicate(timeout=60)
    assert eventually(lambda: rays(scratch) == [], seconds=20)
    assert list(scratch.iterdir()) == []


FINISHES = """
import signal, sys, time
came = []
signal.signal(signal.SIGTERM, lambda *_: came.append(1))
print("ready", flush=True)
while not came:  # a pause might begin after the signal has come
    time.sleep(0.05)
time.sleep(2)
print("finished", flush=True)
sys.exit(5)
"""


@pytest.mark.slow
def test_a_signal_goes_on_to_the_command_which_takes_its_time(scratch):
    lead = nodes(0, free_port(), scratch, sys.executable, "-c", FINISHES, num_nodes=1)
    assert lead.stdout.readline() == "ready\n"
    lead.terminate()
    output, _ = lead.communicate(timeout=60)
    assert output == "finished\n"
    assert lead.returncode == 5
    assert eventually(lambda: rays(scratch) == [], seconds=20)
