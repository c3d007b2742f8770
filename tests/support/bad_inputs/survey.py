"""Tries bad inputs of every family and counts how they end: SEED COUNT [FILE [FAMILY…]]."""

import contextlib
import importlib
import json
import multiprocessing
import os
import random
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "agg"}

from megatron_ibpo.commands.main import COMMANDS
from support.bad_inputs import place
from support.bad_inputs.families import FAMILIES, FILES, files_of
from support.paths import ROOT

LONGEST_S = 20  # seconds of processor time that a command may take
MOST_S = 180  # seconds that it may take beside other work of the machine
MOST_BYTES = 2 * 10**9  # of memory that a command may hold at one time, its libraries included
REFUSED_AT = 3 * 10**9  # bytes from which on it gets no more, so that the machine lives on
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
"""What the commands import, so that no child does; that starts no threads."""
CRASH = re.compile(r"^Traceback \(most recent call last\)|internal error|please report it", re.MULTILINE)


def main(seed, count, file=os.devnull, *only):
    for module in MODULES:
        importlib.import_module(module)
    from transformers import AutoTokenizer, LlamaForCausalLM, Qwen3ForCausalLM  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a fork would leave locks of threads behind"
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as directory:
        valid, log = Path(directory) / "valid", Path(directory) / "log"
        valid.mkdir()
        runs = (partial(run_command, place.filled(words, valid)) for words in place.RUNS)
        for work in (partial(place.make, valid), *runs):
            made = in_child(work, log)
            assert made[0] == "taken", made
        for name in only or FILES:
            takes_what_is_valid(name, valid, log)
        found = {name: tried(name, seed, int(count), valid, log) for name in only or FAMILIES}
    Path(file).write_text(json.dumps(found))


@contextlib.contextmanager
def own_directory(valid):
    here = valid.with_name("here")
    here.mkdir()
    with contextlib.chdir(here):
        yield
    shutil.rmtree(here)


def takes_what_is_valid(name, valid, log):
    """Else nothing bad about it would be tested."""
    tree, which, commands = FILES[name]
    for number in range(max(len(commands), len(files_of(valid / tree, which)))):
        with own_directory(valid):
            files = files_of(place.copied(valid, tree), which)
            command = commands[number % len(commands)]
            words = place.filled(command, valid, file=files[number % len(files)])
            ended = in_child(partial(run_command, words), log)
        assert ended[0] == "taken", (words, ended)


def tried(name, seed, count, valid, log):
    """Try the inputs of a family; return how many ended in each way, and those that ended wrongly."""
    make, share = FAMILIES[name]
    inputs = max(1, round(share * count / sum(number for _, number in FAMILIES.values())))
    verdicts, wrong = Counter(), []
    for number in range(inputs):
        with own_directory(valid):
            words = make(random.Random(f"{seed} {name} {number}"), valid)
            verdict, said = in_child(partial(run_command, words), log)
        verdicts[verdict] += 1
        if verdict not in ("refused", "taken"):
            wrong.append({"number": number, "command": " ".join(words)[:300], "said": said[-600:]})
    print(name, dict(verdicts), *wrong, sep="\n", flush=True)
    return {"inputs": inputs, **verdicts, "wrong": wrong}


def in_child(work, log):
    """Run `work` in a forked child; return its verdict and the end of what it said."""
    child = multiprocessing.get_context("fork").Process(target=_be_child, args=(work, log))
    child.start()
    _, status, used = os.wait4(child.pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it has left running
    said, status = log.read_text(errors="replace")[-3000:], os.waitstatus_to_exitcode(status)
    if status in (-signal.SIGXCPU, -signal.SIGALRM):
        return "hang", said
    if used.ru_maxrss * 1024 > MOST_BYTES:
        return "above 2 GB", said
    if status < 0 or CRASH.search(said) or (status and not said.strip()):
        return "traceback", said
    return "refused" if status else "taken", said


def _be_child(work, log):
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(file, number)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_S, LONGEST_S + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (REFUSED_AT, REFUSED_AT))
    signal.alarm(MOST_S)
    sys.exit(work() or 0)


def run_command(words):
    words = [word.replace("\0", "") for word in words]
    name = next(name for name in (" ".join(words[:2]), words[0]) if name in DOORS)
    arguments = words[len(name.split()) :]
    first, *rest = DOORS[name]
    if first == "-m":
        sys.argv = [*rest, *arguments]
        sys.modules.pop(rest[0], None)  # as if it were run for the first time
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = [first, *rest, *arguments]
    sys.path.insert(0, str(Path(first).parent))
    runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
