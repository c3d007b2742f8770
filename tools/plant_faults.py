"""Plant the published faults of faults.yaml, and record which of them `ibpo verify` sees.

    python tools/plant_faults.py                          all of them, and every setting without a fault
    python tools/plant_faults.py --only "no answer is right"      with the checks alone that should see it
    python tools/plant_faults.py --table                  print the results for docs/verify.md

Each fault is planted in a copy of the last commit, where verify runs with the settings of the fault. The exit
status is 1 if no check that should see it does, or if a setting without a fault has a wrong row.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from mutants import ROOT, Mutant, copied, environment, mutant_of

from megatron_ibpo.basics.entry_point import DONE, FAILED, run_tool
from megatron_ibpo.basics.versions import machine

LIST = ROOT / "tools/faults.yaml"
RESULTS = ROOT / "tools/results/verify_faults.json"
LONGEST_S = 900
"""Seconds after which verify is ended."""


@dataclass
class Arguments:
    only: tuple[str, ...] = ()
    """Names of faults, or of settings to run without a fault; all by default."""
    save: Path = RESULTS
    """JSON file for the results; rows of other faults in it are kept."""
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

    def run(self, copy: Path, *, all_checks: bool) -> dict[str, Any]:
        """Run verify in a copy with the fault; return its result."""
        path, saved, began = copy / self.mutant.file, copy / "verify.json", time.monotonic()
        source = path.read_text()
        words = [sys.executable, "-m", "megatron_ibpo.commands.verify", *self.flags, "--save", str(saved)]
        of_samples = (
            ["engine"] if "tokens" in self.caught_by else []
        )  # opens the run, whose samples are looked at
        only = [] if all_checks else [*dict.fromkeys([*self.caught_by, *of_samples])]
        words += ["--only", ",".join(only)] if only else []
        words += [] if self.model is None else ["--hf-checkpoint", str(changed_model(copy, self.model))]
        saved.unlink(missing_ok=True)
        path.write_text(self.mutant.planted(source))
        try:
            done = subprocess.run(
                words, cwd=copy, env=environment(copy), timeout=LONGEST_S, capture_output=True, text=True
            )
        finally:
            path.write_text(source)
        rows = json.loads(saved.read_text())["checks"] if saved.exists() else []
        wrong = [row for row in rows if row["verdict"] == "wrong"]
        wrong_checks = {row["check"].partition(":")[0] for row in wrong}
        is_right = bool(wrong_checks & {*self.caught_by}) if self.caught_by else bool(rows) and not wrong
        note = "" if is_right else ", NOT AS IT SHOULD"
        print(f"{self.name}: {sorted(wrong_checks) or 'nothing wrong'}{note}")
        # the reasons of a fault's many rows would be half of the record
        fields = ("check", "figure", "bound", *(() if self.caught_by else ("reason",)))
        return {
            "name": self.name, "caught_by": list(self.caught_by), "as_expected": is_right,
            "wrong": [{field: row[field] for field in fields} for row in wrong],
            "not_checked": [row["check"] for row in rows if row["verdict"] == "not checked"],
            "rows": len(rows), "seconds": round(time.monotonic() - began, 1),
            "error": None if rows else f"status {done.returncode}: {done.stderr[-600:]}",
        }  # fmt: skip


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
    settings = {
        name: (tuple(entry["flags"]), entry.get("model")) for name, entry in listed["settings"].items()
    }
    trials = [
        Trial(name, flags, model, Mutant(name, "", "README.md", (), None, None))
        for name, (flags, model) in settings.items()
    ]
    for entry in listed["faults"]:
        flags, model = settings[entry["under"]]
        flags = (*flags, *entry.get("flags", ()))
        trials.append(Trial(entry["name"], flags, model, mutant_of(entry), tuple(entry["caught_by"])))
    return trials


def main(arguments: Arguments) -> int:
    """Plant the faults; return the exit status."""
    stored = json.loads(arguments.save.read_text())["trials"] if arguments.save.exists() else []
    results = {result["name"]: result for result in stored}
    if arguments.table:
        print(*table(results), sep="\n")
        return DONE
    trials = read_trials()
    chosen = [trial for trial in trials if not arguments.only or trial.name in arguments.only]
    if unknown := {*arguments.only} - {trial.name for trial in chosen}:
        raise ValueError(f"{LIST}: no fault or setting is called {', '.join(sorted(unknown))}")
    with copied(1) as (copy,):
        for trial in chosen:
            results[trial.name] = trial.run(copy, all_checks=not arguments.only)
            in_order = [results[trial.name] for trial in trials if trial.name in results]
            content = {"machine": machine(), "trials": in_order}
            arguments.save.write_text(json.dumps(content, indent=1) + "\n")
    return FAILED if any(not results[trial.name]["as_expected"] for trial in chosen) else DONE


def table(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the tables of docs/verify.md: faults that were tried, and what saw them; then
    settings without a fault."""
    yield (
        "| what went wrong | reported in | planted in, under | seen by | figure | bound |\n"
        + "|---" * 6
        + "|"
    )
    listed = yaml.safe_load(LIST.read_text())
    for entry in listed["faults"]:
        if entry["name"] not in results:
            continue
        wrong = results[entry["name"]]["wrong"]
        rows = [row for row in wrong if row["check"].partition(":")[0] in entry["caught_by"]]
        row = rows[0] if rows else {"check": "not seen"}
        figures = (f"{row[name]:.3g}" if row.get(name) is not None else "" for name in ("figure", "bound"))
        place = f"`{entry['file'].removeprefix('megatron_ibpo/')}`, {entry['under']}"
        issues = ", ".join(entry["issue"]) or "none"
        yield f"| {' | '.join([entry['what'], issues, place, row['check'], *figures])} |"
    yield "\n| settings without a fault | right | wrong | not checked | seconds |\n" + "|---" * 5 + "|"
    for name in listed["settings"]:
        if name in results:
            result = results[name]
            wrong, unchecked = len(result["wrong"]), len(result["not_checked"])
            counts = (result["rows"] - wrong - unchecked, wrong, unchecked, result["seconds"])
            yield f"| {' | '.join([name, *map(str, counts)])} |"


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
