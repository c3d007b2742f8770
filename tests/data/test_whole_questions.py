"""The policy sees the whole question: templates, columns, days and tokenizers that would change it."""

import json
import string
from datetime import datetime

import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from megatron_ibpo.commands.data import inspect_source
from megatron_ibpo.config import DataConfig
from megatron_ibpo.data import (
    CorrectionTemplate,
    DataError,
    PromptSuffixes,
    open_sources,
    prompts_of_rows,
)
from megatron_ibpo.data.demonstrations import DemonstrationReader
from megatron_ibpo.data.layouts import plain_row
from megatron_ibpo.data.prompts import chat_prompt, plain_prompt
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.environments.chat import TemplateChat
from megatron_ibpo.run.inputs import date_notes
from support.byte_tokenizers import FAMILIES, byte_level, family_tokenizer

MARKS = "<|im_start|>{{ m.role }}\n", "<|im_end|>\n"
END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QUESTION = "How many pens has Sam?"
ASKED = [{"role": "user", "content": QUESTION}]
SHORT = [{"role": "system", "content": "Be short."}, *ASKED]
LONG = [{"role": "user", "content": QUESTION + " He buys one." * 40}]
TURNS = [*ASKED, {"role": "assistant", "content": "Two."}, {"role": "user", "content": "And Ann?"}]


def chat_of(content, where="messages"):
    """A template that shows `content` of each message."""
    return f"{{% for m in {where} %}}{MARKS[0]}{content}{MARKS[1]}{{% endfor %}}{END}"


LEAVES_OUT = {
    "the first part": (chat_of("{{ m.content[0].text }}"), ASKED),
    "every part's text": (chat_of("{% for part in m.content %}{{ part.text }}{% endfor %}"), ASKED),
    "parts of a kind": (
        chat_of("{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"), ASKED
    ),
    "parts by name": (chat_of("{{ m.content | map(attribute='text') | join }}"), ASKED),
    "another field": (chat_of("{{ m.text }}"), ASKED),
    "another data set's field": (chat_of("{{ m['value'] }}"), ASKED),
    "a beginning": (chat_of("{{ m.content[:200] }}"), LONG),
    "a truncated text": (chat_of("{{ m.content | truncate(200) }}"), LONG),
    "the first line": (chat_of("{{ m.content.split('\n')[0] }}"), [{"role": "user", "content": "A\nB"}]),
    "no system message": (chat_of("{{ m.content }}", "messages if m.role != 'system'"), SHORT),
    "the first message": (chat_of("{{ messages[0].content }}"), SHORT),
    "the last message": (chat_of("{{ m.content }}", "messages[-1:]"), TURNS),
    "other roles": (chat_of("{{ m.content }}", "messages if m.role == 'human'"), ASKED),
    "nothing": (END, ASKED),
}  # fmt: skip


@pytest.mark.parametrize("template", LEAVES_OUT)
def test_a_template_that_leaves_out_a_message_is_refused(template):
    source, messages = LEAVES_OUT[template]
    with pytest.raises(DataError, match="the chat template leaves out the content of message"):
        chat_prompt(messages, byte_level(source))


def demonstrated(directory, tokenizer, *rows):
    return open_sources(
        [written(directory, *rows)], tokenizer, DataConfig(apply_chat_template=True, label_key="response"),
        split="train", reader_type=DemonstrationReader,
    ).at(0)  # fmt: skip


SAID = [*ASKED, {"role": "assistant", "content": "Two."}]


@pytest.mark.parametrize(
    "template", ["the first part", "another field", "no system message", "other roles", "answers"]
)
def test_no_demonstration_is_learnt_without_its_question_or_answer(tmp_path, template):
    answers = chat_of("{{ m.content if m.role != 'assistant' }}"), ASKED
    source, messages = (LEAVES_OUT | {"answers": answers})[template]
    chat = [*messages, SAID[-1]]
    with pytest.raises(DataError, match="leaves out the content of message"):
        demonstrated(tmp_path, byte_level(source), {"messages": chat})


def test_a_demonstration_with_a_picture_is_refused(tmp_path):
    for changes in (
        {"images": ["a.png"]},
        {"messages": [{**SAID[0], "content": f"<image>{QUESTION}"}, SAID[1]]},
    ):
        with pytest.raises(DataError, match="read text alone"):
            demonstrated(tmp_path, TOKENIZER, {"messages": SAID} | changes)


def test_an_episode_is_not_opened_with_such_a_template():
    spoken = chat_of("{{ m.content if m.role == 'assistant' else m.content[0].text }}")
    for template, says in (
        (spoken, r"leaves out the content of message 0 \(user\)"),
        (LEAVES_OUT["the first part"][0], "does not show what the assistant said"),
        (LEAVES_OUT["other roles"][0], "does not show what the assistant said"),
    ):
        tokenizer = byte_level(template)
        with pytest.raises(DataError, match=says):
            TemplateChat(tokenizer, {tokenizer.eos_id})


SHOWS = {
    "content": chat_of("{{ m.content }}"),
    "trimmed": chat_of("{{ m.content | trim }}"),
    "as JSON": chat_of("{{ m.content | tojson }}"),
    "text or parts": chat_of("{{ m.content if m.content is string else m.content[0].text }}"),
}  # fmt: skip


@pytest.mark.parametrize("template", [*SHOWS, *FAMILIES])
def test_templates_that_show_everything_are_accepted(template):
    tokenizer = byte_level(SHOWS[template]) if template in SHOWS else family_tokenizer(template)
    for messages in (ASKED, SHORT, LONG, TURNS):
        ids, head = chat_prompt(messages, tokenizer)
        assert messages[-1]["content"][-8:] in tokenizer.decode_all(ids[:head])
        assert tokenizer.decode_all(ids) == tokenizer.render_chat(messages)


# ------------------------------------------------------------------------------------------------- clocks

DATED = {
    "day": "{{ strftime_now('%d %b %Y') }}", "time": "{{ strftime_now('%H:%M:%S') }}",
    "if there is one": "{% if strftime_now is defined %}{{ strftime_now('%j') }}{% endif %}",
    "a draw": "{{ range(10 ** 5) | random }}",
}  # fmt: skip


def on_another_day(monkeypatch):
    later = type("Later", (datetime,), {"now": classmethod(lambda cls, *_: datetime(2030, 1, 1))})
    monkeypatch.setattr(chat_template_utils, "datetime", later)


@pytest.mark.parametrize("template", [*DATED, "llama3_2", "gpt_oss"])
def test_prompts_are_the_same_on_every_day(template, monkeypatch):
    def prompt():
        if template not in DATED:
            return list(chat_prompt(ASKED, family_tokenizer(template))[0])
        return list(chat_prompt(ASKED, byte_level(DATED[template] + SHOWS["content"]))[0])

    today = prompt()
    on_another_day(monkeypatch)
    assert prompt() == today
    assert prompt() == today, "and in every process"


def test_a_run_says_so_and_settings_may_give_another_day():
    assert "26 Jul 2024 on every day" in date_notes(family_tokenizer("gpt_oss"))[0]
    assert date_notes(family_tokenizer("qwen3")) == ()
    llama = family_tokenizer("llama3_2")
    assert "26 Jul 2024" in llama.render_chat(ASKED)
    assert "01 Feb 2026" in llama.render_chat(ASKED, {"date_string": "01 Feb 2026"})


# ----------------------------------------------------------------------------------------------- pictures

CHAT = {"prompt": ASKED, "reward_model": {"ground_truth": "5"}, "data_source": "geometry"}
PLAIN = {"prompt": QUESTION, "label": "5"}


def asked(text):
    return CHAT | {"prompt": [{"role": "user", "content": text}]}


PICTURES = {
    "paths": CHAT | {"images": [{"path": "a.png"}]}, "bytes": CHAT | {"image": {"bytes": "x", "path": None}},
    "a name": PLAIN | {"image": "a.png"}, "names": PLAIN | {"images": ["a.png", "b.png"]},
    "films": CHAT | {"videos": [{"video": "a.mp4"}]}, "a film": PLAIN | {"video": "a.mp4"},
    "sounds": CHAT | {"audios": ["a.wav"]}, "a sound": PLAIN | {"audio": {"array": [0.1], "rate": 9}},
    "vLLM's": CHAT | {"multi_modal_data": {"image": ["a.png"]}},
    "a mark before": asked(f"<image>{QUESTION}"), "a mark after": asked(f"{QUESTION}\n<image>"),
    "a film's mark": asked(f"<video>\n{QUESTION}"), "a sound's": PLAIN | {"prompt": f" <audio> {QUESTION}"},
    "Qwen's": asked(f"<|vision_start|><|image_pad|><|vision_end|>{QUESTION}"),
}  # fmt: skip
NO_PICTURES = (
    CHAT | {"images": []}, CHAT | {"images": None, "videos": None}, PLAIN | {"image": ""},
    CHAT | {"image": {"bytes": None, "path": None}}, CHAT | {"multi_modal_data": {"image": []}},
    asked("What does an <image> tag do in SVG?"), asked("Close the <video> element: <video></video>."),
    CHAT | {"extra_info": {"image": "a.png"}},
)  # fmt: skip


def written(directory, *rows):
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def left_out(source, **data):
    settings = DataConfig(apply_chat_template=True, **data)
    found = inspect_source(
        source, TOKENIZER, settings, split="train", max_prompt_len=512, most_rows=9, show=1
    )
    return found.as_json(TOKENIZER)


def trained(source, **data):
    return open_sources([source], TOKENIZER, DataConfig(apply_chat_template=True, **data), split="train")


TOKENIZER = family_tokenizer("qwen3")


@pytest.mark.parametrize("row", PICTURES)
def test_a_row_with_pictures_films_or_sounds_is_refused(tmp_path, row):
    """By training and by `data`, which counts it."""
    source = written(tmp_path, PICTURES[row], CHAT)
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: field '\w+' (holds|has).*read text alone"):
        trained(source)
    assert len(trained(source, skip_bad_rows=True)) == 1
    found = left_out(source)
    assert (found["prompts"], found["left_out"]) == (1, {"bad rows": 1})


def test_a_table_s_pictures_are_seen(tmp_path):
    rows = [CHAT | {"images": [{"bytes": b"png", "path": None}]}, CHAT | {"images": []}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="field 'images' holds a part of the question"):
        trained(str(tmp_path / "rows.parquet"))
    assert left_out(str(tmp_path / "rows.parquet"))["left_out"] == {"bad rows": 1}


def test_empty_columns_and_words_about_pictures_are_no_pictures(tmp_path):
    assert len(trained(written(tmp_path, *NO_PICTURES))) == len(NO_PICTURES)


# ------------------------------------------------------------------------------------- ids and field names


@pytest.mark.parametrize(
    ("ids", "repeated"),
    [([1, 1], 1), ([1, 2, 1, 1], 2), (["a", "b", "a"], 1), ([1, "1"], 0), ([None, None], 0), ([7, 8, 9], 0)],
)
def test_data_counts_the_ids_for_which_training_stops(tmp_path, ids, repeated):
    rows = [{"prompt": f"{QUESTION} {n}", "label": "5", "id": own} for n, own in enumerate(ids)]
    source = written(tmp_path, *rows)
    found = left_out(source)
    assert found["left_out"] == ({"bad rows": repeated} if repeated else {})
    assert found["prompts"] == len(trained(source, skip_bad_rows=True)) == len(ids) - repeated
    if repeated:
        assert "is also that of" in found["named"]["bad rows"][0]
        with pytest.raises(DataError, match=r"line \d: id .* is also that of .*line 1"):
            trained(source)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"extra_info": "{}"}, "field 'extra_info' must be an object, found str"),
        ({"metadata": "{}"}, "field 'metadata' must be an object, found str"),
        ({"data_source": 3}, "field 'data_source' must be text, found int"),
        ({"task": 3}, "field 'task' must be text, found int"),
        ({"reward_model": {"style": "rule"}}, "field 'reward_model' must be an object with ground_truth"),
        ({"reward_model": "rule"}, "field 'reward_model' must be an object with ground_truth"),
        ({"reward_model": {"ground_truth": None}}, "field 'reward_model' has no ground_truth"),
        ({"reward_model": {"ground_truth": ""}}, "field 'reward_model.ground_truth' is empty"),
        ({"reward_model": {"ground_truth": []}}, "field 'reward_model.ground_truth' is empty"),
        ({"reward_model": {"ground_truth": True}}, "field 'reward_model.ground_truth' must be text or a num"),
        ({"reward_model": {"ground_truth": float("nan")}}, "field 'reward_model.ground_truth' must be text"),
        ({"reward_model": None}, "no field 'label'"),
    ],
)
def test_errors_name_the_fields_that_the_row_has(changes, says):
    with pytest.raises(DataError) as caught:
        plain_row(CHAT | changes, "prompt", "label")
    assert says in str(caught.value)


def test_errors_of_known_data_sets_name_their_fields():
    for row, says in (
        ({"question": QUESTION, "answer": True}, "field 'answer' must be text or a number"),
        ({"problem": "", "answer": "5"}, "field 'problem' is empty"),
        ({"problem": QUESTION, "solution": "five"}, "field 'solution' has no"),
    ):
        with pytest.raises(DataError, match=says):
            plain_row(row, "prompt", "label")


# ------------------------------------------------------------------------------------ a space before a text

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
PIECES = [
    *SPECIAL[:1],
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    *sorted(set(string.printable) - {" "}),
]
INSTRUCTION = (
    "{{ bos_token }}{% for m in messages %}### Instruction:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}"
)
INST = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


def prepends(core):
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def prepends_alone(core):
    prepends(core)
    core.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁"), normalizers.Prepend("▁")])


def metaspace(scheme):
    def set_up(core):
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)

    return set_up


def adds_bos(core):
    prepends(core)
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", PLACES["<s>"])])


PLACES = {piece: number for number, piece in enumerate([*PIECES, *SPECIAL[1:]])}
KINDS = {
    "prepend": prepends, "prepend last": prepends_alone, "first": metaspace("first"),
    "always": metaspace("always"), "never": metaspace("never"), "with bos": adds_bos,
}  # fmt: skip


def of_pieces(kind, template):
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens([AddedToken(own, special=True, normalized=False) for own in SPECIAL])
    KINDS[kind](core)
    library = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    library.chat_template = template
    return HuggingFaceTokenizer(library)


@pytest.mark.parametrize("template", [INSTRUCTION, INST, SHOWS["content"]], ids=["###", "INST", "chat"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_a_prompt_are_those_of_the_whole(kind, template):
    tokenizer = of_pieces(kind, template)
    for messages in (ASKED, SHORT, LONG):
        whole = tokenizer.library.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(chat_prompt(messages, tokenizer)[0]) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_a_demonstration_are_those_of_the_whole(tmp_path, kind):
    tokenizer = of_pieces(kind, SHOWS["content"])
    (turn,) = demonstrated(tmp_path, tokenizer, {"messages": SAID}).turns
    whole = tokenizer.library.apply_chat_template(SAID, return_dict=False)
    assert [*turn.prompt, *turn.response[: turn.response.index(tokenizer.eos_id)]] == whole


@pytest.mark.parametrize("kind", KINDS)
def test_text_inserted_into_a_prompt_gains_no_space(kind):
    """Headings of candidate solutions, suffixes, tails; behind an added token the tokenizer's own remains."""
    tokenizer = of_pieces(kind, INSTRUCTION)
    pieces = tokenizer.library.convert_ids_to_tokens
    for text in ("\nCandidate solution 1: ", "x", "\n", " x", "a</s>"):
        assert pieces(tokenizer.encode(text))[0] == text[0].replace(" ", "▁")
    ids, head = plain_prompt("Sam", tokenizer, "!")
    assert pieces(list(ids[head:])) == ["!"]
    behind = pieces(tokenizer.encode("<|im_end|>x"))
    assert behind == pieces(tokenizer.encode_rendered("a<|im_end|>x"))[-len(behind) :]
    assert tokenizer.encode("") == []
    prompt = open_prompt(tokenizer)
    suffixed = PromptSuffixes(tokenizer, ["?"])(prompt, 0)
    assert pieces(list(suffixed))[prompt.head_length] == "?"
    corrected = CorrectionTemplate(tokenizer, 1)(prompt, prompt.token_ids[:1], [])
    assert pieces(list(corrected))[prompt.head_length] == "\n"


def open_prompt(tokenizer):
    data, rows = DataConfig(apply_chat_template=True), [("row 0", {"prompt": ASKED, "label": "5"})]
    source = prompts_of_rows(rows, tokenizer, data, spec="rows", max_prompt_len=None)
    return source.at(0)
