import json
import shutil
import signal
from contextlib import suppress
from itertools import compress
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from sentencepiece import SentencePieceTrainer
from tiny_tokenizer import CHAIN_SUM_HEAD, make_tiny_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_ibpo.basics.records import token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.credit.corrections import CompareAndCorrect
from megatron_ibpo.data import CorrectionTemplate, DataError, load_tokenizer, open_sources
from megatron_ibpo.data.demonstrations import DemonstrationReader
from megatron_ibpo.data.row_prompts import read_jsonl
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.run.inputs import thinking_marks
from support.byte_tokenizers import byte_level
from support.credit_cases import plain
from support.paths import ROOT

SCHEME = "reasoning_gym://"
SUMS = f"{SCHEME}chain_sum?"
ONE_DIGIT = f"{SUMS}min_digits=1&max_digits=1"
CHAIN_SUM = f"{ONE_DIGIT}&min_terms=5&max_terms=7&compact=1"
INSTRUCTION_K2 = (
    "You are given two candidate solutions to the same problem. Compare them step by step, identify any "
    "inconsistencies or errors, and then produce a corrected solution and final answer."
)
INSTRUCTION_K1 = (
    "You are given a candidate solution to the problem. Check it step by step, identify any errors, and then "
    "produce a corrected solution and final answer."
)


def template(turn):
    """A ChatML template that writes a turn after its role like this."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + turn + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


TINY = HuggingFaceTokenizer(make_tiny_tokenizer())
CHATTY = byte_level(template("{{ m.content | trim }}"), merges=[("a", "a"), ("n", ".")])


def opened(spec, tokenizer, *, split="train", max_prompt_len=None, **data):
    return open_sources(
        [str(spec)], tokenizer, DataConfig(**data), split=split, max_prompt_len=max_prompt_len
    )


PIECES = [*"0123456789+-=#?|*/()., \n", CHAIN_SUM_HEAD, "Candidate solution 1: ", "Candidate solution 2: ",
          INSTRUCTION_K1, INSTRUCTION_K2]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES)))
@settings(max_examples=50)
def test_the_tiny_tokenizer_round_trips_its_alphabet_with_64_ids(pieces):
    text = "".join(pieces)
    ids = TINY.encode(text)
    assert len(ids) == len(pieces)
    assert TINY.decode(ids) == text
    assert TINY.decode([*TINY.encode_prompt(text), TINY.eos_id]) == text
    assert TINY.encode_prompt(text) == [1, *ids], "a prompt begins with bos, and nothing else does"
    assert (TINY.vocab_size, TINY.encode("x")) == (64, [TINY.unk_id])
    assert {TINY.decode([i]) for i in (TINY.pad_id, TINY.eos_id)} == {""}
    assert TINY.decode([*ids, 50, *TINY.encode("5")]) == text + "<unused50>5", "what means nothing"


def test_sentencepiece_joins_without_added_spaces_and_needs_an_end_token(tmp_path):
    def trained(**ids):
        lines = ("Candidate solution 1: one plus two is three.", "What is 12 + 7?", "Compare the solutions.")
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines * 20), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300,
            byte_fallback=True, hard_vocab_limit=False, normalization_rule_name="identity", minloglevel=2,
            **ids,
        )  # fmt: skip
        return load_tokenizer(tmp_path / "tokenizer.model")

    tokenizer = trained()
    assert load_tokenizer(tmp_path).encode("a") == tokenizer.encode("a")
    start = tokenizer.encode_prompt("What is 12 + 7?")
    middle, end = tokenizer.encode("\nCandidate solution 1: "), tokenizer.encode("one")
    assert start[0] == 1  # bos
    assert tokenizer.decode(start + middle + end) == "What is 12 + 7?\nCandidate solution 1: one"
    assert tokenizer.decode([*end, tokenizer.eos_id]) == "one"
    with pytest.raises(DataError, match="--apply-chat-template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert trained(eos_id=0, unk_id=2).eos_id == 0
    with pytest.raises(DataError, match="no end-of-sequence piece; without it no response can end"):
        trained(eos_id=-1)


def test_a_vocabulary_too_small_for_the_correction_prompt_is_refused():
    three = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}))
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=three, eos_token="<eos>"))
    with pytest.raises(DataError, match=r"cannot encode .*Candidate.* has 3 tokens: is it this model's"):
        CorrectionTemplate(tokenizer, 2)


def test_tokenizer_json_suffices_alone_and_unreadable_tokenizers_are_named(tmp_path):
    model = ROOT / "examples/tiny_qwen3"
    shutil.copytree(model, tmp_path / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    for beside in ("tokenizer.model", "config.json"):
        (tmp_path / "hf" / beside).write_text("not to be read")
    assert load_tokenizer(tmp_path / "hf").encode("4+9=") == load_tokenizer(model).encode("4+9=")
    tokenizer = byte_level()
    marks = thinking_marks(CompareAndCorrect(ibpo_strip_thinking=True), tokenizer)
    assert [tokenizer.decode(ids) for ids in (marks.opening, marks.closing)] == ["<think>", "</think>"]
    # one that cannot be loaded is named
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    for files in ({"tokenizer.json": "{}", "tokenizer_config.json": settings}, {"tokenizer.model": "x"}, {}):
        shutil.rmtree(tmp_path / "hf")
        for name, content in files.items():
            (tmp_path / "hf").mkdir(exist_ok=True)
            (tmp_path / "hf" / name).write_text(content)
        with pytest.raises(DataError, match=f"{tmp_path}/hf"):
            load_tokenizer(tmp_path / "hf")


def test_a_chain_sum_prompt_is_its_compact_question_and_newline():
    prompt = opened(CHAIN_SUM, TINY).batch(3, 4)[0]
    expression = prompt.metadata["expression"]
    assert prompt.text == CHAIN_SUM_HEAD + expression.replace(" ", "") + "="
    assert [TINY.decode(ids) for ids in (prompt.head_ids, prompt.tail_ids)] == [prompt.text, "\n"]
    assert (prompt.index, prompt.token_ids[0], prompt.label) == (12, 1, str(eval(expression)))


def test_reproducible_batches_never_contain_held_out_questions():
    once, again, of_seed_1 = (opened(CHAIN_SUM, TINY, data_seed=seed) for seed in (0, 0, 1))
    once.batch(0, 5)
    assert plain(once.batch(7, 5)) == plain(again.batch(7, 5))
    assert plain(once.batch(0, 10)[5:]) == plain(again.batch(1, 5))
    assert [p.text for p in once.batch(7, 5)] != [p.text for p in of_seed_1.batch(7, 5)]
    # 2-term sums of one digit: 200 questions, so both splits have seen nearly all of theirs
    spec = f"{ONE_DIGIT}&min_terms=2&max_terms=2"
    trained = {p.text for seed in (0, 1) for p in opened(spec, TINY, data_seed=seed).batch(0, 600)}
    held_out, other = (opened(spec, TINY, split="eval", data_seed=n).batch(0, 600) for n in (0, 5))
    assert plain(held_out) == plain(other)
    assert len(trained | {p.text for p in held_out}) > 190
    assert trained.isdisjoint(p.text for p in held_out)


def test_a_level_is_that_of_the_tasks_own_curriculum():
    def terms(settings, split="train", count=60):
        batch = opened(f"{SUMS}{settings}", byte_level(), split=split).batch(0, count)
        return [prompt.metadata["num_terms"] for prompt in batch]

    assert set(terms("level=0")) == {2}
    assert set(terms("level=3")) == {2, 3, 4, 5}
    assert set(terms("level=10", count=200)) == {*range(2, 13)}, "the highest"
    assert set(terms("level=3&min_terms=5")) == {5}, "parameters win"
    climbing = terms("level=0..2&over=30")
    assert [max(climbing[:10]), max(climbing[10:20]), max(climbing[20:])] == [2, 3, 4]
    assert max(terms("level=0..2&over=30000", split="eval")) == 4, "held-out items are of all levels"


def test_a_task_that_cannot_be_generated_is_refused():
    for spec, says in (
        ("ftp://prompts.jsonl", "expected a file or directory"),
        (f"{SCHEME}chain_summ", "did you mean 'chain_sum'"),
        (f"{SCHEME}leg_counting", "no token for some of the prompt's characters"),
        (f"{SUMS}min_term=5", "did you mean 'min_terms'"),
        *((f"{SUMS}min_terms={value}", "must be") for value in ("nan", "-Infinity", "1e999")),
        (f"{SUMS}min_terms=9&max_terms=3", "max_terms must be >= min_terms"),
        (f"{SUMS}seed=3", "--data-seed"),
        (f"{ONE_DIGIT}&x=1", "no parameter 'x'"),
        (f"{SUMS}level=99", "level 99: the highest level of chain_sum is 10"),
        (f"{SUMS}level=0..2", "needs over=N"),
        (f"{SUMS}over=5", "needs level=FIRST..LAST"),
        (f"{SCHEME}composite?level=1", "no curriculum for composite"),
    ):
        with pytest.raises(DataError, match=says):
            opened(spec, TINY)


def test_endless_items_are_given_up_and_failing_ones_named(monkeypatch):
    class Stubborn:
        size = 2**31

        def __getitem__(self, index):  # catches what would stop it
            while True:
                with suppress(Exception):
                    while True:
                        pass

    monkeypatch.setattr("megatron_ibpo.data.generated.ITEM_S", 0.2)
    monkeypatch.setattr("megatron_ibpo.data.generated._dataset", lambda *_: Stubborn())
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(DataError, match=r"gcd: an item was not made within 0\.2 s; make its parameters"):
        opened(f"{SCHEME}gcd", TINY)
    assert signal.getsignal(signal.SIGALRM) is before
    monkeypatch.setattr("megatron_ibpo.data.generated._dataset", lambda *_: SimpleNamespace(size=1))
    with pytest.raises(DataError, match="item 0: the task makes none: TypeError"):
        opened(f"{SCHEME}gcd", TINY)


def test_items_unchecked_at_the_start_are_checked_when_drawn(monkeypatch):
    spec, letters = f"{ONE_DIGIT}&min_terms=2&max_terms=9", byte_level()
    with pytest.raises(DataError, match=r"item \d+: the prompt has"):
        opened(spec, letters, max_prompt_len=90)
    monkeypatch.setattr("megatron_ibpo.data.generated.CHECK_S", -1.0)
    source = opened(spec, letters, max_prompt_len=90)
    assert source.ready == 1
    both = [f"{spec}&weight=1", f"{ONE_DIGIT}&min_terms=2&max_terms=3&weight=3"]
    assert open_sources(both, letters, DataConfig(), split="train").ready == 2, "one of each"
    with pytest.raises(DataError, match=r"item \d+: the prompt has"):
        source.batch(0, 64)
    short = opened(spec, letters, max_prompt_len=90, drop_long_prompts=True)
    assert max(len(prompt.token_ids) for prompt in short.batch(0, 64)) <= 90
    assert short.left_out()["left_out/too_long_prompts"] > 0


def test_a_bad_row_is_named_by_file_line_and_field(tmp_path):
    path = tmp_path / "rows.jsonl"
    for lines, says in (
        ("not json", "line 1: not JSON"),
        ('{"prompt": "1", "label": "1"}\n\n[1]', "line 3: expected a JSON object, found list"),
        ('{"prompt": "1"}', "line 1: no field 'label'.*--label-key"),
        ('{"sum": "1", "result": "1"}', "no field 'prompt' and no field 'label' .found: 'sum', 'result'"),
        ('{"prompt": 3, "label": "1"}', "field 'prompt' must be text or a list of messages, found int"),
        ('{"prompt": "1", "label": null}', "field 'label' must be text or a number, found NoneType"),
        ('{"prompt": "1", "label": true}', "field 'label' must be text or a number, found bool"),
        ('{"prompt": "", "label": "1"}', "field 'prompt' is empty"),
        ('{"prompt": "1", "label": "1", "metadata": []}', "field 'metadata' must be an object"),
        ('{"prompt": "1", "label": "1", "task": 7}', "field 'task' must be text"),
        ('{"prompt": [{"role": "user", "content": "1"}], "label": "1"}', "add --apply-chat-template"),
        ('{"prompt": [{"role": "user"}], "label": "1"}', "message 0: needs text under 'role' and 'content'"),
        ('{"prompt": "1+2+3+4+5+6+7", "label": "1"}', "the prompt has 14 tokens, but only 10 fit"),
        ('{"prompt": "what?", "label": "1"}', "no token for some of the prompt's characters"),
        ("", "no prompts in it"),
        ('{"prompt": "1", "label": -Infinity}', "line 1: not JSON: -Infinity is no number"),
        ('{"prompt": "1", "label": 1e999}', "line 1: not JSON: 1e999 is too large"),
        ('{"prompt": "1", "label": ' + "9" * 5000 + "}", "line 1: not JSON: Exceeds the limit"),
        *(('{"prompt": "1", "label": ' + "[" * depth + "]" * depth + "}", "nest deeper than 100 levels")
          for depth in (101, 50_000)),
        (r'{"prompt": "1\ud800", "label": "1"}', r"line 1: not JSON: it holds half a character \(\\ud800 "),
        ('{"prompt": "' + "1+" * 500_000 + '", "label": "1"}', "1,000,000 characters, far more than the 10"),
        ('{"' + "k" * 500_000 + '": 1}', "no field 'label' .found: 'kkk.{0,80}; --input-key and"),
    ):  # fmt: skip
        path.write_text(lines)
        with pytest.raises(DataError, match=rf"rows\.jsonl.*{says}"):
            opened(path, TINY, max_prompt_len=10)
    path.write_text(r'{"prompt": "\ud83d\ude00", "deep": ' + "[" * 98 + "]" * 98 + "}")  # is read
    ((_, read),) = read_jsonl(path)
    assert read()["prompt"] == "\U0001f600"


def test_a_chat_template_runs_in_a_sandbox(tmp_path):
    for template in (
        "{{ ().__class__.__base__.__subclasses__() }}",  # the classes of everything
        "{{ raise_exception.__globals__['os'].system('touch ' + messages[0].content) }}",  # its globals
        "{{ cycler.__init__.__globals__.os.system('touch ' + messages[0].content) }}",  # the loop's own
        "{{ '{0.__class__.__mro__}'.format(messages) }}",  # a format string
        "{{ (messages | attr('append')).__self__.__class__ }}",  # a filter that looks up
        "{% set _ = messages.append({'role': 'user', 'content': 'more'}) %}",  # a change of what it is given
    ):
        messages = [{"role": "user", "content": str(tmp_path / "ran")}]
        with pytest.raises(DataError, match=r"its chat template refuses the messages: .*(unsafe|undefined)"):
            byte_level(template).render_chat(messages)
        assert not (tmp_path / "ran").exists(), template
        assert len(messages) == 1, template


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_chat_prompts_match_the_template_and_split_after_user_words(tmp_path):
    for content in ("Who is Ann.", "  padded \n", "aaa", "a\n<|im_end|>"):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
        path = jsonl(tmp_path / "a.jsonl", {"label": "2", "prompt": messages})
        (prompt,) = opened(path, CHATTY, apply_chat_template=True).batch(0, 1)
        own, how = CHATTY._tokenizer, {"add_generation_prompt": True, "return_dict": False}
        assert list(prompt.token_ids) == own.apply_chat_template(messages, tokenize=True, **how), content
        assert own.decode(prompt.head_ids).endswith("user\n" + content.strip())
        assert own.decode(prompt.tail_ids) == "<|im_end|>\n<|im_start|>assistant\n", content
    with pytest.raises(DataError, match="no chat template"):
        opened(path, TINY, apply_chat_template=True)
    jsonl(path, {"label": "2", "prompt": [{"role": "assistant", "content": "1"}]})
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: the last message must be the user's"):
        opened(path, CHATTY, apply_chat_template=True)


def test_the_correction_prompt_shows_the_candidates_after_the_question(tmp_path):
    wrong, right = (token_ids(TINY.encode(text)) for text in ("1+2=4#4", "1+2=3#3"))
    (prompt,) = opened(CHAIN_SUM, TINY).batch(0, 1)
    ids = CorrectionTemplate(TINY, 2)(prompt, wrong, [right])
    assert TINY.decode(ids) == (
        f"{prompt.text}\nCandidate solution 1: 1+2=4#4\nCandidate solution 2: 1+2=3#3\n{INSTRUCTION_K2}\n"
    )
    # the question's tokens, four for the scaffold of each candidate pair, the instruction and two breaks
    assert len(ids) == prompt.head_length + 7 + 7 + 4 + 3
    assert TINY.eos_id not in ids
    assert ids.dtype == np.int32
    for k in (1, 2):  # without a reference
        ids = CorrectionTemplate(TINY, k)(prompt, wrong, [])
        assert TINY.decode(ids) == f"{prompt.text}\nCandidate solution 1: 1+2=4#4\n{INSTRUCTION_K1}\n", k
    with pytest.raises(DataError, match="--ibpo-k"):
        CorrectionTemplate(TINY, 3)  # it has no token for "three"
    path = jsonl(tmp_path / "a.jsonl", {"label": "2", "prompt": "1+1?"})
    (prompt,) = opened(path, CHATTY, apply_chat_template=True).batch(0, 1)
    target, *references = [token_ids(CHATTY.encode(text)) for text in "ABC"]
    ids = CorrectionTemplate(CHATTY, 3)(prompt, target, references)
    assert CHATTY.decode_all(ids) == (
        "<|im_start|>user\n1+1?\nCandidate solution 1: A\nCandidate solution 2: B\nCandidate solution 3: C\n"
        + INSTRUCTION_K2.replace("two", "three")
        + "<|im_end|>\n<|im_start|>assistant\n"
    ), "inside the user's turn"


CHATML = template("{{ m.content }}")
SAID = ("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4"), ("user", "never answered")
CHAT = [{"role": role, "content": content} for role, content in SAID]


def demonstrations(path, tokenizer, **data):
    config = DataConfig(label_key="response", **{"apply_chat_template": True, **data})
    return open_sources(
        [str(path)], tokenizer, config, split="eval", max_prompt_len=200, reader_type=DemonstrationReader
    )


def learned(path, chat_template, position=0, **data):
    """Return (text of the prompt, text of what follows, its part in the loss) of each sequence of a row."""
    tokenizer = byte_level(chat_template)
    turns = demonstrations(path, tokenizer, **data).at(position).turns
    parts = [(own.prompt, own.response, list(compress(own.response, own.is_trained))) for own in turns]
    return [tuple(map(tokenizer.decode_all, part)) for part in parts]


def test_only_the_assistants_turns_of_a_chat_enter_the_loss(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": CHAT[:2]})
    prompt, between = (f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in ("1+1", "2+2"))
    whole = [(prompt, f"2<|im_end|>\n{between}4<|im_end|>", "2<|im_end|>4<|im_end|>")]
    assert learned(path, CHATML) == whole
    parquet.write_table(pa.Table.from_pylist([{"messages": CHAT}]), tmp_path / "a.parquet")
    assert learned(tmp_path / "a.parquet", CHATML) == whole
    assert learned(path, CHATML, 1) == [(prompt, "2<|im_end|>", "2<|im_end|>")]


def test_a_chat_shows_its_tools_and_learns_the_calls(tmp_path):
    calls = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"
    with_tools = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + template("{{ m.content }}" + calls)
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    chat = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = jsonl(tmp_path / "a.jsonl", {"messages": chat, "tools": tools})
    ((prompt, _, loss),) = learned(path, with_tools)
    assert prompt.startswith('[{"type": "function", "function": {"name": "add"}}]\n<|im_start|>user\n1+1')
    assert loss == "<call>add</call><|im_end|>It is 2.<|im_end|>"


def test_a_turn_that_later_looks_different_is_its_own_sequence(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"messages": CHAT})
    thought = "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"  # as Qwen3's
    (_, _, first), (prompt, _, second) = learned(path, template(thought + "{{ m.content }}"))
    assert (first, second) == ("<think></think>2<|im_end|>", "<think></think>4<|im_end|>")
    assert "assistant\n2<|im_end|>" in prompt


def test_responses_always_end_and_follow_prompts_as_in_sampling(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"messages": CHAT})
    without_end = CHATML.replace("<|im_end|>\n", "")
    assert [loss for _, _, loss in learned(path, without_end)] == ["2<|im_end|>", "4<|im_end|>"]
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "1+1=", "response": "2"})
    (without_template,) = learned(path, CHATML, apply_chat_template=False)
    assert without_template == ("1+1=", "2<|im_end|>", "2<|im_end|>")
    (chat,) = learned(path, CHATML)
    assert chat == ("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n", "2<|im_end|>", "2<|im_end|>")


def test_an_unusable_row_is_refused_with_its_place_or_skipped(tmp_path):
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
            demonstrations(path, byte_level(CHATML))
        assert str(refused.value).startswith(f"{path}, line 2: "), (row, fault)
        assert fault in str(refused.value)
    rows = [{"prompt": "1", "response": "2"}, {"prompt": "1"}, {"prompt": "1", "response": "2" * 300}]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    source = demonstrations(path, byte_level(CHATML), skip_bad_rows=True, drop_long_prompts=True)
    assert len(source) == 1
    assert len([note for note in source.notes if "left out 1" in note]) == 2
