"""`tests/gpu.sh`: what a part finds is kept whatever becomes of it, and parts need no vLLM, Ray or tyro."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from waiting import eventually

from megatron_ibpo.report.disk import RoomOnDisk

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import conductor  # noqa: E402

ENDINGS = {
    "passes": "job.note(number=1)",
    "breaks": "job.note(number=2)\n    raise ValueError('no such kernel')",
    "dies": "job.note(number=3)\n    os.kill(os.getpid(), 9)",
    "hangs": "job.note(number=4)\n    time.sleep(60)",
    "nests": "child = subprocess.Popen(['sleep', '60'])\n    job.note(child=child.pid)\n    child.wait()",
    "lacks": "raise Skipped('no compute-sanitizer')",
}
"""Bodies of parts, by the parts' names."""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Parts with these endings, in the place of the real ones."""
    (tmp_path / "parts").mkdir()
    for name, body in ENDINGS.items():
        code = f"import os, subprocess, time\nfrom job import Skipped\n\n\ndef run(job):\n    {body}\n"
        (tmp_path / "parts" / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = tuple(conductor.Part(name, 2 if name == "hangs" else 30) for name in ENDINGS if name != "nests")
    monkeypatch.setattr(conductor, "PARTS", made)
    return made


def test_every_ending_of_a_part_is_reported_with_what_it_had_found(parts, tmp_path, capsys):
    saved = tmp_path / "gpu.json"
    assert conductor.main(["--device", "cpu", "--save", str(saved)]) == 1
    found = json.loads(saved.read_text())["parts"]
    ends = {name: (own["status"], own.get("number")) for name, own in found.items()}
    assert ends == {
        "passes": ("passed", 1),
        "breaks": ("failed", 2),
        "dies": ("failed", 3),
        "hangs": ("failed", 4),
        "lacks": ("skipped", None),
    }
    assert found["breaks"]["reason"] == "ValueError: no such kernel"
    assert "Traceback" in found["breaks"]["said"]
    assert found["dies"]["reason"] == "its process died"
    assert found["hangs"]["reason"] == "it took longer than 2 s"
    assert found["lacks"]["reason"] == "no compute-sanitizer"
    assert "1 passed, 3 failed, 1 skipped" in capsys.readouterr().out


def test_a_part_that_hangs_leaves_no_process_behind(parts, tmp_path):
    told = argparse.Namespace(device="cpu", quick=True)
    found = conductor.run_part(conductor.Part("nests", 2), told, time.monotonic() + 60)
    assert found["reason"] == "it took longer than 2 s"
    assert eventually(lambda: is_over(found["child"]), 10)


def test_a_run_that_is_cut_off_leaves_what_it_had_and_no_process(parts, tmp_path):
    pid, saved = tmp_path / "pid", tmp_path / "gpu.json"
    waits = f"import os, time\n\n\ndef run(job):\n    open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
    (tmp_path / "parts" / "waits.py").write_text(waits + "    time.sleep(60)\n")
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
    assert eventually(lambda: is_over(pid.read_text()), 10)


def test_a_place_for_the_file_that_is_not_there_is_refused_at_once(tmp_path, capsys):
    with pytest.raises(SystemExit):
        conductor.main(["--device", "cpu", "--save", str(tmp_path / "nowhere" / "gpu.json")])
    assert "there is no directory" in capsys.readouterr().err


def test_when_time_is_up_the_rest_is_skipped(parts):
    told = argparse.Namespace(device="cpu", quick=True)
    found = conductor.run_part(parts[0], told, time.monotonic() + conductor.LEAST_S / 2)
    assert (found["status"], found["reason"]) == ("skipped", "no time was left for it")


def test_without_a_gpu_it_says_so(tmp_path):
    found, status = script(tmp_path, "--only", "kernels", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert status == 0
    assert found["kernels"]["status"] == "skipped"
    assert "no CUDA device" in found["kernels"]["reason"]


@pytest.mark.slow
def test_a_trainer_takes_its_steps_without_vllm_ray_transformer_engine_and_tyro(tmp_path):
    for name in ("vllm", "ray", "transformer_engine", "tyro"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name}', name='{name}')\n")
    only = ("--device", "cpu", "--quick", "--only", "trainer-qwen3")
    found, status = script(tmp_path, *only, environment={"PYTHONPATH": str(tmp_path)})
    trained = found["trainer-qwen3"]
    assert status == 0, trained
    assert len(trained["steps"]) == 5
    assert trained["logprob_gap_after"] > trained["logprob_gap_before"]
    assert trained["predicted_bytes"]["weights"] == 4 * trained["parameters"]
    assert trained["tokens_per_second"] > 0


@pytest.mark.slow  # about three minutes; each part is tested by itself elsewhere
@pytest.mark.timeout(600)
def test_all_parts_pass_on_a_cpu(tmp_path):
    found, status = script(tmp_path, "--device", "cpu", "--quick")
    assert status == 0, {name: own for name, own in found.items() if own["status"] == "failed"}
    assert found.keys() == {part.name for part in conductor.PARTS}
    skipped = {name for name, own in found.items() if own["status"] == "skipped"}
    sanitizers = {"memcheck", "racecheck", "synccheck", "initcheck"}
    assert skipped == sanitizers | {"host-syncs-qwen3", "host-syncs-qwen3-next"}


def test_waits_are_skipped_without_cuda_with_the_reason(tmp_path):
    found, status = script(tmp_path, "--device", "cpu", "--quick", "--only", "host-syncs-qwen3")
    assert status == 0
    assert found["host-syncs-qwen3"]["status"] == "skipped"
    assert "on CUDA alone" in found["host-syncs-qwen3"]["reason"]


def test_waits_are_counted_by_the_line_that_waits_and_by_ours_that_led_there():
    """With torch's words, as no CPU says them; every time, and no other warnings."""
    from parts.host_syncs import SYNCHRONIZES, counted

    def waits():
        warnings.warn(SYNCHRONIZES, stacklevel=1)

    with counted() as found:
        for _ in range(2):
            RoomOnDisk(1, print).waiting(waits)
        waits()
        with pytest.warns(UserWarning, match="something else"):
            warnings.warn("something else", stacklevel=1)
    seen = {tuple(re.sub(r":\d+", "", name) for name in places): times for places, times in found.items()}
    here = "test_gpu_script.py waits"
    assert seen == {(here, "megatron_ibpo/report/disk.py waiting"): 2, (here, ""): 1}


def is_over(pid):
    process = Path("/proc", str(pid))
    return not process.exists() or "(zombie)" in (process / "status").read_text()


def script(directory, *arguments, environment=()):
    """What the parts found, and the exit status."""
    saved = directory / "gpu.json"
    done = subprocess.run(
        ["bash", str(ROOT / "tests" / "gpu.sh"), *arguments, "--save", str(saved)],
        env={**os.environ, "IBPO_PYTHON": sys.executable, **dict(environment)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert saved.exists(), done.stderr
    return json.loads(saved.read_text())["parts"], done.returncode
