"""A prompt of several sequences goes through the trainer's model once, and nothing else changes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.config import Config, ConfigError, check_config
from megatron_ibpo.engines.registry import on_device
from megatron_ibpo.policy.packing import lay_out, pack
from megatron_ibpo.policy.planning import plan_update
from support import planned
from support.layouts import layout
from support.planned import cost
from support.tiny_models import make_gpt_oss, make_olmo2, make_qwen3_5
from support.train_sequences import sequence, with_holes
from support.trainers import (
    COMPARED,
    assert_close,
    close_trainer,
    config_for,
    moved,
    open_trainer,
    weights_of,
)


def sharing(parallel=None, *, shared=True, **settings):
    config = config_for(parallel or layout(), **settings)
    config.model.share_prompts = shared
    return config


def families(prompts=(1, 2, 3, 30, 70, 33, 4), seed=0):
    """Draw uneven families, two with prompts of similar lengths; the last sequence is one by itself."""
    draw = np.random.default_rng(seed)
    rows = []
    for group, length in enumerate(prompts):
        prompt = draw.integers(2, 60, length).tolist()
        for _ in range(draw.integers(2, 5) if group < len(prompts) - 1 else 1):
            response = draw.integers(2, 60, draw.integers(1, 50)).tolist()
            engine = (-4.2 + 0.05 * draw.standard_normal(len(response))).tolist()
            weight, advantage = 1 / 8, float(draw.choice([-1.5, 0.5, 1.0]))
            rows.append(sequence(prompt, response, advantage=advantage, weight=weight, group=group,
                                 rollout_logprobs=engine))  # fmt: skip
    order = draw.permutation(len(rows))
    return with_holes([rows[i] for i in order])


def test_two_families_and_a_whole_sequence_are_packed_by_hand():
    """Prompts 7 8 9 and 5 6; rows: four continuations, then 3 1, then the roots 7 8 and 5, then padding."""
    rows = [
        sequence([7, 8, 9], [1, 2], advantage=1.0, weight=0.5, group=0, rollout_logprobs=[-1.0, -2.0]),
        sequence([3], [1, 4], advantage=2.0, weight=0.5, group=1, rollout_logprobs=[-3.0, -4.0]),
        sequence([5, 6], [8], advantage=3.0, weight=0.5, group=2, rollout_logprobs=[-5.0]),
        sequence([7, 8, 9], [4], advantage=4.0, weight=0.5, group=0, rollout_logprobs=[-6.0]),
        sequence([5, 6], [1, 1], advantage=5.0, weight=0.5, group=2, rollout_logprobs=[-7.0, -8.0]),
    ]
    (batch,) = plan_update(rows, sharing(), 1, cost).shares[0][0].cut.micro_batches
    assert (batch.members, batch.siblings) == ((0, 3, 2, 4, 1), (2, 2))
    laid_out = lay_out(pack(batch), multiple=4, device=torch.device("cpu"))
    assert laid_out.input_ids_1N.tolist() == [[9, 1, 9, 6, 6, 1, 3, 1, 7, 8, 5, 0]]
    assert laid_out.position_ids_1N.tolist() == [[2, 3, 2, 1, 1, 2, 0, 1, 0, 1, 0, 0]]
    assert laid_out.rows.targets_N.tolist() == [1, 2, 4, 8, 1, 1, 1, 4, 8, 9, 6, 0]
    assert laid_out.rows.response_mask_N.tolist() == [1] * 8 + [0] * 4
    assert laid_out.rows.rollout_logprobs_N.tolist() == [-1, -2, -6, -5, -7, -8, -3, -4, 0, 0, 0, 0]
    assert laid_out.rows.cu_seqlens.tolist() == [0, 2, 3, 4, 6, 8, 12], "roots and padding are one more"
    assert laid_out.rows.advantages.tolist() == [1, 4, 3, 5, 2, 0]
    model = laid_out.sequences
    assert (model.cu_seqlens_q.tolist(), model.max_seqlen_q) == ([0, 2, 3, 4, 6, 8, 10, 11, 12], 4)
    shared = model.continuations
    assert (shared.rows, shared.cu_seqlens.tolist()) == (6, [0, 2, 3, 4, 6])
    assert (shared.cu_roots.tolist(), shared.root_C.tolist()) == ([0, 2, 4, 5, 6], [1, 1, 2, 2])
    assert shared.positions_N.tolist() == laid_out.position_ids_1N[0].tolist()
    assert laid_out.places_R.tolist() == list(range(8))
    assert laid_out.places_T.tolist() == [8, 9, 0, 1, 8, 9, 2, 10, 3, 10, 4, 5, 6, 7]


DRAWN = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=40)
"""Family and response tokens of each sequence."""


def drawn_rows(drawn):
    """Make prompts of 1, 2, 5, 10 and 17 tokens, a family's all the same."""
    prompts = [list(range(3, 3 + length)) for length in (1, 2, 5, 10, 17)]
    return [
        sequence(prompts[family], [number % 50 + 2] * tokens, advantage=1.0, weight=0.5, group=family)
        for number, (family, tokens) in enumerate(drawn)
    ]


def load(rows):
    """Return the cost of a pass, which has each prompt once."""
    prompts = {row.prompt_token_ids.tobytes(): len(row.prompt_token_ids) for row in rows}
    own = sum(cost(row.num_tokens) - cost(len(row.prompt_token_ids)) for row in rows)
    return own + sum(cost(length) for length in prompts.values())


@given(DRAWN, st.integers(1, 4), st.integers(30, 200))
def test_micro_batches_of_even_ranks_hold_each_prompt_once(drawn, ranks, max_tokens):
    """No sequence would even the fullest and the emptiest rank out if it moved from one to the other."""
    rows = drawn_rows(drawn)
    shares = plan_update(rows, sharing(max_tokens=max_tokens), ranks, cost).shares
    batches_by_rank = [share[0].cut.micro_batches for share in shares]
    assert sorted(i for batches in batches_by_rank for b in batches for i in b.members) == [*range(len(rows))]
    for batch in (batch for batches in batches_by_rank for batch in batches):
        laid_out = lay_out(pack(batch), multiple=1, device=torch.device("cpu"))
        prompts = {row.prompt_token_ids.tobytes(): len(row.prompt_token_ids) for row in batch.sequences}
        tokens = sum(prompts.values()) + sum(len(row.response_token_ids) for row in batch.sequences)
        assert laid_out.input_ids_1N.shape[1] <= max(1, tokens)
        assert tokens <= max_tokens or len(batch.members) == 1
        read = [[*row.prompt_token_ids, *row.response_token_ids][:-1] for row in batch.sequences]
        assert laid_out.input_ids_1N[0][laid_out.places_T].tolist() == [
            token for own in read for token in own
        ]
        places = [place for own in read for place in range(len(own))]
        assert laid_out.position_ids_1N[0][laid_out.places_T].tolist() == places
    by_rank = [[row for batch in batches for row in batch.sequences] for batches in batches_by_rank]
    loads = [load(own) for own in by_rank]
    fullest, emptiest = by_rank[loads.index(max(loads))], by_rank[loads.index(min(loads))]
    for place, row in enumerate(fullest if ranks > 1 else []):
        moved_loads = load(fullest[:place] + fullest[place + 1 :]), load([*emptiest, row])
        assert max(moved_loads) > max(loads) * (1 - 1e-9)


def test_a_short_response_joins_its_family():
    """And not the first gap, of the 8 tokens that it has with its prompt, beside the long sequence."""
    shapes = (([1] * 17, 5), ([2] * 5, 10), ([2] * 5, 3))
    rows = [sequence(prompt, [3] * tokens, advantage=1.0, weight=0.5, group=0) for prompt, tokens in shapes]
    batches = plan_update(rows, sharing(max_tokens=30), 1, cost).shares[0][0].cut.micro_batches
    assert [(batch.members, batch.siblings) for batch in batches] == [((0,), ()), ((1, 2), (2,))]


def test_prompts_are_shared_on_cpus_unless_another_setting_excludes_it(shapes):
    def resolved(config, on_gpu=False):
        return on_device(config, shapes["dense"], on_gpu=on_gpu).shares_prompts

    assert resolved(Config()) is True
    assert resolved(Config(), on_gpu=True) is False
    assert resolved(on_device(Config(), shapes["dense"], on_gpu=False), on_gpu=True) is False
    assert resolved(sharing(shared=False)) is False
    with pytest.raises(ValueError, match="--share-prompts True: the kernels of GPUs take whole sequences"):
        resolved(sharing(), on_gpu=True)
    excluding = {
        "--context-parallel-size": lambda config: setattr(config.parallel, "context_parallel_size", 2),
        "--use-routing-replay": lambda config: setattr(config.loss, "use_routing_replay", True),
        "--use-rollout-routing-replay": (
            lambda config: setattr(config.rollout, "use_rollout_routing_replay", True)
        ),
        "--moe-aux-loss-coeff": lambda config: setattr(config.model, "moe_aux_loss_coeff", 0.1),
        "--mtp-num-layers": lambda config: setattr(config.model, "mtp_num_layers", 1),
        "--model-override moe_z_loss_coeff": (
            lambda config: setattr(config.model, "model_override", ("moe_z_loss_coeff=0.001",))
        ),
    }
    for flag, exclude in excluding.items():
        config = Config()
        exclude(config)
        assert resolved(config) is False, flag
        config.model.share_prompts = True
        with pytest.raises(ConfigError, match=f"--share-prompts True: {flag} needs whole sequences"):
            check_config(config)


def passes(world, hf_dir, config, rows):
    """Return log-probs before an update, its metrics and its gradients by name (rank 0)."""
    trainer, export, _ = open_trainer(world, hf_dir, config)
    logprobs, before = planned.logprobs(trainer, rows), weights_of(export)
    metrics = planned.update(trainer, rows)
    after = weights_of(export)
    close_trainer()
    return logprobs, metrics, moved(before, after)


def compare(world, hf_dir, rows, *case, parallel=None, **settings):
    """Compare shared prompts with whole sequences."""
    configs = [sharing(parallel, shared=shared, **settings) for shared in (False, True)]
    whole, shared = (passes(world, hf_dir, config, rows) for config in configs)
    for own, other in zip(shared[0], whole[0], strict=True):
        assert own == pytest.approx(other, abs=2e-5), case
    for name in {*COMPARED} & whole[1].keys():
        assert shared[1][name] == pytest.approx(whole[1][name], rel=2e-4, abs=1e-6), (*case, name)
    assert_close(shared[2], whole[2], *case)


MADE = {"oss": make_gpt_oss, "olmo2": make_olmo2, "3.5": make_qwen3_5}


@pytest.mark.world(1)
@pytest.mark.parametrize("model", ["dense", "next", *MADE])
def test_gradients_and_log_probs_are_those_of_whole_sequences(world, checkpoints, tmp_path, model):
    """In one micro-batch and in several, with windows and sinks, and with delta nets, whose convolutions look
    further back than the shorter prompts reach."""
    hf_dir = checkpoints[model] if model not in MADE else MADE[model](tmp_path / model, 4, std=0.1)
    for max_tokens in (1000, 90):
        compare(world, hf_dir, families(), model, max_tokens, max_tokens=max_tokens)


@pytest.mark.world(2)
def test_ranks_that_divide_layers_or_sequences_share_prompts_too(world, checkpoints):
    """The second mini-batch needs old log-probs, with micro-batches of its own; the fused head sees roots."""
    for name, parallel in (
        ("dense", layout(tp=2)),
        ("dense", layout()),
        ("next", layout(tp=2, ep=2)),
        ("next", layout(pp=2)),
    ):
        own = {"num_steps_per_rollout": 2, "log_probs_tokens": 120, "fuse_lm_head": True}
        compare(world, checkpoints[name], families(), name, parallel, parallel=parallel, **own)
