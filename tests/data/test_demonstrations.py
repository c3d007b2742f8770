"""Rows to learn from: which tokens are in the loss, and which rows are refused, with their place."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron_ibpo.config import DataConfig
from megatron_ibpo.data import DataError, open_sources
from megatron_ibpo.data.demonstrations import DemonstrationReader
from support.byte_tokenizers import byte_level

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows the thinking of the last turn alone, as Qwen3's does."""
WITHOUT_END = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "never answered"},
]


def opened(path, tokenizer, context=200, **data):
    config = DataConfig(label_key="response", **data)
    return open_sources(
        [str(path)], tokenizer, config, split="eval", max_prompt_len=context, reader_type=DemonstrationReader
    )


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def learned(source, tokenizer, position=0):
    """Return (text of the prompt, text of what follows, its part in the loss) of each sequence of a row."""
    return [
        (
            tokenizer.decode_all(own.prompt),
            tokenizer.decode_all(own.response),
            tokenizer.decode_all([i for i, t in zip(own.response, own.is_trained, strict=True) if t]),
        )
        for own in source.at(position).turns
    ]


def test_only_the_assistants_turns_of_a_chat_are_in_the_loss(tmp_path):
    chatty = byte_level(CHATML)
    source = opened(jsonl(tmp_path / "a.jsonl", {"messages": CHAT}), chatty, apply_chat_template=True)
    between = "\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    assert learned(source, chatty) == [
        (
            "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n",
            f"2<|im_end|>{between}4<|im_end|>",
            "2<|im_end|>4<|im_end|>",
        )
    ]


def test_a_chat_with_tools_shows_them_and_the_calls_are_in_the_loss(tmp_path):
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    chat = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    tokenizer = byte_level(WITH_TOOLS)
    path = jsonl(
        tmp_path / "a.jsonl", {"messages": chat, "tools": [{"type": "function", "function": {"name": "add"}}]}
    )
    ((prompt, _, loss),) = learned(opened(path, tokenizer, apply_chat_template=True), tokenizer)
    assert prompt.startswith('[{"type": "function", "function": {"name": "add"}}]\n<|im_start|>user\n1+1')
    assert loss == "<call>add</call><|im_end|>It is 2.<|im_end|>"


def test_a_turn_that_is_shown_differently_later_is_a_sequence_of_its_own(tmp_path):
    thinking = byte_level(THINKING)
    source = opened(jsonl(tmp_path / "a.jsonl", {"messages": CHAT}), thinking, apply_chat_template=True)
    (_, _, first), (prompt, _, second) = learned(source, thinking)
    assert (first, second) == ("<think></think>2<|im_end|>", "<think></think>4<|im_end|>")
    assert "assistant\n2<|im_end|>" in prompt


def test_a_turn_without_an_end_gets_one_so_that_the_policy_learns_to_stop(tmp_path):
    endless = byte_level(WITHOUT_END)
    source = opened(jsonl(tmp_path / "a.jsonl", {"messages": CHAT}), endless, apply_chat_template=True)
    assert [loss for _, _, loss in learned(source, endless)] == ["2<|im_end|>", "4<|im_end|>"]


def test_prompt_and_response_are_joined_as_a_policy_writes_them(tmp_path):
    letters = byte_level(CHATML)
    row = {"prompt": "1+1=", "response": "2"}
    plain = opened(jsonl(tmp_path / "a.jsonl", row), letters)
    assert learned(plain, letters) == [("1+1=", "2<|im_end|>", "2<|im_end|>")]
    (chat,) = learned(opened(tmp_path / "a.jsonl", letters, apply_chat_template=True), letters)
    assert chat == ("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n", "2<|im_end|>", "2<|im_end|>")


def test_a_parquet_file_gives_the_same_as_jsonl(tmp_path):
    chatty = byte_level(CHATML)
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    jsonl(tmp_path / "a.jsonl", *rows)
    both = [opened(tmp_path / f"a.{kind}", chatty, apply_chat_template=True) for kind in ("parquet", "jsonl")]
    assert [learned(both[0], chatty, n) for n in (0, 1)] == [learned(both[1], chatty, n) for n in (0, 1)]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"messages": CHAT[:1]}, "field 'messages' has no turn of the assistant to learn from"),
        ({"messages": CHAT[1:]}, "the first message is the assistant's"),
        ({"messages": [{"role": "user"}]}, "field 'messages', message 0: needs text"),
        ({"messages": CHAT[:2], "tools": "add"}, "field 'tools' must be a list of objects"),
        ({"prompt": "1+1"}, "neither 'messages' nor 'prompt' and 'response'"),
        ({"prompt": "1+1", "response": ""}, "field 'response' is empty"),
        ({"response": "2"}, "no field 'prompt' beside 'response'"),
        ({"prompt": "1+1", "response": "2" * 300}, "tokens, and the context holds 200"),
    ],
    ids=["no answer", "no prompt", "no content", "tools", "no response", "empty", "no question", "too long"],
)
def test_a_row_that_cannot_be_learned_from_is_refused_with_its_place(tmp_path, row, fault):
    path = jsonl(tmp_path / "a.jsonl", {"messages": CHAT}, row)
    with pytest.raises(DataError) as refused:
        opened(path, byte_level(CHATML), apply_chat_template=True)
    assert str(refused.value).startswith(f"{path}, line 2: ")
    assert fault in str(refused.value)


def test_rows_that_are_left_out_on_request_are_counted(tmp_path):
    rows = [{"prompt": "1", "response": "2"}, {"prompt": "1"}, {"prompt": "1", "response": "2" * 300}]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    source = opened(path, byte_level(), skip_bad_rows=True, drop_long_prompts=True)
    assert len(source) == 1
    assert [note for note in source.notes if "left out 1" in note]
