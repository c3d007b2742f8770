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
        for index in np.random.default_rng(0).permutation(len(asked)).tolist():
            if len(self.asked) == self.dies_after:
                raise Killed
            one = asked[index]
            self.asked.append(one.key)
            request = one.request
            written = [1 + request.seed % 3, int(request.prompt_token_ids[-1])]
            logprobs = np.array([-0.25, -request.seed % 7], np.float32)
            sample = Sample(
                request.prompt_token_ids, token_ids(written), logprobs, "stop", request.temperature,
                versions=((0, 0),), loss_mask=np.ones(2, bool),
            )  # fmt: skip
            if one.key in self.failing:
                sample.reward_error = "no sandbox"
            else:
                sample.reward, sample.correct = float(written[0] == 1), written[0] == 1
            answer = lambda _, text: text  # noqa: E731
            each(index, eval_sample("sums", one, sample, str(written), answer, keep_tokens=True))


def evaluated(directory, engine=None, settings=SETTINGS, *, corrects=True):
    """A whole evaluation in one process: (summary, samples)."""

    def prompt_ids(prompt, shown):
        return token_ids([prompt.index, *(s.token_ids[0] for s in shown), 9])

    with KeptSamples(directory, "/models/a", {"sums": settings}) as kept:

        def ask(asked):
            return answered(asked, kept.found("sums"), engine or SimulatedEngine(), kept.add)

        corrector = Corrector(prompt_ids, 2, 64) if corrects else None
        return evaluate(PROMPTS, ask, SAMPLING, has_answers=True, corrector=corrector)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return evaluated(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(("dies_after", "cut"), [(0, 0), (1, 0), (10, 5), (13, 0), (24, 0), (25, 0), (44, 0)])
def test_an_evaluation_that_is_killed_goes_on_where_it_stopped(dies_after, cut, tmp_path, undisturbed):
    """20 samples and 5 greedy ones, then 20 corrections: killed anywhere, nothing is asked twice but what
    a line was not finished for, and what comes out is what would have come out."""
    first, second, third = SimulatedEngine(dies_after), SimulatedEngine(), SimulatedEngine()
    with pytest.raises(Killed):
        evaluated(tmp_path, first)
    assert read_results(tmp_path)["status"] == "unfinished"
    if cut:
        path = samples_path(tmp_path, "sums")
        path.write_bytes(path.read_bytes()[:-cut])
    assert evaluated(tmp_path, second) == undisturbed
    assert set(first.asked) & set(second.asked) == ({first.asked[-1]} if cut else set())
    assert len({*first.asked, *second.asked}) == 45
    assert {sample.key for sample in read_samples(tmp_path, "sums")} == {s.key for s in undisturbed[1]}
    assert evaluated(tmp_path, third) == undisturbed
    assert third.asked == []


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


def test_samples_of_other_settings_and_lines_that_are_none_are_refused(tmp_path):
    evaluated(tmp_path)
    path = samples_path(tmp_path, "sums")
    before = path.read_text()
    other = SETTINGS | {"--eval-temperature": 0.7, "policy": "bbbb"}
    differs = "policy was 'aaaa', is 'bbbb'; --eval-temperature was 0.6, is 0.7"
    with pytest.raises(KeptError, match=differs):
        evaluated(tmp_path, settings=other)
    assert path.read_text() == before
    first = json.loads(before.splitlines()[0])
    assert first.keys() >= {
        "set", "id", "prompt_index", "kind", "number", "prompt", "label", "text", "answer", "reward",
        "correct", "error", "finish_reason", "num_tokens", "details",
    }  # fmt: skip
    assert (first["set"], first["prompt"]) == ("sums", f"question {first['prompt_index']}")
    unsettled = json.dumps(first | {"settings": "0" * 16})
    none = "no sample of an evaluation"
    for line, says in [(unsettled, "made by other settings"), *((x, none) for x in ("{}", "[1]", "no JSON"))]:
        path.write_text(f"{before}{line}\n")
        with pytest.raises(KeptError, match=rf"sums\.samples\.jsonl, line 46: {says}"):
            evaluated(tmp_path)
    (tmp_path / "results.json").unlink()
    with pytest.raises(KeptError, match="the settings it was made with are not recorded"):
        evaluated(tmp_path)
    for content in ("[]", '{"sets": 1}', '{"sets": {"a": {}}}', "x"):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(KeptError, match=re.escape("results.json: ")):
            evaluated(tmp_path)


def test_another_set_is_added_beside_what_is_there(tmp_path):
    evaluated(tmp_path)
    with KeptSamples(tmp_path, "/models/a", {"more": {"--seed": 1}}) as kept:
        assert kept.num_found == 0
    assert list(read_results(tmp_path)["sets"]) == ["sums", "more"]
    assert len(read_samples(tmp_path, "sums")) == 45
