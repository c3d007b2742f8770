"""Provides checkpoints for tests to break."""

import shutil

import pytest
from safetensors.torch import load_file

from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.weights.formats.convert import hf_to_megatron
from support.checkpoint_bytes import shard_by_hand
from support.conversions import ALONE
from support.tiny_models import make_qwen3


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("models") / "dense", 1)


@pytest.fixture(scope="module")
def tensors(origin):
    return load_file(origin / "model.safetensors")


@pytest.fixture
def here(tmp_path, origin, tensors):
    """A sharded copy that a test may break, and where its conversion goes."""
    return shard_by_hand(origin, tmp_path / "hf", tensors), tmp_path / "out" / "stored"


@pytest.fixture(scope="module")
def converted(origin, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "stored"
    hf_to_megatron(origin, target, ParallelConfig(tensor_model_parallel_size=2), ALONE)
    return target


@pytest.fixture
def stored(tmp_path, converted):
    """A Megatron checkpoint that a test may break."""
    return shutil.copytree(converted, tmp_path / "stored")
