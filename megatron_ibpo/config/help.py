"""The text of --help, --help-all and --help WORD, made of the fields' names, types, ranges and docstrings."""

import ast
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

from megatron_ibpo.config.config import ENTRIES, PARAMETERS, Config, Entry, flag
from megatron_ibpo.config.config_error import nearest, peer_answer
from megatron_ibpo.config.parameters import Registry
from megatron_ibpo.config.ranges import OF_ALL

COMMON_FLAGS = (
    "hf_checkpoint", "prompt_data", "eval_prompt_data", "apply_chat_template", "rm_type",
    "advantage_estimator", "lr", "kl_coef", "rollout_batch_size", "n_samples_per_prompt",
    "rollout_max_response_len", "num_steps_per_rollout", "num_rollout", "num_epoch", "max_tokens_per_gpu",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "context_parallel_size", "rollout_num_gpus_per_engine", "run_dir", "load", "save_interval",
    "eval_interval", "eval_num_prompts", "seed", "dry_run",
)  # fmt: skip
"""Fields that --help of training shows, in this order."""
HELP_FLAGS = {
    "--help WORD": "Flags with this word in their name or text, such as --help lr.",
    "--help-all": "All flags with their full text.",
    "--config FILE.yaml": "Recipe with flags as keys. May be repeated; later files win, flags win over all.",
    "--print-config": "Print what the other flags result in, as a recipe.",
}
_TYPES = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH", bool: "True|False", types.NoneType: "None"}


@dataclass(frozen=True)
class _Flag:
    """A flag, the title of its section, its docstring, and its value by default."""

    section: str
    entry: Entry
    text: str
    value: Any

    @property
    def default(self) -> str:
        if self.value in (None, ()):
            return "[required]" if "Required." in self.text else "[None]"
        return f"[{' '.join(map(str, self.value)) if isinstance(self.value, tuple) else self.value}]"

    def full(self) -> str:
        """Return the flag with its values, its whole text and its range."""
        name, kind = flag(self.entry.name), self.entry.type
        typed = f"{name}, --no-{name[2:]}" if kind is bool else f"{name} {_values(kind)}"
        rules = "".join(f" Range: {rule.rule}." for rule in self.entry.ranges[len(OF_ALL) :])
        return f"{_filled(f'{typed} {self.default}', '  ')}\n{_filled(self.text + rules, ' ' * 6)}"

    def has(self, word: str) -> bool:
        return word in flag(self.entry.name) or bool(re.search(rf"\b{re.escape(word)}", self.text.lower()))


def usage_text(program: str, description: str) -> str:
    """Return the description of a program; its indented paragraphs are not wrapped."""
    parts = f"usage: {program} FLAGS…\n\n{inspect.cleandoc(description)}".split("\n\n")
    return "\n\n".join([*(part if part[0] == " " else _filled(part) for part in parts), ""])


def help_text(
    config: Config, registries: Sequence[Registry], words: Sequence[str] | None, common: Sequence[str]
) -> str:
    """Return the help, with the values of `config` as defaults.

    Args:
        words: [] shows the flags `common`, words show the flags that have all of them, None shows all flags.
    """
    flags = {row.entry.name: row for row in _flags(config, registries)}
    if words:
        return _search([word.lower().strip("-").replace("_", "-") for word in words], flags)
    if words is None:
        sections = groupby(flags.values(), lambda row: row.section)
        return "\n\n".join(
            text for title, rows in sections for text in (title, *(row.full() for row in rows))
        )
    rows = {flag(name): f"{_first_sentence(flags[name].text)} {flags[name].default}" for name in common}
    lines = [_filled(text, f"  {name:<31}", 33) for name, text in (rows | HELP_FLAGS).items()]
    lines.insert(len(rows), f"\nThese are {len(rows)} of {len(flags)} flags, with their [defaults]. More:")
    return "\n".join(lines)


def _search(words: Sequence[str], flags: Mapping[str, _Flag]) -> str:
    """Return the flags that have all the words, after what the words mean in TRL and verl."""
    peers = [_filled(answer, "  ") for word in words if (answer := peer_answer(f"--{word}"))]
    matches = [row for row in flags.values() if all(map(row.has, words))]
    matches.sort(key=lambda row: not all(word in flag(row.entry.name) for word in words))
    phrase, parts = " ".join(words), {part: None for name in flags for part in name.split("_")}
    close = nearest(phrase, [*parts, *flags]).replace("_", "-")
    nothing = f"No flag has {phrase!r} in its name or text{close}"
    return "\n\n".join([*peers, *map(_Flag.full, matches)]) or nothing


def _flags(config: Config, registries: Sequence[Registry]) -> Iterator[_Flag]:
    """Yield the flags by section. The parameters of each choice are a section."""
    owners: list[tuple[str, Any, Iterable[Entry]]] = []
    for name, kind in ((field.name, type(getattr(config, field.name))) for field in fields(config)):
        title = _filled(f"{name}: {_first_sentence(str(kind.__doc__))}")
        owners.append((title, kind, [entry for entry in ENTRIES.values() if entry.section == name]))
    for registry in registries:
        choice = registry.choice_in(config)
        title = f"{PARAMETERS} of {flag(registry.setting)} {choice}"
        owners.append((title, registry.find(choice), registry.entries(choice).values()))
    for title, owner, entries in owners:
        texts = _docstrings(owner) if entries else {}
        yield from (_Flag(title, entry, texts.get(entry.name, ""), entry.get(config)) for entry in entries)


def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, inherited ones included, where there is source."""
    texts = {}
    for base in reversed(kind.__mro__[:-1]):
        with suppress(OSError, TypeError):
            [parsed] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for field, text in pairwise(getattr(parsed, "body", ())):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    texts[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts


def _values(kind: Any) -> str:
    """Return the values of a type, as the user types them."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return f"{{{','.join(map(str, parts))}}}"
    if typing.get_origin(kind) is tuple:
        return " ".join("…" if part is ... else _values(part) for part in parts)
    return "|".join(map(_values, parts)) if parts else _TYPES.get(kind, "VALUE")


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s+(?=[A-Z0-9\"])", text, maxsplit=1)[0]


def _filled(text: str, start: str = "", indent: int = 6) -> str:
    """Return `start` and `text`, wrapped to the terminal (at most 100 columns)."""
    width = max(min(100, shutil.get_terminal_size((100, 24)).columns), indent + 20)
    after = " " * indent if start else ""
    return textwrap.fill(text, width, initial_indent=start, subsequent_indent=after, break_on_hyphens=False)
