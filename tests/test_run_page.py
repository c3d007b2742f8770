"""The run page: everything of a run in one file, text of the model never more than text; in a browser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import find_browser, open_page
from credit_cases import plain

from megatron_ibpo.data import make_tiny_tokenizer
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.records import Correction, Group, Prompt, Sample, TrainSequence, token_ids
from megatron_ibpo.report import load_groups, rollout_path, save_groups
from megatron_ibpo.report.rollout_data import load_trained
from megatron_ibpo.report.run_page import build_run_page

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = "</script><script>window.harmed=1</script><img src=x onerror=window.harmed=1>\u2028&lt;${TITLE}"
TOKENIZER = HuggingFaceTokenizer(make_tiny_tokenizer())

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium on this machine: apt-get install chromium-headless-shell"
)


def response(text, correct, prompt=(1, 5)):
    ids = token_ids([*TOKENIZER.encode(text), TOKENIZER.eos_id])
    return Sample(
        prompt_token_ids=token_ids(prompt),
        token_ids=ids,
        logprobs=np.full(len(ids), -0.5, np.float32),
        finish_reason="stop",
        temperature=1.0,
        versions=((0, 0),),
        loss_mask=np.ones(len(ids), bool),
        reward=float(correct),
        correct=correct,
    )


def correction(target, references, text, correct, *, rewritten=False):
    made = Correction(target, tuple(references), response(text, correct, prompt=(1, 2)))
    made.distance, made.reference_distance, made.rewritten, made.unmodified_share = 0.25, 0.5, rewritten, 0.75
    return made


def sequence(group, kind, index, of, advantage, **fields):
    return TrainSequence(
        prompt_token_ids=of.prompt_token_ids,
        response_token_ids=of.token_ids,
        loss_mask=of.loss_mask,
        advantage=advantage,
        weight=0.125,
        prompt_index=0,
        group=group,
        index=index,
        kind=kind,
        **fields,
    )


def hostile_tokenizer():
    """The tiny tokenizer, but that one of its tokens reads like an attack."""

    class Hostile:
        eos_id = TOKENIZER.eos_id

        @staticmethod
        def decode(ids):
            return HOSTILE if list(ids) == TOKENIZER.encode("?") else TOKENIZER.decode(ids)

    return Hostile()


@pytest.fixture
def run_dir(tmp_path):
    """Two recorded steps of a run: a success, a rewrite, a no-op, a failure, and a response left alone."""
    run = tmp_path / "run"
    run.mkdir()
    config = {"advantage-estimator": "ibpo", "hf-checkpoint": "moved/away/tiny_qwen3"}
    (run / "config.yaml").write_text(json.dumps(config))
    TOKENIZER._tokenizer.save_pretrained(run / "tokenizer")
    rows = [{"kind": "evaluation", "step": 0, "accuracy": 0.5, "seconds": {}}]
    rows += [
        {"kind": "step", "step": s, "reward": 0.1 * s, "gradient_snr": None, "seconds": {}} for s in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt = Prompt(0, token_ids([1, 5]), 2, HOSTILE, "sum", HOSTILE)
    wrong, right = response("6+7=3", False), response("6+7=13", True)
    kept = response("1+1=2", True)
    groups = [
        Group(
            prompt,
            [wrong, right, response("6+7=?", False), response("9", False), response("7+6=1", False)],
            [
                correction(0, [1], "6+7=13", True),
                correction(2, [1], "0=0#13", True, rewritten=True),
                correction(3, [1], "9", False),
                correction(4, [1], "7+6=2", False),
            ],
        ),
        Group(prompt, [response("2", False), kept], skipped_pairs=1),
    ]
    weights = np.array([0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    trained = [
        sequence(0, "response", 0, wrong, 0.75, token_weights=weights),
        sequence(0, "response", 1, right, 1.5),
        sequence(0, "correction", 3, groups[0].corrections[3].response, -1.0),
        sequence(1, "response", 1, kept, 1.0),
    ]
    old = [np.full(len(s.response_token_ids), -0.5, np.float32) for s in trained]
    new = [np.array([-0.4, -0.5, -0.6, -0.5, -0.7, -0.5], np.float32), *old[1:]]
    for step in (1, 2):
        save_groups(
            rollout_path(run / "rollouts", step), step, groups, TOKENIZER.decode, trained,
            old_logprobs=old, new_logprobs=new,
        )  # fmt: skip
    return run


def test_what_was_trained_on_is_kept_beside_what_it_was_made_of(run_dir):
    path = rollout_path(run_dir / "rollouts", 1)
    trained = load_trained(path)
    assert trained.keys() == {
        (0, "response", 0), (0, "response", 1), (0, "correction", 3), (1, "response", 1),
    }  # fmt: skip
    first = trained[0, "response", 0]
    assert first.token_weights.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert first.new_logprobs.tolist() == np.float32([-0.4, -0.5, -0.6, -0.5, -0.7, -0.5]).tolist()
    assert (trained[0, "response", 1].advantage, trained[0, "response", 1].weight) == (1.5, 0.125)
    assert trained[0, "response", 1].token_weights is None
    assert plain(load_groups(path)) == plain(load_groups(path))


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_the_page_is_one_file_that_asks_for_nothing_and_holds_nothing_foreign(run_dir):
    page = build_run_page(run_dir, tokenizer=hostile_tokenizer())
    found = Elements()
    found.feed(page)
    tags = [tag for tag, _ in found.tags]
    assert tags.count("script") == 2
    assert not {"img", "link", "iframe", "object", "base", "form"} & set(tags)
    for _, attributes in found.tags:
        assert not {"src", "href"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    policy = next(a["content"] for tag, a in found.tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert HOSTILE not in page
    script = re.search(r"<script>(.*)</script>\n</body>", page, re.DOTALL)[1]
    assert "innerHTML" not in script
    assert "http://www.w3.org/2000/svg" in script  # a name, the only address there is
    assert page.count("http") - page.count("http-equiv") == 1


def test_the_data_of_the_page_is_that_of_the_run(run_dir):
    page = build_run_page(run_dir, steps=[2], tokenizer=hostile_tokenizer())
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert [step["step"] for step in data["steps"]] == [2]
    group = data["steps"][0]["groups"][0]
    assert group["prompt"] == HOSTILE
    assert [c["noop"] for c in group["corrections"]] == [False, False, True, False]
    first = group["corrections"][0]
    assert first["ops"] == [["equal", 0, 4, 0, 4], ["insert", 4, 4, 4, 5], ["equal", 4, 5, 5, 6]]
    assert group["responses"][0]["weights"][4] == 1.0
    assert "".join(data["tokens"][n][0] for n in group["responses"][0]["tokens"]) == "6+7=3⟨end⟩"
    assert data["rows"][1] == {"kind": "step", "step": 1, "reward": 0.1, "gradient_snr": None}


def test_what_is_not_there_is_said(run_dir, tmp_path):
    with pytest.raises(ValueError, match="is it the directory of a run"):
        build_run_page(tmp_path)
    with pytest.raises(ValueError, match="no records of step 7, 9"):
        build_run_page(run_dir, steps=[9, 7, 1])


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.yaml", "", "config.yaml: must hold `key: value` lines"),
        ("config.yaml", "{", "config.yaml: is not YAML"),
        ("config.yaml", "advantage-estimator: 3\nhf-checkpoint: x", "advantage-estimator must be text, is 3"),
        ("config.yaml", "advantage-estimator: x", "hf-checkpoint must be text, is None"),
        ("summary.json", "[]", "summary.json: no summary of a run"),
        ("summary.json", '{"status": "x", "steps": "many"}', "summary.json: steps must be a number"),
        ("summary.json", '{"status": "x", "steps": NaN}', "summary.json: not JSON: NaN"),
        ("metrics.jsonl", "3\n", "metrics.jsonl, line 1: no row of a metrics log"),
        ("metrics.jsonl", '{"kind": "step", "step": "1"}\n', "line 1: no row"),
        ("metrics.jsonl", '{"kind": "step", "step": 1, "reward": {}}\n', "line 1: no row"),
        ("metrics.jsonl", '{"kind": "step", "step": 1, "reward": Infinity}\n', "line 1: not JSON: Infinity"),
        ("metrics.jsonl", "[" * 100_000 + "\n", "line 1: not JSON: its brackets nest deeper"),
        ("rollouts/step_000001.json", "[" * 100_000, "step_000001.json: not a file of --save-debug"),
        ("rollouts/step_000001.json", '{"format": 2, "step": 1, "groups": [3]}', "step_000001.json"),
    ],
)
def test_a_malformed_file_of_a_run_is_named(run_dir, file, text, words):
    (run_dir / file).write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)):
        build_run_page(run_dir, tokenizer=hostile_tokenizer())


def test_other_files_among_the_recordings_are_left_alone(run_dir):
    (run_dir / "rollouts" / "step_backup.json").write_text("{}")
    assert "step_backup" not in build_run_page(run_dir, steps=[1], tokenizer=hostile_tokenizer())


def test_the_command_writes_the_page(run_dir):
    command = [sys.executable, str(ROOT / "tools/run_page.py")]
    # from a directory that knows nothing of where the run was made
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, run_dir.name],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=run_dir.parent,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert (run_dir / "page.html").exists()
    done = subprocess.run([*command, "nowhere"], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 2
    assert "is it the directory of a run" in done.stderr


@needs_browser
def test_in_a_browser_responses_are_shown_filtered_and_walked_by_keys(run_dir):
    path = run_dir / "page.html"
    path.write_text(build_run_page(run_dir, tokenizer=hostile_tokenizer()), encoding="utf-8")
    with open_page(path) as page:

        def text(selector):
            return page.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent")

        def marked(pane):
            return page.evaluate(
                f"[...document.querySelectorAll('.pane')][{pane}].querySelectorAll('.token').values()"
                ".map((t) => [t.textContent, t.className.replace('token', '').trim()]).toArray()"
            )

        # one response of each kind; the first one's correction inserts a digit
        assert text("#count") == "1 of 5"
        assert text("#kind") == "success"
        assert text("#prompt") == HOSTILE
        assert ["1", "insert"] in marked(3)
        assert all(kind in ("", "special") for _, kind in marked(1))
        assert page.evaluate("document.querySelectorAll('.pane').length") == 4  # prompt, y, reference, ŷ
        assert page.evaluate("document.querySelectorAll('figure svg').length") == 2  # accuracy, reward

        kinds = []
        for _ in range(5):
            kinds.append(text("#kind"))
            page.press("j")
        assert kinds == ["success", "rewrite", "no-op", "failed", "none"]
        assert text("#count") == "5 of 5"  # the last one stays
        page.press("k")
        assert text("#count") == "4 of 5"

        # filters
        counts = []
        for _ in range(6):
            page.press("f")
            counts.append((page.evaluate("document.getElementById('filter').value"), text("#count")))
        assert counts[:3] == [
            ("corrected, no rewrite", "1 of 1"),
            ("rewritten", "1 of 1"),
            ("no-op", "1 of 1"),
        ]
        assert counts[-1] == ("all", "1 of 5")

        # token weights and ratios, where they were recorded
        title = page.evaluate("document.querySelectorAll('.pane')[1].querySelectorAll('.token')[4].title")
        assert "token weight 1" in title
        assert "ratio of the update 0.8187" in title  # exp(-.2)
        assert "5 of 6 tokens masked" in page.evaluate("document.querySelectorAll('.pane')[1].textContent")
        page.press("c")
        background = (
            "document.querySelectorAll('.pane')[1].querySelectorAll('.token')[{}].style.backgroundColor"
        )
        assert "100%" in page.evaluate(background.format(0))
        assert "0%" in page.evaluate(background.format(4))

        # steps, and a click on a group
        page.press("ArrowRight")
        assert page.evaluate("document.getElementById('step').selectedOptions[0].textContent") == "2"
        page.evaluate("document.querySelector('tr[data-group=\"1\"]').click()")
        assert text("#count") == "5 of 5"
        assert "no correction was made" in text("#detail")

        # nothing of the model's ran, nothing was asked for, nothing failed
        assert page.evaluate("window.harmed") is None
        requests = [
            e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"
        ]
        assert requests == [path.as_uri()]
        assert not [e for e in page.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]


@needs_browser
@pytest.mark.parametrize("width", [800, 1000, 1400, 1920])
def test_in_a_browser_no_column_is_cut_off(run_dir, width):
    path = run_dir / "page.html"
    path.write_text(build_run_page(run_dir), encoding="utf-8")
    with open_page(path, size=(width, 1000)) as page:
        for part in ("document.documentElement", "document.querySelector('main > section')"):
            shown, needed = page.evaluate(f"[{part}.clientWidth, {part}.scrollWidth]")
            assert needed <= shown, part
        last = page.evaluate("document.querySelector('#groups th:last-child').getBoundingClientRect().right")
        assert last <= width


@needs_browser
def test_in_a_browser_a_run_without_records_says_so(run_dir, tmp_path):
    for file in (run_dir / "rollouts").iterdir():
        file.unlink()
    path = tmp_path / "page.html"
    path.write_text(build_run_page(run_dir), encoding="utf-8")
    with open_page(path) as page:
        assert "--save-debug-rollout-data" in page.evaluate("document.getElementById('detail').textContent")
        page.press("j")
        assert not [e for e in page.events if e["method"] == "Runtime.exceptionThrown"]
