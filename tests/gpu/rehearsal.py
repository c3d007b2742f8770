"""Rehearse the bundled engine without a GPU: what it imports, configures and builds under a faked H100.

    WHEELS=DIR python tests/gpu/rehearsal.py MODEL … >table.json

The Python must have what the GPU machine has: CUDA's torch, Triton and transformers. gcc makes a stand-in for
the driver's library, which vLLM's libraries are linked with.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import wheels

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHECK_S = 600.0
NO_DEVICE = 100  # the error that all functions of the stand-in return


def main(models):
    with wheels.unpacked() as packages, tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch:
        paths = packages.variables["PYTHONPATH"]
        libraries = [
            library for path in paths.split(os.pathsep) for library in Path(path).glob("vllm/**/*.so")
        ]
        make_driver(Path(scratch), libraries)
        environment = os.environ | packages.variables | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), paths]), "LD_LIBRARY_PATH": scratch, "TMPDIR": scratch,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        table = {"imports": check(environment, "imports")}
        for model in map(Path, models):
            table[model.name] = {action: check(environment, action, model) for action in ("engine", "model")}
    print(json.dumps(table, indent=1))


def make_driver(folder, libraries):
    """Make a libcuda.so.1 with what the libraries call of the driver; every function reports no device."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    functions = sorted(set(re.findall(r" U (cu[A-Z]\w+)", listed)))
    code = "".join(f"int {function}(void) {{ return {NO_DEVICE}; }}\n" for function in functions)
    compiler = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-"]
    command = [*compiler, "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=code, text=True, check=True, timeout=60)


def check(environment, *arguments):
    command = [sys.executable, str(HERE / "faked_h100.py"), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=CHECK_S,
    )  # fmt: skip
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-4000:]}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
