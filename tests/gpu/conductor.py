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
import textwrap
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import engine_bundle
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
    minutes: str = ""  # the ten minutes that it belongs to, if any: `--minutes first`


PARTS = (  # first vLLM as our engine; then what else only a GPU can refute: memory that is freed and lent
    Part("engine-loads", 60, minutes="first"), Part("engine-samples", 130, minutes="first"),
    Part("engine-colocated", 130, minutes="first"), Part("engine-loop", 270, minutes="first"),
    Part("engine-graphs", 200, minutes="second"),
    Part("engine-next", 220, "engine_family", "qwen3_next", minutes="second"),
    Part("engine-moe", 180, "engine_family", "qwen3_moe", minutes="second"),
    Part("engine-updates-in-flight", 140, minutes="second"),
    Part("machine", 120), Part("trainer-qwen3", 180, "trainer", "qwen3"),
    Part("sleep", 120), Part("weight-update", 120), Part("loop", 240),
    Part("kernels", 240, "suites", "kernels"), Part("delta-net", 420),
    Part("trainer-qwen3-next", 480, "trainer", "qwen3_next"),
    Part("trainer-qwen3-next-torch", 180, "trainer", "qwen3_next/torch"),
    Part("resume", 180), Part("parity", 300, "suites", "parity"), Part("recipes", 300, "loop", "recipes"),
    Part("trainer-qwen3-fused", 180, "trainer", "qwen3/fused"),
    Part("trainer-speed", 420),
    Part("host-syncs-qwen3", 150, "host_syncs", "qwen3"),
    Part("host-syncs-qwen3-next", 480, "host_syncs", "qwen3_next"),
    Part("real-model", 300, minutes="third"), Part("loss-speed", 240, minutes="third"),
    Part("transformer-engine", 180, minutes="third"),
    *(Part(tool, 180, "suites", tool) for tool in ("memcheck", "racecheck", "synccheck", "initcheck")),
)  # fmt: skip
MINUTES, QUICK_MINUTES = 45.0, 9.5
CPU_PACE = 5.0  # what CPUs may take of that and of a part's time
LEAST_S = 20.0  # with less time left no part is started
DOWNLOADS = {  # flag → flags that may stand beside it
    "--wheels": set(), "--engine-wheels": {"--part-mib", "--installed", "--add"},
    "--model-wheels": {"--part-mib"},
}  # fmt: skip
DESCRIPTION = """\
Find out what of this code works on one GPU, how fast and in how much memory: at most 45 minutes.
Environment: WHEELS=DIR has downloads to unpack, WHEELS_SITE=DIR keeps them unpacked, IBPO_PYTHON=FILE is
the Python. docs/gpu_report.md explains all of it."""


def main(argv):
    arguments = parse(argv)
    try:
        return download(arguments) if is_download(arguments) else test(arguments)
    except (wheels.WheelsError, model_wheels.ModelError) as error:
        print(f"tests/gpu.sh: {error}", file=sys.stderr)
        return 2


def is_download(arguments):
    return bool(arguments.wheels or arguments.engine_wheels or arguments.model_wheels)


def download(arguments):
    if arguments.wheels:
        return wheels.download(arguments.wheels)
    if arguments.model_wheels:
        return model_wheels.make(arguments.model_wheels, arguments.part_mib)
    bundle, installed, added = arguments.engine_wheels, arguments.installed, arguments.add
    return engine_bundle.make(bundle, arguments.part_mib, installed, added)


def test(arguments):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part under way is ended, too
    deadline = time.monotonic() + 60 * pace(arguments) * (QUICK_MINUTES if arguments.quick else MINUTES)
    report: dict = {"format": 1, "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    report |= {"device": arguments.device, "quick": arguments.quick, "parts": {}}
    with wheels.unpacked() as packages:
        report["wheels"] = packages.archives
        os.environ |= packages.variables
        for part in PARTS:
            if not is_wanted(part, arguments):
                continue
            report["parts"][part.name] = found = run_part(part, arguments, deadline)
            if "way" in found:  # later engines are started in the way that held first
                os.environ.setdefault("IBPO_ENGINE_WAY", found["way"])
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
    parser = argparse.ArgumentParser(
        prog="tests/gpu.sh", allow_abbrev=False, description=DESCRIPTION, epilog=parts_table(),
        usage="bash tests/gpu.sh [options]; --help lists them",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    names, minutes = [part.name for part in PARTS], sorted({part.minutes for part in PARTS} - {""})
    run = parser.add_argument_group("run parts")
    run.add_argument("--minutes", choices=minutes, help="the parts that tell most, in ten minutes each")
    run.add_argument("--only", nargs="+", choices=names, metavar="PART", help="these parts alone")
    run.add_argument("--quick", action="store_true", help="fewer cases; ends after ten minutes")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes, no GPU")
    run.add_argument("--save", type=Path, default=Path("gpu.json"), help="the report (gpu.json)")
    pack = parser.add_argument_group("download for a machine without a network; nothing is run")
    pack.add_argument(
        "--wheels", type=Path, metavar="DIR", help="what the parts import, without vLLM and Ray"
    )
    pack.add_argument(
        "--engine-wheels", type=Path, metavar="DIR", help="the same with both, slimmed, in parts"
    )
    pack.add_argument("--model-wheels", type=Path, metavar="DIR", help="the model of real-model, in parts")
    pack.add_argument(
        "--part-mib", type=int, default=28, metavar="MIB", help="a part holds at most this (28)"
    )
    pack.add_argument("--installed", type=file, metavar="FILE", help="leave out what this `pip list` names")
    pack.add_argument("--add", type=file, action="append", default=[], metavar="WHEEL", help="another wheel")
    arguments = parser.parse_args(argv)
    if text := conflict({word.partition("=")[0] for word in argv if word.startswith("--")}):
        parser.error(text)
    if others := [part.name for part in PARTS if arguments.minutes and is_elsewhere(part, arguments)]:
        parser.error(
            f"--minutes {arguments.minutes} does not have {', '.join(others)}; drop one of the flags"
        )
    arguments.quick |= arguments.minutes is not None
    if not arguments.save.absolute().parent.is_dir():
        parser.error(f"--save {arguments.save}: there is no directory {arguments.save.absolute().parent}")
    if not is_download(arguments) and (problem := wheels.problem()):
        parser.error(problem)
    return arguments


def parts_table():
    """Return the names of all parts, and which ten minutes have them."""
    rows = {"first": "", "second": "", "third": "", "": ""}
    for part in PARTS:
        rows[part.minutes] += f" {part.name}"
    lines = (
        textwrap.fill(f"{group or 'others'}:{names}", 80, subsequent_indent="  ", break_on_hyphens=False)
        for group, names in rows.items()
    )
    return "parts by minutes:\n" + "\n".join(lines)


def conflict(flags):
    """Return why these flags do not go together; empty if they do."""
    downloads = sorted(flags & DOWNLOADS.keys())
    if len(downloads) > 1:
        return f"{' and '.join(downloads)}: one download at a time"
    if downloads and (extra := flags - DOWNLOADS[downloads[0]] - set(downloads)):
        return f"{', '.join(sorted(extra))} does not go with {downloads[0]}, which runs nothing; drop one"
    if not downloads and (extra := flags & set().union(*DOWNLOADS.values())):
        return f"{', '.join(sorted(extra))} goes only with a download, such as --engine-wheels DIR"
    return ""


def is_elsewhere(part, arguments):
    return part.name in (arguments.only or ()) and part.minutes != arguments.minutes


def file(text):
    """Return the path of an existing file that a flag names."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def pace(arguments):
    return CPU_PACE if arguments.device == "cpu" else 1.0


def is_wanted(part, arguments):
    named = not arguments.only or part.name in arguments.only
    return named and arguments.minutes in (None, part.minutes)


def computed_by(parts):
    layers = {name: part["layers"].values() for name, part in parts.items() if part.get("layers")}
    libraries = {name: sorted({library for library, _ in own}) for name, own in layers.items()}
    local = " (local modules)"
    return {name: ", ".join(own) + (local if "torch" in own else "") for name, own in libraries.items()}


def run_part(part, arguments, deadline):
    left = deadline - time.monotonic()
    if left < LEAST_S:
        reason = f"no time was left for it; {alone(part, arguments)}"
        return {"status": "skipped", "reason": reason, "seconds": 0.0}
    limit = part.seconds * pace(arguments)
    allowed = min(limit, left)
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
        if not ended and allowed < limit:
            reason = f"cut off: only {allowed:.0f} of its {limit:.0f} s were left; {alone(part, arguments)}"
            found |= {"status": "skipped", "reason": reason}
        elif not ended:
            found |= {"status": "failed", "reason": f"it took longer than {limit:.0f} s"}
        elif found.get("status") not in ("passed", "failed", "skipped"):
            found |= {"status": "failed", "reason": "its process died"}
        if found["status"] == "failed":
            found["said"] = log.read_text(errors="replace")[-4000:]
    return found


def alone(part, arguments):
    """Return the command that runs a part alone, and overwrites no report."""
    flags = (["--quick"] if arguments.quick else []) + (["--device cpu"] if arguments.device == "cpu" else [])
    words = [*flags, f"--only {part.name} --save {part.name}.json"]
    return f"`bash tests/gpu.sh {' '.join(words)}` runs it alone"


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
