"""Models and data sets of the Hugging Face Hub, with a function that answers in its place."""

import base64
import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from huggingface_hub.utils import _http

import megatron_ibpo as mi
from megatron_ibpo.basics.entry_point import BAD_INPUT
from megatron_ibpo.commands import sft
from megatron_ibpo.config import ConfigError
from megatron_ibpo.config.paths import display_name, missing_snapshot, read_hub_id
from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.data.hub import HubError, UploadError, prepare_upload, upload_export, with_local_copies
from megatron_ibpo.run.settings import check_settings, parse_config
from support.paths import ROOT

TINY, RECIPE = ROOT / "examples/tiny_qwen3", ROOT / "examples/recipes/small_cpu.yaml"
OLD, NEW = "a" * 40, "b" * 40
OWNER = "me"  # token of a user of this name, who may write to repositories of their own
URL = "http://hub.test"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The stand-in for this process, with a cache of its own."""
    hub = SimpleNamespace(
        repos={},  # "owner/name" or "datasets/owner/name" → (folder, commit of main); all have its files
        uploaded={},  # created repository → its files
        private=set(),  # created repositories that only their owner sees
    )

    def client():
        in_its_place = {URL: httpx2.MockTransport(lambda request: answer(hub, request))}
        return httpx2.Client(mounts=in_its_place, event_hooks={"request": [_http.hf_request_event_hook]})

    monkeypatch.setattr(_http, "_GLOBAL_CLIENT_FACTORY", client)
    monkeypatch.setenv("HF_TOKEN", OWNER)
    monkeypatch.setenv("IBPO_CWD", str(tmp_path))
    for name, value in {
        "ENDPOINT": URL, "HUGGINGFACE_CO_URL_TEMPLATE": URL + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True,
    }.items():  # fmt: skip
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    _http.close_session()
    yield hub
    _http.close_session()


def answer(hub, request):
    """As the Hub, as far as downloads and uploads need it."""
    path, sender = request.url.path, request.headers.get("Authorization", "").removeprefix("Bearer ")
    if path.endswith("/auth-check/write"):
        return httpx2.Response(200 if path.split("/")[3] == OWNER == sender else 403)
    if request.method == "POST":
        return answer_to_upload(hub, path, sender, *map(json.loads, request.content.splitlines()))
    verb, file = "resolve", ""
    if path.startswith(("/api/models/", "/api/datasets/")):
        kind, owner, name, *rest = path.removeprefix("/api/").split("/")
        repo = f"{owner}/{name}" if kind == "models" else f"{kind}/{owner}/{name}"
        verb, revision = rest[:2] or ("revision", "main")
    else:
        repo, _, place = path[1:].partition("/resolve/")
        revision, _, file = place.partition("/")
    if repo not in hub.repos:
        return httpx2.Response(404, headers={"X-Error-Code": "RepoNotFound"})
    folder, newest = hub.repos[repo]
    commit = newest if revision == "main" else revision
    if len(commit) != 40:
        return httpx2.Response(404, headers={"X-Error-Code": "RevisionNotFound"})
    if verb == "revision":
        return httpx2.Response(
            200, json={"id": repo.removeprefix("datasets/"), "sha": commit, "siblings": []}
        )
    contents = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    digests = {name: hashlib.sha1(content).hexdigest() for name, content in contents.items()}
    if verb == "resolve":
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digests[file]}"'}
        return httpx2.Response(200, headers=headers, content=contents[file])
    return httpx2.Response(200, json=[
        {"type": "file", "oid": digests[name], "size": len(content), "path": name}
        for name, content in contents.items()
    ])  # fmt: skip


def answer_to_upload(hub, path, sender, first, *rest):
    if path == "/api/repos/create":
        owner = first["organization"]
        repo = f"{owner}/{first['name']}"
        if not owner == OWNER == sender:
            says = {"X-Error-Message": f"You may not create models of {owner}"}
            return httpx2.Response(403, headers=says)
        if first["visibility"] == "private" and repo not in hub.uploaded:
            hub.private.add(repo)
        hub.uploaded.setdefault(repo, {})
        return httpx2.Response(200, json={"url": f"{URL}/{repo}"})
    owner, name, verb = path.split("/")[3:6]
    if verb == "preupload":
        regular = {"uploadMode": "regular", "shouldIgnore": False}
        return httpx2.Response(
            200, json={"files": [regular | {"path": file["path"]} for file in first["files"]]}
        )
    files = [entry["value"] for entry in rest]
    hub.uploaded[f"{owner}/{name}"] |= {file["path"]: base64.b64decode(file["content"]) for file in files}
    commit = "c" * 40
    return httpx2.Response(
        200, json={"commitUrl": f"{URL}/{owner}/{name}/commit/{commit}", "commitOid": commit}
    )


def test_hub_ids_become_snapshots_and_failures_take_one_line(tmp_path, hub, monkeypatch, capsys):
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
    (tmp_path / "gsm8k/README.md").write_text("# GSM8K")
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
    said = capsys.readouterr().err
    assert f"Qwen/Tiny of the Hub: commit {NEW}" in said
    assert "openai/gsm8k has several data sets, main, socratic; taking main" in said
    weights = Path(model, new, "model.safetensors").read_bytes()
    assert weights == (TINY / "model.safetensors").read_bytes()
    assert not Path(model, new, "original").exists()
    assert not Path(data, new, "README.md").exists()
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

    said = refusal("--hf-checkpoint", "Qwen/Nope")
    assert "Qwen/Nope: there is no such path, and no model Qwen/Nope on http" in said
    assert "the model Qwen/Tiny has no revision v2" in refusal("--hf-checkpoint", "Qwen/Tiny@v2")
    said = refusal("--hf-checkpoint", "Qwen/Tiny/sub")
    assert "a model is owner/name or owner/name@revision" in said
    assert "no file there that ends in .jsonl" in refusal(*of_data, "openai/gsm8k/other")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolved(*newest) == found
    assert "HF_HUB_OFFLINE is set, and the cache in" in refusal(*of_data, "openai/none")


def test_sft_and_runs_from_python_take_ids_too(monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = ["--hf-checkpoint", "Qwen/Nope", "--prompt-data", "openai/gsm8k"]
    assert sft.main(words) == BAD_INPUT
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
    said = capsys.readouterr().err
    assert f"uploaded {tmp_path}/hf to {URL}/me/tiny" in said
    assert "me/other: the run was stopped before its end, so nothing is uploaded" in said


def test_an_impossible_upload_is_refused_before_the_run(tmp_path, hub, monkeypatch):
    def refusal(owner):
        with pytest.raises(HubError) as refused:
            prepare_upload(RunConfig(push_to_hub=f"{owner}/tiny"))
        return str(refused.value).removeprefix(f"--push-to-hub {owner}/tiny: ")

    assert refusal("you") == f"nothing can be uploaded to {URL}: You may not create models of you"
    run = RunConfig(run_dir=tmp_path, push_to_hub="me/tiny")
    with pytest.raises(UploadError, match=f"not uploaded: .*`hf upload me/tiny {tmp_path}/hf` tries again$"):
        upload_export(run, stopped=False)  # there is no export
    constants = "huggingface_hub.constants"
    with monkeypatch.context() as patched:
        patched.setattr(f"{constants}.ENDPOINT", "http://127.0.0.1:9")
        assert refusal("me").startswith("nothing can be uploaded to http://127.0.0.1:9: ")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(f"{constants}.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert refusal("me") == "no token; `hf auth login` stores one, or set HF_TOKEN"
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal("me")
    for word in ("tiny", "me/tiny@main", "me/tiny/part"):
        with pytest.raises(ConfigError, match=f"--push-to-hub: must be OWNER/NAME, is '{word}'"):
            check_settings(parse_config(["--push-to-hub", word]))


def test_a_path_wins_over_an_id(tmp_path, monkeypatch):
    monkeypatch.setenv("IBPO_CWD", str(tmp_path))
    (tmp_path / "Qwen/Tiny").mkdir(parents=True)
    assert parse_config(["--hf-checkpoint", "Qwen/Tiny"]).model.hf_checkpoint == tmp_path / "Qwen/Tiny"
    mistyped = parse_config(["--hf-checkpoint", "Qwen/Tyni"])
    (said,) = [line for line in mistyped.problems(trains=False) if "hf-checkpoint" in line]
    assert "Qwen/Tyni is not a directory" in said
    assert "Qwen/Tyni@main would name it on the Hugging Face Hub" in said
    own = parse_config(["--prompt-data", "data/train.jsonl"]).data.prompt_data
    assert own == (f"{tmp_path}/data/train.jsonl",)


def test_hub_ids_differ_from_paths_and_lost_snapshots_are_named():
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
