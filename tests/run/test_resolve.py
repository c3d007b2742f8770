"""Settings are resolved in one place, and a run without room is refused before anything is loaded."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from megatron_ibpo.cluster.placement import Engines, Node, plan_placement
from megatron_ibpo.config import ConfigError
from megatron_ibpo.config.config import ENTRIES
from megatron_ibpo.engines.registry import sampling_precision
from megatron_ibpo.policy.overrides import read_overrides
from megatron_ibpo.run.on_cluster import OnCluster
from megatron_ibpo.run.open import open_run
from megatron_ibpo.run.preflight import preflight
from megatron_ibpo.run.resolve import read_foundation, resolve, settle
from megatron_ibpo.run.settings import parse_config
from support.live_loop import StandIns, config_of, in_place
from support.paths import ROOT

TINY = ROOT / "examples/tiny_qwen3"


def settings(*flags):
    config = parse_config(["--hf-checkpoint", str(TINY), "--rollout-max-response-len", "8", *flags])
    foundation = read_foundation(config)
    return config, foundation, settle(config, foundation, None)


def machine(count, *, gpus):
    node = Node("here", "10.0.0.1", cpus=count, gpus=count if gpus else 0)
    return plan_placement([node], num_trainers=count, engines=None, on_gpu=gpus)


def test_devices_resolve_only_the_settings_that_depend_on_them():
    config, foundation, settled = settings()
    assert settled.rollout.rollout_max_context_len == foundation.shape.max_position_embeddings
    assert (settled.model.bf16, sampling_precision(settled.rollout).dtype, settled.cluster.num_trainers) == (
        None,
        "auto",
        None,
    )
    for gpus, precision in ((True, (True, "bfloat16")), (False, (False, "float32"))):
        resolved = resolve(settled, foundation, machine(2, gpus=gpus))
        assert (resolved.config.model.bf16, sampling_precision(resolved.config.rollout).dtype) == precision
        assert (resolved.config.cluster.num_trainers, resolved.world_size, resolved.accelerators) == (
            2,
            2,
            2,
        ), f"{gpus=}"
    assert config.rollout.rollout_max_context_len is None, "what the user gave is not changed"


def test_an_impossible_context_length_is_refused():
    with pytest.raises(ValueError, match=r"--rollout-max-context-len 100000: more than the model's context"):
        settings("--rollout-max-context-len", "100000")
    config = parse_config(["--hf-checkpoint", str(TINY), "--rollout-max-response-len", "100000"])
    config.rollout.rollout_max_response_len = 100_000
    with pytest.raises(ValueError, match="leaves no room for a prompt in a context of"):
        read_foundation(config)


def test_trainers_indivisible_by_the_layout_are_refused_once_counted():
    _, foundation, settled = settings("--tensor-model-parallel-size", "2")
    assert resolve(settled, foundation, machine(4, gpus=True)).world_size == 4
    with pytest.raises(ValueError, match=r"TP x PP = 2 does not divide the world size \(3\)"):
        resolve(settled, foundation, machine(3, gpus=True))


def test_too_little_memory_is_refused():
    _, foundation, settled = settings()
    resolved = resolve(settled, foundation, machine(1, gpus=False))
    assert preflight(resolved, {})("CPU").text.startswith("no time is predicted")
    with pytest.raises(ValueError, match=r"10\.0\.0\.1 has 0\.2 GiB of main memory"):
        preflight(resolved, {0: 2**28})


def test_an_engine_unfit_for_the_model_is_refused_early():
    _, foundation, settled = settings()
    node = Node("here", "10.0.0.1", cpus=2, gpus=0)
    own = Engines(tensor_parallel_size=1, colocate=False, num_gpus=1)
    placement = plan_placement([node], num_trainers=1, engines=own, on_gpu=False)
    assert resolve(settled, foundation, placement).engine_settings.device == "cpu"
    narrow = replace(foundation, shape=replace(foundation.shape, head_dim=16))
    resolved = resolve(settled, narrow, placement)
    assert resolved.config.rollout.rollout_backend == "transformers", "of a run that names no engine"
    named = replace(settled, rollout=replace(settled.rollout, rollout_backend="vllm"))
    with pytest.raises(ValueError, match=r"head_dim 16 in config\.json"):
        resolve(named, narrow, placement)
    alone = plan_placement([node], num_trainers=1, engines=None, on_gpu=False)
    assert resolve(named, narrow, alone).engine_settings is None


def test_overrides_are_data():
    _, foundation, settled = settings("--model-override", "recompute_modules=[mlp]")
    settled.model.recompute_granularity = "selective"
    overrides = read_overrides(resolve(settled, foundation, machine(1, gpus=True)).config)
    assert overrides.recomputed_modules == {"mlp"}
    assert (overrides.chunks, overrides.optimizer_bytes.device) == (1, 12)


@pytest.mark.parametrize("free", [2**20, 2**26])
def test_small_disks_and_unknown_hardware_are_refused_before_processes_start(free, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with (
        in_place(StandIns()),
        pytest.raises(ConfigError, match=r"--run-dir: the disk of .* need"),
        open_run(config_of(tmp_path)),
    ):
        pytest.fail("the run began")
    assert not (tmp_path / "config.yaml").exists(), "nothing is written to a full disk"
    config = config_of(tmp_path / "other")
    config.run.dry_run_hardware = "a100x"
    with in_place(StandIns()), pytest.raises(ValueError, match="a100x"), open_run(config):
        pytest.fail("the run began")


class Unconnected(StandIns):
    """A back end whose cluster must not be started."""

    def connect(self, config):
        pytest.fail("a cluster was started")


def with_fault(run_dir, /, **values):
    """A configuration with these fields, whatever their section."""
    config = config_of(run_dir)
    for name, value in values.items():
        ENTRIES[name].put(config, value)
    return config


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"tensor_model_parallel_size": 3}, "this layout cannot hold the model"),
        ({"dry_run_hardware": "a100x"}, "a100x"),
    ],
)
def test_faults_found_without_torch_stop_before_the_cluster_starts(fault, words, tmp_path):
    backend = Unconnected()
    backend.check = OnCluster().check
    with in_place(backend), pytest.raises(ValueError, match=words), open_run(with_fault(tmp_path, **fault)):
        pytest.fail("the run began")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"run_dir": Path("/proc/run")}, "/proc/run"),
        ({"rm_type": "http_score", "rm_url": "http://127.0.0.1:9/score"}, "127.0.0.1:9"),
        ({"loss_variant": "grop"}, "grop"),
    ],
)
def test_faults_found_without_verifiers_stop_before_they_start(fault, words, tmp_path):
    with (
        in_place(StandIns()),
        patch("megatron_ibpo.run.inputs.start_pool", lambda *_: pytest.fail("verifiers were started")),
        pytest.raises((ValueError, OSError), match=words),
        open_run(with_fault(tmp_path, **fault)),
    ):
        pytest.fail("the run began")
