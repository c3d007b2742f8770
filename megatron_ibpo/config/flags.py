"""The command line: parsing it into `Config`, and its help.

Every field is a flag (`--tensor-model-parallel-size 2`, `--no-sequence-parallel`) and a key of a flat YAML
recipe (dash or underscore). Precedence, weakest first: the fields' defaults, `--config` files in the order
given, flags. `megatron_ibpo.config.presets` defines where a preset counts.
"""

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any, Literal

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.config import ENTRIES, PARAMETERS, Config, Entry, entry_of, flag
from megatron_ibpo.config.config_error import ConfigError, nearest, peer_answer, peer_override
from megatron_ibpo.config.parameters import Registry, entries_of, unknown_setting
from megatron_ibpo.config.paths import path_in_recipe, path_of_user, recipe_file
from megatron_ibpo.config.presets import resolve
from megatron_ibpo.config.recipes import Layer, config_yaml, read_recipe, typed_settings
from megatron_ibpo.config.values import EVAL_SETS, OF_ALL, SOURCES, alternatives, as_type

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
_KINDS_OF_OWN = {"help": tuple[str, ...], "help_all": bool, "config": str, "print_config": bool}
_DECISIVE = (
    "advantage_estimator", "loss_variant", "ibpo_operator", "token_credit", "advantages", "rollout_backend",
)  # fmt: skip
"""Fields that decide which values of earlier layers still apply, and which parameters exist."""
_FIRST = {name: entry_of(name, "", kind) for name, kind in _KINDS_OF_OWN.items()} | {
    name: ENTRIES[name] for name in (*_DECISIVE, "eval_prompt_data")
}
"""Flags that are read first: those that are no fields, those that decide, and that of the held-out prompts,
which may be repeated and replaces a recipe's."""
_GIVEN_ELSEWHERE = {
    "save": "the directory is --run-dir",
    "save_debug_rollout_data": "the records are written into --run-dir",
    "use_wandb": "the key is set by `wandb login`",
}
"""Switches of ours that take a value in other trainers → where that value is given here."""

Group = tuple[str, list[str]]
"""A flag, with its dashes, and the words that follow it; "" for words that follow none."""


def parse_config(
    argv: Sequence[str],
    registries: Sequence[Registry],
    *,
    fit: Callable[[Config, Set[str]], Config] = lambda config, typed: config,
    program: str = "ibpo train",
    description: str = "Train a policy by IBPO: Megatron-core trains, vLLM samples.",
    common: Sequence[str] = COMMON_FLAGS,
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> Config:
    """Return the configuration for a command line, with absolute paths (see `megatron_ibpo.config.paths`).

    Args:
        registries: the choices that have their own parameters.
        fit: changes the configuration, given the names of the fields that the user set by flags; all others
            come from recipes, presets or defaults.
        program: name for --help, with `description` and the fields that matter most to it (`common`).
        defaults: its own defaults of fields, which recipes and flags override.

    `--help` and `--print-config` end the process (SystemExit 0).

    Raises:
        ConfigError: unknown flags, those of other trainers with their name here; too many values, or none; a
            recipe that cannot be read, has an unknown or repeated key or a value of the wrong type; an
            unknown preset or choice; a parameter that the choice does not have; words that are not UTF-8.
    """
    groups = _by_flag(argv)
    first = [group for group in groups if _entry_of(group[0], _FIRST)]
    flags = [group for group in groups if not _entry_of(group[0], _FIRST)]
    values: dict[str, list[Any]] = {}
    for entry, value in _read(first, _FIRST):
        values.setdefault(entry.name, []).append(value)

    recipes = [recipe_file(name, path_of_user) for name in values.get("config", ())]
    typed = {name: occurrences[-1] for name, occurrences in values.items() if name in ENTRIES}
    if "eval_prompt_data" in typed:
        specs = [spec for occurrence in values["eval_prompt_data"] for spec in occurrence or ()]
        typed["eval_prompt_data"] = tuple(specs) if len(specs) > 1 else (specs or [None])[0]
    names = {name for typed_flag, _ in flags for name in _names_of(typed_flag)}
    layers = [Layer(defaults), *(layer for path in recipes for layer in read_recipe(path)), Layer(typed)]
    config = resolve(_held_out_with_their_prompts(layers, "prompt_data" in names), registries)
    if "help" in values or "help_all" in values:
        words = None if "help_all" in values else list(chain(*values["help"]))
        if not words:
            print(_usage_text(program, description))
        print(_help_text(config, registries, words, common))
        raise SystemExit(0)
    entries = ENTRIES | entries_of(config, registries)
    chosen = vars(config.algorithm) | vars(config.rollout)
    for entry, value in _read(
        flags, entries, lambda name: unknown_setting(name, [*entries, *_KINDS_OF_OWN], chosen, registries)
    ):
        entry.put(config, (*entry.get(config), *value) if entry.has_names else value)
    _locate(config, registries)
    config = fit(config, typed.keys() | (ENTRIES.keys() & names))
    if "print_config" in values:
        print(config_yaml(config), end="")
        raise SystemExit(0)
    return config


def load_recipe(path: Path | str, settings: Mapping[str, Any], registries: Sequence[Registry]) -> Config:
    """Return the configuration of a recipe with `settings` on top, typed and located as a second recipe's.
    Raises ConfigError for a recipe that cannot be read, an unknown key, a value of the wrong type, an unknown
    preset or choice, or a parameter that the choice does not have."""
    layers = [*read_recipe(recipe_file(path, path_in_recipe)), typed_settings(settings)]
    config = resolve(_held_out_with_their_prompts(layers, names_prompts=False), registries)
    _locate(config, registries)
    return config


def _locate(config: Config, registries: Sequence[Registry]) -> None:
    """Make the paths absolute that no recipe has given, in place."""
    for entry in (ENTRIES | entries_of(config, registries)).values():
        entry.put(config, entry.located(entry.get(config), in_recipe=False))


def _held_out_with_their_prompts(layers: Sequence[Layer], names_prompts: bool) -> list[Layer]:
    """Return the layers, of which one that names prompts of its own takes back held-out prompts that an
    earlier one named together with others: those say nothing about a policy that is trained on these.

    Args:
        names_prompts: True if a flag, in the last layer, names prompts.
    """
    new_layers: list[Layer] = []
    are_a_pair = False
    for number, layer in enumerate(layers, start=1):
        prompts = "prompt_data" in layer.fields or (names_prompts and number == len(layers))
        if "eval_prompt_data" in layer.fields:
            are_a_pair = prompts
        elif prompts and are_a_pair:
            layer = dataclasses.replace(layer, fields={**layer.fields, "eval_prompt_data": None})
            are_a_pair = False
        new_layers.append(layer)
    return new_layers


def _by_flag(words: Sequence[str]) -> list[Group]:
    """Return each flag with the words that follow it. Words before the first flag, and those from a word with
    one dash on, follow none. Raises ConfigError for a word that is not UTF-8."""
    groups: list[Group] = [("", [])]
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(f"the command line's {word!r} is not UTF-8")
        if word in ("-h", "-help"):
            groups.append(("--help", []))
        elif word.startswith("--"):
            flag_name, is_pair, value = word.partition("=")
            groups.append((flag_name, [value] if is_pair else []))
        elif re.match("-[A-Za-z]", word):
            groups.append(("", [word]))
        else:
            groups[-1][1].append(word)
    return groups


def _read(
    groups: Iterable[Group], entries: Mapping[str, Entry], unknown: Callable[[str], str] = str
) -> list[tuple[Entry, Any]]:
    """Return the field that each flag sets, and its value.

    Args:
        unknown: returns the answer to a flag that is not among the entries.

    Raises:
        ConfigError: with all problems at once.
    """
    values: list[tuple[Entry, Any]] = []
    problems: list[str] = []
    for flag_name, typed_words in groups:
        answers = {word: peer_override(word) for word in typed_words}
        problems += filter(None, answers.values())
        words = [word for word in typed_words if answers[word] is None]
        entry = _entry_of(flag_name, entries)
        if entry is None:
            if flag_name or words:
                problems.append(
                    unknown(flag_name) if flag_name else f"{words[0]}: not a flag; flags begin with --"
                )
        elif problem := _wrong_number(flag_name, entry, words):
            problems.append(problem)
        else:
            try:
                values.append((entry, _value(flag_name, words, entry)))
            except TypeError as error:
                problems.append(f"{flag_name}: {shown(' '.join(words))} is not {error}")
    if problems:
        count = [f"{len(problems)} wrong flags:"] if len(problems) > 1 else []
        raise ConfigError("\n  ".join(count + problems))
    return values


def _value(flag_name: str, words: Sequence[str], entry: Entry) -> Any:
    """Return the value that a flag with these words gives to its field; raises as `as_type`."""
    if _is_switch(entry) and not words:
        return not _turns_off(flag_name, entry)
    spells_none = [*words] == ["None"] and types.NoneType in _kinds(entry)
    return as_type(words if _is_list(entry) and not spells_none else words[0], entry.type)


def _wrong_number(flag_name: str, entry: Entry, values: Sequence[str]) -> str | None:
    """Return what is wrong with the number of a flag's values; None if nothing is."""
    if _is_switch(entry):
        may_have_value = entry.type is not bool and not _turns_off(flag_name, entry)
        if not values or (may_have_value and [*values] in (["True"], ["False"], ["None"])):
            return None
        elsewhere = f"; {_GIVEN_ELSEWHERE[entry.name]}" if entry.name in _GIVEN_ELSEWHERE else ""
        switch = f"{flag(entry.name)} or {flag('no_' + entry.name)}"
        return f"{flag_name} {values[-1]}: a switch, {switch}, which takes no value{elsewhere}"
    if not values:
        # no value empties a recipe's list, but a run cannot do without prompts, and named values add up
        needs_one = {SOURCES, EVAL_SETS}.intersection(entry.ranges) or entry.has_names
        return f"{flag_name}: needs a value" if needs_one or not _is_list(entry) else None
    if values[1:] and not _is_list(entry):
        return f"{flag_name}: takes one value, so {values[1]} is one too many"
    return None


def _names_of(flag_name: str) -> tuple[str, str]:
    """Return the name of the field that a flag sets, and that of the switch which it may turn off."""
    name = flag_name.removeprefix("--").replace("-", "_")
    return name, name.removeprefix("no_")


def _entry_of(flag_name: str, entries: Mapping[str, Entry]) -> Entry | None:
    """Return the field that a flag sets, also as --no-NAME if it is a switch; None if there is none."""
    name, turned_off = _names_of(flag_name)
    switch = entries.get(turned_off)
    return entries.get(name) or (switch if switch is not None and _is_switch(switch) else None)


def _turns_off(flag_name: str, entry: Entry) -> bool:
    return _names_of(flag_name)[0] != entry.name


def _kinds(entry: Entry) -> set[Any]:
    return {typing.get_origin(kind) or kind for kind in alternatives(entry.type)}


def _is_switch(entry: Entry) -> bool:
    return bool in _kinds(entry)


def _is_list(entry: Entry) -> bool:
    return not _kinds(entry).isdisjoint((list, tuple))


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


def _usage_text(program: str, description: str) -> str:
    """Return the description of a program; its indented paragraphs are not wrapped."""
    parts = f"usage: {program} FLAGS…\n\n{inspect.cleandoc(description)}".split("\n\n")
    return "\n\n".join([*(part if part[0] == " " else _filled(part) for part in parts), ""])


def _help_text(
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
    for name, kind in typing.get_type_hints(Config).items():
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
