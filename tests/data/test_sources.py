import gzip
import io
import json
import math
import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tiny_tokenizer import make_tiny_tokenizer

from megatron_ibpo.basics.user_files import append_record, open_records
from megatron_ibpo.commands import data as data_command
from megatron_ibpo.config import Config, DataConfig
from megatron_ibpo.data import DataError, PassRates, open_pass_rates, open_sources, tables
from megatron_ibpo.data.layouts import plain_row
from megatron_ibpo.data.mixtures import cycle_counts, interleaved
from megatron_ibpo.data.pass_rates import Rate, policy_fingerprint, prompt_fingerprint, rate_record
from megatron_ibpo.data.tables import JsonLines
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.report import read_rows
from megatron_ibpo.run.resolve import num_steps
from megatron_ibpo.run.settings import parse_config
from support.byte_tokenizers import family_tokenizer
from support.credit_cases import plain
from support.paths import ROOT

TINY, CHATTY = HuggingFaceTokenizer(make_tiny_tokenizer()), family_tokenizer("qwen3")
CHAIN_SUM = "reasoning_gym://chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=1&compact=1"


def numbers(count, first=0):
    return [str(i) for i in range(first, first + count)]


def rows(count, first=0):
    return [{"prompt": f"{i}=", "label": i} for i in numbers(count, first)]


def as_lines(content):
    return "".join(json.dumps(row) + "\n" for row in content).encode()


def write(path, content):
    """Write rows as JSONL, the content of a file, or of a directory by its files' names."""
    if isinstance(content, dict):
        for name, part in content.items():
            write(path / name, part)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else as_lines(content))
    return path


def opened(path, *, split="train", data=None, tokenizer=TINY, **more):
    return open_sources([str(path)], tokenizer, data or DataConfig(), split=split, **more)


def labels(source, count, step=0):
    return [prompt.label for prompt in source.batch(step, count)]


@pytest.fixture(params=["small", "large"])
def any_size(request, monkeypatch):
    """Files as they are, and as if large: in blocks of a few rows, three of which are shuffled together."""
    if request.param == "large":
        monkeypatch.setattr("megatron_ibpo.data.files.SMALL_ROWS", 3)
        monkeypatch.setattr(tables, "_BLOCK_BYTES", 100)
        monkeypatch.setattr("megatron_ibpo.data.arrow_tables.WINDOW_ROWS", 12)
        monkeypatch.setattr(JsonLines, "window", 3)
    return request.param


LINES = st.lists(
    st.one_of(
        st.integers(0, 10**6).map(lambda i: json.dumps({"i": i})),
        st.sampled_from(["", " ", "\t\t", "\r", "   " * 40]),
        st.integers(1, 300).map(lambda n: json.dumps({"s": "x" * n})),
    ),
    max_size=40,
)


@given(LINES, st.integers(1, 70), st.sampled_from(["\n", "\r\n"]), st.booleans())
@settings(max_examples=80)
def test_blocks_of_any_size_hold_all_rows_in_order(tmp_path_factory, lines, size, end, ends):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes((end.join(lines) + (end if ends and lines else "")).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_BLOCK_BYTES", size)
        table = JsonLines(path)
    places = [(b, i) for b in range(table.num_blocks) for i in range(table.count(b))]
    numbered = [(n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    assert [table.row(*place) for place in places] == [json.loads(line) for _, line in numbered]
    assert [table.location(*place) for place in places] == [
        f"{path}, line {number}" for number, _ in numbered
    ]


def test_epochs_permute_all_rows_and_resume_without_state(tmp_path, any_size):
    for size in (20, 53):
        path = write(tmp_path / "rows.jsonl", rows(size))
        source = opened(path)
        drawn = [label for step in range(3 * size // 7) for label in labels(source, 7, step)]
        epochs = [drawn[start : start + size] for start in (0, size)]  # batches straddle them
        assert all(sorted(epoch, key=int) == numbers(size) for epoch in epochs)
        assert len({tuple(numbers(size)), *map(tuple, epochs)}) == 3
        assert plain(opened(path).batch(5, 7)) == plain(source.batch(5, 7)), "resumed"
        assert labels(opened(path, data=DataConfig(data_seed=1)), size) != epochs[0]
        assert labels(opened(path, split="eval"), size) == numbers(size)
        assert source.num_prompts() == size
        said = "rows are checked now and the others when drawn"
        assert any(said in note for note in source.notes) == (any_size == "large"), size


def test_opening_a_large_file_reads_a_small_part_of_it(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", ({"prompt": "1=" * 50, "label": "1"} for _ in range(100_000)))
    read, pread = Counter(), tables.os.pread
    monkeypatch.setattr("megatron_ibpo.data.files.SMALL_BYTES", 10**6)
    monkeypatch.setattr(tables, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr(tables.os, "pread", lambda f, n, at: read.update(bytes=n) or pread(f, n, at))
    opened(path).batch(0, 8)
    assert read["bytes"] < path.stat().st_size / 4


def test_bad_rows_are_named_or_skipped_and_counted(tmp_path, any_size):
    bad = [b'{"prompt": "1="', b'["1="]', b'{"prompt": "\xff=", "label": 1}', b'{"prompt": "x", "label": 1}']
    lines = as_lines(rows(40)).splitlines()
    lines[20:20] = [*bad[:2], b"", *bad[2:]]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=r"rows\.jsonl, line (21|22|24|25): "):
        opened(path).batch(0, 44)
    source = opened(path, data=DataConfig(skip_bad_rows=True))
    assert set(labels(source, 44)) <= {*numbers(40)}
    (tally,) = source.tallies
    assert tally.counts == {"bad rows": 4}
    summary, *named = tally.lines()
    assert "left out 4 bad rows" in summary
    assert sorted(line.partition(": ")[0].rpartition(" ")[2] for line in named) == ["21", "22", "24", "25"]
    write(path, [{"prompt": "x", "label": "1"}] * 20)
    with pytest.raises(DataError, match=r"(next to no prompt is|no prompts in it.* are) left .*20 bad rows"):
        opened(path, data=DataConfig(skip_bad_rows=True)).at(0)


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


def saved(content):
    """One data set as `save_to_disk` leaves it."""
    name = "data-00000-of-00001.arrow"
    state = {"_data_files": [{"filename": name}], "_indices_data_files": None}
    return {name: as_arrow(content), "state.json": json.dumps(state).encode()}


def test_every_format_gives_the_same_prompts(tmp_path, any_size):
    content, held_out = rows(40), rows(3, first=90)
    shards = {f"train-0000{n}-of-00002.parquet": as_parquet(content[20 * n : 20 * n + 20]) for n in (0, 1)}
    names = b'{"splits": ["train", "test"]}'
    formats = {
        "jsonl": as_lines(content),
        "jsonl.gz": gzip.compress(as_lines(content)),
        "parquet": as_parquet(content),
        "arrow": as_arrow(content),
        "saved": saved(content),
        "parts": {"dataset_dict.json": names, "train": saved(content), "test": saved(held_out)},
        "hub": {"data": {**shards, "test-00000-of-00001.parquet": as_parquet(held_out)}},
    }
    for kind, written in formats.items():
        path, in_parts = write(tmp_path / f"rows.{kind}", written), kind in ("hub", "parts")
        in_order = f"{path}?split=train" if in_parts else path
        assert labels(opened(in_order, split="eval"), 40) == numbers(40), kind
        assert sorted(labels(opened(path), 40), key=int) == numbers(40), kind
        if in_parts:
            assert labels(opened(path, split="eval"), 3) == ["90", "91", "92"], "the held-out part"


def test_layouts_of_known_data_sets_are_recognised_and_said(tmp_path, any_size):
    question, truth = "What is 1 + 1?", {"target": 24, "numbers": [4, 6]}
    messages = [{"role": "user", "content": question}]
    of_verl = {"prompt": messages, "reward_model": {"style": "rule", "ground_truth": "2"}, "unused": "x"}
    for row, label in (
        ({"question": question, "answer": "1 + 1 = 1,002 <<1+1=2>>\n#### 1,002"}, "1002"),  # GSM8K
        ({"problem": question, "solution": r"So $\boxed{3}$.", "answer": "2"}, "2"),  # OpenR1-Math
        ({"problem": question, "solution": r"Not \boxed{3} but \boxed{\pi}."}, r"\pi"),  # NuminaMath
        ({"messages": messages, "label": 2}, "2"),
        ({**of_verl, "data_source": "sums", "extra_info": {"index": 2, "score": math.nan}}, "2"),
        ({**of_verl, "reward_model": {"ground_truth": truth}, "extra_info": None}, json.dumps(truth)),
    ):
        path = write(tmp_path / "train.parquet", as_parquet([row] * 5))
        source = opened(path, data=DataConfig(apply_chat_template=True), tokenizer=CHATTY)
        prompt = source.at(1)
        assert (prompt.text, prompt.label, prompt.task) == (question, label, row.get("data_source", "train"))
        assert prompt.metadata == ({"index": 2, "score": None} if row.get("extra_info") else {})
        assert any("layout" in note and "label" in note for note in source.notes), (row, label)


def test_a_label_may_be_a_list_or_an_object(tmp_path, any_size):
    question, names = "What is 1 + 1?", ["2", "two"]
    verl = {"style": "rule", "ground_truth": names}
    for number, (row, label) in enumerate((
        ({"prompt": question, "label": names}, names),
        ({"prompt": question, "label": {"target": names, "more": None}}, {"target": names, "more": None}),
        ({"prompt": question, "reward_model": verl}, names),
        ({"prompt": question, "reward_model": json.dumps(verl)}, names),
        ({"prompt": question, "reward_model": {"ground_truth": {"target": names}}}, {"target": names}),
        ({"problem": question, "answer": names}, names),
        ({"prompt": question, "label": [2]}, [2]),
    )):  # fmt: skip
        path = write(tmp_path / f"{number}.parquet", as_parquet([row] * 5))
        source = opened(path, data=DataConfig(rm_type="math"), tokenizer=CHATTY)
        assert json.loads(source.at(1).label) == label, row
    array = np.array(names, dtype=object)
    assert plain_row({"prompt": question, "label": array}, "prompt", "label").label == '["2", "two"]'
    assert plain_row({"prompt": question, "label": np.int64(2)}, "prompt", "label").label == "2"
    endless: dict = {}
    endless["x"] = [endless]  # as a user's function may return it
    with pytest.raises(DataError, match="nests deeper than 100 levels"):
        plain_row({"prompt": question, "label": "2", "metadata": endless}, "prompt", "label")
    for row, says in (
        (
            {"prompt": question, "label": [2, 3]},
            r"row 0: the label '\[2, 3\]' is a list of numbers.*list of texts",
        ),
        ({"prompt": question, "label": [[2], [3]]}, "is a list of numbers"),
        ({"prompt": question, "label": []}, "field 'label' is empty"),
        ({"prompt": question, "reward_model": {"ground_truth": True}}, "found bool"),
        ({"problem": question, "answer": "notfound"}, "NuminaMath's word for a problem without an answer"),
    ):
        path = write(tmp_path / "refused.parquet", as_parquet([row] * 5))
        with pytest.raises(DataError, match=says):
            opened(path, data=DataConfig(rm_type="math"), tokenizer=CHATTY).at(1)
    path = write(tmp_path / "numbers.parquet", as_parquet([{"prompt": question, "label": [2, 3]}] * 5))
    assert opened(path, data=DataConfig(rm_type="my:score"), tokenizer=CHATTY).at(1).label == "[2, 3]"


def test_row_fields_join_the_prompt_and_named_fields_win(tmp_path):
    row = {"prompt": "1+1=\n", "label": 2, "task": "sums", "metadata": {"level": 1}, "rm_type": "math"}
    (prompt,) = opened(write(tmp_path / "a.jsonl", [row | {"id": "a-1"}]), split="eval").batch(0, 1)
    assert prompt.token_ids.tolist() == TINY.encode_prompt("1+1=\n")
    assert (prompt.head_length, prompt.label, prompt.task) == (len(prompt.token_ids), "2", "sums")
    assert prompt.metadata == {"level": 1, "rm_type": "math", "id": "a-1"}
    path = write(tmp_path / "a.jsonl", [{"question": "1=", "answer": "2\n#### 1"}])
    source = opened(path, data=DataConfig(input_key="question", label_key="answer"))
    assert (source.at(0).label, source.notes) == ("2\n#### 1", ())
    with pytest.raises(DataError, match=r"no field 'q'.*--input-key"):
        opened(path, data=DataConfig(input_key="q", label_key="answer"))
    with pytest.raises(DataError, match=r"line 1: field 'solution' has no \\boxed"):
        opened(write(path, [{"problem": "1=", "solution": "clear"}]))


def test_damaged_files_are_named(tmp_path):
    text, table = as_lines(rows(50)), as_parquet(rows(50))
    with_nan = as_parquet([{"prompt": "1=", "label": 1.0}, {"prompt": "1=", "label": math.nan}])
    two_sets = {f"{name}/train-00000-of-00001.jsonl": text for name in ("main", "socratic")}
    for number, (suffix, content, says) in enumerate([
        ("parquet", table[:-99], r"rows\.parquet: not a parquet file, or cut off"),
        ("parquet", with_nan, r"rows\.parquet, row 1: field 'label' must be text or a number, is nan"),
        ("arrow", as_arrow(rows(50))[:66], r"rows\.arrow: not an Arrow file, or cut off"),
        ("jsonl.gz", gzip.compress(text)[:-99], r"rows\.jsonl\.gz: damaged or cut off"),
        ("jsonl", text.decode().encode("utf-16"), r"rows\.jsonl: is UTF-16, expected UTF-8; `iconv"),
        ("jsonl", text + b'{"prompt": "\xff="}', "line 51: not UTF-8: byte 13 of the line is 0xff"),
        ("jsonl", {"other.txt": b""}, r"rows\.jsonl: holds no data set"),
        ("jsonl", two_sets, r"several data sets .*main.*socratic.*name one of them"),
        ("jsonl", {"tran.jsonl": text, "test.jsonl": text}, "no part for train; it has (tran|test), "),
        ("txt", b"1", r"rows\.txt: expected a file that ends in \.jsonl"),
    ]):  # fmt: skip
        with pytest.raises(DataError, match=says):
            opened(write(tmp_path / str(number) / f"rows.{suffix}", content))


TABLES = {"jsonl": as_lines(rows(50)), "parquet": as_parquet(rows(50)), "arrow": as_arrow(rows(50))}


@given(
    st.sampled_from(sorted(TABLES)),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=4)), min_size=1, max_size=4),
    st.booleans(),
)
@example("parquet", [(0.6484375, b"\x80")], False)  # the name of a column in a row group
@example("parquet", [(0.08984375, b"\x0e")], False)  # an index beyond the repeated values
@example("parquet", [(0.5827356760684823, b"\xff\xff")], False)  # a footer that ended the process
@example("arrow", [(0.23635537576686483, b"\xff\x0c\x80")], True)  # a buffer with a part of an element
@settings(max_examples=90)
def test_any_damage_to_a_file_is_a_data_error(tmp_path_factory, suffix, hits, skips):
    content = bytearray(TABLES[suffix])
    for place, written in hits:
        start = int(place * len(content))
        content[start : start + len(written)] = written
    path = tmp_path_factory.mktemp("damaged") / f"rows.{suffix}"
    path.write_bytes(bytes(content))
    with suppress(DataError):
        for prompt in opened(path, data=DataConfig(skip_bad_rows=skips)).batch(0, 8):
            assert prompt.label


def test_the_settings_of_a_source_and_wrong_ones(tmp_path):
    content = [{"q": f"{i}=", "a": i, "metadata": {"level": i % 2}, "task": None} for i in range(10)]
    path = write(tmp_path / "a.jsonl", content)
    spec = f"{path}?input_key=q&label_key=a&task=sums&suffix=(0)&rm_type=math&only=metadata.level%3D1"
    source = opened(spec, split="eval")
    assert labels(source, 5) == ["1", "3", "5", "7", "9"]
    assert source.tallies[0].counts == {"not chosen by only": 5}
    prompt = source.at(0)
    assert (prompt.text, prompt.task, prompt.metadata["rm_type"]) == ("1=(0)", "sums", "math")
    for setting, says in (
        ("wieght=2", "a file has no setting 'wieght'; did you mean 'weight'"),
        ("weight=0", "weight must be a number above 0, is '0'"),
        ("weight=nan", "weight must be a number above 0"),
        ("only=level", "only must read FIELD=VALUE"),
        ("weight", "name=value"),
        ("only=label%3D17", "no prompts in it that are left .*10 not chosen"),
    ):
        with pytest.raises(DataError, match=says):
            opened(f"{write(tmp_path / 'a.jsonl', rows(10))}?{setting}")


def test_chats_follow_template_settings_with_one_system_message(tmp_path):
    def first(*said, kwargs=None, suffix=""):
        messages = [{"role": role, "content": content} for role, content in said]
        path = write(tmp_path / "a.jsonl", [{"prompt": messages, "label": "2"}])
        data = DataConfig(apply_chat_template=True, apply_chat_template_kwargs=kwargs, system_prompt="Brief.")
        return opened(f"{path}{suffix}", data=data, tokenizer=CHATTY).at(0)

    for kwargs, thought in ((None, ""), ('{"enable_thinking": false}', "<think>\n\n</think>\n\n")):
        prompt = first(("user", "1+1?\n"), kwargs=kwargs, suffix="?suffix=Say.")
        text = CHATTY.decode_all(prompt.head_ids)
        assert text == "<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\n1+1?\nSay.", (kwargs, thought)
        assert CHATTY.decode_all(prompt.tail_ids) == f"<|im_end|>\n<|im_start|>assistant\n{thought}"
    old = "<think>\nhm\n</think>\n\n1"
    prompt = first(("system", "Own."), ("user", "1?"), ("assistant", old), ("user", "2?"))
    assert CHATTY.decode_all(prompt.token_ids) == (
        "<|im_start|>system\nOwn.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n"
        "<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.text == "2?"


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


def test_mixtures_keep_their_weights_and_end_after_every_source(tmp_path):
    def mixed(*specs):
        return open_sources(specs, TINY, DataConfig(), split="train")

    a, b = write(tmp_path / "a.jsonl", rows(20)), write(tmp_path / "b.jsonl", rows(7, first=100))
    specs = f"{a}?weight=3", f"{b}?weight=1", f"{CHAIN_SUM}&weight=0.5&task=sums"
    source = mixed(*specs)
    prompts = source.batch(0, 900)
    assert Counter(prompt.task for prompt in prompts) == {"a": 600, "b": 200, "sums": 100}
    assert [prompt.index for prompt in prompts] == list(range(900))
    of_a = [prompt.label for prompt in prompts if prompt.task == "a"]
    assert of_a == labels(opened(a), 600), "every source has its own order, as alone"
    assert {p.metadata.get("rm_type") for p in prompts} == {None, "reasoning_gym"}
    assert plain(mixed(*specs).batch(13, 10)) == plain(source.batch(13, 10))
    assert source.num_prompts() == 0, "a generated task has no end"
    source = mixed(*specs[:2])
    size = source.num_prompts()
    assert {*labels(source, size)} == {*numbers(20), *numbers(7, 100)}
    assert len({*labels(source, size - 1)}) == 26


def test_the_steps_of_epochs_follow_from_the_prompts(tmp_path):
    source, config = opened(write(tmp_path / "a.jsonl", rows(10))), Config()
    config.rollout.rollout_batch_size = 4
    for config.run.num_epoch, steps in ((1, 3), (2, 5), (4, 10)):
        assert num_steps(config, source) == steps
    assert num_steps(config, None) == config.run.num_rollout, "recorded rollouts"
    with pytest.raises(ValueError, match="--num-epoch: a generated task never repeats"):
        num_steps(config, opened(CHAIN_SUM))


def test_long_prompts_are_dropped_where_asked(tmp_path, any_size):
    content = [{"prompt": "1+" * (i % 10) + "1=", "label": str(i)} for i in range(50)]
    path = write(tmp_path / "rows.jsonl", content)
    with pytest.raises(DataError, match=r"line \d+: the prompt has \d+ tokens.*--drop-long-prompts"):
        opened(path, max_prompt_len=10).batch(0, 50)
    drops = DataConfig(drop_long_prompts=True)
    source, again = (opened(path, data=drops, max_prompt_len=10) for _ in range(2))
    assert all(len(prompt.token_ids) <= 10 for prompt in source.batch(0, 50))
    assert source.tallies[0].counts["too long prompts"] == 30
    for position in (49, 3, 17):
        assert plain(again.at(position)) == plain(source.at(position)), "whatever was drawn before"


def test_deduplication_ignores_white_space_and_names_repeated_ids(tmp_path, any_size):
    content = [{"prompt": f"{i % 25} ={' ' * (i // 25)}", "label": str(i)} for i in range(50)]
    source = opened(write(tmp_path / "rows.jsonl", content), data=DataConfig(deduplicate=True))
    assert sorted(labels(source, 25), key=int) == numbers(25)
    assert (source.num_prompts(), source.tallies[0].counts) == (25, {"duplicates": 25})
    path = write(tmp_path / "rows.jsonl", [row | {"id": i % 49} for i, row in enumerate(rows(50))])
    says = r"line 50: id 0 is also that of (an earlier row|.*rows\.jsonl, line 1)"
    with pytest.raises(DataError, match=says):
        opened(path, data=DataConfig(deduplicate=True))
    source = opened(path, data=DataConfig(deduplicate=True, skip_bad_rows=True))
    assert sorted(labels(source, 49), key=int) == numbers(49)
    assert (source.num_prompts(), source.tallies[0].counts["bad rows"]) == (49, 1)
    write(path, [row | {"id": "same"} for row in rows(5)])
    with pytest.raises(DataError, match="line 2: id 'same' is also that of"):
        opened(path)  # a large file only for ids among the rows that are checked first


def test_prompts_outside_the_window_of_pass_rates_are_left_out(tmp_path):
    path = write(tmp_path / "rows.jsonl", rows(10))
    by_label = {prompt.label: prompt_fingerprint(prompt) for prompt in opened(path).batch(0, 10)}
    rates = {by_label[i]: Rate(correct=int(i), scored=8) for i in numbers(9)}  # of 9 nothing is known
    source = opened(path, rates=PassRates(0.25, 0.75, rates))
    assert sorted(labels(source, 5)) == ["2", "3", "4", "5", "6"]
    assert source.tallies[0].counts == {"outside the pass-rate window": 4, "without a measured pass rate": 1}
    generated = opened(CHAIN_SUM, rates=PassRates(0.1, 0.9, {}))
    assert "--filter-pass-rate has no effect on it" in generated.notes[0]


def test_pass_rates_are_those_of_this_policy_and_its_settings(tmp_path):
    hf = write(tmp_path / "hf", {"config.json": b"{}", "model.safetensors": b"weights"})
    config = Config()
    config.model.hf_checkpoint = hf
    config.data.filter_pass_rate, config.data.pass_rates = (0.1, 0.9), tmp_path / "rates.jsonl"
    (prompt,) = opened(write(tmp_path / "a.jsonl", rows(1))).batch(0, 1)
    record = rate_record(policy_fingerprint(config), prompt, Rate(3, 4))
    line = json.dumps(record) + "\n"
    config.data.pass_rates.write_text(line + line[: len(line) // 2])  # its writer was stopped
    assert open_pass_rates(config).refusal(prompt) is None
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


def test_held_out_rows_are_never_trained_on(tmp_path, monkeypatch):
    path = write(tmp_path / "set", {"train.jsonl": as_lines(rows(40)), "test.jsonl": as_lines(rows(7))})
    train, evaluated = (opened(path, split=split, holds_out=True) for split in ("train", "eval"))
    assert (len(train), len(evaluated)) == (40, 7)
    assert "its own held-out part, test.jsonl" in evaluated.notes[-1]
    path = tmp_path / "train.jsonl"
    for copies in (1, 3):
        write(path, rows(100) * copies)
        train, *evals = (opened(path, split=split, holds_out=True) for split in ("train", "eval", "eval"))
        assert (len(train), len(evals[0])) == (95 * copies, 5)
        assert "5 prompts of it, which are not trained on" in evals[0].notes[-1], copies
        trained, evaluated, again = labels(train, len(train)), labels(evals[0], 5), labels(evals[1], 5)
        assert not {*trained} & {*evaluated}, copies
        assert again == evaluated, copies
        other = opened(path, split="eval", data=DataConfig(data_seed=1), holds_out=True)
        assert labels(other, 5) != evaluated, copies
    with pytest.raises(DataError, match="--eval-prompt-data, or turn evaluation off by --eval-num-prompts 0"):
        opened(write(tmp_path / "one.jsonl", rows(1)), holds_out=True)
    monkeypatch.setattr("megatron_ibpo.data.files.SMALL_ROWS", 10)  # of a large file as well
    monkeypatch.setattr("megatron_ibpo.data.prompt_files.SHARE_OF_LARGE", 0.1)
    source = opened(write(path, rows(300) * 2), split="eval", holds_out=True)
    evaluated = labels(source, len(source))
    assert 15 < len(evaluated) < 50
    assert {*labels(opened(path, holds_out=True), 900)} == {*numbers(300)} - {*evaluated}


def test_a_users_prompts_withdraw_the_recipes_held_out_ones(tmp_path):
    own, recipe = str(write(tmp_path / "own.jsonl", rows(9))), str(ROOT / "examples/recipes/small_cpu.yaml")
    config = parse_config(["--config", recipe, "--prompt-data", own])
    assert (config.data.eval_prompt_data, config.holds_out) == (None, True)
    both = parse_config(["--config", recipe, "--prompt-data", own, "--eval-prompt-data", own])
    assert (both.data.eval_prompt_data, both.holds_out) == (own, False)
    (tmp_path / "held_out.yaml").write_text("eval-prompt-data: aime25://aime25.jsonl\n")
    chosen = ["--config", recipe, "--config", str(tmp_path / "held_out.yaml"), "--prompt-data", own]
    assert parse_config(chosen).data.eval_prompt_data == "aime25://aime25.jsonl"
    assert not parse_config([*chosen[:2], "--eval-num-prompts", "0", "--prompt-data", own]).holds_out


def test_no_bundled_problem_is_in_both_files():
    files = [(ROOT / f"examples/math/{name}.jsonl").read_text() for name in ("train", "held_out")]
    prompts = [[json.loads(line)["prompt"] for line in file.splitlines()] for file in files]
    assert [*map(len, prompts), len({*prompts[0], *prompts[1]})] == [400, 200, 600]


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


def test_inspection_reports_the_same_counts_as_a_run(tmp_path, capsys):
    make_tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    bad = [{"prompt": "x", "label": 1}, {"prompt": "1+" * 30 + "1=", "label": 1}]
    path = write(tmp_path / "a.jsonl", [*rows(20), *rows(2), *bad])
    words = ["--hf-checkpoint", str(tmp_path / "tokenizer"), "--prompt-data", str(path)]

    def printed(*flags):
        assert data_command.main([*words, *flags]) == 0
        return capsys.readouterr().out

    def inspected(*flags):
        return json.loads(printed("--json", *flags))

    found = inspected("--rollout-max-context-len", "40", "--rollout-max-response-len", "20")
    assert (found["rows"], found["prompts"], found["is_whole"]) == (24, 22, True)
    duplicates = {"duplicates, which stay without --deduplicate": 2}
    assert found["left_out"] == {"bad rows": 1, "too long prompts": 1} | duplicates
    assert "line 23: the tokenizer has no token" in found["named"]["bad rows"][0]
    assert found["first"][0] == {"prompt": "<bos>0=", "label": "0", "task": "a"}
    assert inspected("--deduplicate")["prompts"] == 21
    structured = write(tmp_path / "b.jsonl", [{"prompt": "1=", "label": {"x": 1}}, *rows(2)])
    words[-1], flags = str(structured), ("--rm-type", "math", "--reward-workers", "1")
    (refused,) = inspected(*flags)["label_problems"]
    assert refused.startswith("b, prompt 0, label '{\"x\": 1}': LabelError: it is an object with 'x'")
    assert "a run would refuse this label: b, prompt 0" in printed(*flags)
    words[-1] = str(path)
    path.write_text(path.read_text().replace('"label": "0"', '"label": "0", "task": "other"'))
    assert "\nother 2, a 21\n" in printed()
