import json
import os
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest

from support.paths import ROOT
from support.waiting import eventually, has_ended

sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import conductor


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Put parts with these bodies in the place of the real ones; return how to."""
    (tmp_path / "parts").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def put(**bodies):
        for name, body in bodies.items():
            code = f"import os, subprocess, time\nfrom job import Skipped\ndef run(job):\n    {body}\n"
            (tmp_path / "parts" / f"{name}.py").write_text(code)
        seconds = {name: (2 if name == "hangs" else 30) / conductor.CPU_PACE for name in bodies}
        made = tuple(conductor.Part(name, seconds[name]) for name in bodies)
        monkeypatch.setattr(conductor, "PARTS", made)
        return tmp_path / "gpu.json"

    return put


@pytest.mark.slow
def test_every_ending_of_a_part_is_reported_with_its_findings(parts, capsys):
    layers = {"attention": ("torch", "padded"), "delta net": ("flash-linear-attention", "Triton kernels")}
    saved = parts(
        passes="job.note(number=1, layers={'attention': ('Transformer Engine', 'cuDNN')})",
        breaks=f"job.note(number=2, layers={layers!r})\n    raise ValueError('no such kernel')",
        dies="job.note(number=3)\n    os.kill(os.getpid(), 9)",
        hangs="child = subprocess.Popen(['sleep', '60'])\n    job.note(number=child.pid)\n    child.wait()",
        lacks="raise Skipped('no compute-sanitizer')", misses="import tyro.nowhere",
    )  # fmt: skip
    assert conductor.main(["--device", "cpu", "--save", str(saved)]) == 1
    report, said = json.loads(saved.read_text()), capsys.readouterr().out
    found = report["parts"]
    child = found["hangs"]["number"]
    assert {name: (own["status"], own.get("number")) for name, own in found.items()} == {
        "passes": ("passed", 1), "breaks": ("failed", 2), "dies": ("failed", 3), "hangs": ("failed", child),
        "lacks": ("skipped", None), "misses": ("skipped", None),
    }  # fmt: skip
    assert eventually(lambda: has_ended(child), 10), "a part that hangs leaves no process behind"
    assert {name: own["reason"] for name, own in found.items() if "reason" in own} == {
        "breaks": "ValueError: no such kernel", "dies": "its process died",
        "hangs": "it took longer than 2 s", "lacks": "no compute-sanitizer",
        "misses": "tyro is not installed; WHEELS=DIR gives it (docs/gpu_report.md)",
    }  # fmt: skip
    assert "Traceback" in found["breaks"]["said"]
    assert "1 passed, 3 failed, 2 skipped" in said
    assert "passes was computed by Transformer Engine\n" in said
    local = "flash-linear-attention, torch (local modules)"
    assert report["computed_by"]["breaks"] == local


@pytest.mark.slow
def test_an_interrupted_run_leaves_its_findings_and_no_process(parts, tmp_path):
    pid = tmp_path / "pid"
    waits = f"open({str(pid)!r}, 'w').write(str(os.getpid()))\n    time.sleep(60)"
    saved = parts(passes="job.note(number=1)", waits=waits)
    program = (
        "import conductor, sys\n"
        "conductor.PARTS = conductor.Part('passes', 30), conductor.Part('waits', 60)\n"
        "sys.exit(conductor.main(['--device', 'cpu', '--save', sys.argv[1]]))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(saved)], cwd=ROOT / "tests" / "gpu")
    assert eventually(lambda: pid.exists() and pid.read_text(), 20)
    process.terminate()
    assert process.wait(20) == 143
    assert json.loads(saved.read_text())["parts"]["passes"]["number"] == 1
    assert eventually(lambda: has_ended(pid.read_text()), 10)


@pytest.mark.parametrize(("device", "mfu"), [("NVIDIA H100 80GB HBM3", 0.1), ("an unknown GPU", None)])
@pytest.mark.parametrize("library", ["torch", "Transformer Engine"])
def test_mfu_needs_a_known_gpu_and_names_local_modules(tmp_path, monkeypatch, library, device, mfu):
    from job import Job
    from parts import trainer

    monkeypatch.setattr(trainer.torch.cuda, "get_device_name", lambda _: device)
    monkeypatch.setattr(trainer, "memory", lambda _: {"peak_reserved": 2**30})
    job = Job("cuda", True, tmp_path, found={"layers": {"attention": (library, "")}})
    trainer.note_speed(job, [2.0], 1000, 2 * 98.9e12)
    assert job.found["mfu"] == mfu
    assert ("MFU 10.0%" in job.found["summary"]) == (mfu is not None)
    assert ("(local modules)" in job.found["summary"]) == (library == "torch")


def test_wheels_add_missing_packages_for_one_run_and_hide_nothing(parts, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "wheels"

    def make_wheel(name, content="", tags="py3-none-any"):
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / f"{name}-1.0-{tags}.whl", "w") as archive:
            archive.writestr(f"{name}/__init__.py", content)

    monkeypatch.setenv("WHEELS", str(folder))
    with pytest.raises(SystemExit):
        conductor.main(["--device", "cpu"])
    assert "there are no wheels; `bash tests/gpu.sh --wheels DIR`" in capsys.readouterr().err
    make_wheel("only_in_the_folder", "VALUE = 7")
    make_wheel("pytest", "raise AssertionError('in the place of the one that is installed')")
    saved = parts(needs="import only_in_the_folder, pytest\n    job.note(value=only_in_the_folder.VALUE)")
    assert conductor.main(["--device", "cpu", "--save", str(saved)]) == 0
    report = json.loads(saved.read_text())
    assert report["parts"]["needs"]["value"] == 7
    assert report["wheels"] == ["only_in_the_folder-1.0-py3-none-any.whl"]
    make_wheel("compiled", tags="cp36-abi3-manylinux2014_x86_64")
    assert conductor.parse([]).wheels is None  # one that serves all versions
    make_wheel("compiled", tags="cp39-cp39-manylinux2014_x86_64")
    with pytest.raises(SystemExit):
        conductor.main(["--device", "cpu"])
    said = capsys.readouterr().err
    assert "is for another Python than this 3." in said
    assert " bash tests/gpu.sh --wheels DIR`" in said


def test_the_first_two_ten_minutes_are_the_engines_alone():
    def names(*arguments):
        parsed = conductor.parse(arguments)
        assert parsed.quick
        return [part.name for part in conductor.PARTS if conductor.is_wanted(part, parsed)]

    first, second = names("--minutes", "first"), names("--minutes", "second")
    assert first == ["engine-loads", "engine-samples", "engine-colocated", "engine-loop"]
    assert second == ["engine-graphs", "engine-next", "engine-moe", "engine-updates-in-flight"]
    assert names("--quick")[:8] == first + second, "what tells most comes first"
    assert names("--minutes", "first", "--only", "engine-loop") == ["engine-loop"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--engine-wheels d --only machine", "--only does not go with --engine-wheels, which runs nothing"),
        ("--wheels d --part-mib 3", "--part-mib does not go with --wheels"),
        ("--wheels d --model-wheels e", "--model-wheels and --wheels: one download at a time"),
        (f"--device cpu --installed {__file__}", "--installed goes only with a download"),
        ("--minutes first --only engine-loop machine", "--minutes first does not have machine"),
        ("--save /nowhere/at/all.json", "there is no directory /nowhere/at"),
    ],
)
def test_conflicting_flags_are_refused_in_one_line(flags, problem, capsys):
    with pytest.raises(SystemExit):
        conductor.main(flags.split())
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.endswith("--help lists them")
    assert problem in error


@pytest.mark.slow
def test_a_part_without_time_is_skipped_with_its_command(parts, monkeypatch, capsys):
    saved = parts(first="time.sleep(30)", second="pass")
    monkeypatch.setattr(conductor, "QUICK_MINUTES", 2 / 60 / conductor.CPU_PACE)
    monkeypatch.setattr(conductor, "LEAST_S", 1.0)
    assert conductor.main(["--device", "cpu", "--quick", "--save", str(saved)]) == 0
    found = json.loads(saved.read_text())["parts"]
    assert {name: own["status"] for name, own in found.items()} == {"first": "skipped", "second": "skipped"}
    assert "cut off: only 2 of its 30 s were left" in found["first"]["reason"]
    said = capsys.readouterr().out
    for name, own in found.items():
        command = f"`bash tests/gpu.sh --quick --device cpu --only {name} --save {name}.json` runs it alone"
        assert own["reason"].endswith(command)
        assert command in said, (name, own)


@pytest.mark.slow
def test_a_failing_engine_falls_back_for_later_parts_too(tmp_path, monkeypatch):
    from job import Job
    from vllm_engine import NO_COMPILATION, WAYS, first_that_holds

    from megatron_ibpo.engines import EngineError
    from megatron_ibpo.engines.vllm.settings import vllm_arguments

    assert vllm_arguments(NO_COMPILATION)["compilation_config"]["mode"] == 0
    assert all(len(vllm_arguments(arguments)) == len(arguments) for arguments, _ in WAYS.values())
    tried = []

    def attempt(name, arguments, environment):
        tried.append(name)
        if environment != {"VLLM_USE_V2_MODEL_RUNNER": "0"}:
            raise EngineError(f"{name} has no kernel for this device")
        return name

    job = Job("cuda", True, tmp_path)
    assert first_that_holds(job, WAYS, attempt) == "V1 model runner"
    assert tried == ["default", "TRITON_ATTN", "V1 model runner"]
    assert (job.found["way"], job.found["users_get_it"]) == ("V1 model runner", False)
    assert ["no kernel" in why for why in job.found["failed_ways"].values()] == [True, True]
    monkeypatch.setenv("IBPO_ENGINE_WAY", job.found["way"])
    tried.clear()
    assert first_that_holds(Job("cuda", True, tmp_path), WAYS, attempt) == "V1 model runner"
    assert tried == ["V1 model runner"]
    with pytest.raises(AssertionError, match="no way holds: default"):
        first_that_holds(Job("cuda", True, tmp_path), {"default": ((), {})}, attempt)


@pytest.mark.parametrize(
    ("spans", "lengths", "problem"),
    [
        ([((0, 1),), ((0, 1), (3, 2))], (5, 6), ""),
        ([((0, 2),), ((0, 1),)], (5, 6), ""),
        ([((0, 1),)], (5,), "1 of 2 responses never came"),
        ([((0, 1),), ((0, 1),)], (5, 5), "response 1 has 5 of 6 tokens"),
        ([((0, 2), (2, 1)), ((0, 1),)], (5, 6), "response 0 has the spans ((0, 2), (2, 1))"),
        ([((0, 1),), ((1, 1),)], (5, 6), "response 1 has the spans ((1, 1),)"),
    ],
)
def test_an_update_in_flight_records_old_then_new_weights(spans, lengths, problem):
    from parts.engine_updates_in_flight import problem_of

    def sample(versions, length):
        return SimpleNamespace(versions=versions, token_ids=range(length))

    samples = dict(enumerate(map(sample, spans, lengths)))
    assert problem_of(samples, [SimpleNamespace(max_tokens=length) for length in (5, 6)]) == problem


def test_wrong_weights_and_errors_beyond_rounding_are_noticed():
    import torch
    from parts.engine_loads import compared
    from references import nearer

    sampled, new, old = ([torch.tensor([-1.0, -2.0, shift])] for shift in (-3.0, -3.001, -9.0))
    old[0] -= 0.1
    assert nearer(sampled, new, old)["holds"]
    assert not nearer(sampled, old, new)["holds"]
    right = torch.linspace(-8, 8, 64)
    rounded = right.to(torch.bfloat16)
    assert compared(lambda device: [(rounded, right)], "cpu", 1.0)["problem"] == ""
    assert "off by" in compared(lambda device: [(rounded + 0.5, right)], "cpu", 1.0)["problem"]
    assert "off by" in compared(lambda device: [(rounded * torch.nan, right)], "cpu", 1.0)["problem"]
    expert = torch.tensor([3])
    assert "off by" in compared(lambda device: [(expert, expert + 1)], "cpu", 16.0)["problem"], (
        "another expert"
    )
    assert "ZeroDivisionError" in compared(lambda device: 1 / 0, "cpu", 1.0)["problem"]


@pytest.mark.slow  # three minutes for the first, four for the second, on two cores
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("minutes", ["first", "second"])
def test_the_engine_parts_pass_on_cpus(tmp_path, minutes):
    saved = tmp_path / "gpu.json"
    done = subprocess.run(
        ["bash", str(ROOT / "tests/gpu.sh"), "--device", "cpu", "--minutes", minutes, "--save", str(saved)],
        env=os.environ | {"IBPO_PYTHON": sys.executable}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=1700,
    )  # fmt: skip
    assert saved.exists(), done.stderr
    found = json.loads(saved.read_text())["parts"]
    assert {name: own["status"] for name, own in found.items()} == {
        part.name: "passed" for part in conductor.PARTS if part.minutes == minutes
    }, found
    if minutes == "first":
        assert found["engine-samples"]["same_seeds"]["tokens"] == 1.0
        assert found["engine-loop"]["product"]
        assert found["engine-loop"]["qwen3"]["logprob_difference"] < 1e-5
    else:
        flight = found["engine-updates-in-flight"]
        assert all(flight[name]["first new"]["holds"] for name in ("recompute", "keep"))
        assert found["engine-next"]["new_weights"]["holds"]


@pytest.mark.slow  # about four minutes
@pytest.mark.timeout(900)
def test_all_parts_pass_on_a_cpu_without_optional_packages(tmp_path):
    without = ("vllm", "ray", "transformer_engine", "reasoning_gym", "math_verify", "renderers")
    hidden = f"import sys\nsys.modules.update(dict.fromkeys({without}))\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    saved, paths = tmp_path / "gpu.json", [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        ["bash", str(ROOT / "tests/gpu.sh"), "--device", "cpu", "--quick", "--save", str(saved)],
        env=os.environ | {"IBPO_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=880,
    )  # fmt: skip
    assert saved.exists(), done.stderr
    found = json.loads(saved.read_text())["parts"]
    assert done.returncode == 0, {name: own for name, own in found.items() if own["status"] == "failed"}
    assert found.keys() == {part.name for part in conductor.PARTS}
    skipped = {name for name, own in found.items() if own["status"] == "skipped"}
    need_a_gpu = {"host-syncs-qwen3", "host-syncs-qwen3-next"}
    need_vllm = {part.name for part in conductor.PARTS if part.name.startswith("engine-")} - {"engine-loop"}
    need_vllm |= {"real-model"}
    assert skipped == need_a_gpu | need_vllm | {"memcheck", "racecheck", "synccheck", "initcheck"}
    assert found["engine-loop"]["summary"].startswith("NOT THE PRODUCT")
    assert not found["engine-loop"]["product"]
    trained, loop = found["trainer-qwen3"], found["loop"]
    assert len(trained["steps"]) == 5
    assert trained["logprob_gap_after"] > trained["logprob_gap_before"]
    assert trained["predicted_bytes"]["weights"] == 4 * trained["parameters"]
    assert trained["tokens_per_second"] > 0
    assert loop["first_step"] == {"reward": 0.0, "shaped_reward": 0.0, "loss": 0.0, "grad_norm": 0.0}
    before, after = loop["float32"]["greedy"]
    assert after > before
