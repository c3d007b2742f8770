import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_ibpo
from megatron_ibpo.models import FAMILIES, forward_flops, read_hf_config
from megatron_ibpo.weights.formats.convert import hf_to_megatron, megatron_to_hf
from support.checkpoint_bytes import assert_same_bytes, tensors_of, with_weights
from support.conversions import edit_json, loaded
from support.layouts import layout
from support.paths import ROOT
from support.tiny_models import make_qwen3
from support.trainers import weights_of

PLAIN = """
from dataclasses import replace

from megatron_ibpo.models import llama
from megatron_ibpo.models.llama import layer_spec, megatron_fields
from megatron_ibpo.models.shape import ModelShape, common_fields


def read(fields):
    sizes = {"ffn_hidden_size": fields.count("mlp_size"), "query_key_norms": False}
    return ModelShape(**common_fields(fields), **sizes)


def layer_entries(shape, layer):
    for entry in llama.layer_entries(shape, layer):
        pieces = (replace(piece, name=piece.name.replace("self_attn", "attn")) for piece in entry.pieces)
        yield replace(entry, pieces=tuple(pieces))
"""
"""A family "plain": a dense Qwen3 without norms of queries and keys, and with names of its own."""


@pytest.mark.slow  # the families that there are go the same way
@pytest.mark.world(2)
def test_a_family_is_added_by_a_module_and_a_line(world, tmp_path):
    from megatron_ibpo.weights.layout.export import HFExport

    qwen3, path = make_qwen3(tmp_path / str(world.rank) / "qwen3", 3), tmp_path / str(world.rank) / "plain"
    original = {n.replace("self_attn", "attn"): t for n, t in tensors_of(qwen3).items() if "_norm." not in n}
    plain = with_weights(qwen3, path, original)
    edit_json(plain / "config.json", model_type="plain", mlp_size=192, intermediate_size=None)
    (tmp_path / str(world.rank) / "plain_family.py").write_text(PLAIN)
    sys.path.insert(0, str(tmp_path / str(world.rank)))
    FAMILIES["plain"] = "plain_family"

    shape = read_hf_config(plain)
    assert (shape.family, shape.ffn_hidden_size) == ("plain", 192)
    assert forward_flops(shape, 9) == forward_flops(read_hf_config(qwen3), 9)
    held = weights_of(HFExport(*loaded(world, plain, layout(tp=2))))
    if world.is_rank_0:
        assert "model.layers.0.attn.q_proj.weight" in original
        assert_same_bytes(held, original)
    hf_to_megatron(plain, tmp_path / "stored", layout(tp=2), world)
    megatron_to_hf(tmp_path / "stored", tmp_path / "back", world)
    assert_same_bytes(tensors_of(tmp_path / "back"), original)


def test_shapes_and_costs_of_all_families_need_neither_torch_nor_megatron():
    code = """
import sys
from pathlib import Path
from megatron_ibpo.models import FAMILIES, forward_flops, read_hf_config

shapes = [read_hf_config(model) for model in Path(sys.argv[1]).iterdir()]
assert all(forward_flops(shape, 9) for shape in shapes)
print({*FAMILIES.values()} - {FAMILIES[shape.family] for shape in shapes})
print("torch" in sys.modules, "megatron" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(ROOT / "examples/models")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["set()", "False False"]


def test_no_room_but_the_models_tells_families_apart():
    package = Path(megatron_ibpo.__file__).parent
    strays = [
        f"{path.relative_to(package)}:{node.lineno} {node.value}"
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] != "models"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in FAMILIES
    ]
    assert strays == []
