"""The small packages that `tests/gpu.sh` needs, for a machine without a network: unpacked for one run."""

import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
PACKAGES = (
    *("megatron-core", "flash-linear-attention", "fla-core", "einops", "psutil"),
    *("pytest", "iniconfig", "packaging", "pluggy", "pygments", "hypothesis", "sortedcontainers"),
    # for the whole loop: settings, journal, TensorBoard, curves, and to build the extension
    *("tyro", "docstring_parser", "typeguard", "msgpack", "rich", "markdown-it-py", "mdurl", "pybind11"),
    *("tensorboard", "absl-py", "protobuf", "matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver"),
    *("pillow", "pyparsing", "python-dateutil", "six"),
)


def download(folder):
    files = ("megatron-core.txt", "cpu.txt", "cuda.txt", "dev.txt")
    lines = [line for file in files for line in (REQUIREMENTS / file).read_text().splitlines()]
    pinned = {line.partition("==")[0].lower(): line for line in lines}
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    # megatron-core declares Python 3.12 and serves 3.11
    status = subprocess.call(
        [*pip, "--ignore-requires-python", "--dest", str(folder), *(pinned[name] for name in PACKAGES)]
    )
    if status == 0:
        sizes = [file.stat().st_size / 2**20 for file in folder.glob("*.whl")]
        told = "take it along: WHEELS=DIR bash tests/gpu.sh"
        print(f"{len(sizes)} wheels, {sum(sizes):.1f} MiB, in {folder}; {told}")
    return status


def unpack(folder, into):
    """Unpack what this Python has not installed; the names of the files."""
    installed = {re.sub("[-_.]+", "_", found.name).lower() for found in metadata.distributions()}
    wheels = sorted(folder.glob("*.whl"))
    chosen = [file for file in wheels if file.name.partition("-")[0].lower() not in installed]
    for file in chosen:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(into)
    return [file.name for file in chosen]


def for_other_pythons(folder):
    """Wheels of the folder with code that was compiled for another version than this one."""
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tags = {file.name: file.stem.split("-")[-3:-1] for file in folder.glob("*.whl")}
    compiled = {name: python for name, (python, abi) in tags.items() if python[:2] == "cp" and abi != "abi3"}
    return sorted(name for name, python in compiled.items() if python != own)
