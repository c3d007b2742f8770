"""Off-policy sequences, as corrections of the plain prompt are: their loss, and where they are left out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ibpo.config import Config, LossConfig
from megatron_ibpo.loss import VARIANTS
from megatron_ibpo.policy.importance_correction import correct
from megatron_ibpo.policy.packing import lay_out, pack
from megatron_ibpo.policy.planning import MicroBatch
from megatron_ibpo.run.checks import check_settings
from support.credit_cases import algorithm
from support.layouts import layout
from support.linear_cases import batch_of, plain
from support.loss_calls import loss_of_logits
from support.ranks import run_ranks
from support.tiny_models import make_qwen3
from support.train_sequences import packed, sequence, sequences
from support.trainers import COMPARED, gradients


def two_tokens(advantage=2.0, **given):
    """(loss, slopes by the first logits, stats) of a sequence of two response tokens with the probabilities
    .1 and .4, of a vocabulary of two."""
    logits = torch.tensor([[0.1, 0.9], [0.4, 0.6]], dtype=torch.float64).log().requires_grad_()
    loss, stats = loss_of_logits(
        logits_NV=logits, targets_N=torch.zeros(2, dtype=torch.int64), response_mask_N=torch.ones(2),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32), sequence_weights_S=torch.tensor([0.5]).double(),
        off_policy_S=torch.tensor([True]), advantages=torch.tensor([advantage]).double(), **given,
    )  # fmt: skip
    loss.backward()
    return loss.item(), logits.grad[:, 0].tolist(), stats


@pytest.mark.parametrize("variant", ["gspo", "gspo-token", "grpo", "gmpo", "cispo"])
def test_the_shaped_surrogate_by_hand(variant):
    """Probabilities .1 and .4, A = 2, weight ½: f = .1/.2 and .4/.5, so the loss is -½·2·(.5 + .8)/2 = -.65.
    Its derivative by log p is -½·2/2·γp/(p + γ)² = -½·.25 and -½·.16, by the logit that times 1 - p."""
    loss, slopes, stats = two_tokens(variant=variant, aggregation="sequence-mean")
    assert loss == pytest.approx(-0.65)
    assert slopes == pytest.approx([-0.125 * 0.9, -0.08 * 0.6])
    assert not stats.clipped.any()


def test_weights_scale_the_gradient_of_the_surrogate_and_ratios_do_not_clip_it():
    loss, slopes, _ = two_tokens(token_weights_N=torch.tensor([0.5, 0.0]).double())
    assert (loss, slopes) == (pytest.approx(-0.65), pytest.approx([-0.0625 * 0.9, 0.0]))
    assert two_tokens(advantage=0.0)[:2] == (0.0, [0.0, 0.0])
    # old log-probs far off: the variant's ratio would be clipped, the shaped surrogate has none
    loss, slopes, _ = two_tokens(old_logprobs_N=torch.tensor([-9.0, -9.0]).double())
    assert (loss, slopes) == (pytest.approx(-0.65), pytest.approx([-0.1125, -0.048]))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_sequences_of_both_kinds_lose_what_each_loses_alone(variant):
    batch = batch_of((3, 6, 2, 4))
    batch["advantages"][1] = 0.7
    kinds, everything = torch.tensor([False, True, False, True]), torch.ones(4, dtype=torch.bool)

    def loss_of(chosen, off_policy):
        weights = torch.where(chosen, batch["sequence_weights_S"], 0.0)
        chosen_batch = batch | {"sequence_weights_S": weights}
        return plain(chosen_batch, off_policy_S=off_policy, variant=variant, aggregation=5.0)[0]

    mixed = loss_of(everything, kinds)
    torch.testing.assert_close(mixed, loss_of(~kinds, None) + loss_of(kinds, everything))


def test_the_engines_log_probs_are_of_the_long_prompt():
    """So importance corrections leave off-policy sequences alone, rows that are compared with the engine
    leave them out, and the engine's cannot be the old ones. Ratios 5 and 5 would be cut to 2."""
    arrays = replace(packed([5.0, 5.0], [5.0, 5.0]), off_policy_S=np.array([False, True]))
    corrected, found = correct(arrays, LossConfig(use_tis=True, tis_clip=2.0))
    assert corrected.token_weights_R.tolist() == [2.0, 2.0, 1.0, 1.0]
    assert [own.weight for own in found] == [4.0, 2.0]

    rows = [sequence([7, 8], [3, 4], advantage=1.0, weight=1.0, group=0, off_policy=n == 1) for n in range(2)]
    mixed, plainly = (
        lay_out(pack(MicroBatch((0, 1), tuple(own))), multiple=4, device=torch.device("cpu"))
        for own in (rows, [replace(row, off_policy=False) for row in rows])
    )
    assert mixed.rows.off_policy_S.tolist() == [False, True, False]  # the last is padding
    assert mixed.loss_rows().tolist() == [1, 2, 4, 5]
    assert mixed.compared_rows_R.tolist() == [1, 2]
    assert plainly.rows.off_policy_S is None

    joining = algorithm(ibpo_joint=False, ibpo_plain_prompt="successful")
    config = Config(algorithm=joining, loss=LossConfig(old_logprobs="engine"))
    config.model.hf_checkpoint, config.run.dry_run = Path(), True
    with pytest.raises(ValueError, match="use --old-logprobs recompute"):
        check_settings(config)


@pytest.mark.world
@pytest.mark.slow  # tests/policy has the layouts, and the tests above what the mark does to a loss
def test_every_layout_gives_the_same_gradient_and_metrics(tmp_path):
    """One process against DP2, TP2 and PP2, with importance corrections; and the mark matters."""
    rows = [replace(row, off_policy=number % 3 == 0) for number, row in enumerate(sequences())]
    checkpoint = make_qwen3(tmp_path / "dense", 3, std=0.1)

    def found(size, chosen, *layouts):
        cases = [(checkpoint, own, {"use_tis": True, "max_tokens": 60}) for own in layouts]
        return run_ranks(gradients, size, cases, chosen, timeout=240)[0]

    ((expected, metrics),) = found(1, rows, layout())
    ((unmarked, _),) = found(1, [replace(row, off_policy=False) for row in rows], layout())
    scale = max(g.abs().max().item() for g in expected.values())
    assert max((unmarked[n] - expected[n]).abs().max().item() for n in expected) > 0.05 * scale
    layouts = layout(), layout(tp=2), layout(pp=2)
    for chosen, (moved, own) in zip(layouts, found(2, rows, *layouts), strict=True):
        assert max((moved[n] - expected[n]).abs().max().item() for n in expected) <= 2e-4 * scale, chosen
        for name in {*COMPARED} & metrics.keys():
            assert own[name] == pytest.approx(metrics[name], rel=2e-4, abs=1e-6), (chosen, name)
