"""What becomes of loss terms: each is exact Triton code or refused, and mistakes end in one line."""

import functools
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ibpo.commands import loss as command
from megatron_ibpo.config import Config, ConfigError, LossConfig
from megatron_ibpo.kernels import term_agreement, term_calls, term_tables, traced_terms
from megatron_ibpo.kernels.term_agreement import check_call, compare_with_torch
from megatron_ibpo.kernels.term_calls import TermError
from megatron_ibpo.kernels.traced_terms import PASSED, traced_source
from megatron_ibpo.loss import VARIANTS, resolve_variant
from megatron_ibpo.loss.objective import KL_ESTIMATORS, kernel_agreement, variant_terms
from megatron_ibpo.loss.term_inputs import FURTHER_INPUTS
from megatron_ibpo.run.settings import check_loss_of_run
from support import loss_terms
from support.loss_terms import EXACT, OFTEN_IN_TRITON, PARAMETERS, REFUSED, from_expression


def compare(name):
    return compare_with_torch(EXACT[name], PASSED, FURTHER_INPUTS, PARAMETERS.get(name, {}))


def run_command(capsys, *arguments):
    """Return (exit status, stdout, stderr) of `ibpo loss`."""
    status = command.main([*arguments])
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in OFTEN_IN_TRITON else ()) for name in EXACT]
)
def test_the_code_of_a_term_is_exact(name, capsys):
    """tests/interpreted/ runs the same code in Triton."""
    status, said, _ = run_command(capsys, f"support.loss_terms:exact_{name}")
    assert status == 0, said
    verdict = re.search(r"Triton code of the token term: right \(([\d,]+) rows .* error (\S+)\)", said)
    assert int(verdict[1].replace(",", "")) > 400, said
    assert float(verdict[2]) < 1e-6, said
    assert "on cuda: triton" in said


@pytest.mark.parametrize("text", REFUSED)
def test_a_term_that_kernels_cannot_compute_exactly_is_refused(text, capsys):
    """By the command, or before it where torch cannot train with it either."""
    number = [*REFUSED].index(text)
    status, said, error = run_command(capsys, f"support.loss_terms:refused_{number}")
    refusal = error if status == 2 else re.search("Triton code of the token term: none: (.*)", said)[1]
    assert re.search(REFUSED[text], refusal), refusal
    assert "<string>, line 1" in refusal, refusal
    assert "on cuda: triton" not in said


def test_every_registered_term_is_exact():
    for name, variant in VARIANTS.items():
        params = resolve_variant(name)[1]
        for term in variant_terms(variant):
            assert kernel_agreement(term, variant, params).error < 1e-6, name
    for name, estimator in KL_ESTIMATORS.items():
        assert compare_with_torch(estimator, ("gap",), (), {}).error < 1e-6, name


def test_terms_whose_inputs_changed_are_traced_again(monkeypatch):
    assert "(0.3)" in traced_source(loss_terms.global_number, PASSED, (), {})
    monkeypatch.setattr(loss_terms, "BETA", 0.7)
    assert "(0.7)" in traced_source(loss_terms.global_number, PASSED, (), {})
    compare("global_number")
    settings: dict[str, Any] = {"beta": 1.5, "rate": torch.tensor(0.25)}

    def by_closure(log_ratio):
        return settings["beta"] * log_ratio * settings["rate"], log_ratio > 0

    scaled = loss_terms.Scaled(2.0)
    for beta, rate, scale in ((1.5, 0.25, 2.0), (2.5, 0.75, 3.0)):
        settings["beta"], scaled.scale = beta, scale
        settings["rate"].fill_(rate)
        for term, numbers in ((by_closure, (beta, rate)), (scaled, (scale,))):
            source = traced_source(term, PASSED, (), {})
            assert all(f"({number})" in source for number in numbers), source
            compare_with_torch(term, PASSED, (), {})


def test_other_parameters_compile_nothing_unless_python_needs_their_values():
    sources = {
        name: {traced_source(EXACT[name], PASSED, (), {"eps": eps}) for eps in (0.2, 0.5, 2.0)}
        for name in ("ppo", "by_python_value")
    }
    assert {name: len(texts) for name, texts in sources.items()} == {"ppo": 1, "by_python_value": 3}


def test_terms_that_tell_a_parameter_from_its_neighbours_are_refused():
    """Tensors have a hash of their own, so that the parameter is not found; nor are numbers beside it."""
    weights = {0.5: 2.0}

    def by_value(log_ratio, *, eps):
        return log_ratio * weights.get(eps, 1.0), log_ratio > 0

    def by_clip(log_ratio, *, eps):
        return log_ratio * eps, log_ratio > weights.get(eps, 1.0)

    for term, what in (by_value, "value"), (by_clip, "clip"):
        with pytest.raises(TermError, match=f"its Triton code gives a {what} of"):
            compare_with_torch(term, PASSED, (), {"eps": 0.5})


def test_a_wrong_number_is_noticed_beside_jumps_and_large_values(monkeypatch):
    def jumping(log_ratio, *, p):
        return log_ratio * round(p), log_ratio > 0

    def growing(log_ratio, advantages):
        return log_ratio**3 * advantages**2 + 1.0, log_ratio > 0

    for term, parameters, right, wrong in (
        (jumping, {"p": 2.5}, "(2.0)", "(2.002)"),
        (growing, {}, "+ (1.0)", "+ (1.005)"),
    ):
        source = traced_source(term, PASSED, (), parameters)
        compare_with_torch(term, PASSED, (), parameters)
        assert right in source, source
        wrong_source = functools.partial(lambda text, *_: text, source.replace(right, wrong))
        with monkeypatch.context() as patched:
            patched.setattr(term_agreement, "traced_source", wrong_source)
            with pytest.raises(TermError, match="its Triton code gives a value of"):
                compare_with_torch(term, PASSED, (), parameters)


def test_a_long_term_is_refused_at_once():
    def repeated(log_ratio):
        for _ in range(3000):
            log_ratio = log_ratio * 1.001
        return log_ratio, log_ratio > 0

    started = time.monotonic()
    with pytest.raises(TermError, match=r"test_loss_terms.py, line \d+: `.*1.001`.* more than 500 operators"):
        traced_source(repeated, PASSED, (), {})
    assert time.monotonic() - started < 30


def check_expression(text):
    compare_with_torch(from_expression(text), PASSED, (), {})


def refusal_of(text):
    try:
        check_expression(text)
    except TermError as error:
        return str(error)
    return "none"


@pytest.mark.slow
def test_a_wrong_entry_of_any_table_is_noticed(monkeypatch):
    monkeypatch.setattr(traced_terms, "_sources", {})
    pairs = {"": "log_ratio, advantages", "bool": "log_ratio > 0, advantages > 0"}
    for table, operand, wrong in (
        ("ARITHMETIC", pairs[""], "1.001 * ({})"),
        ("COMPARISONS", pairs[""], "~({})"),
        ("LOGICAL", pairs["bool"], "~({})"),
        ("UNARY", "advantages.abs() + 0.1", "1.001 * ({})"),
        ("TESTS", "advantages", "~({})"),
    ):
        for operator, form in getattr(term_tables, table).items():
            name = str(operator).removeprefix("aten.")
            text = f"log_ratio * torch.{name}({operand})"
            check_expression(text)
            traced_terms._sources.clear()
            with monkeypatch.context() as planted:
                planted.setitem(getattr(term_tables, table), operator, wrong.format(form))
                assert "Triton code gives a value" in refusal_of(text), (table, name)
            traced_terms._sources.clear()


@pytest.mark.parametrize(
    ("table", "operator", "entry", "text"),
    [
        ("ARITHMETIC", "sub", "{1} - {0}", "log_ratio - advantages"),
        ("ARITHMETIC", "minimum", "tl.minimum({}, {})", "torch.minimum(log_ratio, advantages)"),  # drops NaN
        ("ARITHMETIC", "fmax", "tl.maximum({}, {}, tl.PropagateNan.ALL)", "log_ratio.fmax(advantages)"),
        ("UNARY", "relu", "tl.maximum({}, 0.0)", "torch.relu(log_ratio)"),
        ("COMPARISONS", "le", "{} < {}", "log_ratio.clamp(max=1.0)"),  # differs at a tie, in the derivative
        ("UNARY", "sign", "tl.where({} < 0, -1.0, 1.0)", "log_ratio * torch.sign(log_ratio)"),  # at 0
        ("CREATED", "full_like", 0, "log_ratio * torch.full_like(advantages, 0.5)"),
    ],
)
def test_an_entry_that_is_wrong_at_single_numbers_is_noticed(monkeypatch, table, operator, entry, text):
    monkeypatch.setattr(traced_terms, "_sources", {})
    monkeypatch.setitem(getattr(term_tables, table), getattr(term_tables.aten, operator), entry)
    with pytest.raises(TermError):
        check_expression(text)


@pytest.mark.parametrize(
    ("right", "wrong", "text"),
    [
        ("x > 0, 1.0", "x >= 0, 1.0", "advantages.sign() + log_ratio"),
        ("-2.0 * tl.abs", "2.0 * tl.abs", "torch.tanh(log_ratio)"),
        ("near = tl.abs(x) < 1.0", "near = x < 1.0", "torch.expm1(log_ratio)"),
        ("u = 1.0 + x", "u = 1.0 - x", "torch.log1p(log_ratio.abs())"),
    ],
)
def test_a_wrong_line_of_the_preamble_is_noticed(monkeypatch, right, wrong, text):
    assert right in term_tables.PREAMBLE
    monkeypatch.setattr(traced_terms, "_sources", {})
    monkeypatch.setattr(traced_terms, "PREAMBLE", term_tables.PREAMBLE.replace(right, wrong))
    with pytest.raises(TermError, match="Triton code gives a value"):
        check_expression(text)


def test_a_term_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(term_calls, "MOST_SECONDS", 0.1)

    def endless(log_ratio):
        while log_ratio.abs().max() >= 0:
            log_ratio = log_ratio * 0.5
        return log_ratio, log_ratio > 0

    with pytest.raises(TermError, match=r"test_loss_terms.py, line \d+: .*takes more than 0.1 s"):
        check_call(endless, PASSED, {})


MISTAKES = """
import functools, random, sys, torch
from megatron_ibpo.loss import Parameter, Variant

EPS = {"eps": Parameter(0.2, 0.0)}

def clip(x): return torch.zeros_like(x, dtype=torch.bool)

class Callable:
    def __call__(self, log_ratio): return log_ratio, clip(log_ratio), 1

TERMS = {
"""
CASES = {
    "lambda log_ratio: log_ratio": r"returns Tensor, wanted two tensors, \(value, clipped\)",
    "lambda log_ratio: (log_ratio, clip(log_ratio), 1)": "returns 3 values",
    "lambda log_ratio: None": "returns NoneType",
    "lambda log_ratio: 1": "returns int",
    "lambda log_ratio: [log_ratio, clip(log_ratio)]": "returns list",
    "lambda log_ratio: (0.5, clip(log_ratio))": "returns value of type float, wanted a tensor",
    "lambda log_ratio: (log_ratio.mean(), clip(log_ratio))": r"returns value of shape \[\]",
    "lambda log_ratio: (log_ratio[:, None], clip(log_ratio))": r"returns value of shape \[\d+, 1\]",
    "lambda log_ratio: (log_ratio.long(), clip(log_ratio))": "returns value of torch.int64, wanted float",
    "lambda log_ratio: (log_ratio > 0, clip(log_ratio))": "returns value of torch.bool, wanted float",
    "lambda log_ratio: (log_ratio, log_ratio)": "returns clipped of torch.float32, wanted bool",
    "lambda log_ratio: (log_ratio, False)": "returns clipped of type bool, wanted a tensor",
    "lambda log_ratio: (log_ratio * absent, clip(log_ratio))": "`.*absent.*`: NameError: name 'absent'",
    "lambda log_ratio: ({}['k'], clip(log_ratio))": "KeyError: 'k'",
    "lambda log_ratio: (log_ratio + torch.ones(3), clip(log_ratio))": "RuntimeError: The size of tensor",
    "lambda log_ratio: sys.exit(3)": "SystemExit: 3",
    "lambda log_ratio: torch.clip(log_ratio, 'a')": "TypeError: clip",
    "lambda advantages: (advantages, clip(advantages))": "reads none of log_ratio, logprobs: it has no grad",
    "lambda log_ratio: (log_ratio.detach(), clip(log_ratio))": "the value has no gradient",
    "lambda log_ratio: (log_ratio.log(), clip(log_ratio))": "the term's value is NaN at log_ratio -",
    "lambda log_ratio: (log_ratio.abs().sqrt(), clip(log_ratio))": "derivative is NaN at log_ratio 0",
    "lambda log_ratio: (torch.floor_divide(log_ratio, 2), clip(log_ratio))": "cannot be differentiated",
    "lambda log_ratio, advantages: (log_ratio * advantages.mul_(2), clip(log_ratio))": "advantages in place",
    "lambda *inputs: inputs": r"takes \*inputs; a term names each input",
    "lambda log_ratio, rewards: (log_ratio, clip(log_ratio))": "has an argument 'rewards'; a term reads",
    "lambda log_ratio, eps=0.2: (log_ratio, clip(log_ratio))": r"argument 'eps'.* come after a \*",
    "lambda log_ratio, *, beta: (log_ratio * beta, clip(log_ratio))": "params lack 'beta'",
    "lambda log_ratio, *, advantages: (log_ratio * advantages, clip(log_ratio))": "advantages is an input",
    "(lambda log_ratio: (log_ratio, clip(log_ratio)), EPS)": "takes no 'eps', which is in the variant",
    "Callable()": "returns 3 values",
    "Callable": "reads none of log_ratio",
    "functools.partial(lambda log_ratio, *, k: (log_ratio * k, k), k=2.0)": "returns clipped of type float",
    "torch.abs": "wanted a Python function with named arguments, is <built-in",
    "3": "wanted a Python function with named arguments, is 3",
    "eval('lambda log_ratio: log_ratio / 0 * (1 // 0)')": "<string>, line 1: ZeroDivisionError",
}
"""Terms with a mistake, and what is said of it."""


def write_module(directory, monkeypatch, text):
    """Write a module of the user and return its path; it is imported anew."""
    sys.modules.pop("own_terms", None)
    # bytecode of an equally long text of the same second would be read
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = Path(directory) / "own_terms.py"
    path.write_text(text)
    monkeypatch.syspath_prepend(directory)
    return path


def test_a_mistake_in_a_term_takes_one_line(tmp_path, monkeypatch, capsys):
    for text, says in CASES.items():
        term, _, params = text[1:-1].rpartition(", ") if text.startswith("(") else (text, "", "{}")
        path = write_module(
            tmp_path, monkeypatch, f"{MISTAKES}}}\nV = Variant(token_term={term}, params={params})\n"
        )
        status, _, said = run_command(capsys, f"{path}:V")
        assert (status, said.count("\n")) == (2, 1), (text, said)
        assert re.search(says, said), (text, said)
        assert re.search(r"own_terms.py, line \d+|in no file|<string>, line 1", said), (text, said)
        assert "internal error" not in said, (text, said)
        with pytest.raises(ConfigError) as refusal:
            check_loss_of_run(Config(loss=LossConfig(loss_variant=f"{path}:V")))
        assert said.strip().removeprefix("error: ").partition(" at 0x")[0] in str(refusal.value), text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:\n", r"SyntaxError: invalid syntax \(own_terms.py, line 1\)"),
        ("x = {}['k']\n", r"KeyError: 'k' \(.*own_terms.py:1 in <module>\)"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 \(.*own_terms.py:2 in <module>\)"),
        ("V = 3\n", "is a int, wanted a Variant"),
        ("", "defines no 'V'"),
    ],
)
def test_an_unusable_loss_module_is_named_with_its_line(text, says, tmp_path, monkeypatch, capsys):
    path = write_module(tmp_path, monkeypatch, text)
    status, _, said = run_command(capsys, f"{path}:V")
    assert (status, said.count("\n")) == (2, 1), said
    assert re.search(says, said), said


DECIDING = """
from megatron_ibpo.loss import Variant


def deciding(log_ratio):
    loss = log_ratio * 2
    if log_ratio[0] > 0:
        loss = -loss
    return loss, loss > 0


V = Variant(token_term=deciding)
"""


def test_the_loss_command_predicts_the_run(tmp_path, monkeypatch, capsys):
    assert "gradient of the token term: right" in run_command(capsys, "nll")[1]
    status, said, _ = run_command(capsys, "grpo")
    assert status == 0
    assert re.search(r"Triton code of the token term: right \([\d,]+ rows", said), said
    assert "on cuda: triton" in said
    path = write_module(tmp_path, monkeypatch, DECIDING)
    _, said, _ = run_command(capsys, f"{path}:V")
    refusal = re.search(r"Triton code of the token term: none: (.*)", said)[1]
    assert re.search("own_terms.py, line 7: `if log_ratio.0. > 0:`: .* data-dependent", refusal), refusal
    assert "on cuda: refused" in said
    assert "on cuda: triton" not in said
    run = Config(loss=LossConfig(loss_variant=f"{path}:V", loss_backend="triton"))
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        check_loss_of_run(run)
    check_loss_of_run(Config(loss=LossConfig(loss_variant=f"{path}:V", loss_backend="torch")))
    prelu = f"support.loss_terms:refused_{[*REFUSED].index('F.prelu(log_ratio, torch.tensor(0.25))')}"
    status, said, _ = run_command(capsys, prelu)
    assert status == 0
    assert "not checked, since it fails in float64 (RuntimeError: prelu: " in said
