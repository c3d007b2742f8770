"""Conversations as token ids: what is written is only extended, and read as the family writes it."""

import json
import time
from functools import cache
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.data.tokenizer import DataError
from megatron_ibpo.environments.chat import LONGEST_READ, open_chat
from support.byte_tokenizers import FAMILIES, end_ids, family_tokenizer, tagged_bytes

FEW = settings(max_examples=10)
PROPERTIES = {"text": {"type": "string"}, "count": {"type": "integer"}, "exact": {"type": "boolean"}}
CALC = {"name": "calc", "description": "Compute.", "parameters": {"type": "object", "properties": PROPERTIES}}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

words = st.text(st.characters(codec="utf-8", exclude_characters="<>", exclude_categories=["C"]), max_size=20)
words = words.map(str.strip).filter(bool)
arguments = st.fixed_dictionaries({"text": words, "count": st.integers(), "exact": st.booleans()})
answers = st.one_of(words.map(lambda text: [user(text)]), words.map(lambda text: [answer(text)]))


def user(text):
    return {"role": "user", "content": text}


QUESTION = [user("q")]


def assistant(content="", **more):
    return {"role": "assistant", "content": content, **more}


def answer(text):
    return {"role": "tool", "tool_call_id": "call_0", "name": "calc", "content": text}


def call(arguments, number=0):
    function = {"name": "calc", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def chat_with(tokenizer, *ends, applies_template=True, **settings):
    return open_chat(tokenizer, ends, applies_template=applies_template, settings=settings or None)


@pytest.fixture(scope="module")
def chat_of():
    """The tokenizer of a family, its chat format (or "plain"), and the ids that end a turn."""

    @cache
    def opened(name):
        family, is_plain = ("qwen3", True) if name == "plain" else (name, False)
        tokenizer = family_tokenizer(family)
        ends = end_ids(family, tokenizer)
        return tokenizer, chat_with(tokenizer, *ends, applies_template=not is_plain), ends

    return opened


def turn_ids(tokenizer, ends, message):
    """Return the ids of an assistant's turn as the family's template writes it after its prompt."""
    prompt = tokenizer.render_chat(QUESTION)
    text = tokenizer.render_chat([*QUESTION, message], generation_prompt=False)
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False))
    ids = tokenizer.encode(text[len(list(shared)) :])
    end = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return [*ids[:end], ids[end] if end < len(ids) else ends[-1]]


@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(turns=st.lists(st.tuples(st.binary(max_size=8), st.integers(0, 9), answers), max_size=4))
def test_an_episode_is_only_appended_to(chat_of, name, turns):
    tokenizer, chat, ends = chat_of(name)
    conversation = chat.open(QUESTION, [CALC])
    for policy, end, messages in turns:
        before = [*conversation, *policy, ends[end % len(ends)]]
        conversation = [*before, *chat.extend(before, messages)]
        added = tokenizer.decode_all(conversation[len(before) :])
        content = messages[0]["content"]
        assert content in added or json.dumps(content, ensure_ascii=False) in added, (policy, end, messages)
        prompt = tokenizer.render_chat(QUESTION).rpartition("q")[2]
        assert added.endswith(prompt), (policy, end, messages)
        assert chat.extend([5, before[-1]], messages) == conversation[len(before) :]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "llama3_2"])
@FEW
@given(question=words, turns=st.lists(st.tuples(arguments, words, words, words), min_size=1, max_size=3))
def test_episode_ids_equal_the_rendering_of_templates_that_rewrite_nothing(chat_of, name, question, turns):
    tokenizer, chat, ends = chat_of(name)
    assert not any("writes earlier turns differently" in note for note in chat.notes)
    messages = [{"role": "system", "content": "Be brief."}, user(question)]
    ids = chat.open(messages, [CALC])
    for values, result, said, more in turns:
        called = assistant(tool_calls=[call(values)])
        for written, answered in ((called, [answer(result)]), (assistant(said), [user(more)])):
            ids += turn_ids(tokenizer, ends, written)
            ids += chat.extend(ids, answered)
            messages += [written, *answered]
            assert tokenizer.decode_all(ids) == tokenizer.render_chat(messages, tools=[CALC]), (
                written,
                answered,
            )


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "glm4_5", "llama3_2"])
@FEW
@given(messages=answers, more=words)
def test_extending_equals_the_bridge_of_the_renderers_package(chat_of, name, messages, more):
    import renderers  # and a client for servers

    tokenizer, chat, ends = chat_of(name)
    assert any("writes earlier turns differently" in note for note in chat.notes) is (name != "llama3_2")
    theirs = {"qwen3": "Qwen3", "qwen3_5": "Qwen35", "glm4_5": "GLM45", "llama3_2": "Llama3"}[name]
    kind, config = (getattr(renderers, theirs + end) for end in ("Renderer", "RendererConfig"))
    prompt = chat.open(QUESTION, [])
    policy = turn_ids(tokenizer, ends, assistant("done"))
    if messages[0]["role"] == "tool" and name != "llama3_2":
        messages = [*messages, {**answer(more), "tool_call_id": "call_1"}]
    renderer = kind(tokenizer.library, config(thinking_retention="all"))
    bridged = renderer.bridge_to_next_turn(prompt, policy, messages)
    assert [*prompt, *policy, *chat.extend([*prompt, *policy], messages)] == bridged.token_ids


@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(values=arguments, second=arguments)
def test_calls_are_read_back_as_the_family_writes_them(chat_of, name, values, second):
    tokenizer, chat, ends = chat_of(name)
    calls = [call(values)] if name in ("llama3_2", "gpt_oss") else [call(values), call(second, 1)]
    ids = turn_ids(tokenizer, ends, assistant(tool_calls=calls))
    assert chat.read(ids, [CALC]) == chat.read(ids[:-1], [CALC]) == assistant(tool_calls=calls)


def test_reasoning_is_separate_from_answers_and_calls_may_be_text(chat_of):
    for name, thought in (
        ("qwen2_5", "<think>add</think>"), ("qwen3", "<think>\nadd\n</think>\n\n"),
        ("qwen3_5", "add\n</think>\n\n"), ("glm4_5", "\n<think>add</think>\n"),
        ("gpt_oss", "<|channel|>analysis<|message|>add<|end|><|start|>assistant<|channel|>final<|message|>"),
    ):  # fmt: skip
        tokenizer, chat, _ = chat_of(name)
        read = chat.read(tokenizer.encode(thought + "four"))
        assert read == assistant("four", reasoning_content="add"), (name, thought)
        if name != "qwen3_5":  # whose turns begin with reasoning
            assert chat.read(tokenizer.encode("four")) == assistant("four"), name
    made = '<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call>'
    broken, text = made.replace("}}", ""), "Try " + made
    for name in ("qwen2_5", "qwen3"):
        tokenizer, chat, _ = chat_of(name)
        read = chat.read(tokenizer.encode("<think>I ask.</think>" + made))
        assert (read["reasoning_content"], read["tool_calls"]) == ("I ask.", [call({})]), name
        assert chat.read(tokenizer.encode(text), []) == assistant(text), name
        assert chat.read(tokenizer.encode(text), [CALC])["tool_calls"] == [call({})], name
        read = chat.read(tokenizer.encode("So: " + broken), [CALC])
        assert read["malformed_tool_calls"] == [broken], name
        assert read["content"].startswith("So:"), name
        assert broken in read["content"], name
        assert "tool_calls" not in read, name


tags = st.sampled_from([
    "<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "</parameter>", "</function>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "to=functions.f ",
    "<|channel|>", "<|message|>", "<|start|>", "<|call|>", "<|end|>", "[", "{", '"', "\\ud800", '{"name": 3}',
    '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {"x": NaN}}',
])  # fmt: skip


@pytest.mark.parametrize("name", [*FAMILIES, "plain"])
@FEW
@given(st.lists(st.one_of(tags, words), max_size=12), st.lists(st.integers(0, 270)))
def test_reading_never_fails_and_gives_recordable_messages(chat_of, name, parts, ids):
    tokenizer, chat, _ = chat_of(name)
    for turn in (tokenizer.encode("".join(parts)), ids):
        for tools in (None, [], [CALC]):
            check_message(chat.read(turn, tools))


def check_message(read):
    json.dumps(read, ensure_ascii=False, allow_nan=False).encode()
    assert read["role"] == "assistant"
    calls = read.get("tool_calls", [])
    assert all(type(one["function"]["arguments"]) is dict for one in calls)
    assert [one["id"] for one in calls] == [f"call_{number}" for number in range(len(calls))]


def test_a_repetitive_turn_is_quickly_read_as_text(chat_of):
    """Some of these take the family's parser minutes, others make it raise."""
    for name, text in (
        ("qwen3", '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>"),
        ("qwen3", "<tool_call>" + "[" * 50_000 + "</tool_call>"),
        ("qwen3_5", "</think><tool_call><function=f>" + "<parameter=a>" * 5_000 + "</tool_call>"),
        ("qwen3_5", "</think><tool_call>" + "<function=" * 5_000 + "</tool_call>"),
        ("glm4_5", "<tool_call>f" + "<arg_key>" * 5_000), ("gpt_oss", "<|start|><|message|>" * 5_000),
        ("qwen2_5", "<tool_call>" * 5_000), ("qwen3", "<|im_start|>assistant\n" + "\n" * 10_000),
    ):  # fmt: skip
        tokenizer, chat, _ = chat_of(name)
        read = chat.read(tokenizer.encode(text))
        check_message(read)
        assert "tool_calls" not in read, (name, text)


FRAGMENTS = (
    "<", "{", "[", '{"a":', "[],", "\\ud800", "1", "\n", " ", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<tool_call>{</tool_call>", "<tool_call>{", "<tool_call><function=x><parameter=a>",
    "</parameter></function>", "<tool_call>f<arg_key>a</arg_key><arg_value>", "</arg_value>", "<|start|>",
    "<|start|>assistant",
    "<|channel|>", "<|message|>", "<|call|>", "<|python_tag|>", "<|im_start|>", "functions.x",
    '{"name": "x", "parameters": {',
)  # fmt: skip
"""What readers of calls look for, and where they could start again and again."""
READ_AS_QWEN3 = ("qwen2_5", "qwen3_instruct_2507")


@pytest.mark.parametrize("name", [
    *(pytest.param(name, marks=pytest.mark.slow if name in READ_AS_QWEN3 else ()) for name in FAMILIES),
    "plain",
])  # fmt: skip
def test_repetitive_turns_are_read_in_linear_time(chat_of, name):
    """What is linear takes 0.1 s; 8 ns for each pair of characters would be too much."""
    tokenizer, chat, _ = chat_of(name)
    for begins in ("", "<tool_call>"):
        for fragment in FRAGMENTS:
            ids = tokenizer.encode(begins + fragment * (20_000 // len(fragment)))
            for is_last in (False, True):  # other threads and a garbage collection count as well
                start = time.process_time()
                chat.read(ids, [CALC])
                if (seconds := time.process_time() - start) < 0.8:
                    break
                assert not is_last, f"{begins}{fragment!r} over and over took {seconds:.1f} s"


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "plain"])
def test_a_turn_beyond_the_reading_limit_is_text(chat_of, name):
    tokenizer, chat, ends = chat_of(name)
    (mark,), answer = tokenizer.encode("."), tokenizer.encode("</think>so<tool_call>{")
    long = [*tokenizer.encode("<think>"), *[mark] * LONGEST_READ, *answer]
    start = time.process_time()
    read = chat.read([*long, ends[0]], [CALC])
    assert time.process_time() - start < 4
    assert read["content"].startswith("so")
    assert read["reasoning_content"] == "." * LONGEST_READ
    assert not {"tool_calls", "malformed_tool_calls"} & {*read}


def test_a_draft_in_template_opened_thinking_is_no_content(chat_of):
    for name, content in (("qwen3_5", ""), ("qwen2_5", "7")):
        tokenizer, chat, _ = chat_of(name)
        call = '<tool_call>{"name": "calc", "arguments": {}}</tool_call>'
        for text, tools in (("7", []), (f"7{call}", []), ("7" + " " * LONGEST_READ, None)):
            read = chat.read(tokenizer.encode(text), tools)
            assert read["content"][:1] == content, (name, text[:20])


def test_arguments_are_an_object_with_the_types_of_the_schema(chat_of):
    tokenizer, chat, _ = chat_of("qwen2_5")
    text = '<tool_call>{"name": "calc", "arguments": "{\\"count\\": 3}"}</tool_call>'
    assert chat.read(tokenizer.encode(text))["tool_calls"] == [call({"count": 3})]
    for name in ("qwen3_5", "glm4_5"):  # which write a number and its text alike
        tokenizer, chat, ends = chat_of(name)
        ids = turn_ids(tokenizer, ends, assistant(tool_calls=[call({"text": "12"})]))
        assert chat.read(ids, [CALC])["tool_calls"] == [call({"text": "12"})], name
        assert chat.read(ids)["tool_calls"] == [call({"text": 12})], name
    tokenizer, chat, _ = chat_of("llama3_2")
    answered = '{"name": "Ada", "parameters": {}}'
    assert chat.read(tokenizer.encode(answered), []) == assistant(answered), "no call where no tools are"


def test_the_templates_end_of_turn_is_added_once(chat_of):
    for name, end, first in (
        ("qwen3", "<|im_end|>", "\n<|im_start|>user"), ("gpt_oss", "<|return|>", "<|start|>user"),
        ("qwen3", "<|endoftext|>", "<|im_end|>\n<|im_start|>user"), ("glm4_5", "<|user|>", "\nmore"),
        ("glm4_5", "<|endoftext|>", "<|user|>\nmore"), ("llama3_2", "<|eom_id|>", "<|start_header_id|>user"),
    ):  # fmt: skip
        tokenizer, chat, _ = chat_of(name)
        added = chat.extend(tokenizer.encode(end), [user("more")])
        assert tokenizer.decode_all(added).startswith(first)
    with pytest.raises(ValueError, match="a turn that was cut cannot be extended"):
        chat.extend([1, 2, 3], [user("more")])
    tokenizer, _, ends = chat_of("qwen3")
    chat = chat_with(tokenizer, *ends, enable_thinking=False)
    for ids in (chat.open(QUESTION, []), chat.extend([ends[0]], QUESTION)):
        assert tokenizer.decode_all(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_template_without_tools_gets_them_as_text():
    tokenizer = tagged_bytes(CHATML, ("<|im_start|>", "<|im_end|>"), end="<|im_end|>")
    chat = chat_with(tokenizer)
    assert "tools are shown in the system message" in chat.notes[0]
    shown = tokenizer.decode_all(chat.open(QUESTION, [CALC]))
    assert shown.startswith("<|im_start|>system\n# Tools")
    assert json.dumps(CALC) in shown
    assert shown.endswith("</tool_call><|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    said = tokenizer.encode('Let me.<tool_call>{"name": "calc", "arguments": {"count": 1}}</tool_call>')
    read = chat.read([*said, tokenizer.eos_id], [CALC])
    assert read == assistant("Let me.", tool_calls=[call({"count": 1})])
    shown = tokenizer.decode_all(chat.extend([tokenizer.eos_id], [answer("1"), answer("2")]))
    responses = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert shown == f"\n<|im_start|>user\n{responses}<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_template_turns_are_concatenated_text():
    tokenizer = tagged_bytes(None, ("<|end|>",), end="<|end|>")
    chat = chat_with(tokenizer, applies_template=False)
    ids = chat.open([{"role": "system", "content": "Count. "}, user("one ")], [])
    assert tokenizer.decode(ids) == "Count. one "
    ids += [*tokenizer.encode("two "), tokenizer.eos_id]
    assert tokenizer.decode_all(chat.extend(ids, [user("three ")])) == "three "
    assert tokenizer.decode(chat.open(QUESTION, [CALC])).startswith("# Tools")
    said = tokenizer.encode('<tool_call>{"name": "calc", "arguments": {"count": 1}}</tool_call>')
    assert chat.read([*said, tokenizer.eos_id])["tool_calls"] == [call({"count": 1})]


def test_a_template_without_conversations_is_refused_at_the_start():
    for template, fault in (
        (None, "no chat template"),
        (CHATML.replace("m.content", "m.content if m.role == 'user'"), "does not show what the assistant"),
        ("{% for m in messages[1:] %}{{ raise_exception('one turn only') }}{% endfor %}", "one turn only"),
    ):
        tokenizer = tagged_bytes(template, ("<|im_start|>", "<|im_end|>"), end="<|im_end|>")
        with pytest.raises(DataError, match=fault):
            chat_with(tokenizer)
