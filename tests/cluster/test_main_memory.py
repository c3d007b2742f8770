"""A run that holds more in main memory than a node has is refused before anything of it is taken."""

import re
from copy import deepcopy

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ibpo.cluster.main_memory import main_memory
from megatron_ibpo.cluster.placement import Engines, Node, Placement, plan_placement
from megatron_ibpo.config import Config, ParallelConfig, on_device
from megatron_ibpo.models import ModelShape, read_hf_config
from megatron_ibpo.plan.node_memory import check_main_memory
from megatron_ibpo.weights.formats.hugging_face import trained_elements
from megatron_ibpo.weights.layout.export import metadata_of
from support.paths import ROOT
from support.published_recipes import NEXT_80B, configured

GIB = 1024**3
Cluster = tuple[Config, ModelShape, dict[str, int], Placement]


def elements_of(model):
    """Return the elements as the headers of a checkpoint would have them."""
    return {meta.name: meta.num_bytes // 2 for meta in metadata_of(read_hf_config(model), torch.bfloat16)}


@pytest.mark.parametrize("name", ["dense", "next"])
def test_parameters_are_counted_by_elements_whatever_dtype_they_have(models, tmp_path, name):
    tensors = load_file(models[name] / "model.safetensors")
    count = sum(tensor.numel() for tensor in tensors.values())
    (tmp_path / "config.json").write_text((models[name] / "config.json").read_text())
    for dtype in (torch.float32, torch.bfloat16):
        own = {key: tensor.to(dtype) for key, tensor in tensors.items()}
        save_file(own | {"rotary_emb.inv_freq": torch.ones(8)}, tmp_path / "model.safetensors")
        assert sum(trained_elements(tmp_path, read_hf_config(tmp_path)).values()) == count


@pytest.fixture(scope="module")
def resolved_80b() -> Cluster:
    """Arguments of the check: four nodes of eight GPUs."""
    nodes = [Node(f"id{n}", f"10.0.0.{n}", cpus=64, gpus=8) for n in range(4)]
    engines = Engines(tensor_parallel_size=8, colocate=True)
    placement = plan_placement(nodes, num_trainers=32, engines=engines, on_gpu=True)
    config = on_device(configured(NEXT_80B), on_gpu=True, has_delta_nets=True)
    return config, read_hf_config(NEXT_80B), elements_of(NEXT_80B), placement


@pytest.fixture
def cluster_of_80b(resolved_80b: Cluster) -> Cluster:
    config, shape, elements, placement = resolved_80b
    return deepcopy(config), shape, elements, placement


def test_a_node_that_has_too_little_is_named_with_what_needs_how_much(cluster_of_80b: Cluster):
    """One pipeline stage a node, a quarter of the model; a stage without embeddings has less."""
    enough = dict.fromkeys(range(4), 1000 * GIB)
    check_main_memory(*cluster_of_80b, enough)
    cluster_of_80b[0].run.save = False
    with pytest.raises(ValueError, match="main memory") as refused:
        check_main_memory(*cluster_of_80b, enough | {2: 300 * GIB})
    said = str(refused.value)
    assert said.startswith("10.0.0.2 has 300.0 GiB of main memory, and this run needs at least ")
    layers = sum(count for name, count in cluster_of_80b[2].items() if ".layers." in name)
    assert f"; the optimizer {16 * layers / 4 / GIB:.1f};" in said
    assert "--no-optimizer-cpu-offload keeps the optimizer's state on the GPUs" in said
    assert said.count("10.0.0.") == 1, "the others have enough"


def test_what_a_run_would_do_without_is_not_counted(cluster_of_80b: Cluster):
    config = cluster_of_80b[0]
    config.optimizer.optimizer_cpu_offload = config.rollout.offload_train = config.run.save = False
    check_main_memory(*cluster_of_80b, dict.fromkeys(range(4), 4 * GIB))


def on_cpus(model, nodes, trainers, **config) -> Cluster:
    placement = plan_placement(
        [Node(f"id{n}", f"10.0.0.{n}", cpus=1, gpus=0) for n in range(nodes)],
        num_trainers=trainers,
        engines=Engines(tensor_parallel_size=1, colocate=False, num_gpus=1),
        on_gpu=False,
    )
    shape = read_hf_config(model)
    resolved = on_device(Config(**config), on_gpu=False, has_delta_nets=shape.is_recurrent)
    return resolved, shape, elements_of(model), placement


def test_on_cpus_trainers_and_engines_are_in_main_memory_themselves():
    """Four bytes a parameter of weights, of gradients and of each of Adam's means, and of an engine."""
    model = ROOT / "examples/models/qwen3_0_6b"
    arguments = on_cpus(model, nodes=3, trainers=2)
    parameters = sum(arguments[2].values())
    trainer = 16 * parameters + parameters * 12 // 2  # and half of a checkpoint
    engine = 4 * parameters + 512 * 1024**2
    with pytest.raises(ValueError, match="main memory") as refused:
        check_main_memory(*arguments, dict.fromkeys(range(3), GIB))
    needs = [float(found) for found in re.findall(r"at least ([\d.]+)", str(refused.value))]
    assert needs == pytest.approx([trainer / GIB + 0.4] * 2 + [engine / GIB + 0.5], abs=0.1)
    check_main_memory(*arguments, {0: trainer + GIB, 1: trainer + GIB, 2: engine + GIB})


def test_the_tiny_runs_need_little(models):
    for model in models.values():
        arguments = on_cpus(model, nodes=3, trainers=2, parallel=ParallelConfig())
        check_main_memory(*arguments, dict.fromkeys(range(3), 3 * GIB // 2))


def test_the_least_limit_around_a_process_is_what_it_has(tmp_path):
    """The limit is of its own control group or of one around it, in either version of the kernel's
    interface."""
    own, total = tmp_path / "cgroup", psutil.virtual_memory().total
    assert main_memory(tmp_path, tmp_path / "none") == total
    for lines, name in (
        ("4:memory:/a/b\n1:cpu:/\n", "memory/{}memory.limit_in_bytes"),
        ("0::/a/b\n", "{}memory.max"),
    ):
        own.write_text(lines)
        for place, text in (("", "9223372036854771712"), ("a/", "3000000"), ("a/b/", "max")):
            file = tmp_path / name.format(place)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        assert main_memory(tmp_path, own) == 3_000_000
        (tmp_path / name.format("a/b/")).write_text("2000000\n")
        assert main_memory(tmp_path, own) == 2_000_000
