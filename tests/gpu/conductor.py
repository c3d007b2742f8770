"""Runs the parts of `tests/gpu.sh`, each in a process of its own; what they found is one JSON file.

Only the standard library is imported: whatever is broken on a machine must not break this.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import model_wheels
import wheels

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float  # it may take; then it is ended, and what it had found stays
    module: str = ""  # module in `parts`; its name with underscores unless given
    variant: str = ""  # argument of the module


PARTS = (  # first what only a GPU can refute: memory that is pinned, freed and lent, streams, groups of NCCL
    Part("machine", 120), Part("trainer-qwen3", 180, "trainer", "qwen3"),
    Part("sleep", 120), Part("weight-update", 120), Part("loop", 240),
    Part("kernels", 240, "suites", "kernels"), Part("delta-net", 420),
    Part("trainer-qwen3-next", 480, "trainer", "qwen3_next"),
    Part("trainer-qwen3-next-torch", 180, "trainer", "qwen3_next/torch"),
    Part("resume", 180), Part("parity", 300, "suites", "parity"), Part("recipes", 300, "loop", "recipes"),
    Part("trainer-qwen3-fused", 180, "trainer", "qwen3/fused"),
    Part("host-syncs-qwen3", 150, "host_syncs", "qwen3"),
    Part("host-syncs-qwen3-next", 480, "host_syncs", "qwen3_next"),
    Part("real-model", 300), Part("loss-speed", 240), Part("transformer-engine", 180),
    *(Part(tool, 180, "suites", tool) for tool in ("memcheck", "racecheck", "synccheck", "initcheck")),
)  # fmt: skip
MINUTES, QUICK_MINUTES = 30.0, 9.5
LEAST_S = 20.0  # with less time left no part is started


def main(argv):
    arguments = parse(argv)
    if arguments.wheels is not None:
        return wheels.download(arguments.wheels)
    if arguments.model_wheels is not None:
        try:
            return model_wheels.make(arguments.model_wheels, arguments.part_mib)
        except model_wheels.ModelError as error:
            print(f"tests/gpu.sh: {error}", file=sys.stderr)
            return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part under way is ended, too
    deadline = time.monotonic() + 60 * (QUICK_MINUTES if arguments.quick else MINUTES)
    report: dict = {"format": 1, "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    report |= {"device": arguments.device, "quick": arguments.quick, "parts": {}}
    with tempfile.TemporaryDirectory(prefix="gpu-wheels-") as place:
        if os.environ.get("WHEELS"):
            report["wheels"] = wheels.unpack(Path(place))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), place]))
        for part in PARTS:
            if arguments.only and part.name not in arguments.only:
                continue
            report["parts"][part.name] = found = run_part(part, arguments, deadline)
            report["computed_by"] = computed_by(report["parts"])
            new = arguments.save.with_name(arguments.save.name + ".new")  # whole or not at all, always
            new.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            new.replace(arguments.save)
            told = (found.get("reason") or found.get("summary", "")).partition("\n")[0][:160]
            print(f"{part.name:25} {found['status']:8} {found['seconds']:7.1f} s  {told}", flush=True)
    for name, libraries in report.get("computed_by", {}).items():
        print(f"{name} was computed by {libraries}")
    statuses = [found["status"] for found in report["parts"].values()]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in ("passed", "failed", "skipped"))
    print(f"{counts}; written to {arguments.save}")
    return 1 if "failed" in statuses else 0


def parse(argv):
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="tests/gpu.sh", allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes")
    parser.add_argument("--quick", action="store_true", help="fewer cases; fits into ten minutes")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="only download what WHEELS=DIR then gives")
    parser.add_argument("--model-wheels", type=Path, metavar="DIR", help="only download the model, in parts")
    parser.add_argument("--part-mib", type=int, default=28, metavar="MIB", help="bound of a part (28)")
    parser.add_argument("--save", type=Path, default=Path("gpu.json"), help="default: gpu.json")
    arguments = parser.parse_args(argv)
    if not arguments.save.absolute().parent.is_dir():
        parser.error(f"--save {arguments.save}: there is no directory {arguments.save.absolute().parent}")
    if arguments.wheels is None and arguments.model_wheels is None and (problem := wheels.problem()):
        parser.error(problem)
    return arguments


def computed_by(parts):
    layers = {name: part["layers"].values() for name, part in parts.items() if part.get("layers")}
    libraries = {name: sorted({library for library, _ in own}) for name, own in layers.items()}
    local = " (local modules: no evidence of MFU)"
    return {name: ", ".join(own) + (local if "torch" in own else "") for name, own in libraries.items()}


def run_part(part, arguments, deadline):
    left = deadline - time.monotonic()
    if left < LEAST_S:
        return {"status": "skipped", "reason": "no time was left for it", "seconds": 0.0}
    allowed = min(part.seconds, left)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"gpu-{part.name}-") as scratch:
        found_file, log = Path(scratch, "found.json"), Path(scratch, "log")
        command = [sys.executable, "-c", "import job, sys; job.main(*sys.argv[1:])"]
        command += [part.module or part.name.replace("-", "_"), arguments.device, scratch, part.variant]
        command += ["quick"] if arguments.quick else []
        with log.open("wb") as said:
            ended = run(command, arguments.device, said, allowed)
        found = json.loads(found_file.read_text()) if found_file.exists() else {}
        found["seconds"] = round(time.monotonic() - started, 1)
        if not ended:
            found |= {"status": "failed", "reason": f"it took longer than {allowed:.0f} s"}
        elif found.get("status") not in ("passed", "failed", "skipped"):
            found |= {"status": "failed", "reason": "its process died"}
        if found["status"] == "failed":
            found["said"] = log.read_text(errors="replace")[-4000:]
    return found


def run(command, device, said, seconds):
    """Run a command; return whether it ended by itself. Its children are ended with it."""
    # this code before any other, no network, and ranks that meet on the loopback interface
    paths = [*map(str, (ROOT, ROOT / "tests", ROOT / "tools", HERE)), os.environ.get("PYTHONPATH")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    defaults = {"OMP_NUM_THREADS": "1" if device == "cpu" else "8"}
    defaults |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    own |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    process = subprocess.Popen(
        command, env=defaults | dict(os.environ) | own, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said,
        stderr=said, start_new_session=True,
    )  # fmt: skip
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
