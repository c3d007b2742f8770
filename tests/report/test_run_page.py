"""The page of runs: everything in one file, text of the model never more than text; in a browser."""

import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ibpo.basics.records import Group, Prompt, token_ids
from megatron_ibpo.commands.page import main
from megatron_ibpo.report import load_groups, rollout_path, save_groups
from megatron_ibpo.report.page.html import page_script
from megatron_ibpo.report.page.recorded_step import group_of_step
from megatron_ibpo.report.page.static import build_page
from megatron_ibpo.report.rollout_data import load_step
from support.browser import needs_browser, open_page
from support.credit_cases import plain
from support.run_pages import HOSTILE, TOKENIZER, response, write_run

BIDI = "a\u202eb\u2066c\ud800"
"""Turns text around, and ends in half a character."""


def hostile_tokenizer(token=HOSTILE):
    """The tiny tokenizer, but that one of its tokens reads like an attack."""

    def decode(ids):
        return token if list(ids) == TOKENIZER.encode("?") else TOKENIZER.decode(ids)

    return SimpleNamespace(eos_id=TOKENIZER.eos_id, encode=TOKENIZER.encode, decode=decode)


def test_what_was_trained_on_is_kept_beside_what_it_was_made_of(run_dir):
    path = rollout_path(run_dir / "rollouts", 1)
    _, _, trained = load_step(path)
    assert trained.keys() == {
        (0, "response", 0), (0, "response", 1), (0, "correction", 3), (1, "response", 1),
    }  # fmt: skip
    first = trained[0, "response", 0]
    assert first.token_weights.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert first.token_advantages is None
    assert first.new_logprobs.tolist() == np.float32([-0.4, -0.5, -0.6, -0.5, -0.7, -0.5]).tolist()
    assert (trained[0, "response", 1].advantage, trained[0, "response", 1].weight) == (1.5, 0.125)
    assert trained[0, "response", 1].token_weights is None
    assert trained[1, "response", 1].token_advantages.tolist() == [0.5, 0.0, -0.5, 1.0, 2.0, 0.0]
    assert plain(load_groups(path)) == plain(load_groups(path))


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_is_one_file_that_asks_for_nothing_and_holds_nothing_foreign(run_dir):
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


def test_the_data_of_the_page_is_that_of_the_run(run_dir):
    data = data_of(build_page([run_dir], steps=[2], tokenizer=hostile_tokenizer()))
    (run,) = data["runs"]["runs"]
    assert [section["key"] for section in run["sections"]] == [2]
    assert run["left_out"].startswith("1 of 2 recorded steps")
    assert (run["steps"], run["planned"], run["facts"]) == (2, 2, ["not finished"])
    group = data["runs/0/sections/2/groups/0"]
    assert group["question"] == HOSTILE
    assert [c["kind"] for c in group["corrections"]] == ["corrected", "rewritten", "no-op", "failed"]
    first = group["corrections"][0]
    assert first["ops"] == [["equal", 0, 4, 0, 4], ["insert", 4, 4, 4, 5], ["equal", 4, 5, 5, 6]]
    assert group["responses"][0]["weights"][4] == 1.0
    assert "".join(group["vocabulary"][n][0] for n in group["responses"][0]["tokens"]) == "6+7=3⟨end⟩"
    series = data["runs/0/series"]["step"]
    assert series["last"] == [1, 2]
    assert series["metrics"]["reward"] == {"mean": [0.1, 0.2]}
    assert series["metrics"]["seconds/sample"] == {"mean": [2.0, 2.0]}
    assert "gradient_snr" not in series["metrics"]
    index = data["runs/0/sections/2"]
    assert [r["error"] for r in index[1]["responses"]] == [False, False, True]
    assert [r["truncated"] for r in index[1]["responses"]] == [False, True, False]


def test_a_page_that_would_be_too_large_keeps_the_last_and_the_first_step_and_says_what_is_missing(run_dir):
    _, groups, _ = load_step(rollout_path(run_dir / "rollouts", 2))
    for step in range(3, 10):
        save_groups(rollout_path(run_dir / "rollouts", step), step, groups, TOKENIZER.decode)
    whole = data_of(build_page([run_dir]))
    one = len(json.dumps(whole["runs/0/sections/9/groups/0"])) * 2
    (run,) = data_of(build_page([run_dir], most_bytes=3 * one))["runs"]["runs"]
    kept = [section["key"] for section in run["sections"]]
    assert {1, 9} <= set(kept) < set(range(1, 10))
    assert run["left_out"].startswith(f"{9 - len(kept)} of 9 recorded steps are not in this file")
    assert "left_out" not in whole["runs"]["runs"][0]


def test_the_command_writes_the_page_and_says_what_is_not_there(run_dir, tmp_path, capsys, monkeypatch):
    (run_dir / "rollouts" / "step_backup.json").write_text("{}")  # other files are left alone
    monkeypatch.chdir(run_dir.parent)  # which knows nothing of where the run was made
    assert main(["page", run_dir.name]) == 0
    page = (run_dir / "page.html").read_text()
    assert data_of(page)["runs"]["runs"][0]["name"] == "run"
    assert "step_backup" not in page
    assert main(["page", "run/nowhere"]) == 2
    assert "nowhere: no such directory" in capsys.readouterr().err
    with pytest.raises(ValueError, match="holds neither"):
        build_page([tmp_path])
    with pytest.raises(ValueError, match="no records of step 7, 9"):
        build_page([run_dir], steps=[9, 7, 1])


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.yaml", "", "config.yaml: must hold `key: value` lines"),
        ("config.yaml", "{", "config.yaml: is not YAML"),
        ("config.yaml", "advantage-estimator: 3\nhf-checkpoint: x", "advantage-estimator must be text, is 3"),
        ("config.yaml", "advantage-estimator: x", "hf-checkpoint must be text, is None"),
        ("summary.json", "[]", "summary.json: no summary of a run"),
        ("summary.json", '{"status": "x", "accuracy_end": "many"}', "summary.json: at end must be a number"),
        ("summary.json", '{"status": "x", "steps": NaN}', "summary.json: not JSON: NaN"),
        ("metrics.jsonl", "3\n", "metrics.jsonl, line 1: not a row of a metrics log"),
        ("metrics.jsonl", '{"kind": "step", "step": "1"}\n', "line 1: not a row"),
        ("metrics.jsonl", '{"kind": "step", "step": 1, "reward": {}}\n', "line 1: not a row"),
        ("metrics.jsonl", '{"kind": "step", "step": 1, "seconds": {"sample": "x"}}\n', "line 1: not a row"),
        ("metrics.jsonl", '{"kind": "step", "step": 1, "reward": Infinity}\n', "line 1: not JSON: Infinity"),
        ("metrics.jsonl", "[" * 100_000 + "\n", "line 1: not JSON: its brackets nest deeper"),
        ("rollouts/step_000001.json", "[" * 100_000, "step_000001.json: not a file of --save-debug"),
        ("rollouts/step_000001.json", '{"format": 2, "step": 1, "groups": [3]}', "step_000001.json"),
    ],
)
def test_a_malformed_file_of_a_run_is_named(run_dir, file, text, words):
    (run_dir / file).write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)):
        build_page([run_dir], tokenizer=hostile_tokenizer())


def test_a_prompt_in_chatml_is_shown_as_turns_and_a_character_of_several_tokens_as_one():
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
    ids = token_ids([*"≤1".encode(), 0xFF, *"é".encode(), 259])
    sample = response("", True, prompt=asked, token_ids=ids, logprobs=np.zeros(len(ids), np.float32),
                      loss_mask=np.ones(len(ids), bool))  # fmt: skip
    prompt = Prompt(0, token_ids(asked), 2, "1", "sum", "?")
    content = group_of_step(0, Group(prompt, [sample]), {}, chat)
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


def open_samples(page):
    page.wait_until("document.querySelector('figure')")
    page.press("2")
    page.wait_until("document.querySelector('#detail .pane')")


def press_until(page, key, expression):
    page.press(key)
    return page.wait_until(expression)


def count_is(text):
    return f"document.getElementById('count').textContent === {json.dumps(text)}"


@needs_browser
def test_in_a_browser_responses_are_shown_filtered_and_walked_by_keys(run_dir):
    path = write_page(run_dir, run_dir / "page.html", tokenizer=hostile_tokenizer())
    with open_page(path) as page:
        open_samples(page)

        # the last step, the first response, beside its correction, which inserts a digit, and the reference
        assert page.wait_until(count_is("1 of 8"))
        assert text_of(page, "#prompt .text") == HOSTILE
        assert text_of(page, ".kind") == "corrected"
        heads = "[...document.querySelectorAll('.pane h2')].map((h) => h.textContent)"
        assert page.evaluate(heads) == ["✗ response 1", "✓ its correction", "✓ reference: response 2"]
        marked = "[...document.querySelectorAll('.token.{}')].map((t) => t.textContent)"
        assert page.evaluate(marked.format("insert")) == ["1"]
        assert page.evaluate(marked.format("delete")) == []

        kinds = []
        for number in range(2, 10):
            kinds.append(text_of(page, ".kind"))
            press_until(page, "j", count_is(f"{min(number, 8)} of 8"))
        assert kinds == ["corrected", None, "rewritten", "no-op", "failed", None, None, None]
        press_until(page, "k", count_is("7 of 8"))
        assert "truncated" in text_of(page, ".pane")

        # filters
        def counts(key, times):
            for _ in range(times):
                press_until(page, key, "document.querySelector('.busy') === null")
                yield page.wait_until("document.getElementById('count').textContent")

        assert list(counts("f", 8)) == ["1 of 1"] * 5 + ["none", "1 of 1", "7 of 8"]
        assert [count.split(" of ")[-1] for count in counts("v", 4)] == ["2", "5", "1", "8"]
        ends_with = "document.getElementById('count').textContent.endsWith('of {}')"
        enter(page, "low", "0.5")
        page.wait_until(ends_with.format(2))
        enter(page, "low", "")
        enter(page, "text", "#13")
        page.wait_until(count_is("1 of 1"))  # only in a correction
        assert text_of(page, ".kind") == "rewritten"
        enter(page, "text", "")
        page.wait_until(ends_with.format(8))

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


@needs_browser
def test_in_a_browser_tokens_are_coloured_by_what_is_chosen_and_tell_their_numbers(run_dir):
    path = write_page(run_dir, run_dir / "page.html")
    with open_page(path) as page:
        open_samples(page)
        page.evaluate(
            "document.querySelector('.pane .token:nth-child(5)')"
            ".dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
        )
        shown = page.evaluate("document.getElementById('tip').innerText")
        for part in (
            "token 5 of 6", "log-prob of the engine -0.5", "weight in the loss 1", "advantage × weight 0.75",
            "change by the update -0.2",
        ):  # fmt: skip
            assert part in shown
        assert "5 of 6 tokens masked" in text_of(page, ".pane")
        background = "document.querySelector('.pane .token:nth-child({})').style.backgroundColor"
        legends = []
        for _ in range(5):
            press_until(page, "c", "document.querySelector('#legend .scale')")
            first, fifth = (page.evaluate(background.format(n)) for n in (1, 5))
            legends.append((text_of(page, "#legend"), first, fifth))
        shade = "color-mix(in srgb, var(--{}) {}%, transparent)".format
        assert legends == [
            ("0 certain  surprising -5", shade("depth", 10), shade("depth", 10)),
            ("-1.5 discouraged  encouraged 1.5", shade("above", 0), shade("above", 50)),
            ("0 not trained on  in full 1", shade("depth", 0), shade("depth", 100)),
            ("-0.693 trainer thinks less of it  more 0.693", shade("above", 0), shade("above", 0)),
            ("-0.693 less likely now  more 0.693", shade("above", 14), shade("below", 29)),
        ]
        # an advantage of its own for each token
        press_until(page, "c", "document.querySelector('#legend .insert')")
        press_until(page, "c", "document.querySelector('#legend .scale')")
        press_until(page, "c", "document.getElementById('legend').textContent.includes('encouraged')")
        page.click('.group[data-group="1"] .chip[data-place="1"]')
        page.wait_until("document.querySelectorAll('#detail .pane .token').length === 6")
        assert page.evaluate(background.format(3)) == shade("below", 25)
        assert page.problems() == []


@needs_browser
def test_in_a_browser_smoothing_is_a_mean_that_begins_at_the_first_value_and_nothing_is_cut_off(run_dir):
    path = write_page(run_dir, run_dir / "page.html")
    with open_page(path) as page:
        circles = "[...document.querySelectorAll('[data-metric=reward] circle')]"
        heights = f"{circles}.map((circle) => 160 - circle.getAttribute('cy'))"
        page.wait_until("document.querySelector('figure')")
        first, second = page.evaluate(heights)  # above 0, which is at 160
        assert second / first == pytest.approx(0.2 / 0.1, rel=0.01)
        enter(page, "smoothing", "0.5")
        page.wait_until("document.querySelector('path.faint')")
        smoothed_first, smoothed_second = page.evaluate(heights)
        assert smoothed_first == pytest.approx(first)
        # (.5 · .1 · .5 + .2 · .5) / (.5 · .5 + .5) = 1/6
        assert smoothed_second / first == pytest.approx(1 / 6 / 0.1, rel=0.01)
        for width in (390, 800, 1280, 1920):
            page.resize(width, 1000)
            page.load(path)
            page.wait_until("document.querySelector('figure')")
            for key in "123":
                press_until(page, key, "document.querySelector('section:not([hidden]):not(#alarms) *')")
                root = "document.documentElement"
                shown, needed = page.evaluate(f"[{root}.clientWidth, {root}.scrollWidth]")
                assert needed <= shown <= width, (width, key)


@needs_browser
def test_in_a_browser_text_that_hides_or_never_ends_stays_legible(tmp_path):
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
        tokens = "document.querySelectorAll('.pane .token').length"
        assert page.evaluate(tokens) == 3000
        assert text_of(page, ".pane .more") == "show more: 6,001 tokens are left"
        for shown in (6000, 9000, 9001):
            page.click(".pane .more")
            assert page.evaluate(tokens) == shown
        assert page.problems() == []
        # a run without records says so
        page.load(write_page(write_run(tmp_path / "bare", [], steps=()), tmp_path / "bare.html"))
        page.wait_until("document.querySelector('figure')")
        told = "document.getElementById('samples').textContent.includes('--save-debug-rollout-data')"
        press_until(page, "2", told)
        page.press("j")
        assert page.problems() == []
