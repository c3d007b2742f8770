"""A run that has lost a node starts again, and again if another one is lost meanwhile; with a stand-in."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megatron_ibpo.basics.entry_point import FAILED, guarded
from megatron_ibpo.cluster.deaths import ProcessDiedError
from megatron_ibpo.commands import train
from megatron_ibpo.config import Config, on_device
from megatron_ibpo.run import on_cluster
from megatron_ibpo.run import open as run_open
from megatron_ibpo.run.inputs import sampling_settings


@pytest.fixture
def opened(monkeypatch):
    """Set what happens at each opening, in order: an error then, or else one in the steps, or the exit
    status."""
    config = Config()
    config.cluster.node_wait = 7.0

    def trained(*happens):
        left, waits = list(happens), []

        @contextmanager
        def open_run(config, node_wait, started):
            waits.append(node_wait)
            if isinstance(left[0], ProcessDiedError):
                raise left.pop(0)
            yield SimpleNamespace(config=config, reporter=SimpleNamespace(note=lambda _: None))

        def steps(run, stop):
            if isinstance(end := left.pop(0), Exception):
                raise end
            return end

        monkeypatch.setattr(run_open, "open_run", open_run)
        monkeypatch.setattr(on_cluster, "going_on", lambda run, asked: run.config)
        monkeypatch.setattr(train, "_steps", steps)
        stop = SimpleNamespace(cuts_short=lambda work: work())
        return guarded(lambda: train._train(config, stop)), waits

    return trained


LOST, DIED = on_cluster.NodeLostError("a node is lost"), ProcessDiedError("engine 1 has ended")


def test_a_lost_node_is_waited_for_again_while_the_run_starts_but_not_for_good_or_at_first(opened, capsys):
    assert opened(LOST, train.DONE) == (train.DONE, [0.0, 7.0])
    assert opened(LOST, DIED, DIED, LOST, DIED, train.DONE) == (train.DONE, [0.0, *[7.0] * 5])
    capsys.readouterr()
    assert opened(LOST, DIED, DIED, DIED) == (FAILED, [0.0, 7.0, 7.0, 7.0])
    assert capsys.readouterr().err.count("starting again") == 2
    assert opened(DIED) == (FAILED, [0.0])


def test_the_journal_serves_a_run_that_goes_on_though_its_devices_have_decided_some_settings():
    asked = Config()
    run = SimpleNamespace(config=on_device(asked, on_gpu=False, has_delta_nets=True))
    again = on_cluster.going_on(run, asked)
    assert again.run.load == run.config.run.run_dir
    assert again.model.bf16 is False
    assert run.config.rollout.vllm_dtype == "bfloat16"
    assert sampling_settings(again) == sampling_settings(asked)
