"""Try bad inputs of every family and count how they end."""

import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "agg"}

from support.bad_inputs.children import Outcome, in_child, run_command
from support.bad_inputs.families import FAMILIES, Maker
from support.bad_inputs.place import Place


def main(seed: str, count: str, file: str = os.devnull, *only: str) -> None:
    _import_all()
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as directory:
        place = _made(Path(directory))
        found = {name: _family(name, seed, int(count), place) for name in only or FAMILIES}
    Path(file).write_text(json.dumps(found))


def _import_all() -> None:
    """Import what the commands do, so that a child does not; that starts no threads."""
    import gguf  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import reasoning_gym  # noqa: F401
    from transformers import AutoTokenizer, LlamaForCausalLM, Qwen3ForCausalLM  # noqa: F401
    from transformers.integrations import ggml  # noqa: F401

    import megatron_ibpo.plan.run_plan
    import megatron_ibpo.plan.search
    import megatron_ibpo.report.page.static
    import megatron_ibpo.run.in_one_process
    import megatron_ibpo.run.on_cluster
    import megatron_ibpo.run.open
    import megatron_ibpo.study.study_run
    import megatron_ibpo.weights.formats.convert
    import megatron_ibpo.weights.formats.gguf  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a fork would leave locks of threads behind"


def _made(directory: Path) -> Place:
    place = Place(directory)
    for work in (place.make, place.make_run, place.make_saved):
        made = in_child(work, directory / "log")
        assert made.verdict == "taken", made
    for words in place.valid():
        outcome = in_child(partial(run_command, words[0], words[1:]), directory / "log")
        assert outcome.verdict == "taken", (words, outcome)
    return place


def _family(name: str, seed: str, count: int, place: Place) -> dict[str, Any]:
    make, share = FAMILIES[name]
    inputs = max(1, round(share * count / sum(number for _, number in FAMILIES.values())))
    verdicts, wrong = Counter[str](), []
    for number in range(inputs):
        words, outcome = _tried(make, random.Random(f"{seed} {name} {number}"), place)
        verdicts[outcome.verdict] += 1
        if outcome.verdict not in ("refused", "taken"):
            wrong.append({"number": number, "command": " ".join(words)[:300], "said": outcome.said[-600:]})
    print(name, dict(verdicts), *wrong, sep="\n", flush=True)
    return {"inputs": inputs, **verdicts, "wrong": wrong}


def _tried(make: Maker, rng: random.Random, place: Place) -> tuple[list[str], Outcome]:
    here, before = place.directory / "here", os.getcwd()
    here.mkdir()
    os.chdir(here)
    try:
        words = make(rng, place, here)
        return words, in_child(partial(run_command, words[0], words[1:]), place.directory / "log")
    finally:
        os.chdir(before)
        shutil.rmtree(here)


if __name__ == "__main__":
    main(*sys.argv[1:])
