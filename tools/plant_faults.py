"""Plant the published faults of faults.yaml, and record which of them `ibpo verify` sees. Run its settings
without a fault, and record what verify says of them.

    python tools/plant_faults.py                          all of them, and every setting without a fault
    python tools/plant_faults.py --only "no answer is right"      with the checks alone that should see it
    python tools/plant_faults.py --only "small_cpu with seed 1"   settings of faults.yaml, without a fault
    python tools/plant_faults.py --table                  print the results for docs/verify.md

Each fault is planted in a copy of the last commit, where verify runs with the settings of the fault. The exit
status is 1 if no check that should see it does, or if a setting without a fault has a wrong row.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from mutants import ROOT, Mutant, copied, environment, mutant_of

from megatron_ibpo.basics.entry_point import DONE, FAILED, run_tool
from megatron_ibpo.basics.supervised import adopt_orphans
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.verify.rows import CHECKS, check_of

LIST = ROOT / "tools/faults.yaml"
RESULTS = ROOT / "tools/results"
FAULTS, RECIPES = "verify_faults.json", "verify_recipes.json"
"""Files of the results: of planted faults, and of settings without a fault."""
LONGEST_S = 1800
"""Seconds after which verify is ended."""


@dataclass
class Arguments:
    only: tuple[str, ...] = ()
    """Names of faults, or of settings to run without a fault; all by default."""
    save: Path = RESULTS
    """Directory of the results; those of other faults and settings in it are kept."""
    table: bool = False
    """Print the table of the stored results, and plant nothing."""


@dataclass(frozen=True)
class Trial:
    """A fault, or none, under settings."""

    name: str
    flags: tuple[str, ...]
    model: dict[str, Any] | None
    """Fields of config.json that differ from those of the model `like`."""
    mutant: Mutant
    """Without a fault it changes nothing."""
    caught_by: tuple[str, ...] = ()

    def run(self, copy: Path, only: Sequence[str]) -> dict[str, Any]:
        """Run these checks of verify in a copy with the fault; return its result."""
        path, saved, log = copy / self.mutant.file, copy / "verify.json", copy / "verify.log"
        source, began, began_cpu = path.read_text(), time.monotonic(), cpu_seconds()
        words = [sys.executable, "-m", "megatron_ibpo.commands.verify", *self.flags, "--save", str(saved)]
        words += ["--only", ",".join(only)]
        words += [] if self.model is None else ["--hf-checkpoint", str(changed_model(copy, self.model))]
        saved.unlink(missing_ok=True)
        path.write_text(self.mutant.planted(source))
        try:
            with log.open("w") as output:  # shows how far it is
                status = subprocess.run(
                    words, cwd=copy, env=environment(copy), timeout=LONGEST_S, stdout=output, stderr=output
                ).returncode
        finally:
            path.write_text(source)
        content = json.loads(saved.read_text()) if saved.exists() else {"checks": [], "seed": None}
        rows = content["checks"]
        wrong = [row for row in rows if row["verdict"] == "wrong"]
        wrong_checks = {check_of(row["check"]) for row in wrong}
        is_right = bool(wrong_checks & {*self.caught_by}) if self.caught_by else bool(rows) and not wrong
        print(f"{self.name}: {sorted(wrong_checks)}{'' if is_right else ', NOT AS IT SHOULD'}")
        unchecked = {row["check"]: row["reason"] for row in rows if row["verdict"] == "not checked"}
        result = {
            "name": self.name, "as_expected": is_right, "seconds": round(time.monotonic() - began, 1),
            "error": None if rows else f"status {status}: {log.read_text()[-600:]}",
        }  # fmt: skip
        if self.caught_by:  # the reasons of a fault's many rows would be half of the record
            fields = ("check", "figure", "bound")
            return result | {
                "caught_by": list(self.caught_by), "rows": len(rows), "not_checked": [*unchecked],
                "wrong": [{field: row[field] for field in fields} for row in wrong],
            }  # fmt: skip
        return result | {
            "seed": content["seed"], "cpu_seconds": round(cpu_seconds() - began_cpu, 1), "checks": [*only],
            "right": len(rows) - len(wrong) - len(unchecked), "wrong": wrong, "not_checked": unchecked,
        }  # fmt: skip


def cpu_seconds() -> float:
    """Return the processor time of all descendants that have ended, also of those whose own parents did not
    wait for them (`adopt_orphans`)."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read_results(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the stored results of faults and settings by their names."""
    paths = [directory / name for name in (FAULTS, RECIPES) if (directory / name).exists()]
    return {result["name"]: result for path in paths for result in json.loads(path.read_text())["trials"]}


def store(result: dict[str, Any], trials: list[Trial], directory: Path) -> None:
    """Store the result of a fault or a setting beside those of others."""
    results = read_results(directory) | {result["name"]: result}
    is_fault = "caught_by" in result
    in_order = [results[t.name] for t in trials if t.name in results and bool(t.caught_by) == is_fault]
    content = {"machine": machine(), "trials": in_order}
    (directory / (FAULTS if is_fault else RECIPES)).write_text(json.dumps(content, indent=1) + "\n")


def changed_model(copy: Path, changes: dict[str, Any]) -> Path:
    """Write a directory with the tokenizer of the model `like`, without weights, and with the config.json of
    the model `config`, or `like` itself, in which some fields differ."""
    like, target = copy / changes["like"], copy / "build/changed_model"
    shutil.copytree(like, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    fields = json.loads((like / "config.json").read_text())
    of_tokenizer = {name: fields[name] for name in fields if name.endswith(("vocab_size", "_token_id"))}
    if "config" in changes:
        fields = json.loads((copy / changes["config"] / "config.json").read_text()) | of_tokenizer
    (target / "config.json").write_text(json.dumps(fields | changes))
    return target


def read_trials() -> list[Trial]:
    """Return every setting without a fault, and then all faults."""
    listed = yaml.safe_load(LIST.read_text())
    no_fault = Mutant("none", "", "README.md", (), None, None)
    settings = {
        name: Trial(name, tuple(entry["flags"]), entry.get("model"), no_fault)
        for name, entry in listed["settings"].items()
    }
    faults = [
        replace(
            under := settings[entry["under"]], name=entry["name"], mutant=mutant_of(entry),
            flags=(*under.flags, *entry.get("flags", ())), caught_by=tuple(entry["caught_by"]),
        )
        for entry in listed["faults"]
    ]  # fmt: skip
    return [*settings.values(), *faults]


def main(arguments: Arguments) -> int:
    """Plant the faults; return the exit status."""
    if arguments.table:
        print(*table(read_results(arguments.save)), sep="\n")
        return DONE
    trials = read_trials()
    chosen = [trial for trial in trials if not arguments.only or trial.name in arguments.only]
    if unknown := {*arguments.only} - {trial.name for trial in chosen}:
        raise ValueError(f"{LIST}: no fault or setting is called {', '.join(sorted(unknown))}")
    adopt_orphans()
    is_right = True
    with copied(1) as (copy,):
        for trial in chosen:
            result = trial.run(copy, (arguments.only and trial.caught_by) or CHECKS)
            store(result, trials, arguments.save)
            is_right = is_right and result["as_expected"]
    return DONE if is_right else FAILED


def table(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of docs/verify.md: faults that were tried, and what saw them."""
    yield f"| fault | reported in | seen by |\n{'|---' * 3}|"
    for entry in yaml.safe_load(LIST.read_text())["faults"]:
        if entry["name"] in results:
            wrong = [row["check"] for row in results[entry["name"]]["wrong"]]
            seen_by = [check for check in wrong if check_of(check) in entry["caught_by"]] or ["not seen"]
            issues = ", ".join(entry["issue"]) or "none"
            yield f"| {' | '.join([entry['name'], issues, seen_by[0]])} |"


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
