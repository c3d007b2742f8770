"""What travels to a GPU machine without a network: it is slimmed, split, packed and unpacked."""

import importlib.util
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import conductor
import engine_bundle
import wheels
from slim_fatbin import flash_attention_3, slim

MACHINE_CODE, PTX = 2, 1


def fat_binary(*entries):
    """Make one of (kind, architecture, payload)."""
    body = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(payload), architecture) + payload
        for kind, architecture, payload in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def cuda_library(*fat_binaries):
    """Make an ELF file whose section .nv_fatbin holds these, with padding between them, among host code."""
    names = b"\0.text\0.nv_fatbin\0.names\0"
    contents = [b"host code" * 8, (b"\0" * 16).join(fat_binaries), names]
    data, rows = b"\x7fELF\x02\x01\x01".ljust(64, b"\0"), [bytes(64)]
    for content, name in zip(contents, (b".text", b".nv_fatbin", b".names"), strict=True):
        rows.append(struct.pack("<IIQQQQ24x", names.index(name), 1, 0, 0, len(data), len(content)))
        data += content
    header = bytearray(data[:64])
    struct.pack_into("<Q", header, 0x28, len(data))
    struct.pack_into("<HHH", header, 0x3A, 64, len(rows), len(rows) - 1)
    return bytes(header) + data[64:] + b"".join(rows)


def test_slimming_zeroes_only_the_code_for_other_gpus():
    old, right, newer, text = (letter * 24 for letter in (b"o", b"r", b"n", b"t"))
    library = cuda_library(
        fat_binary((MACHINE_CODE, 80, old), (MACHINE_CODE, 90, right), (PTX, 90, text)),
        fat_binary((MACHINE_CODE, 100, newer), (MACHINE_CODE, 90, right * 2)),
    )
    slimmed = slim(library)
    expected = library
    for payload in (old, newer, text):
        expected = expected.replace(payload, bytes(24))
    assert slimmed.library == expected
    assert (slimmed.kept_bytes, slimmed.zeroed_bytes) == (72, 72)
    assert slim(library, lambda code: len(code) == 48).kept_bytes == 48


def test_flash_attention_keeps_helpers_and_kernels_of_used_heads():
    def kernel(size, element="10bfloat16_t", capped=0):
        """Name one as the library does; the tile's sizes come before the head's."""
        tile = "INS1_25CollectiveMainloopFwdSm90ILi2EN4cute5tupleIJNS7_ILi128EEENS7_ILi160EEESA_EEE"
        options = f"Li{size}ENS_{element}EfNS_4arch4Sm90ELb0ELb0ELb{capped}ELb1ELb0E"
        return f"N5flash20enable_sm90_or_laterINS1_16FlashAttnFwdSm90{tile}{options}".encode()

    wanted = flash_attention_3(frozenset({64, 128}))
    assert [wanted(kernel(size)) for size in (64, 96, 128)] == [True, False, True]
    assert not wanted(kernel(64, capped=1))
    assert not wanted(kernel(64, element="6half_t"))
    assert wanted(b"prepare_varlen_num_blocks_kernel")


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (b"PK\x03\x04", "not a 64-bit ELF file"),
        (cuda_library(fat_binary((MACHINE_CODE, 80, b"o" * 8))), "no machine code for sm_90"),
        (
            cuda_library(fat_binary((MACHINE_CODE, 90, b"r" * 64)).replace(b"@" + bytes(7), b"A" + bytes(7))),
            "ends outside",
        ),
        (cuda_library(fat_binary((MACHINE_CODE, 90, b"r" * 8)))[:-80], "damaged"),
    ],
)
def test_foreign_libraries_for_the_gpu_are_refused(library, message):
    with pytest.raises(ValueError, match=message):
        slim(library)


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(100, 300))
def test_a_split_puts_every_file_into_one_bounded_part(numbers, bound):
    sizes = {Path(f"{number}.tar.xz"): size for number, size in enumerate(numbers)}
    parts = engine_bundle.split(sizes, bound)
    assert sorted(file for part in parts for file in part) == sorted(sizes)
    totals = [sum(sizes[file] for file in part) for part in parts]
    assert all(total <= bound for total in totals)
    assert all(first + second > bound for first, second in pairwise(totals))


def make_wheel(folder, name, files=(), tags="py3-none-any"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-{tags}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, content in dict(files or {f"{name}/__init__.py": "VALUE = 7"}).items():
            wheel.writestr(file, content)
    return path


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    """Return how to make a bundle of made wheels with these arguments."""
    code = cuda_library(fat_binary((MACHINE_CODE, 80, os.urandom(4096)), (MACHINE_CODE, 90, b"r" * 24)))
    configs = "vllm/model_executor/layers/fused_moe/configs/E=8,device_name=NVIDIA_"
    contents = {
        "vllm": {
            "vllm/__init__.py": "", "vllm/_C_stable_libtorch.abi3.so": code, "vllm/benchmarks/serve.py": "",
            "vllm/_moe_C_stable_libtorch.abi3.so": code,
            f"{configs}H200.json": "{}", f"{configs}A100.json": "{}",
        },
        "ray": {"ray/__init__.py": "", "ray/jars/ray_dist.jar": os.urandom(4096), "ray/serve/api.py": ""},
        "large": {"large/noise": os.urandom(900_000)}, "larger": {"larger/noise": os.urandom(950_000)},
    }  # fmt: skip

    def fetch(packages, folder):
        for name in packages:
            make_wheel(folder, name.replace("-", "_"), contents.get(name))

    parts = {
        "engine": ("vllm", "large", "larger", "pydantic-core"),
        "ray": ("ray",),
        "trainer": ("mega", "pybind11"),
    }
    monkeypatch.setattr(engine_bundle, "PARTS", parts)
    monkeypatch.setattr(wheels, "fetch", fetch)
    monkeypatch.delenv("WHEELS", raising=False)

    def make(name="bundle", *arguments):
        folder = tmp_path / name
        status = conductor.main(["--engine-wheels", str(folder), *map(str, arguments)])
        files = {part.name: {file.name for file in part.iterdir()} for part in folder.glob("*/")}
        return status, folder, files

    return make


@pytest.mark.slow
def test_a_bundle_is_reproducible_with_bounded_parts(bundle, tmp_path, capsys):
    extra = make_wheel(tmp_path, "transformer_engine")
    pip_list = tmp_path / "installed.txt"
    pip_list.write_text(
        "Package    Version\n---------- -------\nJinja2  3.1.6\nPyBind11 3.1.0\npydantic-core==2.50\n"
    )
    arguments = ["--part-mib", 1, "--installed", pip_list, "--add", extra]
    status, folder, parts = bundle("first", *arguments)
    assert status == 0
    assert parts.keys() == {"engine", "engine-2", "ray", "trainer", "added"}
    assert parts["added"] == {"transformer_engine-1.0-py3-none-any.tar.xz"}
    names = {file.partition("-")[0] for files in parts.values() for file in files}
    assert names == {"vllm", "large", "larger", "ray", "mega", "transformer_engine"}, (
        "the rest is there already"
    )
    report = json.loads((folder / "bundle.json").read_text())
    assert all(part["bytes"] <= 2**20 for part in report["parts"].values())
    vllm = report["parts"]["engine"]["archives"]["vllm-1.0-py3-none-any.tar.xz"]
    assert vllm["slimmed"]["vllm/_C_stable_libtorch.abi3.so"] == {"kept_bytes": 24, "zeroed_bytes": 4096}
    with tarfile.open(folder / "engine" / "vllm-1.0-py3-none-any.tar.xz") as tar:
        packed = set(tar.getnames())
    assert "vllm/model_executor/layers/fused_moe/configs/E=8,device_name=NVIDIA_H200.json" in packed
    assert not [name for name in packed if "A100" in name or "benchmarks" in name]
    assert report["parts"]["ray"]["bytes"] < 4096, "jars stay behind"
    assert (
        bundle("second", *arguments)[1].joinpath("bundle.json").read_bytes()
        == (folder / "bundle.json").read_bytes()
    )
    assert bundle("first")[0] == 2
    assert "first is not empty" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_larger_than_a_part_is_named(bundle, tmp_path, capsys):
    large = make_wheel(tmp_path, "huge", {"huge/noise": os.urandom(1_200_000)})
    assert bundle("bundle", "--part-mib", 1, "--add", large)[0] == 2
    said = capsys.readouterr().err
    assert "huge-1.0-py3-none-any.tar.xz alone takes 1.1 MiB, and a part may take 1 (--part-mib)" in said


def modules_of(packages):
    """Return what Python can import with these packages."""
    paths = packages.variables["PYTHONPATH"].split(os.pathsep)
    return {file.name for path in paths if Path(path).is_dir() for file in Path(path).iterdir()}


@pytest.mark.slow
def test_parts_that_came_before_are_used_again_until_they_change(bundle, tmp_path, monkeypatch):
    _, folder, _ = bundle()
    site = tmp_path / "site"
    monkeypatch.setenv("WHEELS_SITE", str(site))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("WHEELS", str(folder / "engine"))
    with wheels.unpacked() as packages:
        assert {"vllm", "large"} <= modules_of(packages)
        assert packages.variables["PYTHONPATH"].startswith(str(wheels.STAND_INS))
        assert packages.variables["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    mark = site / "engine" / "mark"
    mark.touch()
    monkeypatch.setenv("WHEELS", str(folder / "trainer"))
    with wheels.unpacked() as packages:
        assert {"vllm", "mega"} <= modules_of(packages), "the engine came with another call"
    monkeypatch.setenv("WHEELS", str(folder))
    with wheels.unpacked() as packages:
        assert mark.exists(), "nothing is unpacked twice"
        assert "vllm-1.0-py3-none-any.tar.xz" in packages.archives
    (folder / "engine" / "large-1.0-py3-none-any.tar.xz").unlink()
    with wheels.unpacked() as packages:
        assert not mark.exists()
        assert "large" not in modules_of(packages)
    monkeypatch.delenv("WHEELS")
    with wheels.unpacked() as packages:
        assert {"vllm", "mega"} <= modules_of(packages)
    assert {path.name for path in site.iterdir()} == {"engine", "trainer"}, "Ray is installed here"


def tar_of(path, *members):
    with tarfile.open(path, "w:xz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def a_link(name, target):
    link = tarfile.TarInfo(name)
    link.type, link.linkname = tarfile.SYMTYPE, target
    return link


HOSTILE = {
    "above": [(tarfile.TarInfo("../escaped"), b"x")],
    "absolute": [(tarfile.TarInfo("/tmp/escaped"), b"x")],
    "data": [(tarfile.TarInfo("a-1.0.data/purelib/../../../escaped"), b"x")],
    "link": [(a_link("folder", ".."), b""), (tarfile.TarInfo("folder/escaped"), b"x")],
    "over": [(tarfile.TarInfo("a"), b"x"), (tarfile.TarInfo("a/b"), b"x")],
}


@pytest.fixture
def part(tmp_path, monkeypatch):
    """Return a part's folder for archives, which is unpacked into tmp_path/site/part."""
    (tmp_path / "part").mkdir()
    monkeypatch.setenv("WHEELS", str(tmp_path / "part"))
    monkeypatch.setenv("WHEELS_SITE", str(tmp_path / "site"))
    make_wheel(tmp_path / "part", "a_good_one")
    return tmp_path / "part"


def refusal(part, capsys):
    """Return why the archives are refused, and check that nothing of them is there afterwards."""
    assert conductor.main(["--device", "cpu", "--save", str(part / "gpu.json")]) == 2
    assert not [*part.parent.glob("site/*"), *part.parent.glob("**/escaped")]
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_that_would_write_elsewhere_is_refused_whole(kind, part, capsys):
    tar_of(part / "hostile-1.0-py3-none-any.tar.xz", *HOSTILE[kind])
    assert f"{part}/hostile-1.0-py3-none-any.tar.xz: " in refusal(part, capsys)


def test_hostile_damaged_and_slow_wheels_are_named(part, capsys, monkeypatch):
    hostile = make_wheel(part, "hostile", {"../escaped": "x"})
    assert f"{hostile}: '../escaped' is a path outside the archive" in refusal(part, capsys)
    hostile.unlink()
    whole = part / "whole-1.0-py3-none-any.tar.xz"
    tar_of(whole, (tarfile.TarInfo("noise"), os.urandom(100_000)))
    cut = whole.rename(part / "cut-1.0-py3-none-any.tar.xz")
    cut.write_bytes(cut.read_bytes()[:-30_000])
    assert f"{cut}: " in refusal(part, capsys)
    cut.unlink()
    monkeypatch.setattr(wheels, "UNPACK_S", -1)
    assert "a_good_one-1.0-py3-none-any.whl: not unpacked within" in refusal(part, capsys)


def test_files_go_where_pip_puts_them_and_programs_stay_executable(part, tmp_path):
    info = zipfile.ZipInfo("package/raylet")
    info.external_attr = 0o755 << 16
    with zipfile.ZipFile(part / "package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(info, "#!/bin/sh\n")
        wheel.writestr("package-1.0.data/purelib/package/pure.py", "")
        wheel.writestr("package-1.0.data/scripts/command", "")
    engine_bundle.pack(part / "package-1.0-py3-none-any.whl", part)
    (part / "package-1.0-py3-none-any.whl").unlink()
    with wheels.unpacked():
        place = tmp_path / "site" / "part" / "package"
        assert {file.name for file in place.iterdir()} == {"raylet", "pure.py"}
        assert os.access(place / "raylet", os.X_OK)
        assert not os.access(place / "pure.py", os.X_OK)
        assert not list(place.parent.glob("**/command"))


SEES_STAND_INS = """
import multiprocessing
import pydantic
from openai_harmony import Message, ReasoningEffort, nested
import openai_harmony.deeper
import xgrammar
import another_sitecustomize_ran

class Request(pydantic.BaseModel):
    message: Message

def check():
    assert ReasoningEffort.HIGH == "HIGH" and Request(message=3).message == 3
    assert Message("any", arguments=1) and nested.__module__ == "openai_harmony"
    assert xgrammar.INSTALLED
    try:
        import not_among_them
    except ImportError:
        return True

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(check(), pool.apply(check))
"""


@pytest.mark.slow
def test_only_absent_packages_have_stand_ins_in_every_process(tmp_path):
    (tmp_path / "program.py").write_text(SEES_STAND_INS)
    (tmp_path / "xgrammar.py").write_text("INSTALLED = True")
    another = "import sys, types\nsys.modules['another_sitecustomize_ran'] = types.ModuleType('another')\n"
    (tmp_path / "sitecustomize.py").write_text(another)
    for name in ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions"):
        file = Path(importlib.util.find_spec(name).origin)
        source = file.parent if file.name == "__init__.py" else file
        (tmp_path / source.name).symlink_to(source)
    python = os.path.realpath(sys.executable)  # one that has none of the packages
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(wheels.STAND_INS), str(tmp_path)])}
    done = subprocess.run(
        [python, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.slow  # a minute and a half, and as long again where it makes the bundle
@pytest.mark.timeout(1800)
def test_the_bundled_engine_builds_under_a_simulated_gpu(tmp_path, request):
    python = os.environ.get("IBPO_CUDA_PYTHON")
    if python is None:
        pytest.skip("IBPO_CUDA_PYTHON names no Python with CUDA's torch (docs/gpu_report.md)")
    environment, models = dict(os.environ), request.getfixturevalue("models")
    if not {"WHEELS", "WHEELS_SITE"} & environment.keys():
        environment["WHEELS"] = str(tmp_path / "bundle")
        run(
            ["bash", str(ROOT / "tests/gpu.sh"), "--engine-wheels", environment["WHEELS"]],
            environment | version_of(python),
        )
    script = str(ROOT / "tests" / "gpu" / "rehearsal.py")
    table = json.loads(run([python, script, *map(str, models.values())], environment))
    assert {name: said for name, said in table["imports"]["modules"].items() if said != "ok"} == {}
    assert table["imports"]["absent_operators"] == []
    for name, attention in (("dense", "Attention"), ("next", "GatedDeltaNet")):
        assert table[name]["engine"]["runner_v2"]
        assert "NVIDIA" in table[name]["engine"]["stops"], "only the device was missing"
        assert any(attention in layer for layer in table[name]["model"]["layers"])


def version_of(python):
    command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return {"PIP_PYTHON_VERSION": run(command, os.environ).strip()}


def run(command, environment):
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
