import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from megatron_ibpo.basics.records import Group, Prompt, token_ids
from megatron_ibpo.basics.text import legible
from megatron_ibpo.cluster.ray_session import TOKEN_FILE, write_token
from megatron_ibpo.commands.page import main
from megatron_ibpo.report import rollout_path, save_groups
from megatron_ibpo.report.metrics_log import Columns
from megatron_ibpo.report.page.directories import open_source
from megatron_ibpo.report.page.groups import group_of_step
from megatron_ibpo.report.page.html import build_page, page_script
from megatron_ibpo.report.page.server import application
from megatron_ibpo.report.rollout_data import RecordedStep, load_step
from support.browser import needs_browser, open_page
from support.eval_samples import judged
from support.paths import ROOT
from support.run_pages import HOSTILE, TOKENIZER, record_run, response, write_run
from support.samples import sample_of

BIDI = "a\u202eb\u2066c\ud800"  # turns text around, and ends in half a character


def hostile_tokenizer(token=HOSTILE):
    """The tiny tokenizer, but that one of its tokens reads like an attack."""
    decode = TOKENIZER.decode
    return SimpleNamespace(
        eos_id=TOKENIZER.eos_id, encode=TOKENIZER.encode,
        decode=lambda ids: token if list(ids) == TOKENIZER.encode("?") else decode(ids),
    )  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    return record_run(tmp_path)


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_is_one_file_without_requests_or_foreign_content(run_dir):
    page = build_page([run_dir], tokenizer=hostile_tokenizer())
    elements = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: elements.append((tag, dict(attributes)))
    parser.feed(page)
    tags = [tag for tag, _ in elements]
    assert tags.count("script") == 2
    assert not {"img", "link", "iframe", "object", "base", "form"} & set(tags)
    names = {name for _, attributes in elements for name in attributes}
    assert not {"src", "href"} & names
    assert not any(name.startswith("on") for name in names)
    policy = next(attributes["content"] for _, attributes in elements if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    assert HOSTILE not in page
    assert page.count("http") - page.count("http-equiv") == 1  # the name of SVG, the only address there is
    script = page_script()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", script)
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
    shared = re.findall(r"^(?:async )?(?:function|const|let) (\w+)", script, re.MULTILINE)
    assert len(shared) == len(set(shared)) > 50, "its modules share no name"


def test_the_pages_data_are_the_runs_and_its_trained_samples(run_dir):
    data = data_of(build_page([run_dir], steps=[2], tokenizer=hostile_tokenizer()))
    (run,) = data["runs"]["runs"]
    assert [section["key"] for section in run["sections"]] == [2]
    assert run["left_out"].startswith("1 of 2 recorded steps")
    group, index = data["runs/0/sections/2/groups/0"], data["runs/0/sections/2"]
    assert group["question"] == HOSTILE
    made = group["corrections"]
    assert [correction["kind"] for correction in made] == ["corrected", "rewritten", "no-op", "failed"]
    assert made[0]["ops"] == [["equal", 0, 4, 0, 4], ["insert", 4, 4, 4, 5], ["equal", 4, 5, 5, 6]]
    first, second = group["responses"][:2]
    assert "".join(group["vocabulary"][n][0] for n in first["tokens"]) == "6+7=3⟨end⟩"
    assert (first["weights"], first["advantages"]) == ([0.0, 0.0, 0.0, 0.0, 1.0, 0.0], None)
    assert (first["old"], first["new"]) == ([-0.5] * 6, [-0.4, -0.5, -0.6, -0.5, -0.7, -0.5])
    assert (second["advantage"], second["weight"], second["weights"]) == (1.5, 0.125, None)
    assert ["advantage" in correction["response"] for correction in made] == [False, False, False, True]
    assert first["lines"][0] == ["shaped reward r′", 0.3, "r + λφ = 0 + 0.6·0.5", HOSTILE]
    assert made[0]["lines"] == first["lines"]
    metrics = data["runs/0/series"]["step"]["metrics"]
    assert metrics == {"reward": {"mean": [0.1, 0.2]}, "seconds/sample": {"mean": [2.0, 2.0]}}
    states = [(r["error"], r["truncated"]) for r in index[1]["responses"]]
    assert states == [(False, False), (False, True), (True, False)]
    with pytest.raises(ValueError, match="no records of step 7, 9"):
        build_page([run_dir], steps=[9, 7, 1])


def test_an_oversized_page_keeps_outer_steps_and_names_the_omission(run_dir):
    groups = load_step(rollout_path(run_dir / "rollouts", 2)).groups
    for step in range(3, 10):
        save_groups(rollout_path(run_dir / "rollouts", step), step, groups, TOKENIZER.decode)
    whole = data_of(build_page([run_dir]))
    one = len(json.dumps(whole["runs/0/sections/9/groups/0"])) * 2
    (run,) = data_of(build_page([run_dir], most_bytes=3 * one))["runs"]["runs"]
    kept = [section["key"] for section in run["sections"]]
    assert {1, 9} <= set(kept) < set(range(1, 10))
    assert run["left_out"].startswith(f"{9 - len(kept)} of 9 recorded steps are not in this file")
    assert "left_out" not in whole["runs"]["runs"][0]


def test_the_page_command_writes_and_names_malformed_files(run_dir, tmp_path, monkeypatch):
    (run_dir / "rollouts" / "step_backup.json").write_text("{}")  # other files are left alone
    monkeypatch.chdir(run_dir.parent)  # which knows nothing of where the run was made
    assert main(["page", run_dir.name]) == 0
    page = (run_dir / "page.html").read_text()
    assert data_of(page)["runs"]["runs"][0]["name"] == "run"
    assert "step_backup" not in page
    cases = (  # more of them are made by lot in tests/house/test_fuzz_readers.py
        ("rollouts/step_000001.json", '{"format": 2, "step": 1, "groups": [3]}', "not a file of --save-"),
        ("metrics.jsonl", '{"kind": "step", "step": 1, "seconds": {"sample": "x"}}\n', "line 1: not a row"),
        ("summary.json", '{"status": "x", "accuracy_end": "many"}', "summary.json: at end must be a number"),
        ("config.yaml", "", "config.yaml: must hold `key: value` lines"),
    )  # fmt: skip
    for number, (file, text, words) in enumerate(cases):
        damaged = shutil.copytree(run_dir, tmp_path / str(number))
        (damaged / file).write_text(text)
        with pytest.raises(ValueError, match=re.escape(words)):
            build_page([damaged], tokenizer=TOKENIZER)


def test_samples_are_printed_with_their_explanation_and_no_control_codes(run_dir, capsys):
    def printed(*words):
        return main(["samples", str(run_dir), *words]), *capsys.readouterr()

    status, text, _ = printed()
    assert status == 0
    assert text.startswith("step 2, group 1, label </script>")
    assert "\\u2028" in text.splitlines()[0]
    assert "response 1: 6+7=3⟨end⟩\n  shaped reward r′: r + λφ = 0 + 0.6·0.5 = 0.3 (</script>" in text
    assert "correction 1: 6+7=13⟨end⟩\n  shaped reward r′" in text
    assert printed("--step", "1", "--group", "2")[1].startswith("step 1, group 2")
    assert "recorded steps: 1, 2" in printed("--step", "3")[2]
    assert "no group 9: step 2 has 2 groups" in printed("--group", "9")[2]
    assert legible("\x1b[2Ja\u202eb\n\ud800") == "\\x1b[2Ja\\u202eb\n\\ud800"


def test_chatml_prompts_become_turns_and_split_characters_one_token():
    """A tokenizer with ChatML's marks, which are left out, whose other tokens are bytes."""
    marks = {"<|im_start|>": [257], "<|im_end|>": [258]}
    chat = SimpleNamespace(
        eos_id=259,
        encode=lambda text: marks.get(text, list(text.encode())),
        decode=lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace"),
    )
    turns = ("system", "Be brief."), ("user", "<|im_start|>?")
    asked = [i for role, text in turns for i in (257, *f"{role}\n{text}".encode(), 258, *b"\n")]
    asked += [257, *b"assistant\n"]
    sample = sample_of(asked, [*"≤1".encode(), 0xFF, *"é".encode(), 259])
    prompt = Prompt(0, token_ids(asked), 2, "1", "sum", "?")
    content = group_of_step(0, RecordedStep(1, [Group(prompt, [sample])], {}, []), chat)
    assert content["prompt"] == [*turns, ("assistant", "")]
    texts = [content["vocabulary"][n] for n in content["responses"][0]["tokens"]]
    assert [text for text, _ in texts] == ["≤", "", "", "1", "\ufffd", "é", "", "⟨end⟩"]
    assert [special for _, special in texts] == [False] * 7 + [True]


def write_page(run, path, **options):
    path.write_text(build_page([run], **options), encoding="utf-8")
    return path


def text_of(page, selector):
    return page.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent")


def enter(page, field, value):
    page.evaluate(f"(() => {{ {field}.value = '{value}'; {field}.dispatchEvent(new Event('input')); }})()")


def press_until(page, key, expression):
    page.press(key)
    return page.wait_until(expression)


def open_samples(page):
    page.wait_until("document.querySelector('figure')")
    press_until(page, "2", "document.querySelector('#detail .pane')")


CAUGHT = """(() => {
    window.saved = [];
    window.Blob = class { constructor(parts) { window.saved.push(parts.join("")); } };
    URL.createObjectURL = () => "#saved";
})()"""  # what the page would save as files


def count_is(text):
    return f"document.getElementById('count').textContent === {json.dumps(text)}"


@needs_browser
def test_the_browser_page_filters_responses_and_obeys_keys(run_dir):
    path = write_page(run_dir, run_dir / "page.html", tokenizer=hostile_tokenizer())
    with open_page(path) as page:
        # the last step, the first response, beside its correction, which inserts a digit, and the reference
        open_samples(page)
        assert page.wait_until(count_is("1 of 8"))
        assert text_of(page, "#prompt .text") == HOSTILE
        assert text_of(page, ".kind") == "corrected"
        heads = "[...document.querySelectorAll('.pane h2')].map((h) => h.textContent)"
        assert page.evaluate(heads) == ["✗ response 1", "✓ its correction", "✓ reference: response 2"]
        inserted = "[...document.querySelectorAll('.token.insert')].map((t) => t.textContent)"
        assert page.evaluate(inserted) == ["1"]
        assert "5 of 6 tokens masked" in text_of(page, ".pane")
        # how its advantage came about, and its mask on the text
        assert text_of(page, ".lines dd") == f"r + λφ = 0 + 0.6·0.5 = 0.3{HOSTILE}".replace(
            "\u2028", "\u2028"
        )
        assert "mean 0.46 and σ 0.4 of the rewards that are compared" in text_of(page, "#prompt .facts")
        dimmed = "document.querySelectorAll('.pane:first-child .token.untrained').length"
        assert page.evaluate(dimmed) == 5
        assert page.evaluate("document.querySelectorAll('.bar').length") == 2
        page.evaluate(CAUGHT)
        page.click("#prompt .save")
        saved = json.loads(page.evaluate("window.saved[0]"))
        assert saved["responses"][0]["text"] == "6+7=3⟨end⟩"
        assert saved["responses"][0]["lines"][0][1] == 0.3
        page.click("#tabs [data-tab=curves]")
        page.click("[data-metric=reward] .save")
        assert page.evaluate("window.saved[1]").splitlines() == [
            'run,first_step,last_step,"reward",low,high', '"run",1,1,0.1,,', '"run",2,2,0.2,,',
        ]  # fmt: skip
        press_until(page, "2", "!document.getElementById('samples').hidden")
        press_until(page, "c", "document.querySelector('#legend .scale')")
        assert text_of(page, "#legend") == "0 certain  surprising -5"
        kinds = []
        for number in range(2, 10):
            kinds.append(text_of(page, ".kind"))
            press_until(page, "j", count_is(f"{min(number, 8)} of 8"))
        assert kinds == ["corrected", None, "rewritten", "no-op", "failed", None, None, None]
        press_until(page, "k", count_is("7 of 8"))
        assert "truncated" in text_of(page, ".pane")
        enter(page, "text", "#13")
        page.wait_until(count_is("1 of 1"))  # only in a correction
        assert text_of(page, ".kind") == "rewritten"
        enter(page, "text", "")
        page.wait_until("document.getElementById('count').textContent.endsWith('of 8')")
        # all responses of a group side by side; a click on one in the list
        page.click('.group[data-group="1"] .chip[data-place="2"]')
        page.wait_until(count_is("8 of 8"))
        assert "no reward: timed out" in text_of(page, "#detail")
        press_until(page, "g", "document.querySelectorAll('.side-by-side .pane').length === 3")
        press_until(page, "g", "document.querySelectorAll('.side-by-side').length === 0")
        # steps
        press_until(page, "ArrowLeft", "document.querySelector('#filters select').value === '1'")
        # nothing of the model's ran, nothing was asked for, nothing failed
        assert page.evaluate("window.harmed") is None
        sent = [e["params"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
        assert [one["request"]["url"] for one in sent] == [path.as_uri()]
        assert page.problems() == []


@pytest.mark.slow
@needs_browser
def test_in_a_browser_rewards_are_shades_and_histogram_bars_filter(tmp_path):
    prompt = Prompt(0, token_ids([1, 5]), 2, "1", "sum", "?")
    rewards = [-0.25, 0.5, 0.5, 1.0]
    groups = [Group(prompt, [response("1", reward >= 1, reward=reward) for reward in rewards])]
    run = write_run(tmp_path / "run", groups, steps=(1,))
    log = run / "metrics.jsonl"
    log.write_text(log.read_text().replace('"reward": 0.1', '"reward": 0.000006'))
    with open_page(write_page(run, tmp_path / "page.html", tokenizer=TOKENIZER)) as page:
        page.wait_until("document.querySelector('[data-metric=reward] text')")
        edges = "[...document.querySelectorAll('[data-metric=reward] text')].map((t) => t.getBBox().x)"
        assert min(page.evaluate(edges)) >= 0, "no label of an axis is cut"
        open_samples(page)
        chips = "[...document.querySelectorAll('.chip')].map((chip) => chip.textContent)"
        assert page.evaluate(chips) == ["-.25", ".5", ".5", "1"]
        shades = "new Set([...document.querySelectorAll('.chip')].map((c) => c.style.backgroundColor)).size"
        assert page.evaluate(shades) == 3
        assert text_of(page, ".share") == "mean .44"
        bars = "[...document.querySelectorAll('.bar')].map((bar) => bar.dataset.count)"
        assert page.evaluate(bars) == ["1", "2", "1"]
        assert page.evaluate("document.querySelectorAll('.lines').length") == 0, "a record of before has none"
        picked = "document.querySelector('.bar:nth-of-type(2)').dispatchEvent(new Event('click'))"
        page.evaluate(picked)
        page.wait_until(count_is("1 of 2"))
        page.evaluate(picked)
        page.wait_until("document.getElementById('count').textContent.endsWith('of 4')")
        assert page.problems() == []


@pytest.mark.slow
@needs_browser
def test_the_browser_keeps_hidden_or_endless_text_legible(tmp_path):
    prompt = Prompt(0, token_ids([1, 5]), 2, "1", "sum", BIDI)
    groups = [Group(prompt, [response("6?7", False), response("1" * 9000, True)])]
    run = write_run(tmp_path / "run", groups, steps=(1,))
    huge = BIDI + "x" * 2**20
    page_path = write_page(run, tmp_path / "page.html", tokenizer=hostile_tokenizer(huge))
    with open_page(page_path) as page:
        open_samples(page)
        assert text_of(page, "#prompt .text") == "a⟨U+202E⟩b⟨U+2066⟩c⟨U+D800⟩"
        token = text_of(page, ".pane .token:nth-child(2)")
        assert token.startswith("a⟨U+202E⟩b⟨U+2066⟩c⟨U+D800⟩xxx")
        # the names of three characters are 7 longer than they, each
        assert token.endswith(f"⟨and {len(huge) + 3 * 7 - 20_000:,} more characters⟩")
        press_until(page, "j", count_is("2 of 2"))
        assert text_of(page, ".pane .more") == "show more: 6,001 tokens are left"
        assert page.problems() == []


def client(*directories, host="127.0.0.1:8800"):
    sources = [open_source(directory, tokenizer=TOKENIZER) for directory in directories]
    return TestClient(application(sources), base_url=f"http://{host}", raise_server_exceptions=False)


def add_row(run, step, **values):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": step, "seconds": {}, **values}) + "\n")


def test_the_server_follows_a_growing_run(run_dir):
    log = run_dir / "metrics.jsonl"
    rows = log.read_text()
    log.unlink()
    asked = client(run_dir)
    before = asked.get("/api/runs").json()
    assert before["runs"][0]["steps"] == 0
    log.write_text(rows + '{"kind": "step", "step": 3, "rew')  # a row that is being written
    after = asked.get("/api/runs", params={"version": before["version"]}).json()
    assert after["runs"][0]["steps"] == 2
    again = {"params": {"version": after["version"]}}
    assert asked.get("/api/runs", **again).json() == {"version": after["version"]}
    series = asked.get("/api/runs/0/series").json()
    assert series["step"]["metrics"]["reward"] == {"mean": [0.1, 0.2]}
    assert series["evaluation"]["metrics"]["accuracy"] == {"mean": [0.5]}
    assert asked.get("/api/runs/0/series?first=2&last=9").json()["step"]["last"] == [2]
    index = asked.get("/api/runs/0/sections/1").json()
    assert [len(group["responses"]) for group in index] == [5, 3]
    assert asked.get("/api/runs/0/sections/1/search", params={"text": "#13"}).json() == [[0, 2]]
    with log.open("a") as file:
        file.write('ard": 0.4, "seconds": {}}\n')
    rollout_path(run_dir / "rollouts", 3).write_bytes(rollout_path(run_dir / "rollouts", 2).read_bytes())
    (run_dir / "summary.json").write_text('{"status": "finished", "accuracy_end": 0.75}')
    (run,) = asked.get("/api/runs", **again).json()["runs"]
    assert (run["steps"], [section["key"] for section in run["sections"]]) == (3, [1, 2, 3])
    assert run["facts"] == ["finished", "at end 0.75"]
    (run_dir / "new").write_text("".join(rows.splitlines(keepends=True)[:2]))
    (run_dir / "new").replace(log)
    assert asked.get("/api/runs/0/series").json()["step"]["last"] == [1]
    with log.open("a") as file:
        file.write("3\n")
    reply = asked.get("/api/runs")
    assert reply.status_code == 500
    assert "metrics.jsonl, line 3: not a row of a metrics log" in reply.json()["problem"]
    assert asked.get("/api/runs/0/sections/1").status_code == 200, "the rest goes on"


def test_runs_are_compared_by_differing_settings_and_last_numbers(run_dir, tmp_path):
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


def test_a_long_curve_has_few_points_that_hide_no_extreme():
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
    answers = (1, 0, "so it is 7", 1), (0, 0, HOSTILE, 0), (1, 1, "so it is 8", 0), (0, 1, "é 7", None)
    half = {"set": "aime25", "details": {"tests_passed": 0.5}}
    lines = "".join(json.dumps(asdict(judged(*answer, **half))) + "\n" for answer in answers)
    (directory / "aime25.samples.jsonl").write_text(lines + '{"being": "writ')
    return directory


def test_an_evaluation_shows_sets_of_problems_and_malformed_files(evaluation):
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
    first, second = asked.get("/api/runs/0/sections/0/groups/0").json()["responses"]
    assert (first["text"], first["details"]) == (HOSTILE, {"tests_passed": 0.5})
    assert (second["text"], second["error"]) == ("é 7", "failed")
    assert asked.get("/api/runs/0/sections/0/search?text=IT IS 8").json() == [[1, 1]]
    # a malformed file is named
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
        assert reply.status_code == 500, (file, text, words)
        assert words in reply.json()["problem"]


def test_only_this_machine_is_answered_and_no_script_gets_in(run_dir):
    answered = ("127.0.0.1:8800", "localhost:9999")  # the latter is the end of a tunnel
    refused = ("evil.example", "evil.example:8800", "0.0.0.0:8800", "127.0.0.1.evil.example")
    for host in answered + refused:
        asked, status = client(run_dir, host=host), 200 if host in answered else 400
        for path in ("/", "/api/runs", "/api/runs/0/sections/1"):
            assert asked.get(path).status_code == status, (host, path)
    asked = client(run_dir)
    for path in ("/", "/api/runs", "/api/runs/7/series"):
        headers = asked.get(path, headers={"Origin": "http://evil.example"}).headers
        assert not [name for name in headers if name.startswith("access-control")], path
        assert headers["cross-origin-resource-policy"] == "same-origin", path
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["x-frame-options"] == "DENY", path
        assert headers["cache-control"] == "no-store", path
    page = asked.get("/")
    policy = page.headers["content-security-policy"]
    assert policy in page.text.replace("&#x27;", "'")
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-\S+'; script-src 'sha256-\S+'; img-src data:; "
        r"connect-src 'self'; base-uri 'none'; form-action 'none'", policy,
    )  # fmt: skip


def test_missing_content_is_not_served_and_only_reading_is_allowed(run_dir):
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


def test_no_answer_holds_the_clusters_token_or_outside_files(run_dir, tmp_path):
    token = "0123456789abcdef" * 4
    write_token(run_dir, token)
    asked = client(run_dir)
    tried = ["/", "/api/runs", "/api/runs/0/series"]
    tried += [f"/api/runs/0/sections/{key}{more}" for key in (1, 2) for more in ("", "/groups/0")]
    tried += [f"/api/runs/0/sections/1/search?text={token}"]
    tried += [f"{start}{TOKEN_FILE}" for start in ("/", "/run/", "/api/runs/0/", "/static/", "/%2e/", "//")]
    assert [path for path in tried if token in asked.get(path).text.replace(f"text={token}", "")] == []
    assert token not in build_page([run_dir], tokenizer=TOKENIZER)
    outside, recorded = tmp_path / "outside.json", rollout_path(run_dir / "rollouts", 1)
    recorded.rename(outside)
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
    command = [sys.executable, "-m", "megatron_ibpo.commands.page", "serve", *map(str, arguments)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
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


def test_the_command_listens_on_loopback_and_ends_at_once(run_dir, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        with served(run_dir, "--port", busy) as (process, told, port):
            assert f"port {busy} is taken" in told
            assert port != busy
            assert f"ssh -L {port}:127.0.0.1:{port} " in told
            tables = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
            rows = [line.split() for line in tables.splitlines() if ":" in line]
            listening = [row[1].split(":") for row in rows if row[3] == "0A"]
            assert [address for address, own in listening if int(own, 16) == port] == ["0100007F"]
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
    assert main(["serve", str(tmp_path)]) == 2
    assert "holds neither" in capsys.readouterr().err


@pytest.mark.slow
@needs_browser
def test_the_browser_page_follows_a_training_run(run_dir, tmp_path):
    other = write_run(tmp_path / "other", [], steps=())
    with (
        served(run_dir, other, "--port", 0) as (process, _, port),
        open_page(f"http://127.0.0.1:{port}/") as page,
    ):
        page.wait_until("document.querySelector('[data-metric=reward]')")
        lines = "document.querySelectorAll('[data-metric=reward] path.line').length"
        assert page.evaluate(lines) == 2
        values = "document.querySelector('[data-metric=reward] .values').textContent"
        # the run goes on: curves, steps and an alarm appear without a reload
        for step in range(3, 15):
            add_row(run_dir, step, reward=1.0, accuracy=1.0)
        page.wait_until("document.querySelector('.alarm')?.textContent.includes('run, since step 12')")
        page.wait_until(f"({values}).startsWith('1')")
        # an alarm leads to its curves, accuracy of steps and of evaluations
        page.click(".alarm")
        page.wait_until("document.querySelectorAll('figure').length === 2")
        enter(page, "metric", "")
        page.wait_until(f"{lines} === 2")
        page.click("#runs .run:nth-child(2) input")
        page.wait_until(f"{lines} === 1")
        same = "document.getElementById('comparison').textContent.includes('same settings')"
        press_until(page, "3", same)
        assert page.problems() == []
        # the server goes: the page says so
        process.kill()
        page.wait_until("document.getElementById('status').textContent.includes('no answer from the server')")


def test_the_help_names_the_command_as_a_user_types_it(capsys):
    with pytest.raises(SystemExit):
        main(["page", "--help"])
    usage = capsys.readouterr().out.partition("\n")[0]
    assert usage == "usage: ibpo page [-h] DIRECTORY … [--save PATH] [--steps STEP …]"
