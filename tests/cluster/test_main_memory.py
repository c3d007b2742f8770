"""A run that holds more in main memory than a node has is refused before anything of it is taken."""

import re

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ibpo.cluster.main_memory import main_memory
from megatron_ibpo.cluster.placement import Engines, Node, plan_placement
from megatron_ibpo.config import Config, ParallelConfig, on_device
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.plan.node_memory import check_main_memory
from megatron_ibpo.weights.formats.hugging_face import trained_elements
from megatron_ibpo.weights.layout.export import metadata_of
from support.paths import ROOT
from support.published_recipes import NEXT_80B, configured

GIB = 1024**3


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


def test_a_node_that_has_too_little_is_named_with_what_needs_how_much():
    """Four nodes of eight GPUs. One pipeline stage a node, a quarter of the model; a stage without embeddings
    has less."""
    nodes = [Node(f"id{n}", f"10.0.0.{n}", cpus=64, gpus=8) for n in range(4)]
    engines = Engines(tensor_parallel_size=8, colocate=True)
    config = on_device(configured(NEXT_80B), on_gpu=True, has_delta_nets=True)
    elements = elements_of(NEXT_80B)
    placement = plan_placement(nodes, num_trainers=32, engines=engines, on_gpu=True)
    arguments = (config, read_hf_config(NEXT_80B), elements, placement)
    enough = dict.fromkeys(range(4), 1000 * GIB)
    check_main_memory(*arguments, enough)
    config.run.save = False
    with pytest.raises(ValueError, match="main memory") as refused:
        check_main_memory(*arguments, enough | {2: 300 * GIB})
    said = str(refused.value)
    assert said.startswith("10.0.0.2 has 300.0 GiB of main memory, and this run needs at least ")
    layers = sum(count for name, count in elements.items() if ".layers." in name)
    assert f"; the optimizer {16 * layers / 4 / GIB:.1f};" in said
    assert "--no-optimizer-cpu-offload keeps the optimizer's state on the GPUs" in said
    assert said.count("10.0.0.") == 1, "the others have enough"
    config.optimizer.optimizer_cpu_offload = config.rollout.offload_train = False
    check_main_memory(*arguments, dict.fromkeys(range(4), 4 * GIB))


def on_cpus(model, **config):
    """Arguments of the check: two trainers and an engine."""
    nodes = [Node(f"id{n}", f"10.0.0.{n}", cpus=1, gpus=0) for n in range(3)]
    engines = Engines(tensor_parallel_size=1, colocate=False, num_gpus=1)
    placement = plan_placement(nodes, num_trainers=2, engines=engines, on_gpu=False)
    shape = read_hf_config(model)
    resolved = on_device(Config(**config), on_gpu=False, has_delta_nets=shape.is_recurrent)
    return resolved, shape, elements_of(model), placement


def test_on_cpus_trainers_and_engines_are_in_main_memory_themselves(models):
    """Four bytes a parameter of weights, of gradients and of each of Adam's means, and of an engine."""
    arguments = on_cpus(ROOT / "examples/models/qwen3_0_6b")
    parameters = sum(arguments[2].values())
    trainer = 16 * parameters + parameters * 12 // 2  # and half of a checkpoint
    engine = 4 * parameters + 512 * 1024**2
    with pytest.raises(ValueError, match="main memory") as refused:
        check_main_memory(*arguments, dict.fromkeys(range(3), GIB))
    needs = [float(found) for found in re.findall(r"at least ([\d.]+)", str(refused.value))]
    assert needs == pytest.approx([trainer / GIB + 0.4] * 2 + [engine / GIB + 0.5], abs=0.1)
    check_main_memory(*arguments, {0: trainer + GIB, 1: trainer + GIB, 2: engine + GIB})
    for tiny in models.values():
        little = dict.fromkeys(range(3), 3 * GIB // 2)
        check_main_memory(*on_cpus(tiny, parallel=ParallelConfig()), little)


@pytest.mark.parametrize(
    ("group", "file"),
    [("4:memory:/a/b\n1:cpu:/\n", "memory/{}memory.limit_in_bytes"), ("0::/a/b\n", "{}memory.max")],
    ids=["version 1", "version 2"],
)
def test_the_least_limit_around_a_process_is_what_it_has(tmp_path, group, file):
    """The limit is of its own control group or of one around it."""
    assert main_memory(tmp_path, tmp_path / "none") == psutil.virtual_memory().total
    (tmp_path / "cgroup").write_text(group)
    limits = {"": "9223372036854771712", "a/": "3000000"}
    for own, least in (("max", 3_000_000), ("2000000", 2_000_000)):
        for place, limit in (limits | {"a/b/": own}).items():
            path = tmp_path / file.format(place)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(limit + "\n")
        assert main_memory(tmp_path, tmp_path / "cgroup") == least
