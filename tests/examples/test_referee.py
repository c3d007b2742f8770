"""The referee of frozen policies: gradients, coefficients, and estimates beside exact enumeration."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from frozen_policy import Contender
from gradient_records import (
    PromptRecord,
    credit_of_records,
    follow_up_requests,
    make_compass,
    packed,
    record_prompts,
    request_key,
    response_requests,
    unpacked,
)
from method_verdicts import judge, measure, prices
from referee import measured_positions, require_prompts
from sequence_gradients import (
    GradientQuery,
    SequenceGradients,
    query_of,
    score_query,
    transformers_gradients,
)

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import Config, RolloutConfig
from megatron_ibpo.credit import Vocabulary, credit_of, find_method
from megatron_ibpo.loss import LossRows, make_objective, policy_loss
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.policy.logits_check import transformers_model
from megatron_ibpo.study.plan import Task
from support.credit_cases import context
from support.paths import ROOT
from support.samples import sample_of

TINY = ROOT / "examples/tiny_qwen3"
RESPONSES = [token_ids(ids) for ids in product((0, 1), repeat=2)]
TABLE = 0.5 * torch.randn(8, 2, 2, generator=torch.Generator().manual_seed(3))
"""[place, token, next token]: a policy over two tokens. Corrections are written at places of their own."""
METHODS = {
    "gspo": {},
    "ibpo": {},
    "joint": {"preset": "ibpo-joint-only"},
    "plain": {"preset": "ibpo", "ibpo_lambda": 0.0, "ibpo_joint": False,
              "ibpo_plain_prompt": "successful", "ibpo_rewrite_threshold": 1.0},
    "masked": {"preset": "ibpo-mask", "ibpo_rewrite_threshold": 1.0},
    "weighed": {"preset": "wrong-weight"},
}  # fmt: skip


def toy_gradients():
    return SequenceGradients(
        {"table": TABLE}, lambda parameters, ids: parameters["table"][torch.arange(len(ids)), ids]
    )


def prompt_at(index):
    return Prompt(index, token_ids([index % 2]), 1, "", "toy", "")


def reward(prompt, ids):
    return float(ids[0] == prompt.token_ids[0] and ids[1] == 1)


@cache
def chances(prompt_ids):
    """The policy's probability of each response."""

    def chance(ids):
        read = [*prompt_ids, *ids]
        places = range(len(prompt_ids) - 1, len(read) - 1)
        return float(np.prod([TABLE[place, read[place]].softmax(-1)[read[place + 1]] for place in places]))

    return [chance(ids) for ids in RESPONSES]


def sampled(prompt, request, ids):
    right = reward(prompt, ids)
    return sample_of(request.prompt_token_ids, ids, finish_reason="length", reward=right, correct=bool(right))


def answers(requests):
    def drawn(prompt, request):
        weights = chances(tuple(request.prompt_token_ids.tolist()))
        place = np.random.default_rng(request.seed).choice(4, p=np.array(weights) / sum(weights))
        return sampled(prompt, request, RESPONSES[place])

    return [drawn(prompt, request) for prompt, request in requests]


def contender(name, size=2):
    algorithm = credit_of(**{"preset": name} | METHODS[name])
    rollout = RolloutConfig(rollout_max_response_len=2, n_samples_per_prompt=size)
    words = Vocabulary(lambda prompt, target, others: np.concatenate([prompt.token_ids, target, *others]))
    credit = replace(context(algorithm, rollout=rollout), vocabulary=words)
    config = Config(algorithm=algorithm, rollout=rollout)
    return Contender(name, config, find_method(algorithm), credit, read_hf_config(TINY))


def outcomes(method):
    """Yield (probability, record) of everything that may happen at a prompt."""
    for prompt in map(prompt_at, (0, 1)):
        plain = zip(chances(tuple(prompt.token_ids.tolist())), RESPONSES, strict=True)
        for written in product(list(plain), repeat=method.size):
            record = PromptRecord(prompt)
            for request, (_, ids) in zip(response_requests(method, prompt), written, strict=True):
                record.samples[request_key(request)] = sampled(prompt, request, ids)
            probability = 0.5 * np.prod([chance for chance, _ in written])
            asked = [each.request for each in follow_up_requests(method, record)[1]]
            ways = [
                list(zip(chances(tuple(each.prompt_token_ids.tolist())), RESPONSES, strict=True))
                for each in asked
            ]
            for corrected in product(*ways):
                further = {
                    request_key(request): sampled(prompt, request, ids)
                    for request, (_, ids) in zip(asked, corrected, strict=True)
                }
                whole = PromptRecord(prompt, record.samples | further)
                yield probability * np.prod([chance for chance, _ in corrected]), whole


def contribution(sequences, gradients):
    queries, coefficients = zip(*map(query_of, sequences), strict=True)
    return torch.tensor(coefficients, dtype=torch.float32) @ gradients.each(queries)


def scores(gradients):
    """Yield (probability, prompt, response, score) of every plain response."""
    for prompt in map(prompt_at, (0, 1)):
        for chance, ids in zip(chances(tuple(prompt.token_ids.tolist())), RESPONSES, strict=True):
            yield 0.5 * chance, prompt, ids, gradients.each([score_query(prompt.token_ids, ids)])[0]


def exact(method):
    """Return S, V and C of a method by enumeration."""
    gradients = toy_gradients()
    plain = list(scores(gradients))
    star = sum(chance * reward(prompt, ids) * score for chance, prompt, ids, score in plain)
    chances_of_cases, moved, costs = [], [], []
    rows = {}
    for chance, record in outcomes(method):
        groups, credit = credit_of_records(method, [record])
        chances_of_cases.append(chance)
        costs.append(prices(method.shape, groups[0], credit.sequences)[0])
        total = torch.zeros(gradients.size)
        for query, coefficient in map(query_of, credit.sequences):
            if query.key not in rows:
                rows[query.key] = gradients.each([query])[0]
            total += coefficient * rows[query.key]
        moved.append(total.numpy())
    chance_C, moved_CD, cost_C = map(np.array, (chances_of_cases, moved, costs))
    assert chance_C.sum() == pytest.approx(1)
    noise = 0.0
    for chance, _, _, score in plain:
        along = moved_CD @ score.numpy()
        noise += chance * (chance_C @ along**2 - (chance_C @ along) ** 2)
    return (chance_C @ moved_CD) @ star.numpy(), noise, chance_C @ cost_C


def within(values, expected, *parts):
    """Whether a mean is within four standard errors of what is expected; each part adds its variance."""
    error = np.sqrt(sum(np.var(part, ddof=1) / len(part) for part in parts))
    assert error < 0.25 * abs(expected), "the test would see nothing"
    return abs(np.mean(values) - expected) < 4 * error


@pytest.fixture(scope="module")
def toy():
    """Records of the toy policy, and the directions that they are compared with."""
    gradients = toy_gradients()
    compass = make_compass(prompt_at, answers, gradients, num_star=160, num_scores=160, longest=2)
    methods = {name: contender(name) for name in METHODS}
    prompts = [prompt_at(compass.num_prompts + index) for index in range(100)]  # none that g* is made from
    records = record_prompts(prompts, list(methods.values()), answers, gradients, compass)
    return methods, records, compass


@pytest.mark.parametrize("name", ["gspo", "ibpo"])
def test_the_referees_estimates_converge_to_exact_enumeration(toy, name):
    methods, records, _ = toy
    measured, (signal, noise, cost) = measure(methods[name], records), exact(methods[name])
    own = measured.signal[0]
    assert within(own, signal, own.mean(axis=1), own.mean(axis=0))
    spread = (measured.projections[0] - measured.projections[0].mean(axis=0)) ** 2
    assert within(spread, noise, spread.mean(axis=1), spread.mean(axis=0))
    assert within(measured.cost[0], cost, measured.cost[0])


def test_noise_orthogonal_to_the_compass_costs_no_efficiency(toy):
    """Corrections of the toy are written with parameters of their own, so joint training leaves S and V."""
    methods, records, compass = toy
    star_scores = (compass.star @ compass.scores.T).double().numpy()
    verdict = judge(measure(methods["joint"], records), measure(methods["gspo"], records), star_scores)
    assert verdict.signal.value == pytest.approx(1)
    assert verdict.noise.value == pytest.approx(1)
    assert verdict.euclidean_noise.low > 1
    assert verdict.efficiency["free"].value == pytest.approx(1 / verdict.cost["free"])


@pytest.mark.parametrize("name", METHODS)
def test_coefficients_times_gradients_are_the_gradient_of_the_loss(toy, name):
    """The advantages, token weights and surrogates are those of `assign_credit` and of the trainer's loss."""
    methods, records, _ = toy
    _, credit = credit_of_records(methods[name], records[:40])
    live = [sequence for sequence in credit.sequences if sequence.has_advantage]
    assert any(sequence.off_policy for sequence in live) == (name == "plain")
    assert any(sequence.token_weights is not None for sequence in live) == (name in ("masked", "weighed"))
    table = TABLE.clone().requires_grad_()
    loss = sum(loss_of(table, sequence) for sequence in live)
    loss.backward()
    torch.testing.assert_close(contribution(credit.sequences, toy_gradients()), -table.grad.flatten())


def loss_of(table, sequence):
    ids = torch.tensor([*sequence.prompt_token_ids, *sequence.response_token_ids]).long()
    logits = table[torch.arange(len(ids) - 1), ids[:-1]]
    first = len(sequence.prompt_token_ids) - 1
    mask, weights = torch.zeros(len(logits)), torch.ones(len(logits))
    mask[first:] = 1
    if sequence.token_weights is not None:
        weights[first:] = torch.from_numpy(sequence.token_weights).float()
    rows = LossRows(
        targets_N=ids[1:],
        response_mask_N=mask,
        cu_seqlens=torch.tensor([0, len(logits)], dtype=torch.int32),
        advantages=torch.tensor([sequence.advantage]),
        token_weights_N=weights,
        sequence_weights_S=torch.tensor([sequence.weight]),
        off_policy_S=torch.tensor([True]) if sequence.off_policy else None,
    )
    return policy_loss(logits, rows, make_objective("gspo", backend="torch"))[0]


@pytest.mark.slow
def test_gradients_of_sequences_equal_single_backward_passes():
    gradients, model = transformers_gradients(TINY), transformers_model(TINY, torch.float32)
    rng = np.random.default_rng(0)
    queries = [
        GradientQuery(
            token_ids(rng.integers(3, 60, 4 + place)),
            token_ids(rng.integers(3, 60, 7 - place)),
            rng.random(7 - place),
            off_policy=place == 2,
        )
        for place in range(3)
    ]
    rows = gradients.each(queries)
    for query, row in zip(queries, rows, strict=True):
        model.zero_grad()
        ids = torch.from_numpy(np.concatenate([query.prompt_ids, query.response_ids])).long()
        logprobs = model(ids[None]).logits[0, len(query.prompt_ids) - 1 : -1].log_softmax(-1)
        values = logprobs.gather(1, ids[len(query.prompt_ids) :, None])[:, 0]
        values = values.exp() / (values.exp() + 0.1) if query.off_policy else values
        (values @ torch.from_numpy(query.weights).float()).backward()
        expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(gradients.sum(queries, [1.0, -2.0, 0.5]), torch.tensor([1, -2, 0.5]) @ rows)


def test_no_prompt_serves_both_the_compass_and_a_record():
    taken = []

    def noted(position):
        taken.append(position)
        return prompt_at(position)

    compass = make_compass(noted, answers, toy_gradients(), num_star=170, num_scores=7, longest=2)
    for file in range(3):
        taken += measured_positions(compass, file)
    assert taken == list(range(11 * 16 + 7 + 3 * 10))


def test_a_task_with_too_few_prompts_is_refused():
    require_prompts(Task("endless", {}), 0, 50)
    require_prompts(Task("enough", {}), 50, 50)
    with pytest.raises(ValueError, match="task short: has 49 prompts"):
        require_prompts(Task("short", {}), 49, 50)


def test_a_record_survives_its_file_and_refuses_missing_samples(toy):
    methods, records, _ = toy
    again = [unpacked(packed(record), prompt_at) for record in records[:20]]
    for name, method in methods.items():
        before, after = measure(method, records[:20]), measure(method, again)
        np.testing.assert_allclose(after.projections, before.projections, rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(after.cost, before.cost)
    with pytest.raises(ValueError, match="sample that was not recorded"):
        measure(contender("gspo", size=3), again)
