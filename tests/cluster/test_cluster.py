"""Ray around a run: its own on one machine, a cluster of several nodes, and what is left when it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from unittest import mock

import psutil
import pytest
from ray._private import services

from megatron_ibpo.basics.rendezvous import variables_set
from megatron_ibpo.cluster import nodes as cluster_nodes
from megatron_ibpo.cluster.actor import listening_on
from megatron_ibpo.cluster.nodes import numeric_address
from megatron_ibpo.cluster.ray_session import ClusterError, open_ray, own_token, write_token
from support.example_runs import engines_among, rows_of, started_by
from support.paths import ROOT
from support.simulated_cluster import simulated_cluster
from support.waiting import eventually

pytestmark, slow = pytest.mark.ray, pytest.mark.slow

OWN_RAY = """
import os, stat, sys, time
from pathlib import Path
from megatron_ibpo.cluster.ray_session import open_ray
os.umask(0)
with open_ray(None, num_cpus=2, object_store_bytes=128 * 1024**2):
    import ray
    print(*[node["NodeManagerAddress"] for node in ray.nodes()])
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    modes = [oct(stat.S_IMODE(path.stat().st_mode)) for path in (token, token.parent)]
    print(os.environ["RAY_AUTH_MODE"], *modes)
    print(token.parent, flush=True)
    if len(sys.argv) > 1:
        time.sleep(60)
    assert Path(ray._private.worker._global_node.get_session_dir_path()).is_relative_to(token.parent)
    print(*ray.get(ray.remote(lambda: [name for name in os.environ if name.startswith("RAY_AUTH")]).remote()))
print(*[name for name in os.environ if name.startswith("RAY_AUTH")])
"""


def python(*arguments, env=(), **options):
    clean = {n: v for n, v in os.environ.items() if n != "RAY_ADDRESS" and not n.startswith("RAY_AUTH")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=clean | dict(env), **pipes | options)


def ended(process, status=0):
    output, _ = process.communicate(timeout=200)
    assert process.returncode == status, output
    return output


def rays(directory):
    """Processes that have files of a Ray below `directory` open."""

    def has_some(process):
        with suppress(psutil.Error):
            return any(file.path.startswith(str(directory)) for file in process.open_files())

    return [process for process in psutil.process_iter() if has_some(process)]


@pytest.fixture
def scratch():
    """A short path: the sockets of a Ray lie in it."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_a_local_ray_is_private_and_leaves_no_files(scratch):
    """Ray would keep a token in the home and make its own directory writable for every user."""
    home, temporary = scratch / "home", scratch / "t"
    home.mkdir()
    temporary.mkdir()
    output = ended(python("-c", OWN_RAY, env={"TMPDIR": str(temporary), "HOME": str(home)}))
    address, token, directory, in_a_task, afterwards = output.splitlines()
    assert address == "127.0.0.1"
    assert token == "token 0o600 0o700"
    assert re.fullmatch(rf"{temporary}/ibpo-ray-\w+", directory)
    assert set(in_a_task.split()) == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"}
    assert afterwards == ""
    assert rays(scratch) == [*home.iterdir()] == [*temporary.iterdir()] == []


@slow
def test_a_long_tmpdir_moves_ray_which_dies_with_its_driver(scratch):
    long = scratch / ("x" * (40 - len(f"{scratch}/")))
    long.mkdir()
    process = python("-c", OWN_RAY, "wait", env={"TMPDIR": str(long)})
    said, address, _, directory = [process.stdout.readline().strip() for _ in range(4)]
    assert said.startswith(f"TMPDIR={long} has 40 bytes, and the Unix sockets of ibpo-ray-* leave it ")
    assert said.endswith("at most: /tmp is used instead")
    assert address == "127.0.0.1"
    assert len(rays(directory)) > 3
    process.kill()
    process.wait(10)
    assert eventually(lambda: not Path(directory).exists(), seconds=20)
    assert rays(directory) == [*long.iterdir()] == []


@slow
@pytest.mark.parametrize(
    ("server", "sent", "words"),
    [
        ("gcs_server", "SIGKILL", "GCS server on this machine has died"),
        ("gcs_server", "SIGSTOP", "GCS server on this machine no longer answers"),
        ("raylet", "SIGKILL", "raylet on this machine has died"),
    ],
)
def test_a_dead_or_hanging_ray_server_ends_the_run(scratch, server, sent, words):
    often = "from megatron_ibpo.cluster import ray_session; ray_session.ASK_EVERY_S = 1.0"
    environment = {"TMPDIR": str(scratch)}
    process = python("-c", often + OWN_RAY, "wait", env=environment, stderr=subprocess.PIPE)
    up = [process.stdout.readline() for _ in range(3)]
    assert up[0] == "127.0.0.1\n"
    below = psutil.Process(process.pid).children(recursive=True)
    [victim] = [one for one in below if one.name() == server]
    victim.send_signal(getattr(signal, sent))
    try:
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, said) == (1, f"error: Ray's {words}; start the run again\n")
    assert eventually(lambda: not any(one.is_running() for one in below), 30)


def test_a_token_of_the_users_is_kept(tmp_path):
    for own in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "a"}, {"RAY_AUTH_TOKEN_PATH": "/a"}):
        with mock.patch.dict(os.environ, own, clear=True), own_token(tmp_path):
            assert dict(os.environ) == own
    assert list(tmp_path.iterdir()) == []


def test_only_the_named_environment_variables_are_written(monkeypatch):
    """Native threads read the others meanwhile."""
    monkeypatch.setenv("KEPT", "1")
    written = []
    for name in ("putenv", "unsetenv"):
        monkeypatch.setattr(os, name, lambda variable, *_: written.append(variable))
    with variables_set({"KEPT": "2", "NEW": "3"}):
        assert (os.environ["KEPT"], os.environ["NEW"]) == ("2", "3")
    assert (os.environ["KEPT"], os.environ.get("NEW")) == ("1", None)
    assert {*written} == {b"KEPT", b"NEW"}


WITH_SERVER = "import sys; from ray._private import services; services.GCS_SERVER_EXECUTABLE = {!r}\n"
SHORT_WAITS = {"RAY_gcs_server_port_wait_time_s": "3", "RAY_raylet_start_wait_time_s": "3"}


@slow
def test_a_ray_that_does_not_start_is_started_once_more(scratch):
    second, server, place = (scratch / name for name in ("second", "server", "t"))
    server.write_text(
        f'#!/bin/sh\n[ -e {second} ] && exec {services.GCS_SERVER_EXECUTABLE} "$@"\n: >{second}; exit 3\n'
    )
    server.chmod(0o755)
    place.mkdir()
    # the second one is real
    environment = SHORT_WAITS | {"RAY_gcs_server_port_wait_time_s": "15", "TMPDIR": str(place)}
    output = ended(python("-c", WITH_SERVER.format(str(server)) + OWN_RAY, env=environment))
    assert re.search(r"^Ray does not start on this machine: .*; trying again$", output, re.MULTILINE)
    assert re.search(r"^127\.0\.0\.1$", output, re.MULTILINE)
    assert list(place.iterdir()) == []


@slow
def test_a_ray_that_fails_to_start_is_no_bad_input(scratch):
    """A job that ends with status 2 is not queued again."""
    train = "from megatron_ibpo.commands.train import main; sys.exit(main(sys.argv[1:]))"
    flags = ("--config", RECIPE, "--run-dir", str(scratch / "run"))
    output = ended(python("-c", WITH_SERVER.format("/bin/false") + train, *flags, env=SHORT_WAITS), 1)
    assert re.search(r"^error: Ray does not start on this machine: ", output, re.MULTILINE)
    assert "Traceback" not in output


def test_there_is_no_cluster_to_join(port):
    address = f"127.0.0.1:{port}"
    said = f"^--ray-address {address}: nothing answers there; start a cluster with `ray start --head`"
    with mock.patch.dict(os.environ), pytest.raises(ClusterError, match=said), open_ray(address, num_cpus=1):
        pass


RECIPE = str(ROOT / "examples/recipes/tiny_qwen3_next_ibpo.yaml")


@slow
def test_a_cluster_of_another_ray_version_is_refused(tmp_path):
    train = "import ray, sys; ray.__version__ = '2.55.1'; from megatron_ibpo.commands.train import main; "
    with simulated_cluster(1) as cluster:
        flags = ["--config", RECIPE, "--run-dir", str(tmp_path / "run"), "--ray-address", cluster.address]
        output = ended(python("-c", train + "sys.exit(main(sys.argv[1:]))", *flags), 2)
    assert f"error: --ray-address {cluster.address}: Version mismatch" in output
    assert re.search(rf"cluster was started with: Ray: {re.escape(metadata.version('ray'))} Python: ", output)
    assert re.search(r"This process .* was started with: Ray: 2\.55\.1 ", output)
    assert "start both from the same environment" in output
    assert "Traceback" not in output


def nodes(rank, port, scratch, *command, num_nodes=2, timeout=1800, env=None):
    """A node whose temporary files and run directory lie in `scratch`; node 0 waits for another one."""
    (scratch / "t").mkdir(exist_ok=True)
    flags = f"--num-nodes {num_nodes} --node-rank {rank} --address 127.0.0.1:{port} --timeout {timeout}"
    words = [*flags.split(), "--run-dir", str(scratch / "run"), "--", *command]
    environment = {"TMPDIR": str(scratch / "t")} | (env or {})
    started = python("-m", "megatron_ibpo.cluster.nodes", *words, env=environment)
    if rank == 0 and num_nodes == 2 and timeout == 1800:
        assert started.stdout.readline() == f"waiting for 1 more node at 127.0.0.1:{port}\n"
    return started


def nothing_left(scratch):
    return eventually(lambda: rays(scratch) == list(scratch.glob("*/*")) == [], 20)


@slow
def test_nodes_with_the_token_form_a_cluster_for_one_command(scratch, port):
    in_a_cluster = """
import os, ray, subprocess, sys, time
from pathlib import Path
mode = Path(sys.argv[1]).stat().st_mode & 0o777
print("token", f"{mode:o}", [name for name in os.environ if name.startswith("RAY_AUTH")])
for other in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 32}):
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    join = "from megatron_ibpo.cluster import ray_session\\nwith ray_session.open_ray(%r, num_cpus=1): pass"
    command = [sys.executable, "-c", join % os.environ["RAY_ADDRESS"]]
    stranger = subprocess.run(command, env=mine | other, capture_output=True, text=True, timeout=60)
    print("stranger:", stranger.stdout, stranger.stderr.splitlines()[-1])
from megatron_ibpo.cluster.ray_session import open_ray
with open_ray(os.environ["RAY_ADDRESS"], num_cpus=1):
    print("nodes", sum(node["Alive"] for node in ray.nodes()))
"""
    token = scratch / "run/.ray_token"
    lead = nodes(0, port, scratch, sys.executable, "-c", in_a_cluster, str(token))
    follower = nodes(1, port, scratch)
    output = ended(lead)
    assert re.search(r"nodes 2\b", output), output
    assert re.search(r"^token 600 \['RAY_AUTH_MODE', 'RAY_AUTH_TOKEN_PATH'\]$", output, re.MULTILINE), output
    refused = r"^stranger:  .*ClusterError: --ray-address 127.0.0.1:\d+: that cluster has another token; set "
    assert len(re.findall(refused, output, re.MULTILINE)) == 2, output
    ended(follower)
    assert nothing_left(scratch)


def test_a_node_without_the_token_learns_how_to_get_it(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(cluster_nodes, "TOKEN_WAIT_S", 0.0)
    monkeypatch.setattr(cluster_nodes, "LOOK_EVERY_S", 0.01)
    with pytest.raises(ClusterError, match=r"waited . s for .*/\.ray_token, which node 0 .*; put RUN_DIR on"):
        cluster_nodes._token_of_node_0(tmp_path)
    write_token(tmp_path, "a" * 64)
    assert cluster_nodes._token_of_node_0(tmp_path) == "a" * 64
    with pytest.raises(ClusterError, match="or set the same RAY_AUTH_TOKEN on all of them"):
        cluster_nodes._token_of_node_0(None)


@slow
def test_another_token_is_refused_and_a_signal_ends_waiting_nodes(scratch, port):
    lead = nodes(0, port, scratch, "true")
    follower = nodes(1, port, scratch, env={"RAY_AUTH_TOKEN": "b" * 32})
    output = ended(follower, 2)
    assert "error: Ray has ended on this node (status 1): node 0 has another token; put RUN_DIR on" in output
    os.killpg(lead.pid, signal.SIGTERM)
    lead.communicate(timeout=60)
    assert nothing_left(scratch)


@slow
def test_nodes_that_do_not_come_are_no_bad_input(scratch, port):
    output = ended(nodes(0, port, scratch, "true", timeout=3), 1)
    assert re.search(r"error: waited \d+ s for 1 more node at .*; start the script on every node", output)
    (log,) = scratch.glob("*/*")
    assert f"the traceback is in {log}" in output, "since there is no directory of the run yet"


def test_the_name_of_node_0_becomes_a_reachable_address(monkeypatch):
    known = {"node0": ["fd00::7", "127.0.1.1", "10.0.0.7"], "alone": ["127.0.1.1"]}

    def resolve(host, port, **_):
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, None, (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert numeric_address("node0", 2) == "10.0.0.7"
    assert numeric_address("alone", 1) == "127.0.1.1"
    assert numeric_address("127.0.0.1", 2) == "127.0.0.1", "nodes that are simulated on one machine"
    with pytest.raises(ClusterError, match=r"MASTER_ADDR=alone is 127\.0\.1\.1 here, which other"):
        numeric_address("alone", 2)
    with pytest.raises(ClusterError, match="MASTER_ADDR=nowhere: no such host is known here"):
        numeric_address("nowhere", 2)


def test_libraries_listen_on_the_interface_of_the_nodes_address(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP", "IBPO_NODE_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    head, loopback = "127.0.0.1:6379", dict.fromkeys(("IBPO_NODE_ADDRESS", "VLLM_HOST_IP"), "127.0.0.1")
    loopback |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    # of a name, and of an address that no interface here has, the way to the head
    for address in ("127.0.0.1", "node0.example", "203.0.113.9"):
        assert listening_on(address, head) == loopback
    nowhere = dict.fromkeys(("IBPO_NODE_ADDRESS", "VLLM_HOST_IP"), "203.0.113.9")
    assert listening_on("203.0.113.9", "no-such-host.invalid:6379") == nowhere
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert listening_on("127.0.0.1", head)["NCCL_SOCKET_IFNAME"] == "ib0", "the user's stays"


def test_a_port_that_is_taken_is_said_at_once(monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken, mock.patch.dict(os.environ):
        port = taken.getsockname()[1]
        flags = f"--num-nodes 2 --node-rank 0 --address 127.0.0.1:{port} -- true"
        assert cluster_nodes.main(flags.split()) == 2
    said = f"error: port {port} is in use on 127.0.0.1: set MASTER_PORT to a free one, the same on all"
    assert capsys.readouterr().err.startswith(said)


@slow
def test_the_command_gets_the_signal_and_time_to_finish(scratch, port):
    finishes = 'sleep 60 & trap "kill $!; sleep 2; echo finished; exit 5" TERM; echo ready; wait'
    lead = nodes(0, port, scratch, "sh", "-c", finishes, num_nodes=1)
    assert lead.stdout.readline() == "ready\n"
    lead.terminate()
    assert ended(lead, 5) == "finished\n"
    assert nothing_left(scratch)


# --- the loop on a cluster of three nodes


@pytest.fixture(scope="module")
def cluster():
    with simulated_cluster(3) as started:
        yield started


@pytest.fixture
def start(cluster, tmp_path):
    """Starts the tiny recipe on the cluster, in the directory `run`, with its output in `log`."""
    with (tmp_path / "log").open("w") as output, ExitStack() as stack:

        def start(flags):
            command = [sys.executable, "-m", "megatron_ibpo.commands.train", *flags.split()]
            command += ["--config", RECIPE, "--run-dir", str(tmp_path / "run"), "--no-save"]
            command += ["--ray-address", cluster.address]
            command += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--eval-num-prompts", "0"]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--no-colocate --rollout-num-gpus 1", ["0, engines –", "1, engines –", "–, engines 0"]),
        ("--num-trainers 2", ["0, engines 0", "1, engines 1", "–, engines –"]),
    ],
)
@pytest.mark.engine
@slow
def test_trainers_on_two_nodes(start, tmp_path, flags, expected):
    process = start(f"{flags} --num-rollout 2 --check-weight-update-equal")
    status, said = process.wait(280), (tmp_path / "log").read_text()
    assert status == 0, said[-5000:]
    placed = [line for line in said.splitlines() if line.endswith("verifiers") and "engines" in line]
    wanted = [f"trainers {row}, 2 verifiers" for row in expected]
    assert sorted(line.split(": ", 1)[1] for line in placed) == wanted
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2]


@pytest.mark.engine
@slow
def test_a_run_awaits_a_lost_node_and_samples_nothing_twice(cluster, start, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"

    def wait_for(words, seconds):
        assert eventually(lambda: words in log.read_text(), seconds), log.read_text()[-5000:]

    process = start("--num-rollout 8 --no-colocate --rollout-num-gpus 1")
    wait_for("step 2/8", 240)
    engine, *_ = engines_among(started_by(cluster.process))
    raylet = next(parent for parent in engine.parents() if parent.name() == "raylet")
    for process_of_node in [raylet, *raylet.children(recursive=True)]:
        process_of_node.kill()
    wait_for("once the cluster has room", 120)
    cluster.add_node()
    assert process.wait(240) == 0, log.read_text()[-5000:]
    assert [row["step"] for row in rows_of(run_dir)] == list(range(1, 9))
    replayed = [row for row in rows_of(run_dir) if row.get("groups_replayed")]
    assert [row["groups_replayed"] for row in replayed[:2]] == [4, 4]
