"""Rows to learn from: which tokens are in the loss, and which rows are refused, with their place."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron_ibpo.config import DataConfig
from megatron_ibpo.data import DataError, open_sources
from megatron_ibpo.data.demonstrations import DemonstrationReader
from support.byte_tokenizers import byte_level


def template(turn):
    """A ChatML template that writes a turn after its role like this."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + turn + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


CHATML = template("{{ m.content }}")
THOUGHT = "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"  # as Qwen3's
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + template("{{ m.content }}" + CALLS)
WITHOUT_END = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAID = ("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4"), ("user", "never answered")
CHAT = [{"role": role, "content": content} for role, content in SAID]


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path, tokenizer, **data):
    config = DataConfig(label_key="response", **{"apply_chat_template": True, **data})
    return open_sources(
        [str(path)], tokenizer, config, split="eval", max_prompt_len=200, reader_type=DemonstrationReader
    )


def learned(path, chat_template, position=0, **data):
    """Return (text of the prompt, text of what follows, its part in the loss) of each sequence of a row."""
    tokenizer = byte_level(chat_template)
    return [
        (
            tokenizer.decode_all(own.prompt),
            tokenizer.decode_all(own.response),
            tokenizer.decode_all([i for i, t in zip(own.response, own.is_trained, strict=True) if t]),
        )
        for own in opened(path, tokenizer, **data).at(position).turns
    ]


def test_only_the_assistants_turns_of_a_chat_are_in_the_loss(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": CHAT[:2]})
    prompt = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    whole = [(prompt, f"2<|im_end|>{between}4<|im_end|>", "2<|im_end|>4<|im_end|>")]
    assert learned(path, CHATML) == whole
    parquet.write_table(pa.Table.from_pylist([{"messages": CHAT}]), tmp_path / "a.parquet")
    assert learned(tmp_path / "a.parquet", CHATML) == whole
    assert learned(path, CHATML, 1) == [(prompt, "2<|im_end|>", "2<|im_end|>")]


def test_a_chat_with_tools_shows_them_and_the_calls_are_in_the_loss(tmp_path):
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    chat = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = jsonl(tmp_path / "a.jsonl", {"messages": chat, "tools": tools})
    ((prompt, _, loss),) = learned(path, WITH_TOOLS)
    assert prompt.startswith('[{"type": "function", "function": {"name": "add"}}]\n<|im_start|>user\n1+1')
    assert loss == "<call>add</call><|im_end|>It is 2.<|im_end|>"


def test_a_turn_that_is_shown_differently_later_is_a_sequence_of_its_own(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"messages": CHAT})
    (_, _, first), (prompt, _, second) = learned(path, template(THOUGHT + "{{ m.content }}"))
    assert (first, second) == ("<think></think>2<|im_end|>", "<think></think>4<|im_end|>")
    assert "assistant\n2<|im_end|>" in prompt


def test_a_turn_without_an_end_gets_one_so_that_the_policy_learns_to_stop(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"messages": CHAT})
    assert [loss for _, _, loss in learned(path, WITHOUT_END)] == ["2<|im_end|>", "4<|im_end|>"]


def test_prompt_and_response_are_joined_as_a_policy_writes_them(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "1+1=", "response": "2"})
    plain = learned(path, CHATML, apply_chat_template=False)
    assert plain == [("1+1=", "2<|im_end|>", "2<|im_end|>")]
    (chat,) = learned(path, CHATML)
    assert chat == ("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n", "2<|im_end|>", "2<|im_end|>")


def test_a_row_that_cannot_be_learned_from_is_refused_with_its_place(tmp_path):
    for row, fault in (
        ({"messages": CHAT[:1]}, "field 'messages' has no turn of the assistant to learn from"),
        ({"messages": CHAT[1:]}, "the first message is the assistant's"),
        ({"messages": [{"role": "user"}]}, "field 'messages', message 0: needs text"),
        ({"messages": CHAT[:2], "tools": "add"}, "field 'tools' must be a list of objects"),
        ({"prompt": "1+1"}, "neither 'messages' nor 'prompt' and 'response'"),
        ({"prompt": "1+1", "response": ""}, "field 'response' is empty"),
        ({"response": "2"}, "no field 'prompt' beside 'response'"),
        ({"prompt": "1+1", "response": "2" * 300}, "tokens, and the context holds 200"),
    ):
        path = jsonl(tmp_path / "a.jsonl", {"messages": CHAT}, row)
        with pytest.raises(DataError) as refused:
            opened(path, byte_level(CHATML))
        assert str(refused.value).startswith(f"{path}, line 2: ")
        assert fault in str(refused.value)


def test_rows_that_are_left_out_on_request_are_counted(tmp_path):
    rows = [{"prompt": "1", "response": "2"}, {"prompt": "1"}, {"prompt": "1", "response": "2" * 300}]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    source = opened(path, byte_level(CHATML), skip_bad_rows=True, drop_long_prompts=True)
    assert len(source) == 1
    assert len([note for note in source.notes if "left out 1" in note]) == 2
