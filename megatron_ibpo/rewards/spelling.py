r"""One spelling of mathematics: Unicode, plain text and font commands written as the LaTeX that math-verify
reads. Every step takes time linear in the text."""

import re
import unicodedata

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
_LAYOUT = re.compile(
    r"(\\\\)|\\(?:left|right|displaystyle|q?quad)(?![A-Za-z])|\\[,;:! ]|\$|~|(?<!\d)\s++|\s++(?!\d)"
)
_LONGEST = 5_000
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
    if len(text) > _LONGEST:
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
    text = _MODULUS.sub(lambda match: f"(mod {match[1] or match[2]})", _LAYOUT.sub(r"\1", latex(text)))
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
