"""The Dockerfile copies what is there, has the pinned versions, and builds the image that KubeRay runs."""

import re
from pathlib import Path

import pytest
import yaml

from support.paths import ROOT

pytestmark = pytest.mark.lint

DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def patterns(file: str) -> set[str]:
    lines = (ROOT / file).read_text().split("\n")
    return {line.rstrip("/").removeprefix("**/") for line in lines if line and not line.startswith("#")}


def test_what_is_copied_is_there_and_lies_where_it_does_in_the_repository():
    for copied in instructions("COPY"):
        *sources, target = [word for word in copied.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
            assert target in (source, "./"), "bootstrap.sh expects the layout of the repository"
            assert target == source or "/" not in source


def test_nothing_that_git_ignores_enters_the_image():
    assert patterns(".dockerignore") == patterns(".gitignore") | {".git"}


def test_python_and_ray_are_those_of_the_pins():
    pins = (ROOT / "requirements/cpu.txt").read_text()
    base, *targets = instructions("FROM")
    python = re.match(r"python:([\d.]+)-", base)[1]
    assert f"Python {python}." in pins, "the pins were tested with it"
    assert targets == ["base AS cpu", "base AS cuda"]
    for device in ("cpu", "cuda"):
        assert f"IBPO_DEVICE={device} PYTHONDONTWRITEBYTECODE=1 bash tools/bootstrap.sh" in DOCKERFILE
    assert f"ray=={kuberay()['rayVersion']}\n" in pins


def test_kuberay_runs_the_image_as_the_user_that_it_has():
    pod = kuberay()["headGroupSpec"]["template"]["spec"]
    assert re.fullmatch(r"[\w./-]+/megatron-ibpo:cuda", pod["containers"][0]["image"])
    assert f"USER_ID={pod['securityContext']['fsGroup']}" in instructions("ARG")
    assert instructions("WORKDIR") == ["/opt/megatron_ibpo"], "which the job's command names"


def kuberay() -> dict:
    job, _ = yaml.safe_load_all(Path(ROOT / "examples/cluster/kuberay.yaml").read_text())
    return job["spec"]["rayClusterSpec"]
