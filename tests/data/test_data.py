"""Prompts, tokenizers and the correction prompt."""

import json
import random
import shutil
import signal
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import CHAIN_SUM_HEAD, make_tiny_tokenizer
from worked_solutions import mended_solution, worked_solution

from megatron_ibpo.basics.records import token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.data import CorrectionTemplate, DataError, generated, load_tokenizer, open_source
from megatron_ibpo.data.row_prompts import read_jsonl
from megatron_ibpo.data.tokenizer import thinking_marks
from support.byte_tokenizers import byte_level
from support.credit_cases import plain
from support.paths import ROOT

SUMS = "reasoning_gym://chain_sum?"
CHAIN_SUM = f"{SUMS}min_terms=5&max_terms=7&min_digits=1&max_digits=1&compact=1"

INSTRUCTION_K2 = (
    "You are given two candidate solutions to the same problem. Compare them step by step, identify any "
    "inconsistencies or errors, and then produce a corrected solution and final answer."
)
INSTRUCTION_K1 = (
    "You are given a candidate solution to the problem. Check it step by step, identify any errors, and then "
    "produce a corrected solution and final answer."
)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tiny(tiny_dir):
    return load_tokenizer(tiny_dir)


@pytest.fixture(scope="module")
def chatty():
    """A byte-level tokenizer with a ChatML template."""
    return byte_level(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        merges=[("a", "a"), ("n", ".")],
    )


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    return train_sentencepiece(tmp_path_factory.mktemp("sp"))


def train_sentencepiece(path, **ids):
    from sentencepiece import SentencePieceTrainer

    lines = (
        "Candidate solution 1: one plus two is three.\nWhat is 12 + 7?\nCompare the candidate solutions.\n"
    )
    (path / "text").write_text(lines * 20)
    SentencePieceTrainer.train(
        input=str(path / "text"), model_prefix=str(path / "tokenizer"), vocab_size=300, byte_fallback=True,
        hard_vocab_limit=False, normalization_rule_name="identity", minloglevel=2, **ids,
    )  # fmt: skip
    return path / "tokenizer.model"


# ------------------------------------------------------------------------------------------ tokenizers

PIECES = [*"0123456789+-=#?|*/()., \n", CHAIN_SUM_HEAD, "Candidate solution 1: ", "Candidate solution 2: ",
          INSTRUCTION_K1, INSTRUCTION_K2]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES)))
@settings(max_examples=50)
def test_tiny_tokenizer_gives_back_every_text_of_its_alphabet(tiny, pieces):
    text = "".join(pieces)
    ids = tiny.encode(text)
    assert len(ids) == len(pieces)
    assert tiny.decode(ids) == text
    assert tiny.decode([*tiny.encode_prompt(text), tiny.eos_id]) == text


def test_tiny_tokenizer_has_64_ids_and_shows_those_that_mean_nothing(tiny):
    assert tiny.vocab_size == 64
    assert {tiny.decode([i]) for i in (tiny.pad_id, tiny.eos_id)} == {""}
    assert tiny.decode([*tiny.encode("#1"), 50, *tiny.encode("5")]) == "#1<unused50>5"


def test_prompts_start_with_bos_and_pieces_do_not(tiny):
    assert tiny.encode_prompt("1+1=") == [1, *tiny.encode("1+1=")]
    assert 1 not in tiny.encode("1+1=")


def test_what_the_tiny_tokenizer_cannot_say_is_unknown(tiny):
    assert tiny.encode("x") == [tiny.unk_id]


def test_sentencepiece_pieces_join_without_added_spaces(sentencepiece_model):
    tokenizer = load_tokenizer(sentencepiece_model)
    assert load_tokenizer(sentencepiece_model.parent).encode("a") == tokenizer.encode("a")
    start = tokenizer.encode_prompt("What is 12 + 7?")
    middle = tokenizer.encode("\nCandidate solution 1: ")
    end = tokenizer.encode("one")
    assert start[0] == 1  # bos
    assert tokenizer.decode(start + middle + end) == "What is 12 + 7?\nCandidate solution 1: one"
    assert tokenizer.decode([*end, tokenizer.eos_id]) == "one"


def test_a_sentencepiece_model_needs_an_end_of_sequence_which_may_be_its_first_piece(tmp_path):
    assert load_tokenizer(train_sentencepiece(tmp_path, eos_id=0, unk_id=2)).eos_id == 0
    with pytest.raises(DataError, match="no end-of-sequence piece; without it no response can end"):
        load_tokenizer(train_sentencepiece(tmp_path, eos_id=-1))


def test_sentencepiece_has_no_chat_template(sentencepiece_model):
    with pytest.raises(DataError, match="--apply-chat-template"):
        load_tokenizer(sentencepiece_model).render_chat([{"role": "user", "content": "hi"}])


def test_a_vocabulary_too_small_for_the_correction_prompt_is_refused(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    three = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}))
    PreTrainedTokenizerFast(tokenizer_object=three, eos_token="<eos>").save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"cannot encode .*Candidate.* has 3 tokens: is it this model's"):
        CorrectionTemplate(load_tokenizer(tmp_path), 2)
    for length, shown in ((60, "x" * 60 + "'"), (61, "x" * 60 + "…'")):
        with pytest.raises(DataError, match=f"cannot encode '{shown}: "):
            load_tokenizer(tmp_path).encode("x" * length)


@pytest.mark.parametrize(
    "files",
    [
        None,
        pytest.param({"README.md": "x"}, marks=pytest.mark.slow),  # imports every model's configuration
        {"tokenizer.json": "{}", "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}'},
        {"tokenizer.model": "x"},
    ],
    ids=["nothing there", "no tokenizer there", "no tokenizer.json", "no tokenizer.model"],
)
def test_a_tokenizer_that_cannot_be_loaded_says_which(tmp_path, files):
    path = tmp_path / "hf"
    if files is not None:
        path.mkdir()
        for name, content in files.items():
            (path / name).write_text(content)
    with pytest.raises(DataError, match=str(path)):
        load_tokenizer(path)


def test_marks_of_thinking_are_the_ids_of_their_text():
    tokenizer = byte_level()
    assert list(map(tokenizer.decode, thinking_marks(tokenizer))) == ["<think>", "</think>"]


def test_a_tokenizer_json_that_is_complete_is_read_and_nothing_beside_it(tmp_path):
    model = ROOT / "examples/tiny_qwen3"
    shutil.copytree(model, tmp_path / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    for beside in ("tokenizer.model", "config.json"):
        (tmp_path / "hf" / beside).write_text("not to be read")
    assert load_tokenizer(tmp_path / "hf").encode("4+9=") == load_tokenizer(model).encode("4+9=")


# ------------------------------------------------------------------------------------- generated tasks


def test_a_chain_sum_prompt_is_the_compact_question_and_a_line_break(tiny):
    prompt = open_source(CHAIN_SUM, tiny, DataConfig(), split="train").batch(3, 4)[0]
    expression = prompt.metadata["expression"]
    assert prompt.index == 12
    assert prompt.text == CHAIN_SUM_HEAD + expression.replace(" ", "") + "="
    assert tiny.decode(prompt.head_ids) == prompt.text
    assert tiny.decode(prompt.tail_ids) == "\n"
    assert prompt.token_ids[0] == 1
    assert prompt.label == str(eval(expression))


def test_a_batch_depends_on_its_place_and_the_seed_alone(tiny):
    once = open_source(CHAIN_SUM, tiny, DataConfig(), split="train")
    again = open_source(CHAIN_SUM, tiny, DataConfig(), split="train")
    other = open_source(CHAIN_SUM, tiny, DataConfig(data_seed=1), split="train")
    once.batch(0, 5)
    assert plain(once.batch(7, 5)) == plain(again.batch(7, 5))
    assert plain(once.batch(0, 10)[5:]) == plain(again.batch(1, 5))
    assert [p.text for p in once.batch(7, 5)] != [p.text for p in other.batch(7, 5)]


def test_no_held_out_question_is_ever_trained_on(tiny):
    # 2-term sums of one digit: 200 questions, so both splits have seen nearly all of theirs
    spec = "reasoning_gym://chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    trained = {p.text for seed in (0, 1) for p in _stream(spec, tiny, "train", seed)}
    held_out = {p.text for p in _stream(spec, tiny, "eval", 0)}
    assert len(trained | held_out) > 190
    assert trained.isdisjoint(held_out)


def test_the_held_out_items_are_the_same_for_every_seed(tiny):
    assert plain(_stream(CHAIN_SUM, tiny, "eval", 0, 200)) == plain(_stream(CHAIN_SUM, tiny, "eval", 5, 200))


def _stream(spec, tokenizer, split, seed, n=600):
    return open_source(spec, tokenizer, DataConfig(data_seed=seed), split=split).batch(0, n)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("reasoning_gym://chain_summ", "did you mean 'chain_sum'"),
        (f"{SUMS}min_term=5", "did you mean 'min_terms'"),
        (f"{SUMS}min_terms=five", "min_terms must be of type int"),
        *((f"{SUMS}min_terms={value}", "must be") for value in ("nan", "-Infinity", "1e999")),
        (f"{SUMS}min_terms=9&max_terms=3", "max_terms must be >= min_terms"),
        (f"{SUMS}min_terms", "name=value"),
        (f"{SUMS}seed=3", "--data-seed"),
        (f"{SUMS}compact=yes", "compact must be 0 or 1"),
        (f"{SUMS}min_terms=1&max_terms=1&max_digits=1&min_digits=1&x=1", "no parameter 'x'"),
        ("reasoning_gym://leg_counting", "no token for some of the prompt's characters"),
        ("ftp://prompts.jsonl", "expected a file or directory"),
    ],
)
def test_a_task_that_cannot_be_generated_is_refused(tiny, spec, says):
    with pytest.raises(DataError, match=says):
        open_source(spec, tiny, DataConfig(), split="train")


def test_an_item_that_takes_forever_is_given_up(tiny, monkeypatch):
    monkeypatch.setattr(generated, "ITEM_S", 0.3)
    before, started = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(DataError, match=r"min_terms=99999999.*an item was not made within 0\.3 s"):
        open_source(f"{SUMS}min_terms=99999999&max_terms=99999999", tiny, DataConfig(), split="train")
    assert time.monotonic() - started < 10
    assert signal.getsignal(signal.SIGALRM) is before


def test_generated_prompts_must_fit_the_context(tiny):
    with pytest.raises(DataError, match=r"item 0: the prompt has \d+ tokens, but only 8 fit"):
        open_source(CHAIN_SUM, tiny, DataConfig(), split="train", max_prompt_len=8)


# ---------------------------------------------------------------------------------------------- JSONL


def rows_file(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_rows_become_prompts(tiny, tmp_path):
    row = {"prompt": "1+1=\n", "label": 2, "task": "sums", "metadata": {"level": 1}}
    source = open_source(rows_file(tmp_path / "a.jsonl", [row]), tiny, DataConfig(), split="eval")
    (prompt,) = source.batch(0, 1)
    assert len(source) == 1
    assert prompt.token_ids.tolist() == tiny.encode_prompt("1+1=\n")
    assert prompt.token_ids.dtype == np.int32
    assert prompt.head_length == len(prompt.token_ids)
    assert (prompt.label, prompt.task, prompt.metadata) == ("2", "sums", {"level": 1})


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(tiny, tmp_path):
    rows = [{"q": f"{i}=", "a": str(i)} for i in range(20)]
    spec = rows_file(tmp_path / "a.jsonl", rows)
    data = DataConfig(input_key="q", label_key="a", data_seed=3)
    source = open_source(spec, tiny, data, split="train")
    # batches of 7 straddle the epochs of 20
    labels = [p.label for step in range(9) for p in source.batch(step, 7)][:60]
    epochs = [labels[i : i + 20] for i in (0, 20, 40)]
    assert all(sorted(epoch, key=int) == [row["a"] for row in rows] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    resumed = open_source(spec, tiny, data, split="train")
    assert plain(resumed.batch(5, 7)) == plain(source.batch(5, 7))
    in_file_order = open_source(spec, tiny, data, split="eval")
    assert [p.label for p in in_file_order.batch(0, 20)] == [row["a"] for row in rows]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["not json"], "line 1: not JSON"),
        (['{"prompt": "1", "label": "1"}', "", "[1]"], "line 3: expected a JSON object, found list"),
        (['{"prompt": "1"}'], "line 1: no field 'label'.*--label-key"),
        (
            ['{"sum": "1", "result": "1"}'],
            "no field 'prompt' and no field 'label' .found: 'sum', 'result'.; "
            "--input-key and --label-key name others",
        ),
        (['{"question": "1", "label": "1"}'], "no field 'prompt' .found: 'question', 'label'.; --input-key"),
        (['{"prompt": 3, "label": "1"}'], "field 'prompt' must be text or a list of messages, found int"),
        (['{"prompt": "1", "label": null}'], "field 'label' must be text or a number, found NoneType"),
        (['{"prompt": "1", "label": true}'], "field 'label' must be text or a number, found bool"),
        (['{"prompt": "", "label": "1"}'], "field 'prompt' is empty"),
        (['{"prompt": "1", "label": "1", "metadata": []}'], "field 'metadata' must be an object"),
        (['{"prompt": "1", "label": "1", "task": 7}'], "field 'task' must be text"),
        (['{"prompt": [{"role": "user", "content": "1"}], "label": "1"}'], "add --apply-chat-template"),
        (
            ['{"prompt": [{"role": "user"}], "label": "1"}'],
            "message 0: needs text under 'role' and 'content'",
        ),
        (['{"prompt": "1+2+3+4+5+6+7", "label": "1"}'], "the prompt has 14 tokens, but only 10 fit"),
        (['{"prompt": "what?", "label": "1"}'], "no token for some of the prompt's characters"),
        ([], "no prompts in it"),
        (['{"prompt": "1", "label": NaN}'], "line 1: not JSON: NaN is no number"),
        (['{"prompt": "1", "label": -Infinity}'], "line 1: not JSON: -Infinity is no number"),
        (['{"prompt": "1", "label": 1e999}'], "line 1: not JSON: 1e999 is too large"),
        (['{"prompt": "1", "label": "1", "metadata": {"a": [NaN]}}'], "line 1: not JSON: NaN"),
        (['{"prompt": "1", "label": ' + "9" * 5000 + "}"], "line 1: not JSON: Exceeds the limit"),
        (['{"prompt": "1", "label": ' + "[" * 50_000 + "]" * 50_000 + "}"], "nest deeper than 100 levels"),
        (['{"prompt": "1", "label": ' + "[" * 101 + "]" * 101 + "}"], "nest deeper than 100 levels"),
        ([r'{"prompt": "1\ud800", "label": "1"}'], r"line 1: not JSON: it holds half a character \(\\ud800 "),
        ([r'{"prompt": "1", "label": "\udfff\ud800"}'], "it holds half a character"),
        (
            ['{"prompt": "' + "1+" * 500_000 + '", "label": "1"}'],
            "has 1,000,000 characters, far more than the 10",
        ),
        (['{"' + "k" * 500_000 + '": 1}'], "no field 'label' .found: 'kkk.{0,80}; --input-key and"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(tiny, tmp_path, lines, says):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"rows\.jsonl.*{says}"):
        open_source(str(path), tiny, DataConfig(), split="train", max_prompt_len=10)


def test_escapes_of_whole_characters_and_brackets_that_nest_a_little_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"prompt": "\ud83d\ude00", "deep": ' + "[" * 98 + "]" * 98 + "}")
    ((_, row),) = read_jsonl(path)
    assert row["prompt"] == "\U0001f600"


# ------------------------------------------------------------------------------------- chat templates

ATTACKS = {
    "the classes of everything": "{{ ().__class__.__base__.__subclasses__() }}",
    "a function's globals": "{{ raise_exception.__globals__['os'].system('touch ' + messages[0].content) }}",
    "the loop's own": "{{ cycler.__init__.__globals__.os.system('touch ' + messages[0].content) }}",
    "a format string": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "a filter that looks up": "{{ (messages | attr('append')).__self__.__class__ }}",
}


@pytest.mark.parametrize("template", ATTACKS.values(), ids=ATTACKS)
def test_a_chat_template_runs_in_a_sandbox(tmp_path, template):
    hostile = byte_level(template)
    ran = tmp_path / "ran"
    with pytest.raises(DataError, match=r"its chat template refuses the messages: .*(unsafe|undefined)"):
        hostile.render_chat([{"role": "user", "content": str(ran)}])
    assert not ran.exists()


def test_a_chat_template_cannot_change_what_it_is_given():
    hostile = byte_level("{% set _ = messages.append({'role': 'user', 'content': 'more'}) %}")
    messages = [{"role": "user", "content": "1"}]
    with pytest.raises(DataError, match="refuses the messages"):
        hostile.render_chat(messages)
    assert messages == [{"role": "user", "content": "1"}]


@pytest.mark.parametrize("content", ["Who is Ann.", "  padded \n", "aaa", "a\n<|im_end|>"])
def test_chat_prompts_are_the_templates_own_and_split_after_the_users_words(chatty, tmp_path, content):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    spec = rows_file(tmp_path / "a.jsonl", [{"prompt": messages, "label": "1"}])
    source = open_source(spec, chatty, DataConfig(apply_chat_template=True), split="train")
    (prompt,) = source.batch(0, 1)
    own = chatty._tokenizer
    whole = own.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert list(prompt.token_ids) == whole
    assert own.decode(prompt.head_ids).endswith("user\n" + content.strip())
    assert own.decode(prompt.tail_ids) == "<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_without_a_template_is_refused(tiny, tmp_path):
    spec = rows_file(tmp_path / "a.jsonl", [{"prompt": "1", "label": "1"}])
    with pytest.raises(DataError, match="no chat template"):
        open_source(spec, tiny, DataConfig(apply_chat_template=True), split="train")


def test_a_chat_must_end_with_the_user(chatty, tmp_path):
    row = {"prompt": [{"role": "assistant", "content": "1"}], "label": "1"}
    spec = rows_file(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: the last message must be the user's"):
        open_source(spec, chatty, DataConfig(apply_chat_template=True), split="train")


# --------------------------------------------------------------------------------- correction prompts


def test_the_correction_prompt_of_two_candidates(tiny):
    def encoded(text):
        return token_ids(tiny.encode(text))

    prompt = open_source(CHAIN_SUM, tiny, DataConfig(), split="train").batch(0, 1)[0]
    ids = CorrectionTemplate(tiny, 2)(prompt, encoded("1+2=4#4"), [encoded("1+2=3#3")])
    assert tiny.decode(ids) == (
        f"{prompt.text}\nCandidate solution 1: 1+2=4#4\nCandidate solution 2: 1+2=3#3\n{INSTRUCTION_K2}\n"
    )
    # the question's tokens, four for the scaffold of each candidate pair, the instruction and two breaks
    assert len(ids) == prompt.head_length + 7 + 7 + 4 + 3
    assert tiny.eos_id not in ids
    assert ids.dtype == np.int32


def test_the_correction_prompt_without_a_reference(tiny):
    prompt = open_source(CHAIN_SUM, tiny, DataConfig(), split="train").batch(0, 1)[0]
    for k in (1, 2):
        ids = CorrectionTemplate(tiny, k)(prompt, token_ids(tiny.encode("4#4")), [])
        assert tiny.decode(ids) == f"{prompt.text}\nCandidate solution 1: 4#4\n{INSTRUCTION_K1}\n"


def test_the_correction_prompt_stays_inside_the_users_turn(chatty, tmp_path):
    spec = rows_file(tmp_path / "a.jsonl", [{"prompt": "1+1?", "label": "2"}])
    prompt = open_source(spec, chatty, DataConfig(apply_chat_template=True), split="train").batch(0, 1)[0]
    target, *references = [token_ids(chatty.encode(text)) for text in "ABC"]
    ids = CorrectionTemplate(chatty, 3)(prompt, target, references)
    assert chatty.decode_all(ids) == (
        "<|im_start|>user\n1+1?\nCandidate solution 1: A\nCandidate solution 2: B\nCandidate solution 3: C\n"
        + INSTRUCTION_K2.replace("two", "three")
        + "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_correction_prompt_that_cannot_be_said_is_refused_at_start(tiny):
    with pytest.raises(DataError, match="--ibpo-k"):
        CorrectionTemplate(tiny, 3)


# ----------------------------------------------------------------------------------- worked solutions


@pytest.mark.parametrize(
    ("expression", "written"),
    [
        ("6 + 7", "6+7=3#3"),  # the carry is dropped
        ("6 + 7 - 1", "6+7=3-1=2#2"),  # and what follows builds on it
        ("6 + 3", "6+3=9#9"),  # nothing to carry
        ("9 + 3 + 9 - 3", "9+3=2+9=1-3=-2#-2"),  # no borrow below ten
        ("8 - 9 + 5", "8-9=-1+5=4#4"),  # no carry from a negative value
    ],
)
def test_a_student_who_always_drops_carries(expression, written):
    assert worked_solution(expression, random.Random(0), carry_dropped=1.0) == written


def test_a_worked_solution_writes_every_step_and_a_student_drops_borrows_and_slips():
    assert worked_solution("6 + 0 + 1 + 8 - 9") == "6+0=6+1=7+8=15-9=6#6"
    assert worked_solution("15 - 7", random.Random(0), carry_dropped=1.0) == "15-7=18#18"
    slips = {worked_solution("1 + 1", random.Random(i), slip=1.0) for i in range(50)}
    assert slips == {"1+1=0#0", "1+1=1#1", "1+1=3#3", "1+1=4#4"}


EXPRESSIONS = st.tuples(
    st.integers(0, 9), st.lists(st.tuples(st.sampled_from("+-"), st.integers(0, 9)), min_size=1, max_size=6)
).map(lambda drawn: " ".join([str(drawn[0]), *(f"{operator} {term}" for operator, term in drawn[1])]))


@settings(max_examples=50)
@given(EXPRESSIONS, st.randoms(use_true_random=False))
def test_a_student_of_skill_1_mends_the_first_error_and_one_of_skill_0_copies(expression, rng):
    candidate = worked_solution(expression, rng, carry_dropped=0.7, slip=0.3)
    assert mended_solution(expression, candidate, rng, skill=1.0) == worked_solution(expression)
    assert mended_solution(expression, candidate, rng, skill=0.0, carry_dropped=1.0, slip=1.0) == candidate


def test_what_follows_a_mended_step_is_solved_with_the_students_own_errors():
    candidate = "6+7=3+1=4+9=13#13"
    assert mended_solution("6 + 7 + 1 + 9", candidate, random.Random(0), skill=1.0) == "6+7=13+1=14+9=23#23"
    noisy = mended_solution("6 + 7 + 1 + 9", candidate, random.Random(0), skill=1.0, carry_dropped=1.0)
    assert noisy == "6+7=13+1=14+9=13#13"


def test_errors_are_mended_as_often_as_the_skill_says():
    rng = random.Random(0)
    mended = [mended_solution("9 + 9", "9+9=8#8", rng, skill=0.9) for _ in range(4000)]
    assert set(mended) == {"9+9=18#18", "9+9=8#8"}
    assert 0.88 < mended.count("9+9=18#18") / 4000 < 0.92


def test_a_candidate_of_another_problem_is_refused():
    with pytest.raises(ValueError, match="1 steps"):
        mended_solution("9 + 9 + 1", "9+9=8#8", random.Random(0), skill=0.9)


def test_dropped_carries_come_as_often_as_asked():
    rng = random.Random(0)
    dropped = sum(worked_solution("9 + 9", rng, carry_dropped=0.55) == "9+9=8#8" for _ in range(4000))
    assert 0.52 < dropped / 4000 < 0.58
