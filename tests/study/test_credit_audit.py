import io

import numpy as np
import pytest
from rich.console import Console

from megatron_ibpo.basics.records import Correction, Group, Prompt, token_ids
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import write_config
from megatron_ibpo.credit import ThinkingMarks
from megatron_ibpo.data import load_tokenizer
from megatron_ibpo.study import credit_audit, instruments
from megatron_ibpo.study.credit_audit import (
    AuditedResponse,
    audit,
    audit_page,
    plot_audit,
    step_auc,
    step_shares,
)
from megatron_ibpo.study.instruments import correction_edits, modified_tokens, sibling_tokens
from support import live_loop
from support.credit_cases import response


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch):
    """A tenth of what an audit draws, which takes most of its time: what is told apart here is far apart."""
    monkeypatch.setattr(credit_audit, "RESAMPLES", 100)


def wrong(values, modified, *, prompt=0, phi=0.0, sibling=None):
    """A response of steps of two tokens each."""
    steps = list(range(0, 2 * len(values), 2))
    return AuditedResponse(prompt, steps, values, values, values, modified=modified, phi=phi, sibling=sibling)


def test_one_response_by_hand():
    """Four steps of two tokens; the value falls at the third, of which both tokens were changed."""
    one, another = (wrong([0.8, 0.8, 0.7, 0.1, 0.0], [0, 0, 0, 1, 1, 1, 0, 1], prompt=n) for n in (0, 1))
    shares = step_shares(one.modified, one.boundaries)
    assert shares.tolist() == [0.0, 0.5, 1.0, 0.5]
    assert one.drops == pytest.approx([0.0, 0.1, 0.6, 0.1])
    assert step_auc(shares, 2) == 1.0
    assert step_auc(shares, 1) == pytest.approx((1 + 0 + 0.5) / 3)  # above, below, tied
    assert one.nearness == pytest.approx((0.8 + 0.7 + 0.1) / 3)
    found = audit([one, another])
    mask = {name: measure["estimate"] for name, measure in found["mask"]["mask"].items()}
    assert mask["auc"] == 1.0
    assert mask["first_credited_step_is_the_error"] == 0.0  # a token of the second step came first
    assert found["position_of_the_drop"]["estimate"] == 0.75
    assert found["largest_drop"]["estimate"] == pytest.approx(0.6)


def policy(rng, count, *, mask_of, phi_of):
    """Responses of eight steps with one error each, of which sixteen rollouts tell."""
    made = []
    for number in range(count):
        error = int(rng.integers(1, 7))
        chance = np.array([0.8] * (error + 1) + [0.05] * (7 - error))
        halves = np.array([np.append(rng.binomial(8, chance) / 8, 0.0) for _ in range(2)])
        values, (first, second) = halves.mean(0), halves.tolist()
        modified, phi = mask_of(error, rng), phi_of(float(np.mean(values[1:-1])))
        steps = list(range(0, 25, 3))
        made.append(AuditedResponse(number // 3, steps, values.tolist(), first, second, modified, phi))
    return made


@pytest.mark.slow
def test_credit_that_follows_the_error_differs_from_random_credit(tmp_path):
    rng = np.random.default_rng(2)
    exactly = {"mask_of": lambda error, rng: [int(token // 3 == error) for token in range(24)]}
    responses = policy(rng, 45, **exactly, phi_of=lambda near: 0.5 * (near > 0.45))
    good = audit(responses)
    anywhere = {"mask_of": lambda error, rng: rng.permutation([1] * 3 + [0] * 21).tolist()}
    blind = audit(policy(rng, 45, **anywhere, phi_of=lambda near: 0.5 * rng.integers(2)))
    mask, above = good["mask"]["mask"], blind["mask_above_random_auc"]
    assert mask["auc"]["low"] > 0.85
    assert mask["first_credited_step_is_the_error"]["estimate"] > 0.85
    assert good["mask"]["ceiling: drops of the other rollouts"]["auc"]["estimate"] > 0.85
    assert good["mask_above_random_auc"]["low"] > 0.3
    assert above["low"] < 0 < above["high"]
    for found in (good, blind):
        random = found["mask"]["random masks of the same size"]
        assert random["auc"]["estimate"] == pytest.approx(0.5, abs=0.03), found
    follows, tossed = good["phi"], blind["phi"]
    assert follows["rank_correlation"]["low"] > 0.5
    assert tossed["rank_correlation"]["low"] < 0 < tossed["rank_correlation"]["high"]
    counts = {"responses_sampled": 512, "wrong": 90, "corrections": 90, "corrections_correct": 40}
    screen = io.StringIO()
    Console(file=screen, width=140).print(audit_page(counts | {"rollouts": 11440}, good))
    assert "512 responses were sampled; 90 are wrong. 40 of 90 corrections" in screen.getvalue()
    assert "The mask lies on the error more often than random tokens" in screen.getvalue()
    plot_audit(responses, good, tmp_path / "audit.png", title="audit")
    assert (tmp_path / "audit.png").stat().st_size > 10_000


def test_responses_without_a_clear_error_or_a_mask_are_counted():
    responses = [
        wrong([0.2, 0.1, 0.1, 0.0], [1] * 6, prompt=0),  # it never had much to lose
        wrong([0.9, 0.8, 0.1, 0.0], None, prompt=1),  # no correction earned credit
        wrong([0.9, 0.8, 0.1, 0.0], [0] * 6, prompt=2),  # its corrections only insert
        wrong([0.9, 0.0], [1, 1], prompt=3),  # a single step
        wrong([0.9, 0.8, 0.1, 0.0], [0, 0, 1, 1, 0, 0], prompt=4),
    ]
    found = audit(responses)
    assert (found["responses"], found["with_a_located_error"]) == (5, 3)
    assert (found["located_and_masked"], found["empty_masks"]) == (2, 1)
    # the empty mask points nowhere: it misses the error, and tells its step from no other
    assert found["mask"]["mask"]["first_credited_step_is_the_error"]["estimate"] == 0.5
    assert found["mask"]["mask"]["auc"]["estimate"] == (0.5 + 1) / 2
    with pytest.raises(ValueError, match="no wrong responses"):
        audit([])


def test_the_audit_also_scores_differences_to_correct_siblings():
    """The value falls over the second of three steps; a correction costs a generation, a sibling nothing."""
    cases = [
        ([0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0]),
        ([0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]),
        ([0, 0, 1, 0, 0, 0], None),  # no correct sibling
        (None, [0, 0, 0, 1, 0, 0]),  # no correction that earns credit
    ]
    values = [0.9, 0.8, 0.1, 0.0]
    found = audit([wrong(values, mask, sibling=own, prompt=n) for n, (mask, own) in enumerate(cases)])
    assert found["mask_equals_sibling"]["estimate"] == 0.5
    first = {name: s.get("first_credited_step_is_the_error") for name, s in found["mask"].items()}
    assert first["mask"]["estimate"] == 1.0
    assert first["difference to a correct sibling, same responses"]["estimate"] == 0.5


def group_of(responses, corrected):
    """Corrections of the first response: (content, correct, rewritten)."""
    prompt = Prompt(0, token_ids([1]), 1, "x", "t", "q")
    parts = [(response(ids, float(correct)), rewritten) for ids, correct, rewritten in corrected]
    return Group(prompt, responses, [Correction(0, (), own, rewritten=rewritten) for own, rewritten in parts])


def test_the_mask_joins_credited_corrections_and_a_sibling_has_one():
    def mask_of(group, marks=None, *, mark_insertions=False):
        (edits,) = correction_edits([group], marks, mark_insertions=mark_insertions)
        return modified_tokens(group, 0, edits)

    y = response([5, 6, 7, 8], 0.0)
    earning = [([9, 6, 7, 8], True, False), ([5, 6, 9, 8], True, False)]
    others = [([5, 9, 7, 8], False, False), ([5, 6, 7, 9], True, True)]
    assert mask_of(group_of([y], earning + others)) == [1, 0, 1, 0]
    assert mask_of(group_of([y], others)) is None
    # one that only inserts leaves an empty mask, or marks the token before
    inserting = group_of([response([5, 6, 7], 0.0)], [([5, 6, 9, 7], True, False)])
    assert mask_of(inserting) == [0, 0, 0]
    assert mask_of(inserting, mark_insertions=True) == [0, 1, 0]
    y, wrong_one = response([5, 6, 7, 8], 0.0), response([5, 6, 7, 9], 0.0)
    far, near = response([9, 9, 9, 8], 1.0), response([5, 6, 9, 8], 1.0)
    group = group_of([y, far, wrong_one, near], [])
    assert sibling_tokens(group, 0, None, mark_insertions=False) == [0, 0, 1, 0]
    assert sibling_tokens(group_of([y, wrong_one], []), 0, None, mark_insertions=False) is None
    # 80 opens and 81 closes thinking: it is hidden, counts as changed, and moves nothing after it
    marks = ThinkingMarks((80,), (81,))
    y = response([80, 5, 6, 81, 7, 8], 0.0)
    group = group_of([y], [([80, 9, 9, 9, 81, 7, 9], True, False)])
    assert mask_of(group, marks) == [1, 1, 1, 1, 0, 1]
    sibling = response([80, 4, 81, 3, 8], 1.0)
    group.responses.append(sibling)
    assert sibling_tokens(group, 0, marks, mark_insertions=False) == [1, 1, 1, 1, 1, 0]


@pytest.fixture
def audited_run(tmp_path, monkeypatch):
    """Audit a run of these flags whose policy writes lines of 1 and 2, what the seed of a request says;
    returns what `audit_responses` does, and the requests by seed."""
    engine, scratch = live_loop.Engine(), tmp_path / "scratch"

    def open_engine(config, foundation, stack):
        assert (config.run.run_dir, foundation.hf_dir) == (scratch, live_loop.MODEL)
        return engine

    monkeypatch.setattr(live_loop, "LETTERS", (5, 6, 27))
    live_loop.put_in_place_of_processes(monkeypatch, instruments, open_engine)

    def run(*flags, responses, policy="start"):
        write_config(live_loop.config_of(tmp_path, *flags), tmp_path / "config.yaml")
        asked = {"prompts": 3, "responses": responses, "rollouts": 4, "seed": 1, "policy": policy}
        found = instruments.audit_responses(tmp_path, scratch, **asked)
        return *found, {request.seed: request for request in engine.asked}

    return run


def test_wrong_responses_are_corrected_and_continued_from_every_step(audited_run):
    """With the seeds of a run's first step. (Of an answer that ends, the last token counts as its end.)"""
    audited, readable, counts, asked = audited_run("--ibpo-rewrite-threshold", "1", responses=100)
    decode, rows = load_tokenizer(live_loop.MODEL).decode, list(live_loop.questions("eval"))

    def written(*keys):
        return live_loop.written(asked[derive_seed(*keys)])

    def right(prompt, *parts):
        text, row = decode(np.concatenate(parts).astype(int)), rows[prompt]
        return live_loop.reward(row["prompt"], text, row["label"], {})

    answers = [(p, i, written("sample", 1, 0, p, i)) for p in range(3) for i in range(3)]
    wrong = [(p, i, ids) for p, i, ids in answers if not right(p, ids)]
    corrected = [[right(p, written("correction", 1, 0, p, i, m)) for m in range(2)] for p, i, _ in wrong]
    for found, text, (p, _, ids), successes in zip(audited, readable, wrong, corrected, strict=True):
        *starts, end = found.boundaries
        assert (found.prompt, "".join(text["steps"])) == (p, decode(ids[:end]))
        assert [*starts, end] == np.cumsum([0, *map(len, text["steps"])]).tolist()
        scored = [[right(p, ids[:b], written("audit", 1, p, *ids, b, n)) for n in range(4)] for b in starts]
        ends = np.array(scored)
        halves = [[*ends[:, first::2].mean(1), 0.0] for first in range(2)]
        assert [found.values, found.first_half, found.second_half] == [[*ends.mean(1), 0.0], *halves]
        assert found.phi == 0.5 * np.mean(successes)
        assert (found.modified is None) == (found.phi == 0)
        assert (found.sibling is None) == (not any(right(q, ids) for q, _, ids in answers if q == p))
    number = {"responses_sampled": 9, "wrong": 7, "corrections": 14, "corrections_correct": 3}
    assert counts == number | {"skipped_pairs": 0, "rollouts": len(asked) - 9 - 14}


@pytest.mark.slow
def test_a_run_without_corrections_is_corrected_and_audited(audited_run, monkeypatch):
    at = live_loop.FLAGS.index("--ibpo-corrections")
    monkeypatch.setattr(live_loop, "FLAGS", live_loop.FLAGS[:at] + live_loop.FLAGS[at + 2 :])
    everything, *_ = audited_run(responses=8)
    drawn, readable, counts, _ = audited_run("--ibpo-operator", "none", responses=3)
    places = [(one.prompt, one.boundaries) for one in everything]
    numbers = [places.index((one.prompt, one.boundaries)) for one in drawn]
    assert numbers == [0, 1, 4]  # drawn, in their order
    assert (len(readable), counts["wrong"], counts["corrections"]) == (3, 7, 7)
    # what the context of a run has no room for is counted and not made
    _, _, counts, _ = audited_run("--rollout-max-context-len", "20", responses=1)
    assert (counts["wrong"], counts["corrections"], counts["skipped_pairs"]) == (7, 0, 7)
    with pytest.raises(ValueError, match=r"hf holds no policy: .* --policy start"):
        audited_run(responses=1, policy="end")
