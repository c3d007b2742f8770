"""Texts that reasoning_gym's scorers evaluate as Python, and the rules for texts that may be evaluated: they
consist of the parts of the task's expressions. They can call `_FUNCTIONS`, and look up or assign nothing
else.

The lists are of the pinned version of the library. `tests/rewards/test_generated_scorers.py` proves them
against its source.
"""

import re
from collections.abc import Callable
from typing import Any

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
"""All tasks that can be graded."""


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
