"""Thinking that has no end has no answer, whether the response or the template of its prompt opened it."""

import asyncio

import numpy as np
import pytest

from megatron_ibpo.basics.records import Prompt, Sample, token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.data import CorrectionTemplate, ResponseText
from megatron_ibpo.data.prompts import chat_prompt, plain_prompt
from megatron_ibpo.environments.tool_calls import read_text
from megatron_ibpo.rewards import extracted_answer, open_verifier
from megatron_ibpo.rewards.code import extract_answer as program
from megatron_ibpo.rewards.http_wires import JudgeWire, Question
from megatron_ibpo.rewards.reasoning_gym import extract_answer
from megatron_ibpo.rewards.response import final_part
from megatron_ibpo.sampling.requests import scorer
from support.byte_tokenizers import byte_level, family_tokenizer, tagged_bytes

DRAFT, DRAFTS = (
    r"First guess \boxed{7}. But wait, maybe I should",
    "Perhaps the answer is 7. Hmm, let me check",
)
ANSWERED = "First guess \\boxed{8}. But wait, no.\n</think>\n\nIt is \\boxed{7}."
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n@{% endif %}"
)


def template(opening):
    return byte_level(CHATML.replace("@", opening))


def mistral():
    marks = ("<|im_end|>", "<|im_start|>", "[THINK]", "[/THINK]")
    return tagged_bytes(CHATML.replace("@", ""), marks, end="<|im_end|>")


def asked(tokenizer, question="3+4? Reason in <think> tags."):
    ids, head = chat_prompt([{"role": "user", "content": question}], tokenizer)
    return Prompt(0, ids, head, "7", "sums", question)


def sampled(tokenizer, prompt_ids, text):
    ids = token_ids(tokenizer.encode(text))
    ones = np.ones(len(ids), bool)
    return Sample(prompt_ids, ids, np.zeros(len(ids), np.float32), "length", 1.0, ((0, 0),), ones)


@pytest.fixture(scope="module")
def verifier():
    with open_verifier(DataConfig(rm_type="math", reward_workers=1, reward_timeout=60)) as opened:
        yield opened


def rewards(verifier, tokenizer, prompt, *texts, prompt_ids=None):
    score, samples = scorer(verifier, ResponseText(tokenizer)), []
    for text in texts:
        ids = prompt.token_ids if prompt_ids is None else prompt_ids
        samples.append(sampled(tokenizer, ids, text))
        asyncio.run(score(prompt, samples[-1]))
    return [sample.reward for sample in samples]


def test_a_draft_in_template_opened_thinking_is_no_answer(verifier):
    for name, tokenizer, opens in (
        ("Qwen3.5", family_tokenizer("qwen3_5"), True), ("Qwen3", family_tokenizer("qwen3"), False),
        ("Qwen3-Thinking, QwQ", template("<think>\n"), True), ("R1", template("<think>"), True),
        ("thinking is off", template("<think>\n\n</think>\n\n"), False),
        ("begun", template("<think>\nLet me see. "), True), ("Seed-OSS", template("<seed:think>"), True),
    ):  # fmt: skip
        found = rewards(verifier, tokenizer, asked(tokenizer), DRAFT, DRAFTS, ANSWERED)
        assert found == ([0.0, 0.0, 1.0] if opens else [1.0, 1.0, 1.0]), name


def test_marks_that_are_special_tokens_count(verifier):
    think, final = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
    oss, french = family_tokenizer("gpt_oss"), mistral()
    texts = f"{think}{DRAFT}", rf"{think}\boxed{{8}}{final}It is \boxed{{7}}.", rf"{think}\boxed{{7}}{final}8"
    assert rewards(verifier, oss, asked(oss), *texts) == [0.0, 1.0, 0.0]
    texts = f"[THINK]{DRAFT}", r"[THINK]\boxed{8}[/THINK]It is \boxed{7}.", r"\boxed{7}"
    assert rewards(verifier, french, asked(french), *texts) == [0.0, 1.0, 1.0]
    assert (
        ResponseText(french)(asked(french), sampled(french, token_ids([]), "[THINK]hm[/THINK]7")).text
        == "hm7"
    )


def test_a_correction_thinks_only_if_its_prompt_ends_so(verifier):
    for opens, tokenizer in ((True, template("<think>\n")), (False, template(""))):
        prompt, cut_off = asked(tokenizer), token_ids(tokenizer.encode("<think> It is 8. Hm"))
        ids = CorrectionTemplate(tokenizer, 2)(prompt, cut_off, [cut_off])
        found = rewards(verifier, tokenizer, prompt, DRAFT, ANSWERED, prompt_ids=ids)
        assert found == [0.0 if opens else 1.0, 1.0]
    tokenizer = byte_level()
    for text, opens in (
        ("User: 3+4?\nAssistant: <think>\n", True),
        ("Use <think> and </think>.\n3+4?", False),
    ):
        ids, head = plain_prompt(text, tokenizer)
        prompt = Prompt(0, ids, head, "7", "sums", text)
        assert rewards(verifier, tokenizer, prompt, DRAFT, ANSWERED) == [0.0 if opens else 1.0, 1.0], text
        assert [score.reward for score in verifier.score([(prompt, DRAFT)])] == [0.0 if opens else 1.0], text


def test_the_answer_follows_the_last_mark_unless_that_opens_thinking():
    for text, final in (
        ("7", "7"), ("<think>7", ""), ("<think>7</think>8", "8"), ("7</think>8", "8"), ("8<think>7", ""),
        ("<think>a</think>7<think>b</think>8", "8"), ("<think>a</think>7<think>b", ""),
        ("7</think>8<think>", ""), ("<thinking>7", "<thinking>7"),
        ("<think><think>7</think>8", "8"), ("</think>", ""), ("<think>a<think>7", ""),
        ("a</think>7, not in `<think>`", "7, not in `<think>`"), ("<think>a '<think>' 7", ""),
        ('a</think>s = "<think>"', 's = "<think>"'), ("a</think>7 `<think>b", ""), ("'<think>\"7", ""),
        ("a</think>7 `<think>` <think>8", ""), ("a</think>7<think>`", ""),
        ("[THINK]7", ""), ("[THINK]7[/THINK]8", "8"), ("<|START_THINKING|>7<|END_THINKING|>8", "8"),
        ("<|channel>thought\n7", ""), ("<|channel>thought\n7<channel|>8", "8"), ("<|channel|>analysis 7", ""),
        ("<|channel|>commentary to=x<|message|>7<|channel|>final<|message|>8", "8"),
    ):  # fmt: skip
        assert final_part(text) == final, text


def test_text_before_unfinished_thinking_is_reasoning():
    for text, content, reasoning in (
        ("<think>a</think>7", "7", "a"), ("<think>a</think>7<think>b", "", "a\n7<think>b"),
        ("7<think>b", "", "7<think>b"), ("7", "7", None),
    ):  # fmt: skip
        message = read_text(text)
        assert (message["content"], message.get("reasoning_content")) == (content, reasoning), text


def test_our_verifiers_read_thinking_and_users_functions_get_the_text(
    tmp_path,
):
    tokenizer = template("<think>\n")
    prompt, read = asked(tokenizer), ResponseText(tokenizer)

    def response(text):
        return read(prompt, sampled(tokenizer, prompt.token_ids, text))

    fenced = "```python\nprint(7)\n```"
    assert program(response(fenced).marked) is None
    assert program(response(f"hm</think>{fenced}").marked) == "print(7)\n"
    assert extract_answer(response("#7").marked) is None
    for rm_type, texts in (
        ("math", (r"\boxed{7}", r"</think>\boxed{7}")),
        ("reasoning_gym", ("7", "</think>7")),
    ):
        data = DataConfig(rm_type=rm_type)
        assert [extracted_answer(prompt, response(text), data) for text in texts] == [None, "7"], rm_type
    (tmp_path / "judge.txt").write_text("R: {{response}}")
    judge = JudgeWire(DataConfig(rm_url="http://judge", rm_template=tmp_path / "judge.txt"))
    bodies = [judge.body([Question("", response(text).marked, "")]) for text in ("7", "a</think>7")]
    assert [body["messages"][0]["content"] for body in bodies] == ["R: ", "R: 7"]
    (tmp_path / "as_written.py").write_text("def score(_, text, *others): return float(text == 'draft')\n")
    with open_verifier(DataConfig(rm_type=f"{tmp_path}/as_written.py:score", reward_workers=1)) as users:
        assert users.score([(prompt, response("draft"))])[0].reward == 1.0
