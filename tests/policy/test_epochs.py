"""Several epochs over a rollout: TRL's num_iterations; updates whose old log-probs stay; and resumed."""

import json
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from megatron_ibpo.policy import forward_backward
from megatron_ibpo.policy.checkpoint import load_checkpoint
from megatron_ibpo.policy.saving import save_checkpoint
from support import planned, trl_epochs
from support.critics import critic_config, open_critic, rows_with_returns
from support.layouts import layout
from support.train_sequences import sequence, sequences
from support.trainers import close_trainer, config_for, open_trainer, weights_of

pytestmark = pytest.mark.world(1)

EPOCHS = {"num_steps_per_rollout": 2, "num_epochs_per_rollout": 2}


def open_policy(world, checkpoints, **settings):
    """Return a trainer and the export of its weights."""
    config = config_for(layout(), **{"lr": 1e-3, "eps_adam": 1e-8} | settings)
    return open_trainer(world, checkpoints["dense"], config)[:2]


@pytest.mark.parametrize("level", trl_epochs.SETTINGS)
def test_epochs_are_the_iterations_of_trl(world, tmp_path, level):
    """Loss, norm and clipped share of each epoch, and the policy after the last one, on TRL's samples and
    advantages. Each of two mini-batches is a prompt."""
    recorded = json.loads(trl_epochs.FILE.read_text())
    samples, own, settings = recorded["samples"], recorded[level], trl_epochs.SETTINGS[level]
    size, epsilon = trl_epochs.SAMPLES, settings["epsilon"]
    rows = [
        sequence(prompt, response, advantage=advantage, weight=1 / len(samples), group=number // size)
        for number, ((prompt, response, _), advantage) in enumerate(
            zip(samples, own["advantages"], strict=True)
        )
    ]
    loss = {"token": "grpo", "sequence": "gspo"}[level]
    config = config_for(
        layout(), lr=settings["learning_rate"], eps_adam=1e-8, loss_variant=loss, eps_clip=epsilon,
        eps_clip_high=epsilon, loss_aggregation="sequence-mean", num_steps_per_rollout=trl_epochs.GROUPS,
        num_epochs_per_rollout=trl_epochs.ITERATIONS,
    )  # fmt: skip
    config.optimizer.clip_grad = 1.0
    trainer, _, _ = open_trainer(world, trl_epochs.make_model(tmp_path / "model"), config)
    metrics, logprobs = planned.update(trainer, rows), planned.logprobs(trainer, rows)
    close_trainer()
    tokens = [
        sum(len(response) for _, response, _ in samples[n : n + size]) for n in range(0, len(samples), size)
    ]
    terms = tokens if level == "token" else [size] * len(tokens)
    for epoch in range(trl_epochs.ITERATIONS):
        steps = own["steps"][epoch * trl_epochs.GROUPS :][: trl_epochs.GROUPS]
        found = {name: metrics[f"{name}_epoch_{epoch + 1}"] for name in steps[0]}
        wanted = {name: np.mean([step[name] for step in steps]) for name in steps[0]}
        wanted["clip_fraction"] = np.average([step["clip_fraction"] for step in steps], weights=terms)
        assert found == pytest.approx(wanted, rel=1e-3, abs=2e-6), epoch
    assert 0 < metrics["clip_fraction_epoch_2"] < 1
    assert [sum(own) / len(own) for own in logprobs] == pytest.approx(own["logprobs"], abs=2e-4)


def test_an_epoch_repeats_the_update_with_the_same_old_logprobs(world, checkpoints):
    """Bit for bit with the engine's, which stay by themselves, for the policy and its critic. And with the
    trainer's, which are of the weights before the first step."""
    rows = rows_with_returns(6)
    once, export = open_policy(world, checkpoints, num_steps_per_rollout=2, old_logprobs="engine")
    own = planned.logprobs(once, rows)
    updates = [planned.update(once, rows) for _ in range(2)]
    wanted = weights_of(export)
    close_trainer()
    twice, export = open_policy(world, checkpoints, **EPOCHS, old_logprobs="engine")
    metrics = planned.update(twice, rows)
    assert all(tensor.equal(wanted[name]) for name, tensor in weights_of(export).items())
    for name in ("loss", "grad_norm", "clip_fraction", "ratio_mean", "ratio_max", "entropy"):
        assert [metrics[f"{name}_epoch_{number}"] for number in (1, 2)] == [u[name] for u in updates], name
    assert metrics["clip_fraction"] == pytest.approx(sum(u["clip_fraction"] for u in updates) / 2)
    close_trainer()
    recomputing, export = open_policy(world, checkpoints, **EPOCHS)
    recomputed = planned.update(recomputing, rows)
    found = weights_of(export)
    close_trainer()
    by_engine, export = open_policy(world, checkpoints, **EPOCHS, old_logprobs="engine")
    told = [replace(row, rollout_logprobs=np.array(o, np.float32)) for row, o in zip(rows, own, strict=True)]
    same = planned.update(by_engine, told)
    assert recomputed["ratio_max_epoch_2"] == pytest.approx(same["ratio_max_epoch_2"], rel=1e-4)
    assert abs(recomputed["ratio_max_epoch_2"] - 1) > 1e-3
    scale = max((found[name] - tensor).abs().max() for name, tensor in wanted.items())
    assert max((found[name] - tensor).abs().max() for name, tensor in weights_of(export).items()) < scale / 20
    close_trainer()
    moved = []
    for epochs, count in ((1, 2), (2, 1)):
        config = critic_config(layout(), lr=0.01, num_epochs_per_rollout=epochs)
        critic = open_critic(world, checkpoints["dense"], config)
        for _ in range(count):
            planned.update_values(critic, rows)
        moved.append(planned.values(critic, rows))
        close_trainer()
    assert moved[0] == moved[1]


def test_a_run_killed_between_epochs_takes_all_of_them_again(world, checkpoints, tmp_path):
    """The checkpoint is from before the rollout. Schedule and Adam's state are those of an undisturbed run,
    bit for bit."""
    rows, found = sequences(6), []
    for killed in (False, True):
        trainer, export = open_policy(world, checkpoints, **EPOCHS)
        metrics = [planned.update(trainer, rows)]
        saved = save_checkpoint(trainer, tmp_path / str(killed), 1, {})
        if killed:
            third = mock.Mock(side_effect=[None, None, MemoryError])
            with mock.patch.object(forward_backward, "take_step", third), pytest.raises(MemoryError):
                planned.update(trainer, rows)
            close_trainer()
            trainer, export = open_policy(world, checkpoints, **EPOCHS)
            load_checkpoint(trainer, saved)
        metrics.append(planned.update(trainer, rows))
        numbers = [{n: v for n, v in own.items() if n != "seconds_old_logprobs"} for own in metrics]
        found.append((numbers, {name: tensor.tolist() for name, tensor in weights_of(export).items()}))
        close_trainer()
    assert found[0] == found[1]
