"""The policies that only studies start from: their recipes, and where their weights come from."""

import hashlib
import json
import subprocess
from pathlib import Path

import make_study_policy
import make_tiny_checkpoint
import pytest
import tyro
from make_study_policy import Arguments, flags, main, policies, recipe_of

from support.paths import ROOT

POLICIES = policies()


def test_each_recipe_is_understood_by_the_program_that_trains():
    assert len(POLICIES) == 10
    for policy in POLICIES:
        recipe = recipe_of(policy)
        arguments = tyro.cli(make_tiny_checkpoint.Arguments, args=[*flags(policy), "--save", "out"])
        make_tiny_checkpoint.check(arguments)
        assert (arguments.steps, arguments.family, arguments.tensor_parallel) == (
            recipe["steps"],
            "qwen3",
            1,
        ), policy
        assert str(arguments.from_checkpoint) == str(recipe.get("from_checkpoint")), policy
        assert recipe["make"].endswith(f"tools/make_study_policy.py {policy}")
        assert (ROOT / policy / "tokenizer.json").is_file()


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository of a policy and one that is trained from it; their weights are in its history alone."""
    for name, source in (("a", None), ("b", "examples/a")):
        directory = tmp_path / "examples" / name
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(name.encode())
        recipe = {"task": "pairs", "from_checkpoint": source, "steps": 1, "seconds": 9}
        digest = hashlib.sha256(name.encode()).hexdigest()
        (directory / "warm_start.json").write_text(json.dumps(recipe | {"weights_sha256": digest}))

    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init")
    git("add", ".")
    git("commit", "-m", "with weights")
    for name in "ab":
        (tmp_path / "examples" / name / "model.safetensors").unlink()
    monkeypatch.setattr(make_study_policy, "ROOT", tmp_path)
    monkeypatch.setattr(make_study_policy, "LAST_COMMIT", git("rev-parse", "HEAD"))
    return tmp_path


@pytest.fixture
def trained(monkeypatch):
    """Stand in for the training: write the weights "new", and note what was to be trained."""
    commands = []

    def run(command, **settings):
        if command[0] == "git":
            return original(command, **settings)
        commands.append(command)
        with open(f"{command[-1]}/model.safetensors", "wb") as file:
            file.write(b"new")
        return subprocess.CompletedProcess(command, 0)

    original = subprocess.run
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_weights_come_from_the_history_and_are_made_once(clone, trained, capsys):
    for says in ("made (the weights of the published", "exists already (the weights of the published"):
        main(Arguments((clone / "examples/b",)))
        assert f"examples/b: {says}" in capsys.readouterr().out
    assert (clone / "examples/b/model.safetensors").read_bytes() == b"b"
    assert not (clone / "examples/a/model.safetensors").exists()
    assert trained == []


@pytest.mark.parametrize("lacking", ["the commit", "the digest", "--train"])
def test_else_a_policy_is_trained_after_its_start(clone, trained, monkeypatch, capsys, lacking):
    if lacking == "the commit":
        monkeypatch.setattr(make_study_policy, "LAST_COMMIT", "0" * 40)
    if lacking == "the digest":
        for path in clone.glob("examples/*/warm_start.json"):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"weights_sha256": "0" * 64}))
    main(Arguments((clone / "examples/b",), train=lacking == "--train"))
    assert [" --from-checkpoint examples/a " in " ".join(command) for command in trained] == [False, True]
    for name in "ab":
        assert (clone / "examples" / name / "model.safetensors").read_bytes() == b"new"
    assert "examples/b: made (another policy by the recipe" in capsys.readouterr().out


def test_a_relative_path_starts_at_the_working_directory_or_root(clone, trained, monkeypatch):
    monkeypatch.chdir(clone / "examples")
    main(Arguments((Path("a"), Path("examples/b"))))
    assert [(clone / f"examples/{name}/model.safetensors").read_bytes() for name in "ab"] == [b"a", b"b"]


def test_an_unknown_policy_is_refused_with_the_known_ones(clone):
    for names in ((), (clone / "examples/c",), (clone / "examples",)):
        with pytest.raises(ValueError, match=r"examples/a, examples/b$"):
            main(Arguments(names))
