"""Transformer Engine for a machine without a network: one wheel, with GPU code for the H100 and H200 alone.

    python3.12 tests/gpu/transformer_engine_wheel.py DIR --torch 2.11.0     # the other machine's versions

It needs a network, g++ and 10 GB, and no GPU. Its torch extension, which has no wheel on PyPI, is compiled
against the headers of that torch, as one file: headers are most of it. `WHEELS=DIR bash tests/gpu.sh` unpacks
the wheel, and `--engine-wheels --add` takes it.

NOT RUN: the wheel has been imported without a GPU, and no kernel of it was launched.
"""

import argparse
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

from slim_fatbin import slim

PINS = Path(__file__).resolve().parents[2] / "requirements/transformer-engine.txt"
LEFT_OUT = re.compile(r"transformer_engine/(jax|wheel_lib/nccl_ep)/.*|.*/libnccl_ep\.so|.*/top_level\.txt")
LIBRARY = "transformer_engine/wheel_lib/libtransformer_engine.so"
FLAGS = ("-shared", "-fPIC", "-O2", "-g0", "-std=c++17", "-fvisibility=hidden", "-DNDEBUG", "-w")
DEFINED = ("-DTORCH_EXTENSION_NAME=transformer_engine_torch", "-DTORCH_API_INCLUDE_EXTENSION_H")
LINKED = ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda", "torch_python")
STEP_S = 7200.0


def main(folder, torch):
    with tempfile.TemporaryDirectory(prefix="transformer-engine-") as scratch:
        packages, source = download(Path(scratch), torch)
        extension = compile_extension(packages, source, Path(scratch, "extension.so"))
        folder.mkdir(parents=True, exist_ok=True)
        wheel = pack(sorted(Path(scratch).glob("*.whl")), source, extension, folder)
    print(f"{wheel.stat().st_size:12,d}  {wheel}")


def download(scratch, torch):
    """Download the pinned wheels and the extension's source, and install torch and headers in an environment.

    Returns:
        The environment's packages, and the source.
    """
    run(sys.executable, "-m", "venv", scratch / "env")
    pip = (scratch / "env/bin/python", "-m", "pip", "--quiet")
    run(*pip, "install", "setuptools==80.10.2", "wheel==0.45.1", "packaging", f"torch=={torch}")
    (packages,) = (scratch / "env/lib").glob("python3.*/site-packages")
    cuda = next((packages / "nvidia").glob("cu1[0-9]")).name
    run(*pip, "install", "--no-deps", f"nvidia-cuda-crt=={cuda[2:]}.0.*")  # declared by the compiler alone
    pins = [line for line in PINS.read_text().splitlines() if line.startswith("transformer-engine")]
    for pin in pins:
        kind = "--no-binary" if "-torch" in pin else "--only-binary"
        run(*pip, "download", "--no-deps", "--no-build-isolation", kind, ":all:", "--dest", scratch, pin)
    (archive,) = scratch.glob("transformer_engine_torch-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(scratch / "source", filter="data")
    (source,) = (scratch / "source").iterdir()
    return packages, source


def compile_extension(packages, source, target):
    """Compile all files of the torch extension as one; some four minutes of one core."""
    files = sorted((source / "csrc").rglob("*.cpp"))
    together = source / "together.cpp"
    together.write_text("".join(f'#include "{path}"\n' for path in files))
    common = source / "common_headers"
    headers = [source / "csrc", common, common / "common", common / "common/include"]
    headers += [packages / "torch/include", packages / "torch/include/torch/csrc/api/include"]
    headers += [*(packages / "nvidia").glob("*/include"), sysconfig.get_path("include")]
    included = [f"-I{path}" for path in headers]
    libraries = [f"-L{packages / 'torch/lib'}", *(f"-l{name}" for name in LINKED)]
    run("g++", *FLAGS, *DEFINED, *included, together, "-o", target, *libraries)
    return target


def pack(wheels, source, extension, folder):
    """Write one wheel with what is used of all three packages; return its path."""
    version = wheels[0].name.split("-")[1]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    path = folder / f"transformer_engine-{version}-{python}-{python}-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as packed:
        for wheel in map(zipfile.ZipFile, wheels):
            for name in wheel.namelist():
                if not LEFT_OUT.fullmatch(name) and name not in packed.namelist():
                    content = wheel.read(name)
                    packed.writestr(name, slimmed(content) if name == LIBRARY else content)
        packed.write(extension, f"transformer_engine_torch{sysconfig.get_config_var('EXT_SUFFIX')}")
        packed.write(source / "PKG-INFO", f"transformer_engine_torch-{version}.dist-info/METADATA")
    return path


def slimmed(library):
    reduced = slim(library)
    print(f"{LIBRARY}: {reduced.kept_bytes:,d} bytes of GPU code kept, {reduced.zeroed_bytes:,d} left out")
    return reduced.library


def run(*command):
    subprocess.run([str(word) for word in command], check=True, stdin=subprocess.DEVNULL, timeout=STEP_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="gets the wheel")
    parser.add_argument("--torch", required=True, help="version of torch on the other machine")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.torch)
