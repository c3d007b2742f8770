"""A bundle for GPU machines without a network: vLLM's CUDA engine, Ray, Megatron-core and what they import.

Such a machine has torch, Triton and transformers, and an H100 or H200. The bundle travels in parts: folders
of archives that wheels.py unpacks there. What nothing here uses is left out of vLLM and Ray: code for other
GPUs, servers, dashboards, and what only quantized weights need (docs/gpu_report.md).
"""

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import wheels
from slim_fatbin import flash_attention_3, slim

PARTS = {  # in the order in which they travel: each needs those before it
    "engine": (
        *("vllm", "annotated-types", "astor", "blake3", "cachetools", "cbor2", "compressed-tensors", "depyf"),
        *("dill", "fastapi", "httpcore2", "httpx2", "ijson", "jiter", "jsonschema"),
        *("jsonschema-specifications", "lark", "loguru", "msgspec", "openai", "pybase64", "pydantic"),
        *(
            "pydantic-core",
            "pydantic-settings",
            "python-dotenv",
            "python-json-logger",
            "pyzmq",
            "referencing",
        ),
        *("rpds-py", "setproctitle", "sniffio", "starlette", "truststore", "typing-inspection", "watchfiles"),
    ),
    "ray": ("ray",),
    "trainer": wheels.PACKAGES,
}
HEAD_SIZES = frozenset({64, 128, 256})  # of FlashAttention 3: those of the models here
LEFT_OUT = {  # files of a distribution, by regular expressions
    "vllm": (
        r".*\.jpg", r"vllm/benchmarks/.*", r"vllm/vllm-rs.*", r".*/instrumentator/static/.*",
        r"vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/.*",
        r".*/(_deepselect|_flashkda|_flashmla|_qutlass|_vllm_fa2)[^/]*\.so", r".*deep_gemm[^/]*\.so",
        r".*/fused_moe/configs/(?!.*H[12]00)[^/]*\.json",  # tuned for other GPUs
    ),
    "ray": (
        r"ray/(jars|cpp|data|llm|rllib|serve|train|tune)/.*", r"ray/dashboard/client/.*", r".*\.(pyx|pxd|h)",
    ),
}  # fmt: skip
FAT_BINARIES = {  # libraries with code for many GPUs, and what is chosen among that for the right one
    "vllm/_C_stable_libtorch.abi3.so": None,
    "vllm/_moe_C_stable_libtorch.abi3.so": None,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": flash_attention_3(HEAD_SIZES),
}
STRIPPED = ("ray/_raylet.so", "ray/core/src/ray/gcs/gcs_server", "ray/core/src/ray/raylet/raylet")
STRIP_S = 120.0


def make(folder, part_mib, installed=None, added=()):
    """Download, slim and pack all parts below an empty folder, and print and note their sizes.

    Args:
        folder: gets a folder per part, and bundle.json with sizes and digests.
        part_mib: the most that the archives of one part may take.
        installed: file with the other machine's `pip list`; its packages are left out.
        added: further wheels, which make a part of their own.

    Raises:
        wheels.WheelsError: a wheel cannot be had or packed, or is alone larger than a part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise wheels.WheelsError(f"{folder} is not empty; name a folder for the bundle alone")
    absent = listed(installed) if installed else set()
    report: dict = {"format": 1, "part_mib": part_mib, "parts": {}}
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=folder) as scratch:
        for name, packages in PARTS.items():
            source = Path(scratch, name)
            wheels.fetch(
                [package for package in packages if wheels.normalized(package) not in absent], source
            )
            add_parts(report, folder, name, sorted(source.glob("*.whl")))
        add_parts(report, folder, "added", added)
    (folder / "bundle.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"WHEELS={folder}/PART bash tests/gpu.sh unpacks one part, WHEELS={folder} all of them")
    return 0


def listed(file):
    """Return the names in the output of `pip list` or `pip freeze`."""
    return {wheels.normalized(re.split(r"[\s=@]", line)[0]) for line in file.read_text().splitlines() if line}


def add_parts(report, folder, name, wheel_files):
    """Pack wheels and move the archives into the folders of one part, or of several within the bound."""
    with tempfile.TemporaryDirectory(prefix=".packed-", dir=folder) as scratch:
        archives = {}
        for wheel in wheel_files:
            archive, facts = pack(wheel, Path(scratch))
            archives[archive] = facts
            print(f"{facts['bytes']:12,d}  {archive.name}", flush=True)
        sizes = {archive: facts["bytes"] for archive, facts in archives.items()}
        for number, group in enumerate(split(sizes, report["part_mib"] * 2**20), 1):
            part = name if number == 1 else f"{name}-{number}"
            (folder / part).mkdir()
            for archive in group:
                archive.rename(folder / part / archive.name)
            total = sum(sizes[archive] for archive in group)
            contents = {archive.name: archives[archive] for archive in sorted(group)}
            report["parts"][part] = {"bytes": total, "archives": contents}
            print(f"{total:12,d}  {part}: {len(group)} archives, {total / 2**20:.1f} MiB", flush=True)


def split(sizes, bound):
    """Put files of these sizes into as few groups as first-fit finds, each within the bound.

    Raises:
        wheels.WheelsError: a file alone exceeds it.
    """
    groups: list[list[Path]] = []
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        if sizes[file] > bound:
            size = f"{sizes[file] / 2**20:.1f} MiB, and a part may take {bound / 2**20:.0f} (--part-mib)"
            raise wheels.WheelsError(f"{file.name} alone takes {size}")
        room = (group for group in groups if sum(map(sizes.get, group)) + sizes[file] <= bound)
        if (group := next(room, None)) is not None:
            group.append(file)
        else:
            groups.append([file])
    return groups


def pack(wheel, folder):
    """Pack what is used of a wheel as a tar.xz of the same name. The same wheel gives the same bytes.

    Returns:
        The archive, and its facts: bytes, unpacked bytes, digest, and what was kept of each slimmed library.
    """
    archive, slimmed, unpacked = folder / f"{wheel.stem}.tar.xz", {}, 0
    try:
        with tarfile.open(archive, "w:xz", preset=6) as tar:
            for name, is_executable, stream in wheels.files(wheel):
                if is_left_out(wheel, name):
                    continue
                content = reduced(name, stream.read(), slimmed)
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(content), 0o755 if is_executable else 0o644
                tar.addfile(info, io.BytesIO(content))
                unpacked += len(content)
    except (*wheels.DAMAGE, subprocess.SubprocessError) as error:
        raise wheels.WheelsError(f"{wheel}: {error}") from error
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    facts = {"bytes": archive.stat().st_size, "unpacked_bytes": unpacked, "sha256": digest}
    return archive, facts | ({"slimmed": slimmed} if slimmed else {})


def is_left_out(wheel, name):
    patterns = LEFT_OUT.get(wheel.name.partition("-")[0], ())
    return wheels.installed_path(name) is None or any(re.fullmatch(pattern, name) for pattern in patterns)


def reduced(name, content, slimmed):
    """Return a file without what the other machine does not need; note sizes of libraries in `slimmed`."""
    if name in FAT_BINARIES:
        library = slim(content, FAT_BINARIES[name])
        slimmed[name] = {"kept_bytes": library.kept_bytes, "zeroed_bytes": library.zeroed_bytes}
        return library.library
    return stripped(content) if name in STRIPPED and shutil.which("strip") else content


def stripped(program):
    """Remove the names of local symbols, which only debuggers read."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(program)
        file.flush()
        subprocess.run(["strip", "--strip-all", file.name], check=True, capture_output=True, timeout=STRIP_S)
        return Path(file.name).read_bytes()
