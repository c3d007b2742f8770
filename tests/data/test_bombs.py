"""Small files that stand for very much are refused, or read in little time and memory."""

import gc
import gzip
import json
import os
import signal
import struct
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tiny_tokenizer import make_tiny_tokenizer

from megatron_ibpo.config import DataConfig
from megatron_ibpo.data import DataError, arrow_tables, open_sources, tables
from megatron_ibpo.data.arrow_tables import is_compressed, largest_row
from megatron_ibpo.data.row_prompts import MOST_LINES
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.evaluate import sets
from megatron_ibpo.evaluate.benchmarks import benchmark_rows
from support.byte_tokenizers import family_tokenizer

TINY = HuggingFaceTokenizer(make_tiny_tokenizer())
MIB = 2**20
ROW = b'{"prompt":"1+1=","label":"2"}\n'


@contextmanager
def quickly(seconds=4.0):
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds


def repeated(content, times):
    """Compressed content, over and over: a file may be made of many compressed parts."""
    return gzip.compress(content) * times


LINES = {
    "a gibibyte of newlines": (repeated(b"\n" * MIB, 1024), "rows.jsonl.gz: more than 262,144 lines, blank"),
    "newlines after a row": (
        repeated(ROW + b"\n" * MIB, 999),
        "more than 262,144 lines, blank ones included",
    ),
    "a line of spaces": (repeated(b" " * MIB, 300), "more than 256 MiB of content.*`gunzip` it"),
    "brackets": (
        repeated(ROW[:-2] + b', "x": "' + b"[" * 2**21 + b'"}\n', 9),
        "more than 8,388,608 brackets",
    ),
    "a row without an end": (repeated(b'{"prompt": "' + b"a" * MIB, 300), "more than 256 MiB of content"),
}
SLOW = ("a line of spaces", "a row without an end")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in LINES]
)
def test_compressed_lines_are_bounded_in_number_and_in_length(case, tmp_path):
    content, says = LINES[case]
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(content)
    assert len(content) < 3 * MIB
    for split in ("train", "eval"):
        with quickly(), pytest.raises(DataError, match=says):
            list(
                open_sources(
                    [str(path)], TINY, DataConfig(skip_bad_rows=True), split=split, holds_out=True
                ).batch(0, 1)
            )


def test_files_of_a_source_share_one_line_limit_checked_first(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_ibpo.data.row_prompts.parsed_row", None)
    for number in range(9):
        (tmp_path / f"train-0000{number}-of-00009.jsonl.gz").write_bytes(repeated(ROW + b"\n" * 40_000, 1))
    with pytest.raises(DataError, match=r"-00006-of-00009\.jsonl\.gz: more than 262,144 lines"):
        open_sources([str(tmp_path)], TINY, DataConfig(), split="train")
    assert MOST_LINES == 262_144


def test_line_numbers_count_blanks_and_an_overlong_line_is_bad(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_ibpo.data.row_prompts.LONGEST_LINE", 1000)
    for name, pack in (("rows.jsonl", bytes), ("rows.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(
            pack(b"\n\r\n" + ROW + b'{"x": "' + b"a" * 5500 + b'"}\n \n' + ROW.strip())
        )
        source = open_sources([str(tmp_path / name)], TINY, DataConfig(skip_bad_rows=True), split="train")
        assert (len(source), source.tallies[0].counts) == (2, {"bad rows": 1}), (name, pack)
        assert source.tallies[0].named["bad rows"] == [
            f"{tmp_path / name}, line 4: the line is longer than 0 MiB"
        ]


def test_plain_files_of_blank_lines_are_read_at_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROW + b"\n" * 30 * MIB)
    with quickly(2), pytest.raises(DataError, match="more than 262,144 lines"):
        open_sources([str(path)], TINY, DataConfig(), split="train")
    path.write_bytes(b"\n" * 70 * MIB + ROW)
    with quickly(2), pytest.raises(DataError, match="no row in the first 64 MiB, but blank lines"):
        open_sources([str(path)], TINY, DataConfig(), split="train")
    path.write_bytes(b"\n" * 30 * MIB + ROW + b"\n" * 40 * MIB + ROW)
    with quickly(2):
        table = tables.JsonLines(path)
        places = [(b, n) for b in range(table.num_blocks) for n in range(table.count(b))]
    assert [table.row(*place)["label"] for place in places] == ["2", "2"]


@pytest.mark.parametrize("block_bytes", [7, 16, 64, 1000])
def test_blank_lines_are_no_rows_wherever_blocks_end(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(tables, "_BLOCK_BYTES", block_bytes)
    content = (
        b"\n \n" + ROW + b"\t\r\n\n\n" + ROW + b" " * 50 + ROW + b"\n" * 40 + b"  " + ROW + b"   \n\n   "
    )
    (tmp_path / "rows.jsonl").write_bytes(content)
    table = tables.JsonLines(tmp_path / "rows.jsonl")
    places = [(b, n) for b in range(table.num_blocks) for n in range(table.count(b))]
    expected = [n for n, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    assert [table.location(*place).rpartition(" ")[2] for place in places] == [str(line) for line in expected]
    assert all(table.row(*place) == json.loads(ROW) for place in places)


def columns(**more):
    return pa.table({"prompt": pa.array(["1+1="]), "label": pa.array(["2"]), **more})


def of_one(values, count):
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), values)


def test_a_value_that_is_repeated_is_one_in_memory(tmp_path):
    path, long = tmp_path / "rows.parquet", pa.array(["1" * MIB])
    parquet.write_table(
        pa.table({"prompt": of_one(long, 20_000), "label": of_one(pa.array(["2"]), 20_000)}),
        path,
        store_schema=False,
    )
    assert path.stat().st_size < 2**18
    before = pa.total_allocated_bytes()
    with quickly(), pytest.raises(DataError, match="row 0: the prompt has 1,048,576 characters"):
        open_sources([str(path)], TINY, DataConfig(), split="train", max_prompt_len=100)
    table = arrow_tables.Parquet(path, ["prompt", "label"])
    assert table.row(0, 19_999)["prompt"] == "1" * MIB
    assert pa.total_allocated_bytes() - before < 20 * MIB
    lists = pa.ListArray.from_arrays(pa.array([0, 20_000]), of_one(long, 20_000))
    parquet.write_table(columns(tools=lists, task=pa.array(["t"])), path, store_schema=False)
    with quickly(), pytest.raises(DataError, match="the row is larger than 64 MiB"):
        arrow_tables.Parquet(path).row(0, 0)


def test_lists_of_nothing_are_measured_before_they_are_made(tmp_path):
    count = 2**31 - 2
    nothing = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count))
    table = columns(metadata=pa.StructArray.from_arrays([nothing], ["x"]))
    with pa.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as file:
        file.write_table(table)
    zeros = pa.ListArray.from_arrays(pa.array([0, 10**7], pa.int32()), pa.nulls(10**7, pa.int8()))
    parquet.write_table(
        columns(metadata=pa.StructArray.from_arrays([zeros], ["x"])), tmp_path / "rows.parquet"
    )
    for name in ("rows.arrow", "rows.parquet"):
        with quickly(), pytest.raises(DataError, match=f"{name}, row 0: the row is larger than 64 MiB"):
            open_sources([str(tmp_path / name)], TINY, DataConfig(), split="train")


VALUES = {
    "JSON": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}'] * 300)),
    "tensors": pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((300, 2, 3))),
    "views of text": pa.array(["a value of more than twelve letters"] * 300, pa.string_view()),
    "views of bytes": pa.array([b"short"] * 300, pa.binary_view()),
    "views of lists": pa.array([["a", "b"], []] * 150, pa.list_view(pa.string())),
    "large views of lists": pa.array([[1], [2, 3]] * 150, pa.large_list_view(pa.int64())),
}


@pytest.mark.parametrize("case", VALUES)
def test_columns_of_any_type_that_writers_use_are_measured(case, tmp_path):
    table = pa.table({"prompt": ["1+1="] * 300, "label": ["2"] * 300, "tools": VALUES[case]})
    with pa.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as file:
        file.write_table(table)
    parquet.write_table(table, tmp_path / "rows.parquet")
    names = table.column_names
    for rows in (
        arrow_tables.ArrowFile(tmp_path / "rows.arrow", names),
        arrow_tables.Parquet(tmp_path / "rows.parquet"),
    ):
        assert repr(rows.row(0, 7)["tools"]) == repr(table["tools"][7].as_py()), rows.path
        assert 0 < largest_row(table.slice(7, 1)) < 500, rows


def test_views_that_show_one_value_many_times_are_refused(tmp_path):
    count, shown = 10**5, b"1" * 1000
    view = struct.pack("<i4sii", len(shown), shown[:4], 0, 0)
    buffers = [None, pa.py_buffer(view * count), pa.py_buffer(shown)]
    texts = pa.Array.from_buffers(pa.string_view(), count, buffers)
    first, all_of_them = pa.array([0], pa.int32()), pa.array([count], pa.int32())
    table = columns(task=pa.ListViewArray.from_arrays(first, all_of_them, texts))
    with pa.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as file:
        file.write_table(table)
    with quickly(), pytest.raises(DataError, match="the row is larger than 64 MiB"):
        arrow_tables.ArrowFile(tmp_path / "rows.arrow", ["task"]).row(0, 0)


def test_oversized_row_groups_are_refused_at_the_start(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    many = pa.table({"prompt": ["1+1="] * 5000, "label": ["2"] * 5000})

    def refused(says, **how):
        parquet.write_table(many, path, **how)
        with pytest.raises(DataError, match=f"^{path}: {says}"):
            open_sources([str(path)], TINY, DataConfig(), split="train")

    for encoding in ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"):
        says = f"has the encoding {encoding}; write it with another one, such as by pandas"
        refused(says, use_dictionary=False, column_encoding=encoding)
    with monkeypatch.context() as patch:
        patch.setattr(arrow_tables, "_MOST_GROUP_ROWS", 4999)
        refused("row group 0 has 5,000 rows; write it with smaller ones, such as row_group_size=1000")
    monkeypatch.setattr(arrow_tables, "WINDOW_BYTES", MIB)
    many = pa.table({"prompt": ["1" * 500] * 5000, "label": ["2"] * 5000})
    refused("row group 0 has 2 MiB and 5,000 values", use_dictionary=False)
    parquet.write_table(many, path, use_dictionary=False, row_group_size=100)
    assert arrow_tables.Parquet(path, ["prompt"]).window < 20, "no more is held than the window may take"


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
def test_compressed_arrow_files_are_refused(tmp_path, kind, compression):
    path = tmp_path / "rows.arrow"
    table = pa.table(
        {
            "prompt": [f"{i}+1=" for i in range(300)],
            "label": ["2"] * 300,
            "task": pa.array(["a"] * 300).dictionary_encode(),
        }
    )
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with make(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as file:
        file.write_table(table)
    if compression is None:
        assert len(open_sources([str(path)], TINY, DataConfig(), split="train")) == 300
        return
    with pytest.raises(DataError, match=r"rows.arrow: .*its buffers are compressed"):
        open_sources([str(path)], TINY, DataConfig(), split="train")


def test_damaged_message_metadata_gives_false_or_a_handled_error():
    for content in (b"", b"\0" * 64, b"\xff" * 64, bytes(range(256))):
        try:
            assert is_compressed(content) in (True, False), content
        except IndexError:
            continue


def test_benchmark_files_are_bounded_too(tmp_path):
    path = tmp_path / "aime25.jsonl.gz"
    path.write_bytes(repeated(b"\n" * MIB, 1024))
    with quickly(), pytest.raises(DataError, match="more than 262,144 lines, blank ones included, or 1 GiB"):
        list(benchmark_rows(str(path)))
    with (tmp_path / "aime25.json").open("wb") as file:
        file.truncate(257 * MIB)
    says = r"has 269,484,032 bytes; such a file may have at most 268,435,456; JSON Lines .*may have more"
    with pytest.raises(DataError, match=says):
        list(benchmark_rows(str(tmp_path / "aime25.json")))
    for name in ("many.json", "many.jsonl"):
        (tmp_path / name).write_bytes(b"[" + b"[]," * 2**23 + b"[]]\n")
        with quickly(1), pytest.raises(DataError, match=f"{name}.*: more than 8,388,608 brackets"):
            list(benchmark_rows(str(tmp_path / name)))


def test_large_rows_read_one_by_one_are_no_fault(tmp_path, monkeypatch):
    path = tmp_path / "programs.jsonl"
    path.write_bytes(b"".join(b'{"x":"' + b"1" * MIB + b'"}\n' for _ in range(60)))
    monkeypatch.setattr("megatron_ibpo.evaluate.benchmarks.RECORD_BYTES", 40 * MIB)
    assert sum(1 for _ in benchmark_rows(str(path))) == 60
    assert sets._unused_fields(str(path), DataConfig()) == [f"{path}: fields that are not used: 'x'"]


QUESTION = [{"role": "user", "content": "q"}]
TEMPLATES = {
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "more than 0.5 s",
    ),
    "a number": ("{{ 10 ** (10 ** 9) }}", "more than 0.5 s"),
    "a long text": ("{{ messages[0].content * 10**11 }}", "more than 1,024 MiB of memory"),
    "a doubled text": (
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "more than",
    ),
    "padding": ("{{ messages[0].content | center(10**11) }}", "more than 1,024 MiB of memory"),
    "a constant": ("{{ 'a' * 10**11 }}", "more than 1,024 MiB of memory"),
    "a list": ("{% set x = [0] * 10**11 %}", "more than 1,024 MiB of memory"),
    "an output": (
        "{{ messages[0].content * 20000000 }}",
        "has 20,000,000 bytes, and 16,777,216 are the limit",
    ),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "its own refusal": ("{{ raise_exception('no system role') }}", "no system role"),
    "Python's insides": ("{{ ''.__class__.__mro__ }}", "unsafe"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_chat_templates_have_limits_of_time_memory_and_text(case, monkeypatch):
    monkeypatch.setattr(
        "megatron_ibpo.data.template_process.RENDER_S", 0.5 if "0.5 s" in TEMPLATES[case][1] else 20
    )
    template, says = TEMPLATES[case]
    tokenizer = family_tokenizer("qwen3")
    tokenizer.library.chat_template = template
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(DataError, match=f"its chat template refuses the messages: .*{says}"):
            tokenizer.render_chat(QUESTION)
    if "0.5 s" in says:
        assert time.monotonic() - start < 0.4, "a template that took too long is not asked again"


def interrupt(*_):
    raise KeyboardInterrupt


def no_process():
    raise BlockingIOError(11, "Resource temporarily unavailable")


def test_template_rendering_equals_the_library_and_survives_a_kill():
    tokenizer, tools = family_tokenizer("qwen3"), [{"name": "calc", "description": "", "parameters": {}}]
    settings = {"enable_thinking": False}
    expected = tokenizer._rendered(QUESTION, [{"type": "function", "function": tools[0]}], True, settings)
    assert tokenizer.render_chat(QUESTION, settings, tools=tools) == expected
    os.kill(tokenizer._template._child._pid, signal.SIGKILL)
    assert tokenizer.render_chat(QUESTION, settings, tools=tools) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multiprocessing.connection.Connection.poll", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tokenizer.render_chat([{"role": "user", "content": "another"}])
    assert tokenizer.render_chat(QUESTION, settings, tools=tools) == expected, "no answer is left over"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fork", no_process)
        with pytest.raises(DataError, match="its process cannot be started, or dies: BlockingIOError"):
            family_tokenizer("qwen3").render_chat(QUESTION)
    child = tokenizer._template._child
    os.kill(child._pid, signal.SIGHUP)
    assert tokenizer.render_chat(QUESTION, settings, tools=tools) == expected
    assert tokenizer._template._child is child, "the handlers of the run are not called in this process"
    half = [{"role": "user", "content": "\ud800"}]
    assert "\ud800" in tokenizer.render_chat(half)
    with pytest.raises(DataError, match=r"the messages have .* and 16,777,216 are the limit"):
        tokenizer.render_chat([{"role": "user", "content": "x" * 2**25}])


def test_the_process_of_a_template_ends_with_its_tokenizer():
    tokenizer = family_tokenizer("qwen3")
    tokenizer.render_chat(QUESTION)
    pid = tokenizer._template._child._pid
    assert Path(f"/proc/{pid}").exists()
    del tokenizer
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_a_row_of_millions_of_lists_is_a_bad_row():
    with quickly(1), pytest.raises(DataError, match="the row has more than 4,194,304 brackets"):
        tables.parsed_row(b'{"x": [' + b"[]," * 2**22 + b"[]]}")
