r"""Answers as text: their fast comparison, as text and as plain numbers, which leaves undecided what needs
mathematics; and one spelling of mathematics, the LaTeX that math-verify reads. Every step takes time linear
in the text."""

import functools
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest

_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])(?![A-Za-z])|~|\\\$|[$€£¥]|\{,\}(?=\d{3})")
_DEGREES = re.compile(r"(?<=\d)\s*+(?:\^\s*+(?:\{\s*+)?\\circ\s*+(?:\}\s*+)?|°\s*+)$")
_FRAC = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_WRAPPED = re.compile(
    r"\\(?:f?boxed|text(?:bf|rm|it|sf)?|math(?:rm|bf|sf)|mbox|operatorname|boldsymbol|bm|underline|emph)"
    r"\s*\{([^{}]*)\}",
    re.DOTALL,
)
_DELIMITED = re.compile(r"(?:\\\((.*)\\\)|\\\[(.*)\\\]|\{([^{},]*)\})", re.DOTALL)
_GAP = re.compile(r"(?<=\d)\s+(?=\d)")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:\s\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"([-+]?)(\d+|[1-9]\d{0,2}(?:,\d{3})+|(?=\.\d))(?:\.(\d*))?(?:[eE]([-+]?\d{1,3}))?")
_POWER_OF_TEN = re.compile(r"(?:([-+]?\d+(?:\.\d+)?)(?:\\times|\\cdot|\*|×))?10\^(?:\{([-+]?\d{1,3})\}|(\d))")
_DECIMAL_COMMA = re.compile(r"([-+]?)(\d+),(\d{2}|\d{4,})|([-+]?)(0),(\d{3})")
_FRACTION = re.compile(r"([-+]?)\\frac(?:\{(-?\d+)\}\{(-?\d+)\}|(\d)(\d))|([-+]?\d+)/(-?\d+)")
_MEMBERS = re.compile(r"([(\[])([^()\[\],]*+,[^()\[\]]*+)([)\]])")
_WORD = re.compile(r"[A-Za-z][A-Za-z'\- ]*")
_ARTICLE = re.compile(r"^(?:the|an?) (?=[a-z]{3})", re.IGNORECASE)
_LONGEST_KEPT = 1000
"""Longest answer, in characters, whose normal form is cached; thousands of long ones would fill the
memory."""
_MOST_WRAPPINGS = 100
"""Limit on nested delimiters that are stripped: each costs a scan of the whole text."""
_LONGEST_INTEGER = 300
"""Limit on the digits of a fraction's parts; longer ones are left undecided."""
_PLACES = 6
"""Decimals to which math-verify compares: two numbers with no more decimals are equal or they are not."""
_TINY = "0000"
"""First decimals of a number of which six decimals leave little: up to six significant digits are compared
exactly."""
_UNITS = re.compile(
    r"""[cmk]?m | (?:centi|kilo)?met(?:er|re)s? | in(?:ch(?:es)?)? | f(?:oo|ee)?t | y(?:ar)?ds? | mi(?:les?)?
      | [km]?g | (?:kilo)?grams? | lbs? | pounds? | oz | ounces? | s | sec(?:ond)?s? | min(?:ute)?s?
      | h(?:ou)?rs? | h | days? | weeks? | months? | years? | dollars? | cents? | usd | euros? | degrees?
      | (?:square|cubic)?\ *units?""",
    re.VERBOSE | re.IGNORECASE,
)
_UNIT = re.compile(r"([-+]?[\d.,/]*\d)\s*([A-Za-z][A-Za-z ]*)")


@dataclass(frozen=True)
class _Number:
    """An exact value."""

    value: Fraction | tuple[str, str, str]
    """(sign, digits before the point, digits after it), without redundant zeros; a Fraction for a
    fraction."""
    is_short: bool
    """True for at most `_PLACES` decimals, as many digits of a tiny number, or a fraction of integers."""
    has_point: bool


def normal(text: str) -> str:
    r"""Return the answer without noise (spaces, `$`, `\left`, `\text{}`, a final full stop) and with one
    spelling for each symbol: `\frac` for `\dfrac`, `\emptyset` for `\varnothing`."""
    return _short_normal(text) if len(text) <= _LONGEST_KEPT else _normal(text)


def _normal(text: str) -> str:
    text = unwrapped(text)
    text = text.replace("\\varnothing", "\\emptyset").replace("∅", "\\emptyset")
    text = _FRAC.sub(r"\\frac", _LAYOUT.sub("", text.replace("−", "-").replace("\\%", "%"))).strip()
    text = text.rstrip(".").strip() if not text.endswith("..") else text
    while (wrapped := _WRAPPED.fullmatch(text)) is not None:
        text = wrapped[1].strip()
    text = _DEGREES.sub("", text)
    if _GROUPED.fullmatch(text):
        return "".join(text.split())
    if _WORD.fullmatch(text):
        return " ".join(text.split())
    unit = _UNIT.fullmatch(_WRAPPED.sub(r" \1", text))
    if unit is not None and _UNITS.fullmatch(unit[2].strip()):
        return unit[1]
    return "".join(_GAP.sub("\0", text).split()).replace("\0", " ")


_short_normal = functools.lru_cache(maxsize=8192)(_normal)


def unwrapped(text: str) -> str:
    r"""Return the text without what stands around all of it: braces, `\( \)`, `\text{}`."""
    text = _unbraced(text.strip())
    for _ in range(_MOST_WRAPPINGS):
        wrapped = _WRAPPED.fullmatch(text) or _DELIMITED.fullmatch(text)
        if wrapped is None:
            break
        text = next(group for group in wrapped.groups() if group is not None).strip()
    return text


def without_fonts(text: str) -> str:
    r"""Return the text with the content of `\text{}`, `\textbf{}` and the like in their place."""
    return _WRAPPED.sub(r"\1", text)


def _unbraced(text: str) -> str:
    """Strip braces around the whole text, however many; regular expressions cannot count them."""
    inner = text.lstrip("{")
    depth = len(text) - len(inner)
    core = inner[: len(inner) - depth] if depth and inner.endswith("}" * depth) else text
    return text if "{" in core or "}" in core else core


def compare(answer: str, label: str) -> bool | None:
    """Return whether two answers are the same; None if that takes mathematics."""
    ours, theirs = normal(answer), normal(label)
    if not ours or not theirs:
        return None
    if ours == theirs:
        return True
    if _WORD.fullmatch(ours) and _WORD.fullmatch(theirs) and min(len(ours), len(theirs)) >= 2:
        return True if _folded(ours) == _folded(theirs) and _is_prose(ours) else None
    if ours[-1] == "%" or theirs[-1] == "%":
        return _compare_percent(ours, theirs)
    as_numbers = _compare_numbers(ours, theirs)
    return _compare_members(ours, theirs) if as_numbers is None else as_numbers


def _compare_numbers(ours: str, theirs: str) -> bool | None:
    first, second = _number(ours), _number(theirs)
    if first is None or second is None:
        return None
    if _value(first) == _value(second):
        return True
    if first.has_point != second.has_point and Fraction in (type(first.value), type(second.value)):
        return None  # a rounded decimal of a fraction
    return False if first.is_short and second.is_short else None


def _compare_percent(ours: str, theirs: str) -> bool | None:
    """Compare a percentage: 50% equals 50, as in a question that asks for percent, and .5."""
    verdict = _compare_numbers(ours.rstrip("%"), theirs.rstrip("%"))
    if verdict is not False or ours[-1] == theirs[-1]:
        return verdict
    percent, number = (ours, theirs) if ours[-1] == "%" else (theirs, ours)
    return _compare_numbers(f"{percent[:-1]}e-2", number) if "/" not in percent + number else None


def _compare_members(ours: str, theirs: str) -> bool | None:
    """Compare pairs, tuples and intervals of numbers, in order; a tuple never equals a single number."""
    first, second = _MEMBERS.fullmatch(ours), _MEMBERS.fullmatch(theirs)
    if (first is None) != (second is None):
        return False if _number(theirs if first is not None else ours) is not None else None
    if first is None or second is None or (first[1], first[3]) != (second[1], second[3]):
        return None
    pairs = list(zip_longest(first[2].split(","), second[2].split(",")))
    if None in pairs[-1]:
        return None
    verdicts = [_compare_numbers(ours, theirs) for ours, theirs in pairs]
    return False if False in verdicts else all(verdicts) or None


def decimal_comma(text: str) -> str | None:
    """Return `1,22` as 1.22 if the comma is unlikely to separate thousands; None if there is no such comma or
    it may separate the members of a list."""
    match = _DECIMAL_COMMA.fullmatch(normal(text))
    if match is None:
        return None
    sign, integer_digits, places = match.groups()[:3] if match[2] else match.groups()[3:]
    return f"{sign}{integer_digits}.{places}"


def _folded(words: str) -> str:
    """Return the words in lower case, without an article; "no solutions" is "no solution"."""
    words = re.sub(r"^(no .*solution)s$", r"\1", words.casefold())
    return _ARTICLE.sub("", words)


def _is_prose(word: str) -> bool:
    """Return whether a word is prose rather than a product of variables, whose capitals are other ones."""
    return len(word) > 2 or word.casefold() == "no"


def _value(number: _Number) -> object:
    if isinstance(number.value, Fraction):
        return number.value
    sign, integer_digits, places = number.value
    if len(integer_digits) + len(places) > _LONGEST_INTEGER:
        return number.value
    return Fraction(int(sign + (integer_digits + places or "0")), 10 ** len(places))


def _number(text: str) -> _Number | None:
    if (match := _FRACTION.fullmatch(text)) is not None:
        return _fraction(match)
    if (match := _POWER_OF_TEN.fullmatch(text)) is not None:
        power = match[2] or match[3]
        return _number(f"{match[1] or 1}e{power}")
    if (match := _NUMBER.fullmatch(text)) is None:
        return None
    sign, integer_digits, places = match[1], match[2].replace(",", ""), match[3] or ""
    power = int(match[4] or 0)
    if power >= 0:
        places = places.ljust(power, "0")
        integer_digits, places = integer_digits + places[:power], places[power:]
    else:
        integer_digits = integer_digits.rjust(-power, "0")
        integer_digits, places = integer_digits[:power], integer_digits[power:] + places
    integer_digits, places = integer_digits.lstrip("0"), places.rstrip("0")
    sign = "-" if sign == "-" and (integer_digits or places) else ""
    is_tiny = not integer_digits and places.startswith(_TINY) and len(places.lstrip("0")) <= _PLACES
    return _Number((sign, integer_digits, places), len(places) <= _PLACES or is_tiny, bool(places))


def _fraction(match: re.Match[str]) -> _Number | None:
    sign, numerator = match[1] or "", match[2] or match[4] or match[6]
    denominator = match[3] or match[5] or match[7]
    if len(numerator) + len(denominator) > _LONGEST_INTEGER or int(denominator) == 0:
        return None
    value = Fraction(int(numerator), int(denominator))
    return _Number(-value if sign == "-" else value, True, False)


_SYMBOLS = {
    "−": "-", "‐": "-", "‑": "-", "﹣": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ",
    "∙": r"\cdot ", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "≤": r"\le ", "⩽": r"\le ",
    "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv ", "±": r"\pm ",
    "∓": r"\mp ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ",
    "∉": r"\notin ", "⊂": r"\subset ", "⊆": r"\subseteq ", "∣": r"\mid ", "∖": r"\setminus ",
    "→": r"\to ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "…": r"\ldots ", "⋯": r"\ldots ", "°": r"^{\circ}", "º": r"^{\circ}", "′": "'",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}", "ⅇ": "e", "ⅈ": "i", "ℯ": "e", "∧": r"\land ", "∨": r"\lor ", "∑": r"\sum ",
    "∫": r"\int ", "∠": r"\angle ", "∀": r"\forall ", "∃": r"\exists ",
}  # fmt: skip
_GREEK = {
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "ζ": r"\zeta ",
    "η": r"\eta ", "θ": r"\theta ", "ι": r"\iota ", "κ": r"\kappa ", "λ": r"\lambda ", "μ": r"\mu ",
    "ν": r"\nu ", "ξ": r"\xi ", "ο": r"\omicron ", "π": r"\pi ", "ρ": r"\rho ", "ς": r"\varsigma ",
    "σ": r"\sigma ", "τ": r"\tau ", "υ": r"\upsilon ", "φ": r"\phi ",
    "χ": r"\chi ", "ψ": r"\psi ", "ω": r"\omega ",
    "Γ": r"\Gamma ", "Δ": r"\Delta ", "Θ": r"\Theta ", "Σ": r"\Sigma ", "Φ": r"\Phi ", "Ω": r"\Omega ",
}  # fmt: skip
_TABLE = str.maketrans(_SYMBOLS | _GREEK)
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱˣ", "0123456789+-=()nix", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙₖᵢₓ", "0123456789+-=()nkix", strict=True))
_RAISED_RUN, _LOWERED_RUN = (re.compile(f"[{''.join(characters)}]+") for characters in (_RAISED, _LOWERED))
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_ROOT = re.compile(r"(√|∛)\s*(?:\(([^()]{1,200})\)|\{([^{}]{1,200})\}|(\d+(?:\.\d+)?|\\pi|[A-Za-z]))")
_WORD_ROOT = re.compile(r"(?<![A-Za-z\\])sqrt\s*(?:\(([^()]{1,200})\)|\{([^{}]{1,200})\}|\[([^][]{1,200})\])")
_FONT = r"(?:math(?:rm|it|sf|bf|tt|normal)|text(?:rm|it|normal)?|rm|it|operatorname\*?|mbox|boldsymbol)"
_CONSTANT = re.compile(
    rf"\\{_FONT}(?![A-Za-z])\s*+(?:\{{\s*+(e|i|\\pi\s*+)\}}|(e|i)(?![A-Za-z]))"
    r"|\{\s*+\\(?:rm|it)\s++(e|i|\\pi)\s*+\}"
)
"""e, i or π in another font."""
_FUNCTION = re.compile(
    rf"\\{_FONT}\s*+\{{\s*+((?:arc)?(?:sin|cos|tan|cot|sec|csc)|sinh|cosh|tanh|ln|log|exp|max|min|gcd)\s*+\}}"
)
_MIXED = re.compile(
    r"(?<![\d.,/^_\\{}])(?<!\d )(\d{1,15})"
    r"(?:(?:\s++|\\ |~)(\d{1,15})\s?/\s?(\d{1,15})|(?:\s|\\ |~)*+\\[dt]?frac\{(\d{1,15})\}\{(\d{1,15})\})"
    r"(?!\s*+[\d./^!])"
)
_MODULUS = re.compile(
    r"\(?\\?(?:[pb]?mod|(?:text|mathrm|operatorname)\{mod\})(?:\{([A-Za-z0-9]{1,50})\}|([A-Za-z0-9]{1,50}))\)?"
)
_TEXT_LAYOUT = re.compile(
    r"(\\\\)|\\(?:left|right|displaystyle|q?quad)(?![A-Za-z])|\\[,;:! ]|\$|~|(?<!\d)\s++|\s++(?!\d)"
)
_LONGEST_SPELLED = 5_000
"""Characters of a text that is spelled anew; a longer one is no formula that anything here reads."""
_RULES = [
    (re.compile(r"\\(?:dots[cbmio]?|cdots|ldots|hdots)(?![A-Za-z])|(?<!\.)\.\.\.(?!\.)"), r"\\ldots "),
    (re.compile(r"\\(?:leqslant|leq)(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\(?:geqslant|geq)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\degrees?(?![A-Za-z])"), r"^{\\circ}"),
    (re.compile(r"\\[bB]igg?[lrm]?(?![A-Za-z])"), ""),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\{([:,])\}(?!\d{3})"), r"\1"),
    (re.compile(r"(\\[dtc]?frac)\s*+(\d)\s*+(\d)"), r"\1{\2}{\3}"),
    (re.compile(r"([_^]|\\sqrt)\s*+(\d)(?=\s)"), r"\1{\2}"),
    (re.compile(r"_\{\\(?:text|mathrm)\{(\d+)\}\}"), r"_{\1}"),
    (re.compile(r"(?<![\w.}])(\d+)_\{10\}"), r"\1"),
    (re.compile(r"(?<![A-Za-z\\])(ln|log|sin|cos|tan)(?=\s*\(|\s+\d)"), r"\\\1"),
    (re.compile(r"(?<=\d)\^\{?(?:\\(?:text|mathrm)\{)?(?:st|nd|rd|th)\}{0,2}$"), ""),
    (re.compile(r"\+/-"), r"\\pm "),
    (re.compile(r"(?<=[\w)}\]])\*\*(?=[\w({\\+-])"), "^"),  # other ones are bold text of Markdown
    (re.compile(r"(?<![A-Za-z\\])(pi|theta|infinity|alpha|beta)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"\\infinity(?![A-Za-z])|(?<![A-Za-z\\])inf(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"(?<=\d)\s{0,9}[xX]\s{0,9}(?=10\s{0,9}\^)"), r"\\times "),
]


def latex(text: str) -> str:
    """Return a formula in the spelling that math-verify reads."""
    if len(text) > _LONGEST_SPELLED:
        return text
    text = _VULGAR.sub(_vulgar, text)
    text = _RAISED_RUN.sub(lambda run: f"^{{{''.join(map(_RAISED.__getitem__, run[0]))}}}", text)
    text = _LOWERED_RUN.sub(lambda run: f"_{{{''.join(map(_LOWERED.__getitem__, run[0]))}}}", text)
    text = text.translate(_TABLE)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).translate(_TABLE)  # letters and digits of other fonts
    text = _CONSTANT.sub(lambda match: f"{match[1] or match[2] or match[3]} ", text)
    text = _FUNCTION.sub(r"\\\1 ", text)
    for pattern, spelling in _RULES:
        text = pattern.sub(spelling, text)
    text = _WORD_ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2] or match[3]}}}", text)
    text = _ROOT.sub(_root, text)
    return _MIXED.sub(_improper, text)


def text_form(text: str) -> str:
    """Return the spelling in which formulas that cannot be read are compared: without spaces, and without
    braces around single characters.

    Args:
        text: what `latex` returned. It is spelled once more, since a root inside a root takes two passes.
    """
    text = _MODULUS.sub(lambda match: f"(mod {match[1] or match[2]})", _TEXT_LAYOUT.sub(r"\1", latex(text)))
    return re.sub(r"\{([A-Za-z0-9])\}", r"\1", text).rstrip(".")


def _vulgar(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return f"\\frac{{{numerator}}}{{{denominator}}}"


def _root(match: re.Match[str]) -> str:
    degree = "[3]" if match[1] == "∛" else ""
    return f"\\sqrt{degree}{{{match[2] or match[3] or match[4]}}}"


def _improper(match: re.Match[str]) -> str:
    """Return a mixed number such as `1 1/4` as an improper fraction; other text as it is."""
    integer, numerator, denominator = (int(group) for group in match.groups() if group is not None)
    if not 0 < numerator < denominator:
        return match[0]
    return f"\\frac{{{integer * denominator + numerator}}}{{{denominator}}}"
