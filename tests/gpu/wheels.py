"""Packages for a machine without a network: downloaded elsewhere, unpacked there beside what its Python has.

A part is a folder of archives: wheels, or the `.tar.xz` of engine_bundle.py, which are named like wheels.
"""

import hashlib
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE.parents[1] / "requirements"
STAND_INS = (
    HERE / "stand_ins"
)  # a sitecustomize for what the bundled vLLM imports and a sampling engine does not use
PACKAGES = (
    *("megatron-core", "flash-linear-attention", "fla-core", "einops", "psutil"),
    *("pytest", "iniconfig", "packaging", "pluggy", "pygments", "hypothesis", "sortedcontainers"),
    # for the whole loop: settings, journal, TensorBoard, curves, and to build the extension
    *("tyro", "docstring_parser", "typeguard", "msgpack", "rich", "markdown-it-py", "mdurl", "pybind11"),
    *("tensorboard", "absl-py", "protobuf", "matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver"),
    *("pillow", "pyparsing", "python-dateutil", "six"),
)
DOWNLOAD_S, UNPACK_S = 1800.0, 240.0
STAMP = ".digest"  # of the archives that a folder was unpacked from
DAMAGE = (OSError, EOFError, ValueError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error)


class WheelsError(Exception):
    """An archive cannot be had or unpacked; the message names it."""


class Packages(NamedTuple):
    archives: list[str]  # names of those that a run uses
    variables: dict[str, str]  # environment variables with which Python imports them


def download(folder):
    """Download what the parts without vLLM and Ray import."""
    fetch(PACKAGES, folder)
    sizes = [file.stat().st_size / 2**20 for file in folder.glob("*.whl")]
    print(f"{len(sizes)} wheels, {sum(sizes):.1f} MiB, in {folder}: WHEELS={folder} bash tests/gpu.sh")
    return 0


def fetch(packages, folder):
    """Download wheels of the pinned versions, without what they depend on."""
    files = ("megatron-core.txt", "cpu.txt", "cuda.txt", "dev.txt")
    lines = [line for file in files for line in (REQUIREMENTS / file).read_text().splitlines()]
    pinned = {normalized(line.partition("==")[0]): line for line in lines}
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    pip += ["--ignore-requires-python"]  # megatron-core declares Python 3.12 and serves 3.11
    command = [*pip, "--dest", str(folder), *(pinned[normalized(name)] for name in packages)]
    if subprocess.run(command, timeout=DOWNLOAD_S, check=False).returncode:
        raise WheelsError(f"pip cannot download into {folder}; what it says stands above")


def normalized(name):
    return re.sub("[-_.]+", "_", name.strip()).lower()


def problem():
    """Return what makes $WHEELS useless. Compiled code serves one version of Python, unless it is abi3."""
    if (folder := os.environ.get("WHEELS")) and not _archives(folder):
        return f"WHEELS={folder}: there are no wheels; `bash tests/gpu.sh --wheels DIR` downloads them"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for file in _archives(folder) if folder else ():
        python, abi = file.name.removesuffix(".whl").removesuffix(".tar.xz").split("-")[-3:-1]
        if python[:2] == "cp" and abi != "abi3" and python != "cp" + version.replace(".", ""):
            flag = "--wheels" if file.suffix == ".whl" else "--engine-wheels"
            download = f"`PIP_PYTHON_VERSION={version} bash tests/gpu.sh {flag} DIR` downloads for this"
            how = f"IBPO_PYTHON=FILE names another, {download}"
            return f"WHEELS={folder}: {file.name} is for another Python than this {version}; {how}"
    return ""


def _archives(folder):
    return sorted(file for kind in ("*.whl", "*.tar.xz") for file in Path(folder).rglob(kind))


@contextmanager
def unpacked():
    """Unpack what $WHEELS_SITE lacks of the parts in $WHEELS, and yield the `Packages` of all parts there.

    Without $WHEELS_SITE they are unpacked for this run only. What this Python has installed is left out.

    Raises:
        WheelsError: an archive is damaged, holds a path outside its part, or takes longer than `UNPACK_S`.
    """
    with ExitStack() as stack:
        site = os.environ.get("WHEELS_SITE")
        site = Path(site or stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-wheels-"))).absolute()
        parts = {}
        if folder := os.environ.get("WHEELS"):
            installed = _installed(site)
            for file in _archives(folder):
                if normalized(file.name.partition("-")[0]) not in installed:
                    parts.setdefault(file.absolute().parent.name, []).append(file)
        deadline = time.monotonic() + UNPACK_S
        for name, archives in parts.items():
            unpack_part(archives, site / name, deadline)
        yield _packages(site)


def _installed(site):
    """Return the names of what Python has, except in the site."""
    paths = [path for path in sys.path if not Path(path).absolute().is_relative_to(site)]
    return {normalized(entry.name) for entry in metadata.distributions(path=paths)}


def _packages(site):
    places = sorted(stamp.parent for stamp in site.glob(f"*/{STAMP}"))
    archives = [line for place in places for line in (place / STAMP).read_text().splitlines()[1:]]
    paths, variables = [os.environ.get("PYTHONPATH", ""), *map(str, places)], {}
    if any((place / "vllm").is_dir() for place in places):
        paths.insert(0, str(STAND_INS))  # also before another sitecustomize, which it runs
        # vLLM takes FlashInfer for granted, and it is not in the bundle
        variables = {"VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")}
    return Packages(archives, variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))})


def unpack_part(archives, place, deadline):
    """Unpack archives into a folder, which appears complete or not at all, unless it holds them already."""
    stamp = "\n".join([_digest(archives), *(file.name for file in archives)]) + "\n"
    if (place / STAMP).exists() and (place / STAMP).read_text() == stamp:
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=place.parent) as scratch:
        new = Path(scratch, "new")
        for archive in archives:
            try:
                _unpack(archive, new, deadline)
            except DAMAGE as error:
                raise WheelsError(f"{archive}: {error}") from error
        (new / STAMP).write_text(stamp)
        if place.exists():
            place.rename(Path(scratch, "old"))
        new.rename(place)


def _digest(archives):
    digest = hashlib.sha256()
    for file in archives:
        digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _unpack(archive, place, deadline):
    for name, is_executable, stream in files(archive):
        if (path := installed_path(name)) is None:
            continue
        target = place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            while piece := stream.read(2**20):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not unpacked within {UNPACK_S:.0f} s")
                file.write(piece)
        target.chmod(0o755 if is_executable else 0o644)


def files(archive: Path) -> Iterator[tuple[str, bool, IO[bytes]]]:
    """Yield name, whether it is executable, and content of each file in an archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                if not info.is_dir():
                    with wheel.open(info) as stream:
                        yield info.filename, bool(info.external_attr >> 16 & 0o100), stream
        return
    with tarfile.open(archive, "r:xz") as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isfile() else None
            if stream is None:
                raise ValueError(f"{member.name} is no plain file")
            yield member.name, bool(member.mode & 0o100), stream


def installed_path(name):
    """Return where pip would put a wheel's file below site-packages; None: elsewhere.

    Raises:
        ValueError: it would be outside.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise ValueError(f"{name!r} is a path outside the archive")
    if not path.parts[0].endswith(".data"):
        return path
    kind, *rest = path.parts[1:]
    return PurePosixPath(*rest) if kind in ("purelib", "platlib") and rest else None
