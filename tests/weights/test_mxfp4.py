import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_ibpo.models import read_hf_config
from megatron_ibpo.weights.formats.convert import differing_tensors, hf_to_megatron, megatron_to_hf
from megatron_ibpo.weights.formats.hugging_face import trained_elements
from megatron_ibpo.weights.formats.mxfp4 import dequantised
from megatron_ibpo.weights.weight_errors import CheckpointError
from support.checkpoint_bytes import assert_same_bytes
from support.conversions import ALONE, edit_json
from support.layouts import layout
from support.tiny_models import make_gpt_oss


def test_numbers_worked_by_hand():
    """The lower four bits come first; a scale of 127 is 1, of 128 is 2, of 126 a half."""
    blocks = torch.zeros(3, 16, dtype=torch.uint8)
    blocks[:, 0], blocks[:, 1] = 0x21, 0xF7
    found = dequantised(blocks, torch.tensor([127, 128, 126], dtype=torch.uint8))
    assert found.dtype == torch.bfloat16
    one = torch.tensor([0.5, 1.0, 6.0, -6.0] + [0.0] * 28)
    assert torch.equal(found.float(), torch.cat((one, 2 * one, one / 2)))


def test_every_number_under_every_scale_is_that_of_transformers():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone())
    found = dequantised(blocks, scales).transpose(1, 2)
    usual = slice(10, 245)  # powers of two far from the ends of what bfloat16 holds
    assert_same_bytes({"": found[:, :, usual].contiguous()}, {"": expected[:, :, usual].contiguous()})


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A gpt-oss in bfloat16 whose experts are in MXFP4, as it is published, and what its experts are."""
    directory = make_gpt_oss(tmp_path_factory.mktemp("packed"), 3)
    generator = torch.Generator().manual_seed(0)
    stored, whole = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = whole[name] = tensor.bfloat16()
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator).byte()
        scales = torch.randint(120, 130, (experts, rows, columns // 32), generator=generator).byte()
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        whole[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone()).contiguous()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    edit_json(directory / "config.json", quantization_config={"quant_method": "mxfp4"})
    return directory, whole


@pytest.mark.parametrize("parallel", [layout(), layout(tp=2, ep=2)], ids=["one", "TP2 EP2"])
def test_it_is_converted_to_bfloat16_and_training_asks_for_that(packed, tmp_path, parallel):
    directory, whole = packed
    with pytest.raises(CheckpointError, match=r"experts\.down_proj.* in MXFP4, .* convert to-megatron"):
        trained_elements(directory, read_hf_config(directory))
    hf_to_megatron(directory, tmp_path / "stored", parallel, ALONE)
    assert differing_tensors(directory, tmp_path / "stored", ALONE) == []
    megatron_to_hf(tmp_path / "stored", tmp_path / "back", ALONE)
    assert_same_bytes(load_file(tmp_path / "back/model.safetensors"), whole)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_parts_that_do_not_belong_together_are_refused(packed, tmp_path):
    directory = shutil.copytree(packed[0], tmp_path / "damaged")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1\.mlp\.experts\.down_proj is not in MXFP4 as its name says"):
        hf_to_megatron(directory, tmp_path / "stored", layout(), ALONE)
