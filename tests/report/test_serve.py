"""The server of the page: what it answers and to whom, while a run writes; and in a browser."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from megatron_ibpo.cluster.ray_token import TOKEN_FILE, write_token
from megatron_ibpo.commands.page import main
from megatron_ibpo.report import rollout_path
from megatron_ibpo.report.metrics_log import Columns
from megatron_ibpo.report.page.directories import open_source
from megatron_ibpo.report.page.server import application
from megatron_ibpo.report.page.static import build_page
from support.browser import needs_browser, open_page
from support.eval_samples import judged
from support.paths import ROOT
from support.run_pages import HOSTILE, TOKENIZER, write_run


def client(*directories, host="127.0.0.1:8800"):
    sources = [open_source(directory, tokenizer=TOKENIZER) for directory in directories]
    return TestClient(application(sources), base_url=f"http://{host}", raise_server_exceptions=False)


def add_row(run, step, **values):
    row = {"kind": "step", "step": step, "seconds": {}, **values}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_the_server_tells_what_the_file_holds(run_dir):
    asked = client(run_dir)
    (run,) = asked.get("/api/runs").json()["runs"]
    assert (run["name"], run["steps"], run["planned"]) == ("run", 2, 2)
    assert [section["key"] for section in run["sections"]] == [1, 2]
    series = asked.get("/api/runs/0/series").json()
    assert series["step"]["metrics"]["reward"] == {"mean": [0.1, 0.2]}
    assert series["evaluation"]["metrics"]["accuracy"] == {"mean": [0.5]}
    assert asked.get("/api/runs/0/series?first=2&last=9").json()["step"]["last"] == [2]
    none = {"first": [], "last": [], "metrics": {}}
    assert asked.get("/api/runs/0/series?first=3&last=9").json()["step"] == none
    index = asked.get("/api/runs/0/sections/1").json()
    assert [len(group["responses"]) for group in index] == [5, 3]
    group = asked.get("/api/runs/0/sections/1/groups/1").json()
    assert group["responses"][1]["advantages"] == [0.5, 0.0, -0.5, 1.0, 2.0, 0.0]
    assert asked.get("/api/runs/0/sections/1/search", params={"text": "#13"}).json() == [[0, 2]]
    everything = asked.get("/api/runs/0/sections/1/search", params={"text": "WINDOW.HARMED"}).json()
    assert len(everything) == 8  # it is in the prompt of both groups


def test_rows_and_records_that_a_run_adds_are_seen(run_dir):
    asked = client(run_dir)
    before = asked.get("/api/runs").json()["version"]
    assert asked.get("/api/runs", params={"version": before}).json() == {"version": before}
    add_row(run_dir, 3, reward=0.3)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 4, "rew')  # a row that is being written
    after = asked.get("/api/runs", params={"version": before}).json()
    assert after["runs"][0]["steps"] == 3
    assert asked.get("/api/runs/0/series").json()["step"]["metrics"]["reward"] == {"mean": [0.1, 0.2, 0.3]}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('ard": 0.4, "seconds": {}}\n')
    rollout_path(run_dir / "rollouts", 3).write_bytes(rollout_path(run_dir / "rollouts", 2).read_bytes())
    (run,) = asked.get("/api/runs", params={"version": after["version"]}).json()["runs"]
    assert (run["steps"], [section["key"] for section in run["sections"]]) == (4, [1, 2, 3])
    (run_dir / "summary.json").write_text('{"status": "finished", "accuracy_end": 0.75}')
    for step in range(5, 15):
        add_row(run_dir, step, accuracy=1.0)
    (run,) = asked.get("/api/runs").json()["runs"]
    assert run["facts"] == ["finished", "at end 0.75"]
    (alarm,) = run["alarms"]
    spell = (alarm["name"], alarm["metric"], alarm["since"], alarm["until"])
    assert spell == ("reward saturates", "accuracy", 14, None)


def test_a_run_is_followed_from_its_first_row_and_a_log_that_a_resumed_run_replaced_read_anew(run_dir):
    log = run_dir / "metrics.jsonl"
    rows = log.read_text().splitlines(keepends=True)
    log.unlink()
    asked = client(run_dir)
    before = asked.get("/api/runs").json()
    assert before["runs"][0]["steps"] == 0
    log.write_text("".join(rows))
    assert asked.get("/api/runs", params={"version": before["version"]}).json()["runs"][0]["steps"] == 2
    assert asked.get("/api/runs/0/series").json()["step"]["last"] == [1, 2]
    (run_dir / "new").write_text("".join(rows[:2]))
    (run_dir / "new").replace(log)
    assert asked.get("/api/runs/0/series").json()["step"]["last"] == [1]
    with log.open("a") as file:
        file.write("3\n")
    reply = asked.get("/api/runs")
    assert reply.status_code == 500
    assert "metrics.jsonl, line 3: not a row of a metrics log" in reply.json()["problem"]
    assert asked.get("/api/runs/0/sections/1").status_code == 200, "the rest goes on"


def test_runs_are_compared_by_settings_that_differ_and_by_their_last_numbers(run_dir, tmp_path):
    other = write_run(tmp_path / "other", [], steps=())
    settings = json.loads((other / "config.yaml").read_text())
    (other / "config.yaml").write_text(json.dumps(settings | {"advantage-estimator": "gspo", "lr": 0.1}))
    add_row(other, 3, reward=0.6, loss=1.0)
    compared = client(run_dir, other).get("/api/runs").json()["comparison"]
    assert compared["settings"] == [["advantage-estimator", "ibpo", "gspo"], ["lr", None, 0.1]]
    numbers = {name: values for name, *values in compared["numbers"]}
    assert numbers["reward"] == [0.15, 0.3]
    assert numbers["loss"] == [None, 1.0]
    assert numbers["evaluation/accuracy"] == [0.5, 0.5]


def test_a_curve_of_many_steps_is_drawn_from_few_points_that_hide_no_extreme():
    def columns(values):
        return Columns({"kind": "step", "step": n, "x": x, "seconds": {}} for n, x in enumerate(values, 1))

    thousand = columns([float(n == 777) for n in range(1, 1001)])
    thinned = thousand.thinned(None, None, 10)
    assert thinned["first"] == [*range(1, 1000, 100), 1000]
    assert thinned["last"] == [*range(100, 1000, 100), 999, 1000]
    mean, high = ([0.0] * 7 + [peak] + [0.0] * 3 for peak in (0.01, 1.0))
    assert thinned["metrics"]["x"] == {"mean": mean, "low": [0.0] * 11, "high": high}
    near = thousand.thinned(775, 779, 10)
    assert (near["last"], near["metrics"]["x"]) == ([775, 776, 777, 778, 779], {"mean": [0, 0, 1, 0, 0]})
    # steps without a value leave gaps and not zeros
    found = columns([3.0 if n % 4 == 0 else None for n in range(1, 9)]).thinned(None, None, 4)
    assert found["metrics"]["x"] == {key: [None, 3.0, None, None, 3.0] for key in ("mean", "low", "high")}


@pytest.fixture
def evaluation(tmp_path):
    directory = tmp_path / "evaluated"
    directory.mkdir()
    measured = {
        "settings": {}, "measures": {"accuracy": 0.5, "pass_at_2": 0.75, "accuracy_low": 0.4},
        "intervals": {"accuracy": [0.4, 0.6]}, "notes": ["one row was skipped"],
    }  # fmt: skip
    sets = {"aime25": measured, "math500": {"settings": {}}}
    results = {"status": "unfinished", "policy": "/models/a", "sets": sets}
    (directory / "results.json").write_text(json.dumps(results))
    half = {"set": "aime25", "details": {"tests_passed": 0.5}}
    samples = [
        judged(1, 0, "so it is 7", 1.0, **half),
        judged(0, 0, HOSTILE, 0.0, finish_reason="length", **half),
        judged(1, 1, "so it is 8", 0.0, **half),
        judged(0, 1, "é 7", None, error="timed out", **half),
    ]
    lines = "".join(json.dumps(one.as_json()) + "\n" for one in samples)
    (directory / "aime25.samples.jsonl").write_text(lines + '{"being": "writ')
    return directory


def test_an_evaluation_is_read_as_sets_of_problems_with_their_samples(evaluation):
    asked = client(evaluation)
    (shown,) = asked.get("/api/runs").json()["runs"]
    facts = (shown["kind"], shown["title"], shown["facts"])
    assert facts == ("evaluation", "evaluation of a", ["unfinished"])
    assert shown["sets"]["aime25"]["measures"]["pass_at_2"] == 0.75
    assert shown["sets"]["aime25"]["intervals"] == {"accuracy": [0.4, 0.6]}
    assert shown["sets"]["math500"] == {"measures": {}, "intervals": {}, "notes": []}
    assert shown["sections"] == [{"key": 0, "label": "aime25"}]
    problems = asked.get("/api/runs/0/sections/0").json()
    assert [problem["prompt"] for problem in problems] == ["question 0", "question 1"]
    assert [r["reward"] for r in problems[0]["responses"]] == [0.0, None]
    group = asked.get("/api/runs/0/sections/0/groups/0").json()
    assert [r["text"] for r in group["responses"]] == [HOSTILE, "é 7"]
    assert group["responses"][1]["error"] == "timed out"
    assert group["responses"][0]["details"] == {"tests_passed": 0.5}
    assert asked.get("/api/runs/0/sections/0/search?text=IT IS 8").json() == [[1, 1]]


def test_a_malformed_file_of_an_evaluation_is_named(evaluation):
    of_words = '{"sets": {"a": {"settings": {}, "intervals": {"accuracy": ["x", 1]}}}}'
    for file, text, words in [
        ("aime25.samples.jsonl", "3\n", "aime25.samples.jsonl, line 1: not a sample"),
        ("aime25.samples.jsonl", "{\n", "aime25.samples.jsonl, line 1: not JSON"),
        ("results.json", "[]", "results.json: cannot be read as the results of an evaluation"),
        ("results.json", of_words, "intervals must be numbers"),
    ]:
        (evaluation / file).write_text(text)
        address = "/api/runs" if file == "results.json" else "/api/runs/0/sections/0"
        reply = client(evaluation).get(address)
        assert reply.status_code == 500
        assert words in reply.json()["problem"]


def test_this_machine_is_answered_and_a_name_that_was_pointed_here_refused(run_dir):
    answered = ("127.0.0.1:8800", "localhost:9999")  # the latter is the end of a tunnel
    refused = ("evil.example", "evil.example:8800", "0.0.0.0:8800", "127.0.0.1.evil.example")
    for host in answered + refused:
        asked, status = client(run_dir, host=host), 200 if host in answered else 400
        for path in ("/", "/api/runs", "/api/runs/0/sections/1"):
            assert asked.get(path).status_code == status


def test_no_other_origin_may_read_an_answer_and_no_header_lets_a_script_in(run_dir):
    asked = client(run_dir)
    for path in ("/", "/api/runs", "/api/runs/7/series"):
        headers = asked.get(path, headers={"Origin": "http://evil.example"}).headers
        assert not [name for name in headers if name.startswith("access-control")]
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cache-control"] == "no-store"
    page = asked.get("/")
    policy = page.headers["content-security-policy"]
    assert policy in page.text.replace("&#x27;", "'")
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-\S+'; script-src 'sha256-\S+'; img-src data:; "
        r"connect-src 'self'; base-uri 'none'; form-action 'none'", policy,
    )  # fmt: skip


def test_what_is_not_there_is_not_served_and_only_reading_is_allowed(run_dir):
    asked = client(run_dir)
    for path in (
        "/api/runs/1/series", "/api/runs/0/sections/3", "/api/runs/0/sections/1/groups/2",
        "/api/runs/0/series?first=x", "/api/runs/0/series?first=99999999999999999999", "/api/runs/-1/series",
        "/api/runs/0/sections/../../config.yaml", "/api/runs/0/sections/..%2f..%2fconfig.yaml",
        "/config.yaml", "/../config.yaml", "//etc/passwd", "/rollouts/step_000001.json",
    ):  # fmt: skip
        assert asked.get(path).status_code == 404, path
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert asked.request(method, "/api/runs").status_code == 405


def test_the_token_of_a_cluster_is_in_no_answer_and_on_no_page(run_dir, tmp_path):
    token = "0123456789abcdef" * 4
    write_token(run_dir, token)
    asked = client(run_dir)
    tried = ["/", "/api/runs", "/api/runs/0/series"]
    tried += [f"/api/runs/0/sections/{key}{more}" for key in (1, 2) for more in ("", "/groups/0")]
    tried += [f"/api/runs/0/sections/1/search?text={token}"]
    tried += [f"{start}{TOKEN_FILE}" for start in ("/", "/run/", "/api/runs/0/", "/static/", "/%2e/", "//")]
    assert [path for path in tried if token in asked.get(path).text.replace(f"text={token}", "")] == []
    assert token not in build_page([run_dir], tokenizer=TOKENIZER)


def test_a_link_that_leads_out_of_the_run_is_not_followed(run_dir, tmp_path):
    outside = tmp_path / "outside.json"
    recorded = rollout_path(run_dir / "rollouts", 1)
    outside.write_bytes(recorded.read_bytes())
    recorded.unlink()
    recorded.symlink_to(outside)
    asked = client(run_dir)
    reply = asked.get("/api/runs/0/sections/1")
    assert reply.status_code == 404
    assert "leads out of" in reply.json()["problem"]
    assert asked.get("/api/runs/0/sections/2").status_code == 200
    (run_dir / "summary.json").symlink_to(outside)
    assert asked.get("/api/runs").status_code == 404


@contextmanager
def served(*arguments):
    """The command while it runs: (process, first lines, port)."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megatron_ibpo.commands.page", "serve", *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        lines = [process.stdout.readline()]
        while not lines[-1].startswith("from another machine"):
            assert lines[-1], "".join(lines)
            lines.append(process.stdout.readline())
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", "".join(lines))[1])
        yield process, "".join(lines), port
    finally:
        process.kill()
        process.wait(10)


def listeners(port):
    """Local addresses that listen on a port, as the kernel has them."""
    tables = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for line in tables.splitlines() if ":" in line]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]


def test_the_command_listens_on_loopback_alone_takes_a_free_port_and_ends_at_once(run_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        with served(run_dir, "--port", busy) as (process, told, port):
            assert f"port {busy} is taken" in told
            assert port != busy
            assert f"ssh -L {port}:127.0.0.1:{port} " in told
            assert listeners(port) == ["0100007F"]
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/api/runs")
            assert json.loads(connection.getresponse().read())["runs"][0]["name"] == "run"
            connection.request("GET", "/api/runs", headers={"Host": "evil.example"})
            refused = connection.getresponse()
            assert refused.status == 400
            refused.read()
            process.send_signal(signal.SIGINT)  # while a browser keeps its connection
            rest, _ = process.communicate(timeout=5)
            assert (rest.strip(), process.returncode) == ("stopped", 0)


def test_what_is_no_run_is_said_before_anything_listens(tmp_path, capsys):
    for arguments, words in (([str(tmp_path)], "name a directory that does"), ([], "which run?")):
        assert main(["serve", *arguments]) == 2
        assert words in capsys.readouterr().err


@needs_browser
def test_in_a_browser_the_page_follows_a_run_while_it_trains(run_dir, tmp_path):
    other = write_run(tmp_path / "other", [], steps=())
    with (
        served(run_dir, other, "--port", 0) as (process, _, port),
        open_page(f"http://127.0.0.1:{port}/") as page,
    ):
        page.wait_until("document.querySelector('[data-metric=reward]')")
        lines = "document.querySelectorAll('[data-metric=reward] path.line').length"
        assert page.evaluate(lines) == 2
        values = "document.querySelector('[data-metric=reward] .values').textContent"
        assert page.evaluate(values) == "0.20.2"
        assert page.evaluate("document.getElementById('alarms').textContent") == ""
        # the run goes on: curves, steps and an alarm appear without a reload
        for step in range(3, 15):
            add_row(run_dir, step, reward=1.0, accuracy=1.0)
        page.wait_until("document.querySelector('.alarm')?.textContent.includes('run, since step 12')")
        page.wait_until(f"({values}).startsWith('1')")
        # an alarm leads to its curves, accuracy of steps and of evaluations
        page.click(".alarm")
        page.wait_until("document.querySelectorAll('figure').length === 2")
        page.evaluate("(() => { metric.value = ''; metric.dispatchEvent(new Event('input')); })()")
        # the step under the mouse, in every curve
        page.wait_until("document.querySelector('[data-metric=reward]')")
        page.wait_until_drawn()
        left, top, width, height = page.evaluate(
            "(() => { const b = document.querySelector('[data-metric=reward] svg').getBoundingClientRect();"
            " return [b.left, b.top, b.width, b.height]; })()"
        )
        middle, y = left + width * (46 + 324 / 2) / 380, top + height / 2  # step 7 of 14
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=middle, y=y)
        page.wait_until(f"({values}).startsWith('7: 1')")
        # smoothing draws what it smooths faintly
        page.evaluate("(() => { smoothing.value = '0.9'; smoothing.dispatchEvent(new Event('input')); })()")
        page.wait_until("document.querySelectorAll('[data-metric=reward] path.faint').length === 2")
        # a drag zooms, and a run can be left out
        page.wait_until_drawn()
        end = left + width - 12
        for event, x in (("mousePressed", middle), ("mouseMoved", end), ("mouseReleased", end)):
            page.call("Input.dispatchMouseEvent", type=event, x=x, y=y, button="left", clickCount=1)
        page.wait_until("!zoom.hidden && zoom.textContent === 'steps 7 to 14: show all'")
        page.wait_until(f"{lines} === 1")
        page.click("#zoom")
        page.wait_until(f"{lines} === 2")
        page.click("#runs .run:nth-child(2) input")
        page.wait_until(f"{lines} === 1")
        # what differs is in the tables; nothing here does but the numbers
        page.press("3")
        page.wait_until("document.getElementById('comparison').textContent.includes('same settings')")
        assert page.problems() == []
        # the server goes: the page says so
        process.kill()
        page.wait_until("document.getElementById('status').textContent.includes('no answer from the server')")


@needs_browser
def test_in_a_browser_an_evaluation_is_a_table_and_a_reader(evaluation, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(build_page([evaluation]), encoding="utf-8")
    with open_page(file) as page:
        page.wait_until("document.querySelector('#comparison table')")
        table = page.evaluate("document.querySelector('#comparison table').textContent")
        assert "accuracy0.5 0.4 to 0.6–" in table
        assert "one row was skipped" in page.evaluate("document.getElementById('comparison').textContent")
        page.press("2")
        page.wait_until("document.querySelector('.pane')")
        assert page.evaluate("document.querySelector('.pane .text').textContent") == HOSTILE
        page.press("j")
        page.wait_until("document.querySelector('.pane').textContent.includes('no reward: timed out')")
        page.press("j")
        page.wait_until("document.querySelector('.pane .text').textContent === 'so it is 7'")
        assert "tests passed 0.5 · answer 7" in page.evaluate(
            "document.querySelector('.pane .facts').textContent"
        )
        assert page.evaluate("window.harmed") is None
        assert page.problems() == []
