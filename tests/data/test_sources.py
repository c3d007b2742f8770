"""Prompts from files of every kind and size, mixed and filtered, in an order that depends on the position
alone."""

import gzip
import io
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from fractions import Fraction
from itertools import islice

import inspect_data
import pyarrow as pa
import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tiny_tokenizer import make_tiny_tokenizer
from word_problems import word_problems

from megatron_ibpo.basics.record_lines import append_record, open_records
from megatron_ibpo.config import Config, DataConfig
from megatron_ibpo.data import (
    DataError,
    PassRates,
    files,
    generated,
    open_pass_rates,
    open_source,
    open_sources,
    tables,
)
from megatron_ibpo.data.order import TableOrder, cycle_counts, interleaved
from megatron_ibpo.data.pass_rates import Rate, policy_fingerprint, prompt_fingerprint, rate_record
from megatron_ibpo.data.tables import JsonLines
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.report import read_rows
from megatron_ibpo.run.run_data import with_epochs
from support.byte_tokenizers import byte_level
from support.chat_families import family_tokenizer
from support.credit_cases import plain
from support.paths import ROOT

LETTERS = byte_level()
TINY = HuggingFaceTokenizer(make_tiny_tokenizer())
CHAIN_SUM = "reasoning_gym://chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=1&compact=1"


def rows(count, first=0):
    return [{"prompt": f"{i}=", "label": str(i)} for i in range(first, first + count)]


def as_lines(content):
    return "".join(json.dumps(row) + "\n" for row in content).encode()


def jsonl(path, content):
    path.write_bytes(as_lines(content))
    return path


def opened(path, *, split="train", data=None, **more):
    return open_source(str(path), TINY, data or DataConfig(), split=split, **more)


def labels(source, count, step=0):
    return [prompt.label for prompt in source.batch(step, count)]


@pytest.fixture(scope="module")
def chatty():
    return family_tokenizer("qwen3")


@pytest.fixture(params=["small", "large"])
def any_size(request):
    """Files that are read at once, and files that are read in parts."""
    if request.param == "large":
        request.getfixturevalue("everything_is_large")


@pytest.fixture
def everything_is_large(monkeypatch):
    """Treat every file as large, in blocks of a few rows, three of which are shuffled together."""
    monkeypatch.setattr(files, "SMALL_ROWS", 3)
    monkeypatch.setattr(tables, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(tables, "WINDOW_ROWS", 12)
    monkeypatch.setattr(JsonLines, "window", 3)


# ------------------------------------------------------------------------------------- large files

LINES = st.lists(
    st.one_of(
        st.integers(0, 10**6).map(lambda i: json.dumps({"i": i})),
        st.sampled_from(["", " ", "\t\t", "\r", "   " * 40]),
        st.integers(1, 300).map(lambda n: json.dumps({"s": "x" * n})),
    ),
    max_size=40,
)


@given(LINES, st.integers(1, 70), st.booleans(), st.booleans())
@settings(max_examples=80)
def test_blocks_of_a_file_have_its_rows_in_order_whatever_their_size(
    tmp_path_factory, lines, size, crlf, ends
):
    end = "\r\n" if crlf else "\n"
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes((end.join(lines) + (end if ends and lines else "")).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_BLOCK_BYTES", size)
        table = JsonLines(path)
    places = [(b, i) for b in range(table.num_blocks) for i in range(table.count(b))]
    numbered = [(n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    assert [table.row(*place) for place in places] == [json.loads(line) for _, line in numbered]
    assert [table.where(*place) for place in places] == [f"{path}, line {number}" for number, _ in numbered]


@given(st.integers(1, 60), st.integers(0, 5))
@settings(max_examples=50)
def test_every_row_comes_once_an_epoch_and_resuming_needs_no_state(tmp_path_factory, count, seed):
    path = jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows(count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_BLOCK_BYTES", 100)
        patch.setattr(JsonLines, "window", 3)
        table = JsonLines(path)
    order = TableOrder(table, seed)
    places = [order.place(position) for position in range(3 * count)]
    epochs = [places[i * count : (i + 1) * count] for i in range(3)]
    whole = sorted((b, i) for b in range(table.num_blocks) for i in range(table.count(b)))
    assert all(sorted(epoch) == whole for epoch in epochs)
    backwards = TableOrder(table, seed)
    assert [backwards.place(position) for position in reversed(range(3 * count))] == places[::-1]
    if count > 20:
        assert epochs[0] != epochs[1]
        assert epochs[0] != whole


def test_a_large_file_is_drawn_like_a_small_one_but_in_another_order(tmp_path, everything_is_large):
    path = jsonl(tmp_path / "rows.jsonl", rows(100))
    source = opened(path)
    assert sorted(labels(source, 100), key=int) == [str(i) for i in range(100)]
    assert labels(source, 100) != labels(source, 100, step=1)
    assert plain(opened(path).batch(5, 7)) == plain(source.batch(5, 7)), "resumed"
    assert labels(opened(path, data=DataConfig(data_seed=1)), 20) != labels(source, 20)
    assert labels(opened(path, split="eval"), 100) == [str(i) for i in range(100)]
    assert source.num_prompts() == 100
    assert any("rows are checked now and the others when drawn" in note for note in source.notes)


def test_opening_a_large_file_reads_a_small_part_of_it(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "rows.jsonl", ({"prompt": "1=" * 50, "label": "1"} for _ in range(100_000)))
    read = Counter()
    pread = tables.os.pread
    monkeypatch.setattr(files, "SMALL_BYTES", 10**6)
    monkeypatch.setattr(tables, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr(tables.os, "pread", lambda f, n, at: read.update(bytes=n) or pread(f, n, at))
    opened(path).batch(0, 8)
    assert read["bytes"] < path.stat().st_size / 4


BAD = [
    '{"prompt": "1="',
    '["1="]',
    '{"prompt": "1="}',
    '{"prompt": "x", "label": "1"}',
    '{"prompt": 1, "label": 1}',
]


@pytest.mark.parametrize("line", BAD)
def test_a_bad_row_is_named_or_skipped_and_counted(tmp_path, any_size, line):
    lines = [json.dumps(row) for row in rows(40)]
    lines[20:20] = [line, "", line]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"rows\.jsonl, line (21|23): "):
        opened(path).batch(0, 42)
    source = opened(path, data=DataConfig(skip_bad_rows=True))
    assert set(labels(source, 42)) <= {str(i) for i in range(40)}
    (tally,) = source.tallies
    assert tally.counts == {"bad rows": 2}
    assert "left out 2 bad rows" in tally.lines()[0]
    assert sorted(part.split(":")[0].split(", ")[1] for part in tally.lines()[1:]) == ["line 21", "line 23"]


def test_where_no_row_can_be_used_that_is_said(tmp_path, everything_is_large):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "x", "label": "1"}] * 20)
    source = opened(path, data=DataConfig(skip_bad_rows=True))
    with pytest.raises(DataError, match=r"next to no prompt is left .*20 bad rows"):
        source.at(0)


# ------------------------------------------------------------------------------- formats and damage


def rl_rows(count):
    """Return rows as existing RL data sets have them."""
    return [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i}="}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i, "score": math.nan},
            "unused": "x",
        }
        for i in range(count)
    ]


def as_parquet(content):
    parquet.write_table(pa.Table.from_pylist(content), written := io.BytesIO(), row_group_size=7)
    return written.getvalue()


def as_arrow(content):
    """Return the content as `datasets` writes it, in batches of ten."""
    table = pa.Table.from_pylist(content)
    with pa.ipc.new_stream(written := io.BytesIO(), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=10):
            writer.write_batch(batch)
    return written.getvalue()


def saved(path, content):
    """One data set as `save_to_disk` leaves it."""
    path.mkdir(parents=True)
    (path / "data-00000-of-00001.arrow").write_bytes(as_arrow(content))
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_data_files": None}
    (path / "state.json").write_text(json.dumps(state))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "arrow", "saved", "saved parts", "hub"])
def test_every_format_gives_the_same_prompts(tmp_path, any_size, kind):
    content, path = rows(40), tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        jsonl(path, content)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(as_lines(content)))
    elif kind == "parquet":
        path.write_bytes(as_parquet(content))
    elif kind == "arrow":
        path.write_bytes(as_arrow(content))
    elif kind == "saved":
        saved(path, content)
    elif kind == "saved parts":
        saved(path / "train", content)
        saved(path / "test", rows(3, 90))
        (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    else:
        (path / "data").mkdir(parents=True)
        for shard in (0, 1):
            part = as_parquet(content[20 * shard : 20 * shard + 20])
            (path / f"data/train-0000{shard}-of-00002.parquet").write_bytes(part)
        (path / "data/test-00000-of-00001.parquet").write_bytes(as_parquet(rows(3, 90)))
    assert labels(
        opened(f"{path}?split=train" if kind in ("hub", "saved parts") else path, split="eval"), 40
    ) == [row["label"] for row in content]
    assert sorted(labels(opened(path), 40), key=int) == [row["label"] for row in content]
    if kind == "hub":
        assert labels(opened(path, split="eval"), 3) == ["90", "91", "92"], "the held-out part"


def test_the_layout_of_rl_data_sets_is_recognised_and_said(tmp_path, chatty):
    (tmp_path / "train.parquet").write_bytes(as_parquet(rl_rows(5)))
    data = DataConfig(apply_chat_template=True)
    source = open_source(str(tmp_path / "train.parquet"), chatty, data, split="eval")
    prompt = source.at(2)
    assert (prompt.text, prompt.label, prompt.task) == ("2=", "2", "sums")
    assert prompt.metadata == {"index": 2, "score": None}
    assert "reward_model.ground_truth" in source.notes[0]


def test_a_ground_truth_that_is_an_object_becomes_json(tmp_path, chatty):
    row = rl_rows(1)[0] | {"reward_model": {"ground_truth": {"target": 24, "numbers": [4, 6]}}}
    row["extra_info"] = None
    path = jsonl(tmp_path / "a.jsonl", [row])
    prompt = open_source(str(path), chatty, DataConfig(apply_chat_template=True), split="train").at(0)
    assert json.loads(prompt.label) == {"target": 24, "numbers": [4, 6]}


def test_the_verifier_and_the_id_of_a_row_go_with_its_prompt(tmp_path):
    row = {"prompt": "1=", "label": 1, "rm_type": "math", "id": "a-1", "metadata": {"level": 3}}
    (prompt,) = opened(jsonl(tmp_path / "a.jsonl", [row])).batch(0, 1)
    assert prompt.metadata == {"level": 3, "rm_type": "math", "id": "a-1"}


def cut(content):
    return content[: len(content) * 2 // 3]


TEXT = as_lines(rows(50))
SAME_IDS = as_lines(row | {"id": number % 30} for number, row in enumerate(rows(50)))
DAMAGED = {
    "parquet cut off": (
        {"rows.parquet": cut(as_parquet(rows(50)))},
        r"rows\.parquet: not a parquet file, or cut off",
    ),
    "gz cut off": ({"rows.jsonl.gz": cut(gzip.compress(TEXT))}, r"rows\.jsonl\.gz: damaged or cut off"),
    "arrow cut off": ({"rows.arrow": as_arrow(rows(50))[:66]}, r"rows\.arrow: not an Arrow file, or cut off"),
    "UTF-16": (
        {"rows.jsonl": TEXT.decode().encode("utf-16")},
        r"rows\.jsonl: is UTF-16, expected UTF-8; `iconv",
    ),
    "invalid UTF-8": (
        {"rows.jsonl": TEXT + b'{"prompt": "\xff=", "label": "1"}\n'},
        r"rows\.jsonl, line 51: not UTF-8: byte 13 of the line is 0xff",
    ),
    "line cut off": ({"rows.jsonl": TEXT[:-10]}, r"rows\.jsonl, line 50: not JSON"),
    "ids": ({"rows.jsonl": SAME_IDS}, r"rows\.jsonl, line 31: id 0 is also that of .*rows\.jsonl, line 1"),
    "no data": ({"rows.jsonl/other.txt": b""}, r"rows\.jsonl: holds no data set"),
    "other kind": ({"rows.txt": b"1"}, r"rows\.txt: expected a file that ends in \.jsonl"),
    "NaN": (
        {"rows.parquet": as_parquet([{"prompt": "1=", "label": 1.0}, {"prompt": "1=", "label": math.nan}])},
        r"rows\.parquet, row 1: field 'label' must be text or a number, is nan",
    ),
    "no such column": (
        {"rows.parquet": as_parquet([{"sentence": "1="}])},
        r"rows\.parquet: has none of the columns .*prompt.*found: sentence",
    ),
    "two data sets": (
        {f"rows.jsonl/{name}/train-00000-of-00001.jsonl": TEXT for name in ("main", "socratic")},
        r"several data sets .*main.*socratic.*name one of them",
    ),
    "no such part": (
        {"rows.jsonl/tran.jsonl": TEXT, "rows.jsonl/test.jsonl": TEXT},
        r"no part for train; it has tran, test|no part for train; it has test, tran",
    ),
}


def damaged(kind, folder):
    """The path of something that cannot be read."""
    for name, content in DAMAGED[kind][0].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / name.split("/")[0]


@pytest.mark.parametrize("kind", DAMAGED)
def test_what_is_damaged_is_named(tmp_path, kind):
    with pytest.raises(DataError, match=DAMAGED[kind][1]):
        opened(damaged(kind, tmp_path))


@pytest.mark.parametrize("kind", ["invalid UTF-8", "line cut off"])
def test_damaged_rows_can_be_skipped(tmp_path, kind):
    source = opened(damaged(kind, tmp_path), data=DataConfig(skip_bad_rows=True))
    assert source.tallies[0].counts == {"bad rows": 1}
    assert "line" in source.notes[-1]


def test_rows_with_the_id_of_another_can_be_skipped(tmp_path):
    source = opened(damaged("ids", tmp_path), data=DataConfig(skip_bad_rows=True))
    assert (len(source), source.tallies[0].counts) == (30, {"bad rows": 20})


def test_a_line_without_end_is_not_read_into_memory(tmp_path, monkeypatch, everything_is_large):
    monkeypatch.setattr(tables, "LONGEST_LINE", 10_000)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(30)) + '{"prompt": "' + "1" * 10**5)
    with pytest.raises(DataError, match=r"line 31: the line is longer than"):
        opened(path).batch(0, 31)


@given(st.binary(max_size=400))
@settings(max_examples=60)
def test_any_bytes_are_rows_or_a_data_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "rows.jsonl"
    path.write_bytes(content)
    with suppress(DataError):
        for prompt in opened(path).batch(0, 3):
            assert prompt.label


TABLES = {".parquet": as_parquet(rows(50)), ".arrow": as_arrow(rows(50))}


@given(
    st.sampled_from(sorted(TABLES)),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=4)), min_size=1, max_size=4),
    st.booleans(),
)
@settings(max_examples=60)
def test_any_damage_to_a_table_is_a_data_error(tmp_path_factory, suffix, hits, skips):
    content = bytearray(TABLES[suffix])
    for place, written in hits:
        start = int(place * len(content))
        content[start : start + len(written)] = written
    path = tmp_path_factory.mktemp("damaged") / f"rows{suffix}"
    path.write_bytes(bytes(content))
    with suppress(DataError):
        for prompt in opened(path, data=DataConfig(skip_bad_rows=skips)).batch(0, 8):
            assert prompt.label


# ----------------------------------------------------------------------------------------- settings


def test_the_settings_of_a_source(tmp_path):
    content = [{"q": f"{i}=", "a": i, "metadata": {"level": i % 2}, "task": None} for i in range(10)]
    path = jsonl(tmp_path / "a.jsonl", content)
    spec = f"{path}?input_key=q&label_key=a&task=sums&suffix=(0)&rm_type=math&only=metadata.level%3D1"
    source = opened(spec, split="eval")
    assert labels(source, 5) == ["1", "3", "5", "7", "9"]
    assert source.tallies[0].counts == {"not chosen by only": 5}
    prompt = source.at(0)
    assert (prompt.text, prompt.task, prompt.metadata["rm_type"]) == ("1=(0)", "sums", "math")


@pytest.mark.parametrize(
    ("settings_of_it", "says"),
    [
        ("wieght=2", "a file has no setting 'wieght'; did you mean 'weight'"),
        ("weight=0", "weight must be a number above 0, is '0'"),
        ("weight=nan", "weight must be a number above 0"),
        ("only=level", "only must read FIELD=VALUE"),
        ("weight", "name=value"),
        ("only=label%3D17", "no prompts in it that are left .*10 not chosen"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, settings_of_it, says):
    path = jsonl(tmp_path / "a.jsonl", rows(10))
    with pytest.raises(DataError, match=says):
        opened(f"{path}?{settings_of_it}")


# ---------------------------------------------------------------------------------------------- chats


@pytest.mark.parametrize(
    ("kwargs", "tail"),
    [
        (None, "<|im_end|>\n<|im_start|>assistant\n"),
        ('{"enable_thinking": true}', "<|im_end|>\n<|im_start|>assistant\n"),
        ('{"enable_thinking": false}', "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_is_turned_off_by_the_templates_own_setting(tmp_path, chatty, kwargs, tail):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1?\n", "label": "2"}])
    data = DataConfig(apply_chat_template=True, apply_chat_template_kwargs=kwargs, system_prompt="Be brief.")
    prompt = open_source(f"{path}?suffix=Say.", chatty, data, split="train").at(0)
    text = chatty.decode_all(prompt.head_ids)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?\nSay."
    assert chatty.decode_all(prompt.tail_ids) == tail


def test_a_chat_keeps_its_own_system_message_and_loses_old_thoughts(tmp_path, chatty):
    messages = [
        {"role": "system", "content": "Own."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n1"},
        {"role": "user", "content": "2?"},
    ]
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": messages, "label": "2"}])
    data = DataConfig(apply_chat_template=True, system_prompt="Be brief.")
    prompt = open_source(str(path), chatty, data, split="train").at(0)
    shown = chatty.decode_all(prompt.token_ids)
    assert shown == (
        "<|im_start|>system\nOwn.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n"
        "<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.text == "2?"


# ------------------------------------------------------------------------------------------ mixtures


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
@settings(max_examples=50)
def test_sources_are_interleaved_evenly_and_in_exact_shares(counts):
    order = interleaved(counts)
    assert Counter(order) == dict(enumerate(counts))
    for end in range(len(order)):
        came = Counter(order[:end])
        for number, count in enumerate(counts):
            assert abs(came[number] - end * count / len(order)) < len(counts)


@settings(max_examples=50)
@given(st.lists(st.fractions(Fraction(1, 500), 1000), min_size=1, max_size=5))
def test_a_cycle_has_the_shares_of_the_weights(weights):
    counts = cycle_counts(weights)
    for count, weight in zip(counts, weights, strict=True):
        assert count >= 1
        assert abs(Fraction(count, sum(counts)) - weight / sum(weights)) < Fraction(1, 2000)


def test_a_mixture_has_its_weights_and_every_source_its_own_order(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", rows(20))
    b = jsonl(tmp_path / "b.jsonl", rows(7, first=100))
    specs = [f"{a}?weight=3", f"{b}?weight=1", f"{CHAIN_SUM}&weight=0.5&task=sums"]
    source = open_sources(specs, TINY, DataConfig(), split="train")
    prompts = source.batch(0, 900)
    assert Counter(prompt.task for prompt in prompts) == {"a": 600, "b": 200, "sums": 100}
    assert [prompt.index for prompt in prompts] == list(range(900))
    of_a = [prompt.label for prompt in prompts if prompt.task == "a"]
    assert of_a == labels(opened(a), 600), "as alone"
    assert {p.metadata.get("rm_type") for p in prompts} == {None, "reasoning_gym"}
    again = open_sources(specs, TINY, DataConfig(), split="train")
    assert plain(again.batch(13, 10)) == plain(source.batch(13, 10))


def test_an_epoch_of_a_mixture_ends_when_every_source_has_given_all(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", rows(20))
    b = jsonl(tmp_path / "b.jsonl", rows(7, first=100))
    source = open_sources([f"{a}?weight=3", str(b)], TINY, DataConfig(), split="train")
    size = source.num_prompts()
    assert {p.label for p in source.batch(0, size)} >= {row["label"] for row in rows(20) + rows(7, first=100)}
    assert len({p.label for p in source.batch(0, size - 1)}) == 26
    endless = open_sources([str(a), CHAIN_SUM], TINY, DataConfig(), split="train")
    assert endless.num_prompts() == 0


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 5), (4, 10)])
def test_the_steps_of_epochs_follow_from_the_prompts(tmp_path, epochs, steps):
    source = opened(jsonl(tmp_path / "a.jsonl", rows(10)))
    config = Config()
    config.rollout.rollout_batch_size, config.run.num_epoch = 4, epochs
    assert with_epochs(config, source).run.num_rollout == steps
    assert with_epochs(config, None) is config, "recorded rollouts"
    with pytest.raises(ValueError, match="--num-epoch: a generated task never repeats"):
        with_epochs(config, open_source(CHAIN_SUM, TINY, DataConfig(), split="train"))


# ------------------------------------------------------------------------------------------- filters


def test_long_prompts_are_dropped_where_asked(tmp_path, any_size):
    content = [{"prompt": "1+" * (i % 10) + "1=", "label": str(i)} for i in range(50)]
    path = jsonl(tmp_path / "rows.jsonl", content)
    with pytest.raises(DataError, match=r"line \d+: the prompt has \d+ tokens.*--drop-long-prompts"):
        opened(path, max_prompt_len=10).batch(0, 50)
    source = opened(path, data=DataConfig(drop_long_prompts=True), max_prompt_len=10)
    assert all(len(prompt.token_ids) <= 10 for prompt in source.batch(0, 50))
    assert source.tallies[0].counts["too long prompts"] == 30
    again = opened(path, data=DataConfig(drop_long_prompts=True), max_prompt_len=10)
    assert [plain(again.at(position)) for position in (49, 3, 17)] == [
        plain(source.at(position)) for position in (49, 3, 17)
    ], "whatever was drawn before"


def test_questions_that_differ_in_white_space_alone_are_duplicates(tmp_path, any_size):
    content = [{"prompt": f"{i % 25} ={' ' * (i // 25)}", "label": str(i)} for i in range(50)]
    path = jsonl(tmp_path / "rows.jsonl", content)
    source = opened(path, data=DataConfig(deduplicate=True))
    assert sorted(labels(source, 25), key=int) == [str(i) for i in range(25)]
    assert (source.num_prompts(), source.tallies[0].counts) == (25, {"duplicates": 25})


def test_ids_that_two_rows_share_are_named_or_left_out(tmp_path, any_size):
    content = [{"prompt": f"{i} =", "label": str(i), "id": i % 49} for i in range(50)]
    path = jsonl(tmp_path / "rows.jsonl", content)
    with pytest.raises(DataError, match="line 50: id 0 is also that of"):
        opened(path, data=DataConfig(deduplicate=True))
    source = opened(path, data=DataConfig(deduplicate=True, skip_bad_rows=True))
    assert sorted(labels(source, 49), key=int) == [str(i) for i in range(49)]
    assert (source.num_prompts(), source.tallies[0].counts["bad rows"]) == (49, 1)


def test_a_large_file_is_refused_for_ids_among_the_rows_that_are_checked_first(tmp_path, everything_is_large):
    content = [{"prompt": f"{i} =", "label": str(i), "id": "same"} for i in range(5)]
    with pytest.raises(DataError, match="line 2: id 'same' is also that of"):
        opened(jsonl(tmp_path / "rows.jsonl", content))


def test_prompts_outside_the_window_of_pass_rates_are_left_out(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", rows(10))
    by_label = {prompt.label: prompt_fingerprint(prompt) for prompt in opened(path).batch(0, 10)}
    rates = {by_label[str(i)]: Rate(correct=i, scored=8) for i in range(9)}  # of 9 nothing is known
    source = opened(path, rates=PassRates(0.25, 0.75, rates))
    assert sorted(labels(source, 5)) == ["2", "3", "4", "5", "6"]
    assert source.tallies[0].counts == {"outside the pass-rate window": 4, "without a measured pass rate": 1}


def test_pass_rates_are_those_of_this_policy_and_its_settings(tmp_path):
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    (hf / "model.safetensors").write_bytes(b"weights")
    config = Config()
    config.model.hf_checkpoint = hf
    config.data.filter_pass_rate, config.data.pass_rates = (0.1, 0.9), tmp_path / "rates.jsonl"
    (prompt,) = opened(jsonl(tmp_path / "a.jsonl", rows(1))).batch(0, 1)
    record = rate_record(policy_fingerprint(config), prompt, Rate(3, 4))
    line = json.dumps(record) + "\n"
    config.data.pass_rates.write_text(line + line[: len(line) // 2])  # its writer was stopped
    rates = open_pass_rates(config)
    assert rates is not None
    assert rates.refusal(prompt) is None
    with open_records(config.data.pass_rates) as file:
        append_record(file, record)
    assert config.data.pass_rates.read_text() == 2 * line
    for change in (
        lambda: setattr(config.rollout, "rollout_temperature", 0.5),
        lambda: (hf / "model.safetensors").write_bytes(b"Weights"),
    ):
        change()
        with pytest.raises(DataError, match="nothing was measured with this policy"):
            open_pass_rates(config)
    config.data.pass_rates.write_text("{}\n" + line)
    with pytest.raises(DataError, match=r"rates\.jsonl, line 1: no line of"):
        open_pass_rates(config)


# ------------------------------------------------------------------------------------ generated tasks


def test_a_level_is_that_of_the_tasks_own_curriculum():
    def terms(spec, split="train", count=60):
        source = open_source(spec, LETTERS, DataConfig(), split=split)
        return [prompt.metadata["num_terms"] for prompt in source.batch(0, count)]

    assert set(terms("reasoning_gym://chain_sum?level=0")) == {2}
    assert set(terms("reasoning_gym://chain_sum?level=3")) == {2, 3, 4, 5}
    assert set(terms("reasoning_gym://chain_sum?level=10", count=200)) == {*range(2, 13)}, "the highest"
    assert set(terms("reasoning_gym://chain_sum?level=3&min_terms=5")) == {5}, "parameters win"
    climbing = terms("reasoning_gym://chain_sum?level=0..2&over=30")
    assert set(climbing[:10]) == {2}
    assert max(climbing[10:20]) == 3
    assert max(climbing[20:]) == 4
    held_out = terms("reasoning_gym://chain_sum?level=0..2&over=30000", split="eval")
    assert max(held_out) == 4, "held-out items are of all levels"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("chain_sum?level=99", "level 99: the highest level of chain_sum is 10"),
        ("chain_sum?level=two", "level must be a number or FIRST..LAST"),
        ("chain_sum?level=0..2", r"needs over=N"),
        ("chain_sum?level=2..0&over=5", "the first is above the last"),
        ("chain_sum?over=5", "needs level=FIRST..LAST"),
        ("chain_sum?level=1&over=5", "only it does"),
        ("composite?level=1", "no curriculum for composite"),
    ],
)
def test_a_level_that_there_is_not_is_refused(spec, says):
    with pytest.raises(DataError, match=says):
        open_source(f"reasoning_gym://{spec}", LETTERS, DataConfig(), split="train")


def test_items_that_are_not_checked_at_the_start_are_when_they_are_drawn(monkeypatch):
    spec, room = "reasoning_gym://chain_sum?min_terms=2&max_terms=9&min_digits=1&max_digits=1", 90
    with pytest.raises(DataError, match=r"item \d+: the prompt has"):
        open_source(spec, LETTERS, DataConfig(), split="train", max_prompt_len=room)
    monkeypatch.setattr(generated, "CHECK_S", -1.0)
    source = open_source(spec, LETTERS, DataConfig(), split="train", max_prompt_len=room)
    assert source.ready == 1
    mixture = open_sources(
        [f"{spec}&weight=1", f"{CHAIN_SUM}&weight=3"], LETTERS, DataConfig(), split="train"
    )
    assert mixture.ready == 2, "one of each"
    with pytest.raises(DataError, match=r"item \d+: the prompt has"):
        source.batch(0, 64)
    short = open_source(spec, LETTERS, DataConfig(drop_long_prompts=True), split="train", max_prompt_len=room)
    assert max(len(prompt.token_ids) for prompt in short.batch(0, 64)) <= room
    assert short.left_out()["left_out/too_long_prompts"] > 0


def test_who_waits_for_a_task_is_told(monkeypatch, capsys):
    made = generated._dataset

    def slowly(name, parameters):
        time.sleep(0.5)
        return made(name, parameters)

    monkeypatch.setattr(generated, "_dataset", slowly)
    monkeypatch.setattr(generated, "TOLD_AFTER_S", 0.01)
    open_source(CHAIN_SUM, TINY, DataConfig(), split="train")
    assert "chain_sum" in capsys.readouterr().err


def test_the_filter_by_pass_rates_says_that_it_leaves_generated_tasks_alone():
    source = open_source(CHAIN_SUM, TINY, DataConfig(), split="train", rates=PassRates(0.1, 0.9, {}))
    assert "--filter-pass-rate has no effect on it" in source.notes[0]


def test_no_bundled_problem_is_in_both_files_and_labels_are_those_of_the_solutions():
    train, held_out = (
        [json.loads(line) for line in (ROOT / f"examples/math/{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    )
    assert (len(train), len(held_out)) == (400, 200)
    assert len({row["prompt"] for row in train + held_out}) == 600
    drawn = {problem.text + "\n": problem for problem in islice(word_problems(seed=14), 3000)}
    for row in train + held_out:
        problem = drawn[row["prompt"]]
        assert problem.solution().endswith(f"\\boxed{{{row['label']}}}")
        *_, last = problem.solution().partition(". The")[0].split(";")
        expression, _, result = last.partition("=")
        assert eval(expression) == int(result) == int(row["label"])


@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_small_policy_learns_the_bundled_problems(tmp_path):
    """The whole loop runs from another directory, with a filter, two sources and a number of epochs."""
    train = ROOT / "examples/math/train.jsonl"
    command = ["bash", str(ROOT / "examples/run_math_jsonl.sh"), "--num-epoch", "1", "--no-save"]
    command += ["--prompt-data", f"{train}?only=metadata.steps%3D1&weight=2&task=one"]
    command += [f"{train}?only=metadata.steps%3D2&task=two"]
    environment = os.environ | {"IBPO_PYTHON": sys.executable, "RUN_DIR": str(tmp_path / "run")}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=1100, capture_output=True)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["greedy_end"] > summary["greedy_start"] + 0.3
    steps = [row for row in read_rows(tmp_path / "run/metrics.jsonl") if row["kind"] == "step"]
    assert {row["prompts/one"] + row["prompts/two"] for row in steps} == {16}
    assert 0.6 < sum(row["prompts/one"] for row in steps) / (16 * len(steps)) < 0.7


# -------------------------------------------------------------------------------------- looked at by a reader


def inspected(tmp_path, capsys, *flags):
    """Return what `ibpo data --json` says of one source."""
    tokenizer = tmp_path / "tokenizer"
    make_tiny_tokenizer().save_pretrained(tokenizer)
    inspect_data.main(
        tyro.cli(inspect_data.Arguments, args=["--hf-checkpoint", str(tokenizer), "--json", *flags])
    )
    return json.loads(capsys.readouterr().out)


def test_the_inspection_counts_what_a_run_would_end_with(tmp_path, capsys):
    path = jsonl(tmp_path / "a.jsonl", [*rows(20), *rows(2), {"prompt": "x", "label": 1}])
    with path.open("a") as file:
        file.write('{"prompt": "' + "1+" * 30 + '1=", "label": 1}\n')
    room = ["--rollout-max-context-len", "40", "--rollout-max-response-len", "20"]
    found = inspected(tmp_path, capsys, "--prompt-data", str(path), *room)
    assert (found["rows"], found["prompts"], found["is_whole"]) == (24, 22, True)
    assert found["left_out"] == {
        "bad rows": 1,
        "too long prompts": 1,
        "duplicates, which stay without --deduplicate": 2,
    }
    assert "line 23: the tokenizer has no token" in found["named"]["bad rows"][0]
    assert found["first"][0] == {"prompt": "<bos>0=", "label": "0", "task": "a"}
    assert sum(found["tokens"]["counts"]) == 22
    assert inspected(tmp_path, capsys, "--prompt-data", str(path), "--deduplicate")["prompts"] == 21


def test_a_generated_task_is_inspected_too(tmp_path, capsys):
    found = inspected(tmp_path, capsys, "--prompt-data", CHAIN_SUM, "--most-rows", "30", "--show", "1")
    assert (found["rows"], found["is_whole"], len(found["first"])) == (30, False, 1)


def test_the_inspection_is_printed_for_readers(tmp_path, capsys):
    make_tiny_tokenizer().save_pretrained(tmp_path)
    path = jsonl(tmp_path / "a.jsonl", [*rows(12), {"prompt": "1+1=", "label": 2, "task": "b"}])
    flags = ["--hf-checkpoint", str(tmp_path), "--prompt-data", str(path)]
    inspect_data.main(tyro.cli(inspect_data.Arguments, args=flags))
    said = capsys.readouterr().out
    assert "13 rows looked at; 13 prompts" in said
    assert "a 12, b 1" in said
    assert "<bos>0=" in said
    assert "█" in said
    with pytest.raises(DataError, match=r"nowhere\.jsonl: no such file"):
        inspect_data.main(tyro.cli(inspect_data.Arguments, args=[*flags[:3], "nowhere.jsonl"]))


QUESTION = "What is 1 + 1?"
OF_KNOWN_DATA_SETS = {
    "GSM8K": ({"question": QUESTION, "answer": "1 + 1 = 1,002 <<1+1=2>>\n#### 1,002"}, "1002"),
    "OpenR1-Math": ({"problem": QUESTION, "solution": r"So $\boxed{3}$.", "answer": "2"}, "2"),
    "NuminaMath-CoT": (
        {"problem": QUESTION, "solution": r"Not \boxed{3} but \boxed{\frac{1}{2}}."},
        r"\frac{1}{2}",
    ),
    "messages": ({"messages": [{"role": "user", "content": QUESTION}], "label": 2}, "2"),
    "DAPO-Math-17k": (
        {"prompt": [{"role": "user", "content": QUESTION}], "reward_model": {"ground_truth": "2"}},
        "2",
    ),
}


@pytest.mark.parametrize(("row", "label"), OF_KNOWN_DATA_SETS.values(), ids=OF_KNOWN_DATA_SETS)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_layouts_of_known_data_sets_are_recognised_and_said(tmp_path, monkeypatch, chatty, row, label, large):
    monkeypatch.setattr(files, "SMALL_ROWS", 1 if large else 10)
    (tmp_path / "train.parquet").write_bytes(as_parquet([row, row, row]))
    data = DataConfig(apply_chat_template=True)
    source = open_source(str(tmp_path / "train.parquet"), chatty, data, split="train")
    prompt = source.at(1)
    assert (prompt.text, prompt.label) == (QUESTION, label)
    assert any("layout" in note and "label" in note for note in source.notes)


def test_named_fields_win_over_a_known_layout(tmp_path):
    row = {"question": "1=", "answer": "2\n#### 1"}
    path = jsonl(tmp_path / "a.jsonl", [row])
    source = opened(path, data=DataConfig(input_key="question", label_key="answer"))
    assert (source.at(0).label, source.notes) == (row["answer"], ())
    with pytest.raises(DataError, match=r"no field 'q'.*--input-key"):
        opened(path, data=DataConfig(input_key="q", label_key="answer"))


def test_a_solution_without_an_answer_is_a_bad_row(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"problem": "1=", "solution": "clear"}])
    with pytest.raises(DataError, match=r"line 1: field 'solution' has no \\boxed"):
        opened(path)
