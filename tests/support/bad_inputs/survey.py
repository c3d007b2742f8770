"""Tries bad inputs of every family and counts how they end: SEED COUNT [FILE [FAMILY…]]."""

import contextlib
import importlib
import json
import os
import random
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "agg"}

import psutil

from megatron_ibpo.commands.main import COMMANDS
from support.bad_inputs.families import FAMILIES
from support.bad_inputs.place import Place
from support.paths import ROOT

LONGEST_S = 20.0  # seconds of processor time that a command may take
MOST_S = 180.0  # seconds that it may take beside other work of the machine
MOST_BYTES = 2 * 10**9  # of memory that a command may hold at one time, its libraries included
STOPPED_AT = 3 * 10**9  # bytes at which a command is ended, so that the machine lives on
DOORS = {name: command.python for name, command in COMMANDS.items()} | {
    "convert-gguf": (str(ROOT / "tools/convert_gguf_to_hf.py"),),
    "choice": ("-m", "megatron_ibpo.commands.choose_recipe"),
}  # name of a command → what Python runs for it
MODULES = (
    "gguf", "matplotlib.pyplot", "reasoning_gym", "transformers.integrations.ggml",
    "megatron_ibpo.run.in_one_process", "megatron_ibpo.run.on_cluster", "megatron_ibpo.run.open",
    "megatron_ibpo.plan.run_plan", "megatron_ibpo.plan.search", "megatron_ibpo.report.page.static",
    "megatron_ibpo.study.study_run", "megatron_ibpo.weights.formats.convert",
    "megatron_ibpo.weights.formats.gguf",
)  # fmt: skip
CRASH = re.compile(r"^Traceback \(most recent call last\)|internal error|please report it", re.MULTILINE)


def main(seed, count, file=os.devnull, *only):
    _import_all()
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as directory:
        place = Place(Path(directory))
        commands = [["train", *words] for words in place.runs]
        for work in (place.make, *(partial(run_command, words) for words in commands)):
            made = in_child(work, place.directory / "log")
            assert made[0] == "taken", made
        for words in place.valid():
            ended = in_child(partial(run_command, words), place.directory / "log")
            assert ended[0] == "taken", (words, ended)
        found = {name: _family(name, seed, int(count), place) for name in only or FAMILIES}
    Path(file).write_text(json.dumps(found))


def _import_all():
    """Import what the commands do, so that a child does not; that starts no threads."""
    for module in MODULES:
        importlib.import_module(module)
    from transformers import AutoTokenizer, LlamaForCausalLM, Qwen3ForCausalLM  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a fork would leave locks of threads behind"


def _family(name, seed, count, place):
    """Try the inputs of a family; return how many ended in each way, and those that ended wrongly."""
    make, share = FAMILIES[name]
    inputs = max(1, round(share * count / sum(number for _, number in FAMILIES.values())))
    verdicts, wrong, here = Counter(), [], place.directory / "here"
    for number in range(inputs):
        here.mkdir()
        with contextlib.chdir(here):
            words = make(random.Random(f"{seed} {name} {number}"), place, here)
            verdict, said = in_child(partial(run_command, words), place.directory / "log")
        shutil.rmtree(here)
        verdicts[verdict] += 1
        if verdict not in ("refused", "taken"):
            wrong.append({"number": number, "command": " ".join(map(str, words))[:300], "said": said[-600:]})
    print(name, dict(verdicts), *wrong, sep="\n", flush=True)
    return {"inputs": inputs, **verdicts, "wrong": wrong}


def in_child(work, log):
    """Run `work` in a forked child; return its verdict and the end of what it said."""
    pid = os.fork()
    if pid == 0:
        _be_child(work, log)
    started, stopped, child = time.monotonic(), None, psutil.Process(pid)
    while not (waited := os.wait4(pid, os.WNOHANG))[0]:
        if time.monotonic() - started > MOST_S or sum(child.cpu_times()[:4]) > LONGEST_S:
            stopped = "hang"
        elif child.memory_info().rss > STOPPED_AT:
            stopped = "above 2 GB"
        if stopped:
            os.killpg(pid, signal.SIGKILL)
            waited = os.wait4(pid, 0)
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it has left running
    said, status = log.read_text(errors="replace")[-3000:], os.waitstatus_to_exitcode(waited[1])
    if stopped is None and waited[2].ru_maxrss * 1024 > MOST_BYTES:
        stopped = "above 2 GB"
    elif stopped is None and (status < 0 or CRASH.search(said) or (status and not said.strip())):
        stopped = "traceback"
    return stopped or ("refused" if status else "taken"), said


def _be_child(work, log):
    status = 1
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in ((0, nothing), (1, output), (2, output)):
            os.dup2(file, number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = int(work() or 0)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def run_command(words):
    """Run a command as Python does for `ibpo NAME ARGUMENTS…`."""
    name, *arguments = (str(word).replace("\0", "") for word in words)
    first, *rest = DOORS[name]
    if first == "-m":
        module, *more = rest
        sys.argv = [module, *more, *arguments]
        sys.modules.pop(module, None)  # as if it were run for the first time
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    sys.argv = [first, *rest, *arguments]
    sys.path.insert(0, str(Path(first).parent))
    runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
