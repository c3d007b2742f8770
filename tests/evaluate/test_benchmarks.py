"""Benchmark files as they are published, written small by hand."""

import base64
import gzip
import json
import pickle
import re
import zlib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.data import DataError
from megatron_ibpo.evaluate.benchmarks import BENCHMARKS, BenchmarkRows
from megatron_ibpo.rewards import open_verifier
from support.sandboxed import adopts_no_longer, needs_sandbox  # noqa: F401


def lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(name, path):
    """(id, prompt, label) of every row, and what is noted of the file."""
    rows = BenchmarkRows(BENCHMARKS[name], name, str(path))
    found = [row for _, row in rows]
    for row in found:
        assert row["metadata"] == {"id": row["id"], "rm_type": BENCHMARKS[name].rm_type}
        assert row["task"] == name
    return [(row["id"], row["prompt"], row["label"]) for row in found], rows.notes()


def test_mathematical_benchmarks_are_read_in_the_layouts_of_their_publishers(tmp_path):
    boxed = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    contests: list[dict] = [
        {"problem_idx": 7, "problem": "What is $6\\cdot 7$?", "answer": 42, "problem_type": ["Algebra"]},
        {"id": "a", "problem": "What is $1+1$?", "answer": "2"},
        {"question": "Find $x$ in $2x=1$. ", "answer": " \\frac{1}{2} "},
    ]
    of_contests = [("7", "What is $6\\cdot 7$?", "42"), ("a", "What is $1+1$?", "2")]
    of_contests.append(("2", "Find $x$ in $2x=1$.", "\\frac{1}{2}"))
    math500 = {"problem": "Simplify $\\sqrt{4}$.", "answer": "2", "level": 1, "unique_id": "test/1.json"}
    gsm8k: list[dict] = [  # the label is what follows the mark
        {"question": "How many eggs?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
        {"question": "How many dollars?", "answer": "A lot.\n#### 1,250,000"},
    ]
    for name, published, rows, expected in [
        ("aime25", 30, contests, of_contests),
        ("math500", 500, [math500], [("test/1.json", "Simplify $\\sqrt{4}$.", "2")]),
        ("gsm8k", 1319, gsm8k, [("0", "How many eggs?", "5"), ("1", "How many dollars?", "1250000")]),
    ]:
        path = lines(tmp_path / f"{name}.jsonl", *rows)
        found, notes = read(name, path)
        assert found == [(id_, question + boxed, label) for id_, question, label in expected]
        assert notes[0].endswith(f" in {path}; published are {published}")
    # a directory is read in the order of its files, and parquet like the others
    directory = tmp_path / "aime"
    lines(directory / "II.jsonl", {"problem_idx": 1, "problem": "second?", "answer": 5})
    (directory / "README.md").write_text("not data")
    table = pyarrow.Table.from_pylist([{"problem_idx": 1, "problem": "first?", "answer": 4}])
    pyarrow.parquet.write_table(table, directory / "I.parquet")
    assert read("aime25", directory)[0] == [("1", "first?" + boxed, "4"), ("1-2", "second?" + boxed, "5")]


def test_humaneval_is_read_from_its_gzipped_file(tmp_path):
    code, check = "def twice(x): ...\n", "def check(candidate): ...\n"
    row = {"task_id": "HumanEval/900", "prompt": code, "entry_point": "twice", "test": check}
    row["canonical_solution"] = "    return 2 * x\n"
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(row) + "\n").encode()))
    ((name, question, label),), _ = read("humaneval", path)
    assert name == "HumanEval/900"
    assert f"```python\n{code}```" in question
    assert "return 2 * x" not in question
    assert json.loads(label) == {"test": check, "entry_point": "twice"}
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"HumanEval.jsonl.gz, after line \d: not gzip, or cut off"):
        read("humaneval", path)


def test_mbpp_reads_both_file_layouts_and_only_test_tasks(tmp_path):
    full = [
        {
            "text": f"Write a function that adds {n}.", "code": "def f(x): ...", "task_id": n,
            "test_setup_code": "import math", "test_list": [f"assert f(1) == {n + 1}", f"assert f(0) == {n}"],
        }
        for n in (10, 11, 510, 511)
    ]  # fmt: skip
    found, notes = read("mbpp", lines(tmp_path / "mbpp.jsonl", *full))
    assert [name for name, _, _ in found] == ["mbpp/11", "mbpp/510"]
    assert notes == ["mbpp: 2 rows outside of MBPP's test set, task_id 11 to 510 left out"]
    _, question, label = found[0]
    assert question.startswith("Write a function that adds 11.\n\nYour code must pass these tests:")
    assert "assert f(0) == 11" in question
    test = "import math\nassert f(1) == 12\nassert f(0) == 11"
    assert json.loads(label) == {"test": test, "entry_point": None}
    row = {"prompt": "Add one.", "task_id": 60, "test_imports": ["import re"], "test_list": ["assert f(1)"]}
    (tmp_path / "sanitized-mbpp.json").write_text(json.dumps([row]))
    ((_, _, label),), _ = read("mbpp", tmp_path / "sanitized-mbpp.json")
    assert json.loads(label)["test"] == "import re\nassert f(1)"


def packed(content):  # as the lite files have private tests
    return base64.b64encode(zlib.compress(pickle.dumps(content))).decode()


def problem(**changes):
    public = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
    private = [{"input": "2 2\n", "output": "4\n", "testtype": "stdin"}]
    return {
        "question_title": "Sum", "question_content": "Print the sum of two numbers.",
        "platform": "atcoder", "question_id": "x001_a", "contest_id": "x001",
        "contest_date": "2025-03-01T00:00:00", "starter_code": "", "difficulty": "easy", "metadata": "{}",
        "public_test_cases": json.dumps(public), "private_test_cases": packed(json.dumps(private)),
        **changes,
    }  # fmt: skip


def problem_of_a_function():
    tests = json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}])
    return problem(  # the full files have private tests unpacked
        question_id="3700", question_content="Return the sum of a list and a number.",
        starter_code="class Solution:\n    def total(self, xs: List[int], y: int) -> int:\n        ",
        public_test_cases=tests, private_test_cases=tests, metadata='{"func_name": "total"}',
    )  # fmt: skip


def test_livecodebench_has_all_tests_and_only_contests_of_its_window(tmp_path):
    path = tmp_path / "test6.jsonl"
    found, _ = read("livecodebench_v6", lines(path, problem(), problem_of_a_function()))
    (first, asks_stdin, label), (second, asks_function, label_of_function) = found
    assert (first, second) == ("x001_a", "3700")
    assert json.loads(label) == {"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"]}
    assert "from stdin" in asks_stdin
    twice = {"inputs": ["[1, 2]\n3"] * 2, "outputs": ["6"] * 2, "fn_name": "total"}
    assert json.loads(label_of_function) == twice
    assert "def total(self, xs: List[int], y: int) -> int:\n```" in asks_function
    days = ["2025-01-31T23:59:59", "2025-02-01T00:00:00", "2025-05-31T00:00:00", "2025-06-01T00:00:00"]
    rows = [problem(contest_date=day, question_id=day[:10], question_content=day) for day in days]
    found, notes = read("livecodebench_v6", lines(path, *rows))
    assert [name for name, _, _ in found] == ["2025-02-01", "2025-05-31"]
    assert notes == ["livecodebench_v6: 2 rows outside of LiveCodeBench v6, 2025-02 to 2025-05 left out"]


def test_malformed_or_executable_private_tests_are_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return Path.touch, (harmed,)

    harmed = tmp_path / "harmed"
    for private, says in [
        (packed(Harmful()), "it asks for pathlib.+, and only a text may be in it"),
        (packed({"input": "1"}), "its pickle holds a dict, where a text must be"),
        ("no base64!", "neither JSON nor base64 of zlib of a pickled text"),
        (base64.b64encode(b"no zlib").decode(), "neither JSON nor base64"),
        (base64.b64encode(zlib.compress(b"no pickle")).decode(), "neither JSON nor base64"),
        (base64.b64encode(zlib.compress(pickle.dumps("[]" * 99))[:-9]).decode(), "it is cut off"),
        (packed('[{"input": "1"}]'), "must be a list of objects with texts 'input' and 'output'"),
        (17, "its tests cannot be read"),
    ]:
        rows = problem(), problem(question_content="?", private_test_cases=private)
        words = f"test6.jsonl, line 2: field 'private_test_cases'.*{says}.*see docs/evaluation.md#benchmarks"
        with pytest.raises(DataError, match=words):
            read("livecodebench_v6", lines(tmp_path / "test6.jsonl", *rows))
    assert not harmed.exists()
    pickle.loads(pickle.dumps(Harmful()))
    assert harmed.exists(), "it would have"


def test_another_layout_is_refused_with_line_and_expectation(tmp_path):
    path = lines(tmp_path / "wrong.jsonl", {"instruction": "1+1=", "output": "2"})
    for name, benchmark in BENCHMARKS.items():
        expected = f"A row of {benchmark.title} has {benchmark.layout} (found: 'instruction', 'output'); see"
        with pytest.raises(DataError, match=re.escape(expected)) as refused:
            read(name, path)
        assert str(refused.value).startswith(f"{path}, line 1: "), (name, benchmark)
    row = {"question": "1+1=", "answer": "#### 2"}
    with pytest.raises(DataError, match=r"line 3: repeats the problem at .*line 1"):
        read("gsm8k", lines(tmp_path / "x.jsonl", row, row | {"question": "2+2="}, row))


def test_unusable_fields_and_misnamed_files_are_refused(tmp_path):
    for name, row, says in [
        ("gsm8k", {"question": "?", "answer": "42"}, "field 'answer' has no '#### ' with the final answer"),
        ("aime25", {"problem": "?", "answer": True}, "field 'answer' must be a text or a number"),
        ("math500", {"problem": "?", "answer": "1", "unique_id": 4}, "field 'unique_id' must be a text"),
        ("mbpp", {"text": "?", "task_id": "11", "test_list": ["assert f"]}, "must be a whole number"),
        ("mbpp", {"text": "?", "task_id": 11, "test_list": []}, "field 'test_list' must be a list of texts"),
        ("livecodebench_v6", problem(contest_date="spring"), "Invalid isoformat"),
        ("livecodebench_v6", problem(metadata="{"), "field 'metadata' must be the text of a JSON object"),
    ]:
        with pytest.raises(DataError, match=re.escape(says)):
            read(name, lines(tmp_path / "x.jsonl", row))
    for file, content, says in [
        ("x.jsonl", b'{"question": \n', "x.jsonl, line 1: not JSON"),
        ("x.jsonl", b"[1]\n", "x.jsonl, line 1: expected a JSON object, found list"),
        ("x.json", b"{}", "x.json: expected a JSON list of objects, found dict"),
        ("x.csv", b"a,b", "whose name ends in .jsonl, .jsonl.gz, .json, .parquet"),
        ("x.jsonl.gz", b"plain", "x.jsonl.gz, after line 0: not gzip"),
        ("x.parquet", b"PAR1 and nothing more", "x.parquet: "),
    ]:
        (tmp_path / file).write_bytes(content)
        with pytest.raises(DataError, match=re.escape(says)):
            read("gsm8k", tmp_path / file)


@needs_sandbox
@pytest.mark.slow
def test_labels_of_code_benchmarks_work_with_the_code_verifier(tmp_path):
    check = "def check(candidate):\n    assert candidate(2) == 4\n"
    of_humaneval = {"task_id": "H/1", "prompt": "def twice(x):\n", "entry_point": "twice", "test": check}
    mbpp = {"task_id": 11, "text": "?", "test_list": ["assert f(1) == 2"]}
    method = "class Solution:\n    def total(self, xs, y):\n        return "
    cases = [
        ("humaneval", of_humaneval, "def twice(x):\n    return 2 * x", "def twice(x):\n    return 5 * x"),
        ("mbpp", mbpp, "f = lambda x: x + 1", "f = lambda x: x"),
        ("livecodebench_v6", problem(), "print(sum(map(int, input().split())))", "print(3)"),
        ("livecodebench_v6", problem_of_a_function(), method + "sum(xs) + y", method + "y"),
    ]
    with open_verifier(DataConfig(rm_type="code", reward_workers=1)) as verifier:
        for number, (name, row, right, wrong) in enumerate(cases):
            ((_, text, label),), _ = read(name, lines(tmp_path / f"{number}.jsonl", row))
            prompt = Prompt(0, token_ids([1]), 1, label, name, text)
            scores = verifier.score([(prompt, f"```python\n{code}\n```") for code in (right, wrong)])
            assert [(score.correct, score.error) for score in scores] == [(True, None), (False, None)], name
