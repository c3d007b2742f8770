"""ibpo COMMAND …: the entry point to all commands of this project.

    bash tools/ibpo.sh COMMAND …    from a fresh clone; installs missing parts first
    .venv/bin/ibpo COMMAND …        once these are installed

Each command is a separate program; COMMAND --help lists its flags. --version prints the versions that matter.
"""

import os
import sys
from collections.abc import Iterable, Sequence

from megatron_ibpo import __version__
from megatron_ibpo.basics.entry_point import BAD_INPUT, command
from megatron_ibpo.basics.versions import installed_versions

COMMANDS = {
    "train": ("train", "train a policy"),
    "sft": ("sft", "train a policy on demonstrations, as a warm start"),
    "evaluate": ("evaluate", "benchmarks and held-out prompts, without training; comparison of two results"),
    "plan": ("train --dry-run", "what a run would need, without running it"),
    "search": ("search", "layouts that fit a cluster, by the predicted time of a step"),
    "convert to-megatron": (
        "convert to-megatron", "Hugging Face checkpoint → Megatron's distributed checkpoint"
    ),
    "convert to-hf": ("convert to-hf", "a run or Megatron checkpoint → Hugging Face checkpoint"),
    "inspect": ("inspect_checkpoint", "what a checkpoint holds, and what is missing"),
    "compare": ("compare", "methods under one budget, over several seeds"),
    "audit": ("audit", "does value fall where corrections change a response?"),
    "verify": ("verify", "does a run compute what it claims, on its model and data?"),
    "skill": ("skill", "do corrections succeed more often than another try?"),
    "data": ("data", "prompts as the model will see them, and what is left out and why"),
    "loss": ("loss", "a loss variant: its code for GPUs, its gradient checked, a picture"),
    "pass-rates": ("pass_rates", "how often a policy solves each prompt, for a filter"),
    "samples": ("page samples", "samples of a run as text, with how each advantage came about"),
    "serve": ("page serve", "read runs in a browser, also while they train"),
    "page": ("page page", "the same as one HTML file"),
}  # fmt: skip
"""Command → (module of this folder and its first words, line of help)."""
_QUESTIONS = ("", "-h", "--help")


def python_words(name: str) -> list[str]:
    """Return the arguments of Python that run a command; the user's follow them."""
    module, *words = COMMANDS[name][0].split()
    return ["-m", f"{__package__}.{module}", *words]


def _print_commands(names: Iterable[str]) -> None:
    print("\n".join(f"  {name:<20} {COMMANDS[name][1]}" for name in names))


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by the command's program. Returns only without one: 0 for --help and --version, 2
    for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    length = 2 if words[:1] == ["convert"] else 1
    name, arguments = " ".join(words[:length]), words[length:]
    if name in COMMANDS:
        os.execv(sys.executable, [sys.executable, *python_words(name), *arguments])
    if name in _QUESTIONS:
        print(__doc__)
        _print_commands(COMMANDS)
        return 0
    subcommands = [command_name for command_name in COMMANDS if command_name.startswith(f"{words[0]} ")]
    if subcommands and "".join(words[1:2]) in _QUESTIONS:
        _print_commands(subcommands)
        return 0
    if name == "--version":
        print(version_text())
        return 0
    from megatron_ibpo.config import nearest  # takes a while to import

    print(
        f"error: no command {name!r}; there are {', '.join(COMMANDS)}{nearest(name, COMMANDS)}",
        file=sys.stderr,
    )
    return BAD_INPUT


def version_text() -> str:
    """Return the version and commit of this package, and those of the libraries that decide what works."""
    installed = installed_versions()
    commit = f", commit {installed['commit']}" if "commit" in installed else ""
    libraries = ("torch", "megatron-core", "vllm", "transformers")
    listed = ", ".join(f"{name} {installed.get(name, 'not installed')}" for name in libraries)
    return f"megatron_ibpo {__version__}{commit}\n{listed}"


if __name__ == "__main__":
    sys.exit(main())
