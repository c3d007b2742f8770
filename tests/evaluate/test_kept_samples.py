"""An evaluation that was interrupted goes on where it stopped, and never mixes two of them."""

import json
import re

import numpy as np
import pytest

from megatron_ibpo.basics.records import Prompt, Sample, token_ids
from megatron_ibpo.config import EvalSampling
from megatron_ibpo.evaluate import Corrector, KeptError, KeptSamples, answered, eval_sample, evaluate
from megatron_ibpo.evaluate.stored_samples import read_results, read_samples, samples_path

SETTINGS = {"policy": "aaaa", "--eval-temperature": 0.6, "--seed": 0}
SAMPLING = EvalSampling(samples=4, max_tokens=8, temperature=0.6, top_p=1.0, top_k=-1)
PROMPTS = [Prompt(i, token_ids([i, 7]), 2, str(i), "t", f"question {i}") for i in range(5)]


class Killed(BaseException):
    """The process ends here."""


class SimulatedEngine:
    """Writes what a request's seed says, in an order of its own, and may be killed on the way."""

    def __init__(self, dies_after=None, failing=()):
        self.asked, self.dies_after, self.failing = [], dies_after, set(failing)

    def __call__(self, asked, each):
        order = np.random.default_rng(0).permutation(len(asked))
        for index in order.tolist():
            if self.dies_after is not None and len(self.asked) == self.dies_after:
                raise Killed
            one = asked[index]
            self.asked.append(one.key)
            written = [1 + one.request.seed % 3, int(one.request.prompt_token_ids[-1])]
            sample = Sample(
                prompt_token_ids=one.request.prompt_token_ids,
                token_ids=token_ids(written),
                logprobs=np.array([-0.25, -one.request.seed % 7], np.float32),
                finish_reason="stop",
                temperature=one.request.temperature,
                versions=((0, 0),),
                loss_mask=np.ones(2, bool),
            )
            if one.key in self.failing:
                sample.reward_error = "no sandbox"
            else:
                sample.reward, sample.correct = float(written[0] == 1), written[0] == 1
            each(
                index, eval_sample("sums", one, sample, str(written), lambda _, text: text, keep_tokens=True)
            )


def evaluated(directory, engine, settings=SETTINGS, *, corrects=True):
    """A whole evaluation in one process: (summary, samples)."""
    corrector = Corrector(
        lambda prompt, shown: token_ids([prompt.index, *(s.token_ids[0] for s in shown), 9]), 2, 64
    )
    with KeptSamples(directory, "/models/a", {"sums": settings}) as kept:
        return evaluate(
            PROMPTS,
            lambda asked: answered(asked, kept.found("sums"), engine, kept.add),
            SAMPLING,
            has_answers=True,
            corrector=corrector if corrects else None,
        )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return evaluated(tmp_path_factory.mktemp("whole"), SimulatedEngine())


@pytest.mark.parametrize("dies_after", [0, 1, 13, 24, 25, 30, 44])
def test_an_evaluation_that_is_killed_goes_on_where_it_stopped(dies_after, tmp_path, undisturbed):
    """20 samples and 5 greedy ones, then 20 corrections: killed anywhere, nothing is asked twice, and what
    comes out is what would have come out."""
    first, second = SimulatedEngine(dies_after), SimulatedEngine()
    with pytest.raises(Killed):
        evaluated(tmp_path, first)
    assert read_results(tmp_path)["status"] == "unfinished"
    found = evaluated(tmp_path, second)
    assert found == undisturbed
    assert set(first.asked).isdisjoint(second.asked)
    assert len(first.asked) + len(second.asked) == 45
    third = SimulatedEngine()
    assert evaluated(tmp_path, third) == undisturbed
    assert third.asked == []


def test_a_line_that_was_never_finished_is_asked_again(tmp_path, undisturbed):
    with pytest.raises(Killed):
        evaluated(tmp_path, SimulatedEngine(dies_after=10))
    path = samples_path(tmp_path, "sums")
    path.write_bytes(path.read_bytes()[:-5])
    second = SimulatedEngine()
    assert evaluated(tmp_path, second) == undisturbed
    assert len(second.asked) == 45 - 9
    assert {sample.key for sample in read_samples(tmp_path, "sums")} == {s.key for s in undisturbed[1]}


def test_samples_that_the_verifier_failed_on_are_asked_again(tmp_path, undisturbed):
    failing = [("sampled", 2, 1), ("greedy", 4, 0)]
    broken, _ = evaluated(tmp_path, SimulatedEngine(failing=failing), corrects=False)
    assert broken.reward_errors == 2
    second = SimulatedEngine()
    mended, samples = evaluated(tmp_path, second, corrects=False)
    assert sorted(second.asked) == sorted(failing)
    assert mended.reward_errors == 0
    assert samples == undisturbed[1][:25]
    assert len(read_samples(tmp_path, "sums")) == 25, "one line a sample"


def test_other_settings_are_refused_with_what_differs(tmp_path):
    evaluated(tmp_path, SimulatedEngine())
    before = samples_path(tmp_path, "sums").read_bytes()
    other = SETTINGS | {"--eval-temperature": 0.7, "policy": "bbbb"}
    with pytest.raises(KeptError) as refused:
        evaluated(tmp_path, SimulatedEngine(), other)
    assert "policy was 'aaaa', is 'bbbb'; --eval-temperature was 0.6, is 0.7" in str(refused.value)
    assert samples_path(tmp_path, "sums").read_bytes() == before


def test_samples_without_settings_and_of_others_are_refused(tmp_path):
    evaluated(tmp_path, SimulatedEngine())
    path = samples_path(tmp_path, "sums")
    row = json.loads(path.read_text().splitlines()[3]) | {"settings": "0" * 16}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    with pytest.raises(KeptError, match=r"sums\.samples\.jsonl, line 46: made by other settings"):
        evaluated(tmp_path, SimulatedEngine())
    (tmp_path / "results.json").unlink()
    with pytest.raises(KeptError, match="the settings it was made with are not recorded"):
        evaluated(tmp_path, SimulatedEngine())


@pytest.mark.parametrize("line", ["{}", "[1]", "no JSON", '{"set": 1}'])
def test_a_line_that_is_no_sample_is_named(line, tmp_path):
    evaluated(tmp_path, SimulatedEngine())
    path = samples_path(tmp_path, "sums")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(KeptError, match=r"line 46: no sample of an evaluation"):
        evaluated(tmp_path, SimulatedEngine())


@pytest.mark.parametrize("content", ["[]", '{"sets": 1}', '{"sets": {"a": {}}}', "x"])
def test_results_that_are_none_are_refused(content, tmp_path):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(KeptError, match=re.escape("results.json: ")):
        evaluated(tmp_path, SimulatedEngine())


def test_a_sample_is_kept_with_all_that_a_reader_needs(tmp_path):
    evaluated(tmp_path, SimulatedEngine())
    row = json.loads(samples_path(tmp_path, "sums").read_text().splitlines()[0])
    assert row.keys() >= {
        "set", "id", "prompt_index", "kind", "number", "prompt", "label", "text", "answer", "reward",
        "correct", "error", "finish_reason", "num_tokens", "details",
    }  # fmt: skip
    assert (row["set"], row["prompt"]) == ("sums", f"question {row['prompt_index']}")


def test_another_set_is_added_beside_what_is_there(tmp_path):
    evaluated(tmp_path, SimulatedEngine())
    with KeptSamples(tmp_path, "/models/a", {"more": {"--seed": 1}}) as kept:
        assert kept.num_found == 0
    assert list(read_results(tmp_path)["sets"]) == ["sums", "more"]
    assert len(read_samples(tmp_path, "sums")) == 45
