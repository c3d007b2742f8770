"""One check for all doors: a model that training would misread is refused by training, fine-tuning,
evaluation, the dry run, conversion and `data` alike."""

import json
import shutil
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from megatron_ibpo.commands.data import Arguments, show_data
from megatron_ibpo.config import DataConfig
from megatron_ibpo.data import DataError
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.run.inputs import open_inputs
from megatron_ibpo.run.open import open_run
from megatron_ibpo.run.preflight import check_inputs, dry_run
from megatron_ibpo.run.resolve import read_foundation
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.run.supervised import open_supervised
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats.convert import hf_to_megatron
from megatron_ibpo.weights.formats.hugging_face import Checkpoint, check_checkpoint
from support.layouts import layout
from support.live_loop import StandIns, config_of, in_place
from support.model_passes import ALONE, edit_json
from support.paths import ROOT

TINY, INDEX = ROOT / "examples/tiny_qwen3", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = [{"prompt": f"{number}+1\n", "response": f"{number + 1}#"} for number in range(9)]


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(TINY, tmp_path / "model")


def with_weights(model, change):
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file({name: own.contiguous() for name, own in weights.items()}, model / "model.safetensors")


def tied(change=lambda weights: None):
    def apply(model):
        edit_json(model / "config.json", tie_word_embeddings=True)
        with_weights(model, change)

    return apply


def last_row_differs(weights):
    weights[HEAD] = weights[EMBEDDING].clone()
    weights[HEAD][-1, -1] += 1e-3


def narrower_head(weights):
    weights[HEAD] = weights[EMBEDDING][:-1].clone()


def untied_without_a_head(**config):
    def apply(model):
        with_weights(model, lambda weights: weights.pop(HEAD))
        edit_json(model / "config.json", **config)
        if not config:
            content = json.loads((model / "config.json").read_text())
            del content["tie_word_embeddings"]
            (model / "config.json").write_text(json.dumps(content))

    return apply


def more_tokens(*tokens):
    def apply(model):
        library = PreTrainedTokenizerFast.from_pretrained(model)
        library.add_tokens([*tokens])
        library.save_pretrained(model)

    return apply


def stale_single(model):
    weights = load_file(model / "model.safetensors")
    save_file(weights, model / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (model / INDEX).write_text(json.dumps(index))


def stale_part(model):
    shutil.copy(model / "model.safetensors", model / "model-00002-of-00002.safetensors")


WEIGHTS = {
    "a head of its own beside ties": (tied(), "tie_word_embeddings=true, but lm_head.weight is not"),
    "a head with another last row": (tied(last_row_differs), "lm_head.weight is not model.embed_tokens"),
    "a head of fewer rows": (tied(narrower_head), r"lm_head.weight has shape \(63, 96\)"),
    "no head, and false": (untied_without_a_head(tie_word_embeddings=False), "config.json says tie_word_emb"),
    "no head, and no word": (untied_without_a_head(), "no tie_word_embeddings, which means false: add it"),
    "a stale single file": (stale_single, "model.safetensors beside model.safetensors.index.json"),
    "a stale part": (stale_part, "model-00002-of-00002.safetensors beside model.safetensors"),
}
TOKENIZERS = {
    "one id too many": (lambda model: edit_json(model / "config.json", vocab_size=63), "vocab_size"),
    "a token more": (
        more_tokens("<new>"),
        "ids go up to 64, and the model's vocab_size in config.json is 64",
    ),
    "several more": (more_tokens(*(f"<{number}>" for number in range(9))), "ids go up to 72"),
}


def flags(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return (
        "--hf-checkpoint",
        str(tmp_path / "model"),
        "--prompt-data",
        str(rows),
        "--run-dir",
        f"{tmp_path}/r",
    )


def train(tmp_path):
    with in_place(StandIns()), open_run(config_of(tmp_path / "r", *flags(tmp_path)[:2])):
        pytest.fail("the run began")


def fine_tune(tmp_path):
    more = ("--label-key", "response", "--rollout-backend", "lean", "--rollout-max-response-len", "8")
    with open_supervised(parse_config([*flags(tmp_path), *more])):
        pytest.fail("the run began")


def evaluate(tmp_path):
    more = ("--eval-num-prompts", "4", "--eval-prompt-data", "import://support.live_loop:questions")
    config = config_of(tmp_path / "r", *flags(tmp_path)[:2], *more)
    with in_place(StandIns()), ExitStack() as stack:
        check_inputs(open_inputs(config, read_foundation(config), trains=False), stack)


def plan(tmp_path):
    dry_run(config_of(tmp_path / "r", *flags(tmp_path)[:2], "--dry-run"))


def convert(tmp_path):
    hf_to_megatron(tmp_path / "model", tmp_path / "stored", layout(), ALONE)


def show(tmp_path):
    data = DataConfig(prompt_data=(str(tmp_path / "rows.jsonl"),), label_key="response")
    flags(tmp_path)
    show_data(Arguments(hf_checkpoint=tmp_path / "model", data=data))


@pytest.mark.parametrize("door", [train, fine_tune, evaluate, plan, convert])
@pytest.mark.parametrize("fault", WEIGHTS)
def test_weights_of_another_model_are_refused_by_every_door(tmp_path, model, fault, door):
    damage, words = WEIGHTS[fault]
    damage(model)
    with pytest.raises(CheckpointError, match=words):
        door(tmp_path)


@pytest.mark.parametrize("door", [train, fine_tune, evaluate, plan, show])
@pytest.mark.parametrize("fault", TOKENIZERS)
def test_ids_beyond_the_embedding_are_refused_by_every_door(tmp_path, model, fault, door):
    damage, words = TOKENIZERS[fault]
    damage(model)
    if fault == "one id too many":
        with_weights(model, lambda own: own.update({name: own[name][:63] for name in (EMBEDDING, HEAD)}))
    with pytest.raises(DataError, match=words):
        door(tmp_path)


def same_as_bfloat16(weights):
    weights[EMBEDDING] = weights[EMBEDDING].bfloat16().float()
    weights[HEAD] = weights[EMBEDDING].bfloat16()


@pytest.mark.parametrize(
    "change",
    [lambda own: own.update({HEAD: own[EMBEDDING].clone()}), lambda own: own.pop(HEAD), same_as_bfloat16],
)
def test_a_head_that_is_the_embedding_is_no_contradiction(model, change):
    """Stored again, left out, or stored in another dtype."""
    tied(change)(model)
    check_checkpoint(model, read_hf_config(model))


def test_all_rows_of_a_long_head_are_compared(tmp_path, monkeypatch):
    """Rows are read a few at a time."""
    monkeypatch.setattr("megatron_ibpo.weights.formats.hugging_face._ROWS", 7)
    for row in (0, 6, 7, 62, 63):
        model = shutil.copytree(TINY, tmp_path / str(row))

        def differ(weights, row=row):
            weights[HEAD] = weights[EMBEDDING].clone()
            weights[HEAD][row] += 1

        tied(differ)(model)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is not"):
            check_checkpoint(model, read_hf_config(model))


def test_files_of_one_set_of_weights_are_read_together(model):
    """An index may name the single file, and pickles beside safetensors are other programs'."""
    weights = load_file(model / "model.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, "model.safetensors")}))
    torch.save(weights, model / "pytorch_model.bin")
    assert {*Checkpoint(model)} == {*weights}
    (model / INDEX).unlink()
    (model / "adapter_model.safetensors").write_bytes(b"")
    assert {*Checkpoint(model)} == {*weights}


def test_a_plan_needs_a_config_alone(tmp_path, model, capsys):
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    plan(tmp_path)
    assert "memory" in capsys.readouterr().out.lower()
