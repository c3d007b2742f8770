"""The small packages that `tests/gpu.sh` needs, for a machine without a network: unpacked for one run."""

import os
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
    pip += ["--ignore-requires-python"]  # megatron-core declares Python 3.12 and serves 3.11
    status = subprocess.call([*pip, "--dest", str(folder), *(pinned[name] for name in PACKAGES)])
    if status == 0:
        sizes = [file.stat().st_size / 2**20 for file in folder.glob("*.whl")]
        print(f"{len(sizes)} wheels, {sum(sizes):.1f} MiB, in {folder}: WHEELS={folder} bash tests/gpu.sh")
    return status


def found():
    return sorted(Path(os.environ["WHEELS"]).glob("*.whl"))


def unpack(into):
    """Unpack what this Python has not installed; the names of the files."""
    installed = {re.sub("[-_.]+", "_", one.name).lower() for one in metadata.distributions()}
    chosen = [file for file in found() if file.name.partition("-")[0].lower() not in installed]
    for file in chosen:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(into)
    return [file.name for file in chosen]


def problem():
    """What makes $WHEELS useless; code that is compiled serves one version, unless it is abi3."""
    if (folder := os.environ.get("WHEELS")) and not found():
        return f"WHEELS={folder}: there are no wheels; `bash tests/gpu.sh --wheels DIR` downloads them"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for file in found() if folder else ():
        python, abi = file.stem.split("-")[-3:-1]
        if python[:2] == "cp" and abi != "abi3" and python != "cp" + version.replace(".", ""):
            how = f"download with `PIP_PYTHON_VERSION={version} bash tests/gpu.sh --wheels DIR`"
            return f"WHEELS={folder}: {file.name} is for another Python than this {version}; {how}"
    return ""
