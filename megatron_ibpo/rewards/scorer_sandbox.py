"""Scorers of generated tasks, in a sandbox (`rewards.sandbox.judges`), since some evaluate what they read as
Python: an answer, which is a model's text, or a label and metadata. Where none can be built, `judge_answers`
runs scorers of `EVALUATE_NOTHING` in this process and refuses the others.

A text that may be evaluated can call `_FUNCTIONS`, and look up or assign nothing else. The lists are of the
pinned version of the library; `tests/rewards/test_generated_scorers.py` proves them against its source.
"""

from __future__ import annotations

import functools
import pickle
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_ibpo.basics.reward_value import ResponseError
from megatron_ibpo.basics.text import error_text
from megatron_ibpo.rewards.limits import cpu_limit
from megatron_ibpo.rewards.sandbox import Limits, Process, SandboxError, judges
from megatron_ibpo.rewards.sandbox.bubblewrap import INSTALL, packages_of
from megatron_ibpo.rewards.sandbox.seccomp import computing_filter

_LIMITS = Limits(seconds=1e8, memory_bytes=1 << 30, tasks=1 << 15)
"""Bounds of the sandbox; it lives as long as its owner. A judge starts no task, and before Linux 5.14 those
of all sandboxes count together."""
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
"""A fork copies one thread."""
_START_S = 100.0
_ATTEMPTS_PER_REQUEST = 64
"""Answers of one request: a judge that answers while it is asked must not wait for its answers to be read."""
_MOST_BYTES = 16 << 20
"""Bytes after which a request has no further attempt: a data row may have 64 MiB, and so would each of its
responses' asks."""
_NAMES: dict[bytes, Literal["right", "wrong", "raised", "unfit", "ended", "silent"]] = {
    judges.RIGHT: "right",
    judges.WRONG: "wrong",
    judges.RAISED: "raised",
    judges.UNFIT: "unfit",
    judges.DIED: "ended",
    judges.SILENT: "silent",
}


@dataclass(frozen=True)
class Verdict:
    """The outcome of judging one answer."""

    kind: Literal["right", "wrong", "raised", "unfit", "ended", "silent"]
    """`raised`: the scorer raised. `ended`: it died or took too long. `unfit`: the task has no dataset with
    these parameters. `silent`: it did not answer, without a reason to see."""
    reason: str = ""


@dataclass(frozen=True)
class Task:
    """A task of reasoning_gym with the parameters of one of its datasets, as a data row names them."""

    name: str
    parameters: bytes
    """A pickle of the parameters, which is read in the sandbox only."""


Attempt = tuple[str, dict[str, Any]]
"""An answer, and the entry of the task's dataset that it answers."""


def judge_answers(task: Task, attempts: Sequence[Attempt]) -> list[Verdict]:
    """Return the verdict of the task's scorer on each answer. Raises SandboxError with what to do if there is
    no sandbox, and the scorer needs one; or if the sandbox fails."""
    needs_it = task.name not in EVALUATE_NOTHING - READ_PARAMETERS
    sandbox = open_scorers(retries=needs_it)
    if isinstance(sandbox, ScorerSandbox):
        return sandbox.judge(task, attempts)
    if needs_it:
        does = "reads parameters of the row" if task.name in READ_PARAMETERS else "may run text as code"
        raise SandboxError(
            f"reasoning_gym's scorer of {task.name} {does}, so it needs the sandbox: {sandbox}"
        )
    return [_judge_in_process(task.name, *attempt) for attempt in attempts]


_opened: list[ScorerSandbox] = []
_refusal: tuple[float, str] | None = None
"""When none could be opened, as of `time.monotonic()`, and why."""
_RETRY_S = 60.0
_HINT = "; docs/code_rewards.md says how to allow it, also in a container"


def open_scorers(*, retries: bool = False) -> ScorerSandbox | str:
    """Return the sandbox of this process, or the reason why there is none. With `retries`, try again if the
    last failure is a minute old, since its cause, such as a lack of memory, may have passed."""
    global _refusal
    if _opened:
        return _opened[0]
    if _refusal is not None and not (retries and time.monotonic() >= _refusal[0] + _RETRY_S):
        return _refusal[1]
    try:
        _opened.append(ScorerSandbox())
    except (SandboxError, OSError) as error:
        hint = "" if INSTALL in str(error) else _HINT
        _refusal = time.monotonic(), f"{error}{hint}"
        return _refusal[1]
    _refusal = None
    return _opened[0]


class ScorerSandbox:
    """A sandbox in which reasoning_gym's scorers judge answers."""

    def __init__(self) -> None:
        """Start it, which takes a second. Raises SandboxError if it cannot be built, or does not isolate."""
        packages = packages_of("reasoning-gym")
        directories = sorted({str(Path(path).parent) for path in packages})
        self._socket, theirs = socket.socketpair()
        with ExitStack() as stack:
            stack.callback(self._socket.close)
            with theirs:
                self._process = Process(
                    "program",
                    Path(judges.__file__).read_text(encoding="utf-8"),
                    [f"import sys; sys.path += {directories!r}"],
                    stdin=theirs.fileno(),
                    limits=_LIMITS,
                    packages=packages,
                    environment=_ENVIRONMENT,
                    forks=True,
                )
            stack.callback(self._process.end)
            self._send(computing_filter(), _START_S)
            if problem := self._receive(_START_S, judges.LONGEST_TEXT):
                raise SandboxError(f"the sandbox does not isolate: a process in it can {problem.decode()}")
            self._ends = stack.pop_all()

    def judge(self, task: Task, attempts: Sequence[Attempt]) -> list[Verdict]:
        """Return the verdict on each answer. Raises SandboxError if the sandbox failed, and is closed."""
        verdicts: list[Verdict] = []
        while len(verdicts) < len(attempts):
            verdicts += self._judge(task, _first_pickled(attempts[len(verdicts) :]))
        return verdicts

    def _judge(self, task: Task, attempts: Sequence[bytes]) -> list[Verdict]:
        reuses_judge = task.name in EVALUATE_NOTHING
        request = pickle.dumps((task.name, reuses_judge, task.parameters, attempts))
        max_bytes = len(attempts) * (judges.HEAD.size + judges.LONGEST_TEXT)
        seconds = len(attempts) * (judges.CREATE_S + judges.JUDGE_S + 2 * judges.WALL_S)
        try:
            self._send(request, seconds)
            return _verdicts(self._receive(seconds, max_bytes), len(attempts))
        except BaseException as error:  # half an answer may be left
            self.close()
            if isinstance(error, OSError | ValueError):
                raise SandboxError(f"the sandbox of scorers failed: {error_text(error)}") from None
            raise

    def _send(self, content: bytes, seconds: float) -> None:
        self._socket.settimeout(seconds)
        self._socket.sendall(judges.LENGTH.pack(len(content)) + content)

    def _receive(self, seconds: float, max_bytes: int) -> bytes:
        self._socket.settimeout(seconds)
        try:
            size = judges.LENGTH.unpack(self._read(judges.LENGTH.size))[0]
            if size > max_bytes:
                raise SandboxError("the sandbox of scorers says too much")
            return self._read(size)
        except OSError as error:
            raise self._process.failure(f"of scorers does not answer ({error_text(error)})") from None

    def _read(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            part = self._socket.recv(size - len(content))
            if not part:
                raise ConnectionError("it has ended")
            content += part
        return content

    def close(self) -> None:
        with suppress(ValueError):
            _opened.remove(self)
        self._ends.close()


def _first_pickled(attempts: Sequence[Attempt]) -> list[bytes]:
    """Return as many of the first attempts, pickled, as one request may have; at least one."""
    pickled, size = list[bytes](), 0
    for attempt in attempts[:_ATTEMPTS_PER_REQUEST]:
        pickled.append(pickle.dumps(attempt))
        size += len(pickled[-1])
        if size >= _MOST_BYTES:
            break
    return pickled


def _verdicts(content: bytes, count: int) -> list[Verdict]:
    verdicts = []
    while content:
        if len(content) < judges.HEAD.size:
            raise ValueError("half a verdict")
        kind, length = judges.HEAD.unpack_from(content)
        content = content[judges.HEAD.size :]
        text, content = content[:length], content[length:]
        if kind not in _NAMES or len(text) < length:
            raise ValueError("no verdict")
        reason = "".join(
            character if character.isprintable() else " " for character in text.decode(errors="replace")
        )
        verdicts.append(Verdict(_NAMES[kind], reason))
    if len(verdicts) != count:
        raise ValueError(f"{len(verdicts)} verdicts on {count} answers")
    return verdicts


def _judge_in_process(name: str, answer: str, entry: dict[str, Any]) -> Verdict:
    try:
        with cpu_limit(judges.JUDGE_S):
            return Verdict("right" if judges.is_right(_dataset(name), name, answer, entry) else "wrong")
    except ResponseError as error:
        return Verdict("ended", str(error))
    except Exception as error:
        return Verdict("raised", error_text(error))


@functools.lru_cache(maxsize=64)
def _dataset(name: str) -> Any:
    """Return a task's dataset with its default parameters: a data row's may ask for any amount of work."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, size=1)


_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "sinh", "cosh", "tanh",
    "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "abs", "Abs",
})  # fmt: skip
_TOKEN = re.compile(r"([A-Za-z]++)[0-9]*+(\s*+\()?|[0-9]++(?:\.[0-9]++)?|[-+*/()]|[ \t\r\n]++", re.ASCII)
_CALL_OR_UNPACKING = re.compile(r"\)\s*+\(|\(\s*+\*")
"""A call of a result, `)(`, or what is unpacked into a call, `(*`."""


def _is_formula(text: str) -> bool:
    """Return whether a text holds only numbers, variables of one letter, `pi`, + - * / ** ( ) and calls of
    `_FUNCTIONS`. What stands in parentheses cannot be called: E, I, N, O, Q and S are sympy's own."""
    if _CALL_OR_UNPACKING.search(text):
        return False
    place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            return False
        name, call = token[1], token[2]
        if name and (name not in _FUNCTIONS if call else len(name) > 1 and name != "pi"):
            return False
        place = token.end()
    return True


def _is_integral(text: str) -> bool:
    """Return whether a text is a formula in which integrals may be left, as in some labels of the library. As
    an answer each would be right, being the question."""
    return _is_formula(text.replace("Integral(", "exp(").replace(",", "+"))


def _contains_only(characters: str, without: tuple[str, ...] = ()) -> Callable[[str], bool]:
    pattern = re.compile(rf"[{characters} \t\r\n]*+")

    def only_these(text: str) -> bool:
        compact = "".join(text.split())
        return pattern.fullmatch(text) is not None and not any(part in compact for part in without)

    return only_these


_is_arithmetic = _contains_only(r"0-9+\-*/()", without=("**", "//", "(*"))
# lists of these are evaluated; they have no brackets of a call, and no lower-case letters for a keyword
_is_letters = _contains_only(r"A-E\[\],'\"")
_is_numbers = _contains_only(r"0-9\[\],\-")
_is_board = _contains_only(r"Q_\[\],'\"")
_ANSWER, _LABEL = "answer", "label"
_EVALUATED: dict[str, dict[str, Callable[[str], bool]]] = {
    "binary_matrix": {_ANSWER: _is_numbers},
    "bitwise_arithmetic": {"problem": _contains_only(r"0-9a-fx+\-*&|\^~<>()", without=("**", "(*"))},
    "countdown": {_ANSWER: _is_arithmetic},
    "intermediate_integration": {_ANSWER: _is_formula, _LABEL: _is_integral, "integrand": _is_formula},
    "n_queens": {_ANSWER: _is_board},
    "number_sorting": {_LABEL: _contains_only(r"0-9eE.+\-\[\],'\"")},
    "polynomial_multiplication": {_ANSWER: _is_formula, _LABEL: _is_formula},
    "puzzle24": {_ANSWER: _is_arithmetic},
    "simple_integration": {_ANSWER: _is_formula, _LABEL: _is_integral, "integrand": _is_formula},
    "spiral_matrix": {_ANSWER: _is_numbers},
    "string_insertion": {_ANSWER: _is_letters},
}
"""Task → what its scorer evaluates (the answer, the label, or a key of the metadata) → whether a text may
be. A label is an answer as well, when it is checked; it may be what an answer may be, unless it is named."""
EVALUATE_NOTHING = frozenset({
    "ab", "acre", "advanced_geometry", "aiw", "arc_1d", "arc_agi", "base_conversion", "basic_arithmetic",
    "bf", "binary_alternation", "caesar_cipher", "calendar_arithmetic", "chain_sum", "circuit_logic",
    "codeio", "coin_flip", "color_cube_rotation", "complex_arithmetic", "count_bits", "count_primes",
    "course_schedule", "cryptarithm", "decimal_arithmetic", "decimal_chain_sum", "dice", "emoji_mystery",
    "family_relationships", "figlet_font", "fraction_simplification", "futoshiki", "game_of_life", "gcd",
    "group_anagrams", "gsm_symbolic", "isomorphic_strings", "jugs", "kakurasu", "knight_swap",
    "knights_knaves", "largest_island", "lcm", "leg_counting", "letter_counting", "letter_jumble",
    "list_functions", "mahjong_puzzle", "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid",
    "needle_haystack", "number_filtering", "number_format", "number_sequence", "palindrome_generation",
    "palindrome_partitioning", "path_star", "polynomial_equations", "pool_matrix", "power_function",
    "prime_factorization", "products", "quantum_lock", "ransom_note", "rearc", "rectangle_count",
    "rotate_matrix", "rotten_oranges", "self_reference", "sentence_reordering", "shortest_path",
    "simple_equations", "simple_geometry", "sokoban", "spell_backward", "string_manipulation",
    "string_splitting", "string_synthesis", "sudoku", "survo", "syllogism", "time_intervals",
    "tower_of_hanoi", "tsumego", "word_ladder", "word_sequence_reversal", "word_sorting", "zebra_puzzles",
})  # fmt: skip
"""Tasks whose scorers evaluate nothing that they read."""
READ_PARAMETERS = frozenset({
    "arc_agi", "decimal_arithmetic", "polynomial_equations", "rearc", "sokoban", "time_intervals",
    "word_ladder",
})  # fmt: skip
"""Those of them whose scorers read what the parameters of the dataset have set."""
GRADABLE = EVALUATE_NOTHING | _EVALUATED.keys()


def is_expression(task: str, answer: str) -> bool:
    """Return whether an answer is an expression that the task's scorer may evaluate, or is not evaluated."""
    may_be = _EVALUATED.get(task, {}).get(_ANSWER)
    return may_be is None or may_be(answer)


def unfit_row(task: str, label: str, metadata: dict[str, Any]) -> str | None:
    """Return why the scorer must not evaluate what a data row holds; None if it may."""
    may_be_of = _EVALUATED.get(task, {})
    for name, may_be in may_be_of.items():
        if name == _ANSWER and _LABEL in may_be_of:
            continue
        text = label if name in (_ANSWER, _LABEL) else metadata.get(name)
        if not isinstance(text, str) or not may_be(text):
            return f"its {'label' if text is label else name} is no expression of the task {task}"
    numbers = metadata.get("numbers")
    if task == "puzzle24" and not (isinstance(numbers, list) and all(isinstance(n, int) for n in numbers)):
        return "its numbers are no list of integers"
    return None
