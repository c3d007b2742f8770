"""A family of models is a module and a line of the table: a new one is read, built, converted and costed."""

import ast
import json
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import megatron_ibpo
from megatron_ibpo.basics.distributed import start_world
from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.models import FAMILIES, forward_flops, read_hf_config
from megatron_ibpo.models.families import family_module
from megatron_ibpo.weights.formats.convert import hf_to_megatron, megatron_to_hf
from support.checkpoint_bytes import assert_same_bytes
from support.paths import ROOT
from support.ranks import run_ranks
from support.tiny_models import make_qwen3

PACKAGE = Path(megatron_ibpo.__file__).parent

PLAIN = """
from dataclasses import replace

from megatron_ibpo.models import shared_entries, spec
from megatron_ibpo.models.shape import ModelShape, common_fields


def read(fields):
    return ModelShape(**common_fields(fields), ffn_hidden_size=fields.count("mlp_size"))


def layer_entries(shape, layer):
    entries = [*shared_entries.attention(shape), *shared_entries.dense_mlp(shape)]
    norms = "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"
    return [renamed(entry) for entry in entries if entry.name not in norms]


def renamed(entry):
    pieces = (replace(piece, name=piece.name.replace("self_attn", "attn")) for piece in entry.pieces)
    return replace(entry, pieces=tuple(pieces))


def layer_spec(shape, layer, backend):
    from megatron.core.transformer.identity_op import IdentityOp

    mixer = spec.attention(backend)
    mixer.submodules.q_layernorm = mixer.submodules.k_layernorm = IdentityOp
    return spec.transformer_layer(mixer, spec.dense_mlp(backend))


def megatron_fields(shape):
    return {"qk_layernorm": False}
"""
"""A family "plain": a dense Qwen3 without norms of queries and keys, and with names of its own."""


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """A checkpoint of the family, whose module is the only thing written and whose line is added."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "plain_family.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(str(code))
    monkeypatch.setitem(FAMILIES, "plain", "plain_family")
    checkpoint = make_qwen3(tmp_path / "hf", 3)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "plain", "mlp_size": config.pop("intermediate_size")}
    (checkpoint / "config.json").write_text(json.dumps(config))
    tensors = load_file(checkpoint / "model.safetensors")
    kept = {name.replace("self_attn", "attn"): tensors[name] for name in tensors if "_norm." not in name}
    save_file(kept, checkpoint / "model.safetensors", metadata={"format": "pt"})
    yield checkpoint
    sys.modules.pop("plain_family", None)


def exported(world, code, checkpoint):
    """Return what a model of the family, filled from the checkpoint and divided over the ranks, gives
    back."""
    sys.path.insert(0, code)
    FAMILIES["plain"] = "plain_family"
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.model import build_model
    from megatron_ibpo.weights.formats.load import load_hf
    from megatron_ibpo.weights.layout.export import HFExport

    config = Config(parallel=ParallelConfig(tensor_model_parallel_size=2))
    parallel.initialize(config.parallel, world, seed=0)
    shape = read_hf_config(checkpoint)
    chunks = build_model(shape, config)
    load_hf(chunks, shape, checkpoint)
    return {name: None if tensor is None else tensor.clone() for name, tensor in HFExport(chunks, shape)}


@pytest.mark.world
def test_a_family_is_added_by_a_module_and_a_line(plain, tmp_path):
    shape = read_hf_config(plain)
    assert (shape.family, shape.ffn_hidden_size) == ("plain", 192)
    assert forward_flops(shape, 9) == forward_flops(read_hf_config(make_qwen3(tmp_path / "qwen3", 0)), 9)
    held, _ = run_ranks(exported, 2, str(tmp_path / "code"), plain)
    original = load_file(plain / "model.safetensors")
    assert_same_bytes(held, original)
    assert "model.layers.0.attn.q_proj.weight" in original
    with closing(start_world()) as world:  # others count in a process without process groups
        hf_to_megatron(plain, tmp_path / "stored", ParallelConfig(tensor_model_parallel_size=2), world)
        megatron_to_hf(tmp_path / "stored", tmp_path / "back", world)
    assert_same_bytes(load_file(tmp_path / "back" / "model.safetensors"), original)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_functions_that_the_table_promises(family):
    module = family_module(family)
    for name in ("read", "layer_entries", "layer_spec", "megatron_fields"):
        assert callable(getattr(module, name))
    assert hasattr(module, "mtp_entries") == hasattr(module, "mtp_layer_spec")


SHAPES_AND_COSTS = """
import sys
from pathlib import Path
from megatron_ibpo.models import FAMILIES, forward_flops, read_hf_config

shapes = [read_hf_config(model) for model in Path(sys.argv[1]).iterdir()]
assert all(forward_flops(shape, 9) for shape in shapes)
print({*FAMILIES.values()} - {FAMILIES[shape.family] for shape in shapes})
print("torch" in sys.modules, "megatron" in sys.modules)
"""


def test_shapes_and_costs_of_all_families_need_neither_torch_nor_megatron():
    command = [sys.executable, "-c", SHAPES_AND_COSTS, str(ROOT / "examples/models")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["set()", "False False"]


def test_no_room_but_the_models_tells_families_apart():
    strays = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.value}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "models"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in FAMILIES
    ]
    assert strays == []


def test_heads_that_cannot_be_shared_evenly_are_refused(plain):
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    with pytest.raises(ValueError, match="num_attention_heads=4 is no multiple of num_key_value_heads=3"):
        read_hf_config(plain)


def test_recurrent_layers_are_told_from_attention(tmp_path):
    dense = read_hf_config(make_qwen3(tmp_path / "dense", 0))
    assert not dense.is_recurrent
    assert replace(dense, full_attention=(True, False)).is_recurrent
