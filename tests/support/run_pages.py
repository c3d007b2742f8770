"""Writes the directories of runs for the page, with text that would harm one that does not escape it."""

import json

import numpy as np
from tiny_tokenizer import make_tiny_tokenizer

from megatron_ibpo.basics.records import Correction, Group, Prompt, TrainSequence, token_ids
from megatron_ibpo.credit.explanation import GroupExplanation, Line, SampleExplanation
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer
from megatron_ibpo.report import rollout_path, save_groups
from support.samples import sample_of

HOSTILE = "</script><script>window.harmed=1</script><img src=x onerror=window.harmed=1>\u2028&lt;${TITLE}"
TOKENIZER = HuggingFaceTokenizer(make_tiny_tokenizer())


def response(text, correct, prompt=(1, 5), **fields):
    fields = {"reward": float(correct), "correct": correct} | fields
    return sample_of(prompt, [*TOKENIZER.encode(text), TOKENIZER.eos_id], **fields)


def correction(target, references, text, correct, *, rewritten=False):
    made = Correction(target, tuple(references), response(text, correct, prompt=(1, 2)))
    made.distance, made.reference_distance, made.rewritten, made.unmodified_share = 0.25, 0.5, rewritten, 0.75
    return made


def sequence(group, kind, index, of, advantage, **fields):
    return TrainSequence(
        prompt_token_ids=of.prompt_token_ids, response_token_ids=of.token_ids, loss_mask=of.loss_mask,
        advantage=advantage, weight=0.125, prompt_index=0, group=group, index=index, kind=kind, **fields,
    )  # fmt: skip


def record_run(place):
    """Write two recorded steps: a success, a rewrite, a no-op, a failure, and a response left alone."""
    prompt = Prompt(0, token_ids([1, 5]), 2, HOSTILE, "sum", HOSTILE)
    wrong, right = response("6+7=3", False), response("6+7=13", True)
    kept = response("1+1=2", True, finish_reason="length")
    failed = response("2", False, reward=None, reward_error="timed out")
    responses = [wrong, right, *(response(text, False) for text in ("6+7=?", "9", "7+6=1"))]
    corrections = [
        correction(0, [1], "6+7=13", True), correction(2, [1], "0=0#13", True, rewritten=True),
        correction(3, [1], "9", False), correction(4, [1], "7+6=2", False),
    ]  # fmt: skip
    others = [response("2", False), kept, failed]
    groups = [Group(prompt, responses, corrections), Group(prompt, others, skipped_pairs=1)]
    trained = [
        sequence(0, "response", 0, wrong, 0.75, token_weights=np.array([0.0, 0.0, 0.0, 0.0, 1.0, 0.0])),
        sequence(0, "response", 1, right, 1.5),
        sequence(0, "correction", 3, corrections[3].response, -1.0),
        sequence(1, "response", 1, kept, 1.0, token_advantages=np.array([0.5, 0.0, -0.5, 1.0, 2.0, 0.0])),
    ]
    old = [np.full(len(s.response_token_ids), -0.5, np.float32) for s in trained]
    new = [np.array([-0.4, -0.5, -0.6, -0.5, -0.7, -0.5], np.float32), *old[1:]]
    told = Line("shaped reward r′", 0.3, "r + λφ = 0 + 0.6·0.5", HOSTILE), Line(HOSTILE, HOSTILE, HOSTILE)
    lines = [SampleExplanation([*told, Line("group mean", 0.46), Line("group σ", 0.4)])]
    explanations = [
        GroupExplanation(lines * len(own.responses), lines * len(own.corrections)) for own in groups
    ]
    written = {"old_logprobs": old, "new_logprobs": new, "explanations": explanations}
    return write_run(place / "run", groups, trained, **written)


def write_run(run, groups, trained=(), *, steps=(1, 2), **written):
    run.mkdir()
    config = {"advantage-estimator": "ibpo", "hf-checkpoint": "moved/away/tiny_qwen3", "num-rollout": 2}
    (run / "config.yaml").write_text(json.dumps(config))
    TOKENIZER._tokenizer.save_pretrained(run / "tokenizer")
    rows = [{"kind": "evaluation", "step": 0, "accuracy": 0.5, "seconds": {}}]
    common = {"kind": "step", "gradient_snr": None, "seconds": {"sample": 2.0}}
    rows += [common | {"step": step, "reward": 0.1 * step} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in steps:
        path = rollout_path(run / "rollouts", step)
        save_groups(path, step, groups, TOKENIZER.decode, trained, **written)
    return run
