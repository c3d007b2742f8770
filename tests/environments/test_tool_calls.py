"""Arguments of calls: what stands in them is what the tool gets, or there is no call."""

import json
import time
from functools import cache
from typing import Any

import pytest

from megatron_ibpo.environments.chat import open_chat
from megatron_ibpo.environments.tool_calls import QWEN3_5, read_text
from support.byte_tokenizers import end_ids, family_tokenizer

IN_JSON = ("qwen2_5", "qwen3", "qwen3_instruct_2507")
IN_TAGS = ("qwen3_5", "glm4_5")
NULL = {"type": "null"}
PROPERTIES = {
    "path": {"type": "string"}, "text": {"type": "string"}, "note": {"type": ["string", "null"]},
    "optional": {"anyOf": [{"type": "string"}, NULL]}, "nullable": {"type": "string", "nullable": True},
    "mode": {"$ref": "#/$defs/Mode"}, "choice": {"enum": ["1", "2"]}, "fixed": {"const": "7"},
    "deep": {"allOf": [{"$ref": "#/$defs/Maybe"}]}, "loop": {"$ref": "#/$defs/Loop"},
    "flag": {"anyOf": [{"type": "boolean"}, NULL]}, "switch": {"type": ["boolean", "null"]},
    "count": {"anyOf": [{"type": "integer"}, NULL]}, "size": {"oneOf": [{"type": "number"}, NULL]},
    "names": {"anyOf": [{"type": "array", "items": {"type": "string"}}, NULL]},
    "level": {"enum": [1, 2, None]},
    "either": {"type": ["string", "array"]}, "table": {"type": "object"}, "limit": {"$ref": "#/$defs/Limit"},
}  # fmt: skip
DEFINITIONS = {
    "Mode": {"enum": ["0", "1"]}, "Maybe": {"anyOf": [{"$ref": "#/$defs/Mode"}, NULL]},
    "Loop": {"$ref": "#/$defs/Loop"}, "Limit": {"anyOf": [{"type": "integer"}, NULL]},
}  # fmt: skip
TOOL = {
    "name": "write",
    "description": "Write.",
    "parameters": {"type": "object", "properties": PROPERTIES, "$defs": DEFINITIONS},
}
TAGS = (
    "</tool_call>", "<tool_call>", "</parameter>", "</function>", "<parameter=path>", "<function=rm>",
    "</arg_value>", "<arg_key>", "</think>", "<think>", "<|im_end|>", "</tool_call>\n<tool_call>",
    "</function>\n</tool_call>",
)  # fmt: skip


@pytest.fixture(scope="module")
def read():
    """The message of a turn in a family's format, with the tool `write`."""

    @cache
    def opened(family):
        tokenizer = family_tokenizer(family)
        ends = end_ids(family, tokenizer)
        return tokenizer, open_chat(tokenizer, ends, applies_template=True), ends[0]

    def read(family, text):
        tokenizer, chat, end = opened(family)
        return chat.read([*tokenizer.encode(text), end], [TOOL])

    return read


def written(family, arguments):
    """A call as the family's template writes it, with texts as they are."""
    if family == "qwen3_5":
        inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
        return f"</think>\n\n<tool_call>\n<function=write>\n{inner}</function>\n</tool_call>"
    if family == "glm4_5":
        inner = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
        return f"<think></think>\n<tool_call>write\n{inner}</tool_call>"
    call = json.dumps({"name": "write", "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def arguments_of(message):
    return [call["function"]["arguments"] for call in message.get("tool_calls", [])]


@pytest.mark.parametrize("family", IN_JSON)
def test_a_tag_in_a_string_of_json_is_text(read, family):
    example = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    for text in (*(f"a {tag} b" for tag in TAGS), *TAGS, example, f"{example} {example}"):
        arguments = {"path": "p", "text": text}
        message = read(family, written(family, arguments) + "\n" + written(family, {"path": text}))
        assert arguments_of(message) == [arguments, {"path": text}], text
        assert "malformed_tool_calls" not in message, text


@pytest.mark.parametrize("family", IN_TAGS)
def test_tags_in_values_are_text_or_make_calls_malformed(read, family):
    example = written(family, {"text": "1"}).rpartition("\n\n" if family == "qwen3_5" else "</think>\n")[2]
    for text in (*(f"a {tag} b" for tag in TAGS), *TAGS, example, f"a {example} b", f"a{example}b{example}c"):
        arguments = {"path": "p", "text": text}
        message = read(family, written(family, arguments))
        assert arguments_of(message) in ([], [arguments]), text
        assert arguments_of(message) or message["malformed_tool_calls"], text
    for text in ("a </tool_call> b", "a </parameter> b", "a </arg_value> b", "<think> </think>"):
        assert arguments_of(read(family, written(family, {"text": text}))) == [{"text": text}], text


def test_a_broken_call_is_malformed_and_makes_no_other_one(read):
    good = '<tool_call>\n{"name": "write", "arguments": {"path": "p"}}\n</tool_call>'
    injected = '{"name": "write", "arguments": {"text": "a </tool_call>' + good + ' b",}}</tool_call>'
    for call, num_good in (
        ('{"name": "write", "parameters": {"path": "p"}}', 1),
        ('{"name": "write", "args": {"path": "p"}}', 1),
        ('{"name": "write", "input": {}}', 1), ('{"name": "write", "arguments": {"path": "p"', 1),
        ('{"name": "write", "arguments": {"path": "p"}}}', 1), ('{"name": "", "arguments": {}}', 1),
        ('{"name": "write", "arguments": []}', 1), ('["write"]', 1),
        (injected.removesuffix("</tool_call>"), 0),
    ):  # fmt: skip
        for family in IN_JSON:
            message = read(family, f"<tool_call>\n{call}\n</tool_call>{good}")
            assert arguments_of(message) == [{"path": "p"}] * num_good, call
            assert message["malformed_tool_calls"], call
            assert call.splitlines()[0][:30] in message["content"], (family, call)
    assert arguments_of(read("qwen3", '<tool_call>{"name": "write"}</tool_call>')) == [{}]
    for family, broken in (
        ("qwen3_5", "<function=write>\n<parameter=path>\np\n</function>"),
        ("qwen3_5", "<function=write>x</function>"),
        ("qwen3_5", "<function=write>" + "<parameter=path>\n1\n</parameter>" * 2 + "</function>"),
        ("glm4_5", "write\n<arg_key>path</arg_key>\n<arg_value>p"), ("glm4_5", "write now, please"),
        ("glm4_5", "write<arg_key>path</arg_key>p"),
    ):  # fmt: skip
        turn = written(family, {"path": "q"}).replace(
            "<tool_call>", f"<tool_call>{broken}</tool_call>\n<tool_call>", 1
        )
        message = read(family, turn)
        assert message["malformed_tool_calls"] == [f"<tool_call>{broken}</tool_call>"], broken
        assert arguments_of(message) == [{"path": "q"}], (family, broken)


@pytest.mark.parametrize("family", IN_TAGS)
def test_call_values_have_their_schemas_types_and_text_stays_text(read, family):
    nulls = ("count", "names", "size", "limit", "note", "optional", "nullable", "deep", "level")
    python = {"flag": ("True", True), "switch": ("False", False)} | dict.fromkeys(nulls, ("None", None))
    values = {"flag": ("false", False), "count": (" 5 ", 5), "size": ("2.5", 2.5), "names": ('["a"]', ["a"]),
              "limit": ("5", 5), "level": ("2", 2), "table": ('{"a": "1"}', {"a": "1"}),
              "either": ('["a"]', ["a"]), "loop": ("3", 3), "unknown": ("3", 3),
              "switch": ("maybe", "maybe")}  # fmt: skip
    keys = ("path", "note", "optional", "nullable", "mode", "choice", "fixed", "deep", "either")
    texts = ("00501", "1", "true", "True", "False", "1e3", "{}", "[1", "nullable", '"quoted"')
    cases: list[dict[str, Any]] = [python, values, *(dict.fromkeys(keys, (text, text)) for text in texts)]
    for expected in cases:
        message = read(family, written(family, {key: text for key, (text, _) in expected.items()}))
        (arguments,) = arguments_of(message)
        assert json.dumps(arguments) == json.dumps({key: value for key, (_, value) in expected.items()})


@pytest.mark.parametrize("family", [*IN_TAGS, *IN_JSON])
def test_space_around_a_text_belongs_to_it(read, family):
    for text in (
        "    return 1", "a\n", "\n\nx", "\n", " ", "", "\t\tx\t", "x\n\n\n", "  a\n    b\n", "\r\nx\r\n",
        "a ", "\n a",
    ):  # fmt: skip
        arguments = {"path": "p", "text": text}
        assert arguments_of(read(family, written(family, arguments))) == [arguments], repr(text)


def test_a_draft_call_in_reasoning_is_no_call(read):
    for family in ("qwen2_5", "qwen3", *IN_TAGS):
        thought, _, call = written(family, {"path": "p"}).rpartition("<tool_call>")
        call, opening = "<tool_call>" + call, "" if family == "qwen3_5" else "<think>"
        for text, num_calls in (
            (f"{opening}I could {call} but", 0), (f"{opening}{call}", 0),
            (f"{opening}{call}</think>Done.", 0), (f"{opening}{call}</think>{call}", 1),
            (f"{thought}Well <think>{call}", 0),
            (f"{thought}{call}<think>{call}", 1), (f"{thought}{call}<think>{call}</think>{call}", 2),
        ):  # fmt: skip
            message = read(family, text)
            assert arguments_of(message) == [{"path": "p"}] * num_calls, (family, text)
            assert "malformed_tool_calls" not in message, (text, num_calls)
    call = "<|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json<|message|>{}<|call|>"
    for text, num_calls in (
        ("<|channel|>analysis<|message|>a {}", 0),
        (f"<|channel|>analysis<|message|>a<|end|>{call}", 1),
    ):
        assert len(arguments_of(read("gpt_oss", text))) == num_calls
    broken = call.replace("{}", '{"text": "')
    message = read("gpt_oss", f"<|channel|>analysis<|message|>a<|end|>{broken}{call}")
    assert "tool_calls" not in message
    assert len(message["malformed_tool_calls"]) == 2


def test_calls_that_share_one_end_are_read_in_linear_time():
    """What is linear takes .1 s. Looking for the end anew for each call took 21 s."""
    begun, ended = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</tool_call>\n", "</parameter>\n</tool_call>"
    start = time.process_time()
    message = read_text(begun * 5_000 + begun.removesuffix("</tool_call>\n") + ended, read_call=QWEN3_5)
    assert time.process_time() - start < 4
    assert (len(message["malformed_tool_calls"]), len(message["tool_calls"])) == (5_000, 1)
