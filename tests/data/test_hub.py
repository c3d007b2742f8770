"""Models and data sets of the Hugging Face Hub, by a server on this machine that answers in its place."""

import json
import shutil
from pathlib import Path

import pytest

import megatron_ibpo as mi
from megatron_ibpo.basics.entry_point import BAD_INPUT
from megatron_ibpo.commands import sft
from megatron_ibpo.config import ConfigError
from megatron_ibpo.config.paths import display_name, missing_snapshot, read_hub_id
from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.data.hub import HubError, with_local_copies
from megatron_ibpo.data.hub_upload import UploadError, prepare_upload, upload_export
from megatron_ibpo.run.checks import check_settings
from megatron_ibpo.run.settings import parse_config
from support.hub_stand_in import OWNER, hub_stand_in
from support.paths import ROOT

TINY, RECIPE = ROOT / "examples/tiny_qwen3", ROOT / "examples/recipes/small_cpu.yaml"
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The stand-in for this process, with a cache of its own."""
    monkeypatch.setenv("HF_TOKEN", OWNER)
    monkeypatch.setenv("IBPO_CWD", str(tmp_path))
    with hub_stand_in() as hub:
        files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": files,
            "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True,
        }.items():  # fmt: skip
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield hub


def test_ids_become_snapshots_of_the_cache_and_what_cannot_be_had_is_one_line(
    tmp_path, hub, monkeypatch, capsys
):
    def resolved(*words):
        config = with_local_copies(parse_config(list(words)))
        return str(config.model.hf_checkpoint), config.data.prompt_data, config.data.eval_prompt_data

    def refusal(*words):
        with pytest.raises(ValueError, match=r"^[^\n]*\Z") as refused:
            resolved(*words)
        return str(refused.value)

    # a data set in the layout of openai/gsm8k and a model, each with files that nobody needs
    for name in ("main/train", "main/test", "socratic/train", "socratic/test"):
        file = tmp_path / f"gsm8k/{name}-00000-of-00001.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"question": "1+1", "answer": "...\n#### 2"}))
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model/original").mkdir()
    (tmp_path / "model/original/model.safetensors").write_bytes(b"the same weights in another layout")
    hub.repos |= {"Qwen/Tiny": (tmp_path / "model", NEW), "datasets/openai/gsm8k": (tmp_path / "gsm8k", NEW)}
    model, data = (f"{tmp_path}/cache/{name}" for name in ("models--Qwen--Tiny", "datasets--openai--gsm8k"))
    old, new = "snapshots/" + OLD, "snapshots/" + NEW
    newest = "--hf-checkpoint", "Qwen/Tiny", "--prompt-data", "openai/gsm8k?weight=2"
    of_data = "--hf-checkpoint", str(TINY), "--prompt-data"

    found = resolved(*newest)
    assert found == (f"{model}/{new}", (f"{data}/{new}/main?weight=2&task=gsm8k",), None)
    assert "openai/gsm8k has several data sets, main, socratic; taking main" in capsys.readouterr().err
    assert Path(model, new, "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()
    assert not Path(model, new, "original").exists()
    held_out = "--eval-prompt-data", "held=openai/gsm8k?split=test"
    _, trained, evaluated = resolved(*of_data, "openai/gsm8k@main/socratic?task=mine", *held_out)
    assert trained == (f"{data}/{new}/socratic?task=mine",)
    assert evaluated == f"held={data}/{new}/main?split=test&task=gsm8k"

    assert resolved("--hf-checkpoint", f"Qwen/Tiny@{OLD}")[0] == f"{model}/{old}"
    (tmp_path / "run").mkdir()
    had = f"hf-checkpoint: {model}/{old}\nprompt-data:\n- {data}/{old}/main?weight=2\n"
    (tmp_path / "run/config.yaml").write_text(had)
    resumed = resolved(*newest, "--load", "run")
    assert resumed == (f"{model}/{old}", (f"{data}/{old}/main?weight=2&task=gsm8k",), None), "its own commits"

    assert "no such path, and no model Qwen/Nope on http" in refusal("--hf-checkpoint", "Qwen/Nope")
    assert "the model Qwen/Tiny has no revision v2" in refusal("--hf-checkpoint", "Qwen/Tiny@v2")
    assert "no file there that ends in .jsonl" in refusal(*of_data, "openai/gsm8k/other")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolved(*newest) == found
    assert "HF_HUB_OFFLINE is set, and the cache in" in refusal(*of_data, "openai/none")


def test_sft_and_runs_from_python_take_ids_too(monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert sft.main(["--hf-checkpoint", "Qwen/Nope", "--prompt-data", "openai/gsm8k"]) == BAD_INPUT
    says = "Qwen/Nope: there is no such path, and HF_HUB_OFFLINE is set"
    assert f"error: {says}" in capsys.readouterr().err
    with pytest.raises(HubError, match=says):
        mi.open_run(mi.load_recipe(RECIPE, hf_checkpoint="Qwen/Nope"))


def test_an_export_is_uploaded_to_a_private_repository(tmp_path, hub, capsys):
    shutil.copytree(TINY, tmp_path / "hf")
    for repo, stopped in (("me/tiny", False), ("me/other", True)):
        run = RunConfig(run_dir=tmp_path, push_to_hub=repo)
        prepare_upload(run)
        upload_export(run, stopped=stopped)
    assert hub.uploaded["me/tiny"] == {file.name: file.read_bytes() for file in TINY.iterdir()}
    assert hub.uploaded["me/other"] == {}
    assert hub.private == {"me/tiny", "me/other"}
    assert "me/other: the run was stopped before its end, so nothing is uploaded" in capsys.readouterr().err


def test_what_cannot_be_uploaded_is_refused_before_the_run_starts(tmp_path, hub, monkeypatch):
    def refusal(owner):
        with pytest.raises(HubError) as refused:
            prepare_upload(RunConfig(push_to_hub=f"{owner}/tiny"))
        return str(refused.value).removeprefix(f"--push-to-hub {owner}/tiny: ")

    assert refusal("you") == f"nothing can be uploaded to {hub.url}: You may not create models of you"
    run = RunConfig(run_dir=tmp_path, push_to_hub="me/tiny")
    with pytest.raises(UploadError, match=f"not uploaded: .*`hf upload me/tiny {tmp_path}/hf` tries again$"):
        upload_export(run, stopped=False)  # there is no export
    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        assert refusal("me").startswith("nothing can be uploaded to http://127.0.0.1:9: ")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert refusal("me") == "no token; `hf auth login` stores one, or set HF_TOKEN"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal("me")
    for word in ("tiny", "me/tiny@main", "me/tiny/part"):
        with pytest.raises(ConfigError, match=f"--push-to-hub: must be OWNER/NAME, is '{word}'"):
            check_settings(parse_config(["--push-to-hub", word]))


def test_ids_are_told_from_paths_which_win_and_a_snapshot_that_is_gone_is_found_again_by_its_commit(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("IBPO_CWD", str(tmp_path))
    (tmp_path / "Qwen/Tiny").mkdir(parents=True)
    config = parse_config(["--hf-checkpoint", "Qwen/Tiny", "--prompt-data", "data/train.jsonl"])
    assert config.model.hf_checkpoint == tmp_path / "Qwen/Tiny"
    assert config.data.prompt_data == (f"{tmp_path}/data/train.jsonl",)
    mistyped = parse_config(["--hf-checkpoint", "Qwen/Tyni"]).problems(trains=False)
    assert any("Qwen/Tyni@main would name it on the Hugging Face Hub" in line for line in mistyped)
    for text, *parts in (
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None, ""),
        ("a/b@refs/pr/3", "a/b", "refs/pr/3", ""),
        ("a/b@refs/convert/parquet/main", "a/b", "refs/convert/parquet", "main"),
        ("openai/gsm8k/main/train.parquet", "openai/gsm8k", None, "main/train.parquet"),
    ):
        found = read_hub_id(text)
        assert [found.repo, found.revision, found.path] == parts
        assert str(found) == text
    for path in ("train.jsonl", "/models/Qwen3", "../models/Qwen3", "data/train.jsonl"):
        assert read_hub_id(path) is None
    path = f"/gone/hub/models--Qwen--Qwen3-0.6B/snapshots/{OLD}"
    assert str(missing_snapshot(path)) == f"Qwen/Qwen3-0.6B@{OLD}"
    assert str(missing_snapshot(path + "/main")) == f"Qwen/Qwen3-0.6B@{OLD}/main"
    assert missing_snapshot("/gone/models") is None
    assert display_name(Path(path)) == "Qwen3-0.6B"
