"""Scorers of generated tasks: what answers, labels and metadata that are code can do, in the sandbox and
where there is none."""

import ast
import inspect
import os
import pickle
import re
import signal
import textwrap
import types

import pytest
import reasoning_gym as library
import sympy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards import (
    LabelError,
    Score,
    Verifier,
    check_labels,
    open_pool,
    scorer_sandbox,
)
from megatron_ibpo.rewards.reasoning_gym import UNGRADABLE, label_problem
from megatron_ibpo.rewards.sandbox import judges
from megatron_ibpo.rewards.scorer_sandbox import (
    EVALUATE_NOTHING,
    READ_PARAMETERS,
    ScorerSandbox,
    Task,
    is_expression,
)
from support.sandboxed import adopts_no_longer, needs_sandbox  # noqa: F401
from support.waiting import eventually, has_ended

EVALUATING = sorted(scorer_sandbox._EVALUATED)
GRADED = sorted(DATASETS.keys() - UNGRADABLE.keys())
WRONG, FAULT = Score(0.0, False), Score(0.0, False, details={"response_error": 1.0})


def item(task, **parameters):
    """The first item of a task, as a prompt."""
    made = library.create_dataset(task, seed=1, size=1, **parameters)[0]
    metadata = {**made["metadata"], "question": made["question"], "parameters": parameters}
    return Prompt(0, token_ids([]), 0, str(made["answer"]), task, made["question"], metadata)


def row(task, label, **metadata):
    metadata |= {"source_dataset": task, "source_index": 0, "question": "what?"}
    return Prompt(0, token_ids([]), 0, label, task, "what?", metadata)


def attacks(path):
    """Texts that write a file, patch the scorers, and raise."""
    patch = "setattr(c, 'score_answer', lambda *_: 1.0)"
    classes = "__import__('reasoning_gym').factory.ProceduralDataset.__subclasses__()"
    return [
        f"__import__('os').system('touch {path}')",
        f"[x for x in ().__class__.__base__.__subclasses__()] and open({str(path)!r}, 'w').close()",
        f"[{patch} for c in {classes}]",
        "[0 for __builtins__['bool'] in [repr]]",
        "(_ for _ in ()).throw(KeyboardInterrupt)",
    ]


def raiser(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture(scope="module")
def pool():
    with open_pool(DataConfig(reward_workers=1, reward_timeout=60.0)) as opened:
        yield opened


@needs_sandbox
def test_no_answer_makes_a_file_or_changes_a_later_verdict(pool, tmp_path):
    assert len(GRADED) == 99
    verifier = Verifier(pool, DataConfig())
    for prompt in map(item, GRADED):
        hostile = [f"<answer>{text}</answer>" for text in attacks(tmp_path / "P")]
        answers = [
            f"<answer>{prompt.label}</answer>",
            *hostile,
            "I do not know",
            f"<answer>{prompt.label}</answer>",
        ]
        scores = verifier.score([(prompt, answer) for answer in answers])
        assert [score.reward for score in scores] == [1.0, *[0.0] * (len(answers) - 2), 1.0], prompt.task
    assert pool.deaths == 0
    assert not (tmp_path / "P").exists()


@needs_sandbox
def test_an_answer_beyond_an_expression_of_its_task_is_wrong(pool):
    numbers = row("countdown", "1 + 2 + 3", numbers=[1, 2, 3], target=6)
    puzzle = row("puzzle24", "(4 + 2)*(3 + 1)", numbers=[1, 2, 3, 4])
    integral = row("simple_integration", "x**2 + C", integrand="2*x", variable="x")
    # a label of the library's own, which does not solve the task
    unsolved = row(
        "intermediate_integration", "-Integral(x**2*cos(x), x) + C", integrand="-x**2*cos(x)", variable="x"
    )
    check_labels(pool, [unsolved], DataConfig())
    product = row("polynomial_multiplication", "x**2 + 2*x + 1")
    flip = row("coin_flip", "0.0625")
    ordered = row("number_sorting", "['1.0', '2.5', '9.0']", direction="ascending")
    imaginary = row("complex_arithmetic", "4.0 - 7.0i", result=[4, -7])
    board = row("n_queens", "Q _\n_ _", valid_answers=["Q _\n_ _"])
    cases = [
        (numbers, "3*2*1", Score(1.0, True)),
        (numbers, "3 + 2 + 2", WRONG),
        (
            row("countdown", "20*5 - 99 + 98", numbers=[20, 5, 99, 98], target=99.0),
            "98 + 5*20 - 99",
            Score(1.0, True),
        ),
        (row("countdown", "97*9 + 1", numbers=[97, 9, 1, 98, 99], target=873), "97*9 + 1/98/99", WRONG),
        (numbers, "(1+2+3)*0e0 + 6e0", FAULT),  # numbers that the library does not count as used
        (numbers, "1*2**3 - 2", FAULT),
        (puzzle, "3*(1 + 4 + 2 + 1)", WRONG),
        (puzzle, "6*4*1*1", WRONG),  # any four numbers that make 24, for the library
        (puzzle, "1*2*3*4", Score(1.0, True)),
        (row("puzzle24", "8/(3 - 8/3)", numbers=[3, 3, 8, 8]), "8/(3 - 8/3)", Score(1.0, True)),
        (row("puzzle24", "8*(9 - 2*3)", numbers=[2, 3, 8, 9]), "8*3 + 2/9", WRONG),  # the library cuts it
        (flip, "0", WRONG),  # any beginning of the label, for the library
        (flip, "0.5", WRONG),
        (flip, "1e9999999999", WRONG),
        (flip, "6.25e-2", Score(1.0, True)),
        (flip, "1/16", Score(1.0, True)),
        (flip, "0.06254", Score(1.0, True)),
        (ordered, "[NaN, NaN, NaN]", WRONG),
        (ordered, '["nan", "NaN", "nan"]', WRONG),
        (ordered, "[1, 2.5, 9]", Score(1.0, True)),
        (imaginary, "nan", WRONG),
        (imaginary, "N an + 1i", WRONG),
        (imaginary, "4 - 7i", Score(1.0, True)),
        (integral, "x*x - C", Score(1.0, True)),
        (integral, "Integral(2*x, x)", FAULT),  # it differentiates to the integrand without being solved
        (integral, "sin(x)**2 + cos(x)**2 + x**2", Score(1.0, True)),
        (unsolved, unsolved.label, FAULT),
        (unsolved, "2*sin(x) - x**2*sin(x) - 2*x*cos(x)", Score(1.0, True)),
        (product, "2*x + x**2 + 1", Score(1.0, True)),
        (product, "expand((x + 1)**2)", FAULT),
        (product, "(lambda: x)()", FAULT),
        (product, "(S)(x)**2 + 2*x + 1", FAULT),
        (board, '[["Q", "_"], ["_", "_"]]', WRONG),  # evaluated, for part marks
        (board, '["Q _" for q in "Q"]', FAULT),
        (board, "Q.Q()", FAULT),
        *((row(task, "1 2"), "[0 for x in [1]]", FAULT) for task in ("spiral_matrix", "binary_matrix")),
        (row("string_insertion", "AB"), "[a for a in 'AB']", FAULT),
    ]
    verifier = Verifier(pool, DataConfig())
    for prompt, answer, right in cases:
        assert verifier.score([(prompt, f"<answer>{answer}</answer>")]) == [right], answer


PIECES = [
    "x", "C", "pi", "sin(", "exp (", "eval(", "S", "__", ".", "'", '"', "[", "]", "(", ")", "0", "12", "1.5",
    "*", "/", "**", "+", "-", " for ", " in ", " if ", " ", "\n", "lambda ", ":", ":=", "=", "Q", "_", "A",
    "B", ",", "{", "}", "@", "\N{MATHEMATICAL ITALIC SMALL E}", ";", "#", "\\", "!", "%", "~", "&", "j", "f'",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
HARMLESS = (ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Subscript, ast.Slice)
HARMLESS += (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Call)


def is_of_mathematics(name):
    return isinstance(getattr(sympy, name, None), sympy.FunctionClass) or name in ("sqrt", "abs")


@settings(max_examples=1000)
@example("simple_integration", "sin(*x")
@example("simple_integration", "sin( ** x")
@example("countdown", "1( *2")
@given(st.sampled_from(["countdown", "n_queens", *["simple_integration"] * 3, "spiral_matrix"]), TEXTS)
def test_evaluated_answers_call_only_functions_of_mathematics(task, text):
    assert all(map(is_of_mathematics, scorer_sandbox._FUNCTIONS))
    text += ")" * (text.count("(") - text.count(")"))
    if not is_expression(task, text):
        return
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return
    for node in ast.walk(tree):
        assert isinstance(node, HARMLESS), text
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert is_of_mathematics(node.func.id), text


@needs_sandbox
def test_no_row_runs_code_at_the_start(pool, tmp_path):
    code = f"__import__('os').system('touch {tmp_path / 'P'}')"
    integral = {"integrand": code, "variable": "x"}
    for prompt, says in (
        (row("polynomial_multiplication", code), "its label is no expression of the task"),
        (row("countdown", code, numbers=[1], target=1), "its label is no expression"),
        (row("number_sorting", code, direction="ascending"), "its label is no expression"),
        (row("simple_integration", "x", **integral), "its integrand is no expression"),
        (row("intermediate_integration", "x", **integral), "its integrand is no expression"),
        (row("bitwise_arithmetic", "1", problem=code), "its problem is no expression"),
        (row("simple_integration", "x", integrand=["x"], variable="x"), "its integrand is no expression"),
        (row("puzzle24", "4*6*1*1"), "its numbers"),
        (row("polynomial", "x"), "reasoning_gym has no task 'polynomial'"),
        (row(["chain_sum"], "1"), "the name of its task must be text"),
        (row("chain_sum", "1", parameters=[code]), "its parameters a mapping"),
        (row("chain_sum", "1", parameters={code: 1}), "unexpected keyword"),
        (row("chain_sum", "1", parameters={"size": 10**12}), "'size'"),
        (row("count_primes", "1", parameters={"max_n": 10**10}), "cannot be made: MemoryError"),
    ):
        with pytest.raises(LabelError, match=re.escape(says)):
            check_labels(pool, [prompt], DataConfig())
        (score,) = Verifier(pool, DataConfig()).score([(prompt, prompt.label)])
        assert score.reward is None, says
    assert pool.deaths == 0
    assert not (tmp_path / "P").exists()


# ----------------------------------------------------------------- in the sandbox, if a text still gets there

EVALUATES = Task("spiral_matrix", pickle.dumps({}))
"""A task whose scorer evaluates every answer but the label."""
LABEL = ("1 2", {"question": "?", "answer": "1 2", "metadata": {}})


def evaluated(text):
    return (text, LABEL[1])


@pytest.fixture(scope="module")
def sandbox():
    opened = ScorerSandbox()
    yield opened
    opened.close()


REFUSED = [
    "open('/tmp/file', 'w')", "__import__('os').open('/tmp/f', 1 | 64)", "__import__('os').mkdir('/tmp/d')",
    "__import__('os').symlink('/', '/tmp/s')", "__import__('os').listdir('/proc')", "open('/etc/passwd')",
    "__import__('os').fork()", "__import__('subprocess').run(['/bin/true'])", "__import__('socket').socket()",
    "__import__('os').kill(__import__('os').getppid(), 9)", "__import__('os').kill(-1, 9)",
    "__import__('os').pidfd_open(__import__('os').getppid())", "__import__('os').setpriority(0, 1, 19)",
    "__import__('resource').prlimit(__import__('os').getppid(), 7, (0, 0))", "__import__('time').sleep(60)",
    "__import__('fcntl').fcntl(0, 8, __import__('os').getppid())",
    "__import__('os').sched_setaffinity(1, {0})",
    "__import__('os').fstat(3)", "__import__('os').fstat(4)", "__import__('os').dup2(0, 9)",
    "__import__('os').setuid(0)", "__import__('os').chmod('/tmp', 0)", "__import__('os').memfd_create('x')",
    "__import__('os').unlink('/tmp/file')", "__import__('os').truncate('/dev/null', 1)",
    "__import__('_thread').start_new_thread(print, ())",
]  # fmt: skip


@needs_sandbox
def test_code_in_a_judge_can_only_compute(sandbox):
    """Each attempt is made by an answer that gets away with full marks if the attempt succeeds."""
    win = "[k.f_globals for k in [__import__('sys')._getframe(1)]] and __import__('os').write(0, b'r\\0\\0')"
    (verdict,) = sandbox.judge(EVALUATES, [evaluated(win)])
    assert verdict.kind == "right"  # so that what follows can fail
    for attempt in REFUSED:
        (verdict,) = sandbox.judge(EVALUATES, [evaluated(f"[{attempt}] and {win}")])
        assert verdict.kind == "wrong", attempt


@needs_sandbox
def test_code_in_a_judge_affects_only_its_own_verdict(sandbox):
    write = "__import__('os').write"
    cases = {
        "[setattr(__import__('__main__'), 'WRONG', b'r')]": "right",  # of its own verdict
        "[__import__('sys').modules.clear()]": "wrong",
        "__import__('os')._exit(0)": "ended",
        "__import__('os').abort()": "ended",
        "__import__('ctypes').string_at(0)": "ended",
        "__import__('os').close(0)": "ended",
        f"{write}(0, b'r' * 9999)": "ended",  # nonsense
        f"{write}(0, b'p\\0\\0')": "ended",
        f"{write}(0, b'x\\xff\\xff' + b'x' * 70000)": "ended",
        "[1] * 10**10": "wrong",  # the scorer catches the error of memory
        "[__import__('signal').signal(24, __import__('signal').SIG_IGN)] and 9**9**9**9": "ended",
        "exec('def f(): f()\\nf()')": "wrong",
    }
    for code, kind in cases.items():
        verdicts = sandbox.judge(EVALUATES, [evaluated(code), LABEL, evaluated("3")])
        assert [verdict.kind for verdict in verdicts] == [kind, "right", "wrong"], (code, verdicts)
        assert len(verdicts[0].reason) <= judges.LONGEST_TEXT, (code, kind)


@needs_sandbox
@pytest.mark.slow
def test_no_answer_changes_the_next_verdict_of_a_judge(sandbox, tmp_path):
    for task in EVALUATING:
        prompt, name = item(task), Task(task, pickle.dumps({}))
        entry = {"question": prompt.text, "answer": prompt.label, "metadata": prompt.metadata}
        asks = [(text, entry) for text in (*attacks(tmp_path / "P"), prompt.label, "no")]
        assert [verdict.kind == "right" for verdict in sandbox.judge(name, asks)[-2:]] == [True, False], task
    assert not (tmp_path / "P").exists()


@needs_sandbox
@pytest.mark.slow
def test_many_responses_to_a_large_row_are_judged_in_turn(sandbox):
    entry = {"question": "?", "answer": "5", "metadata": {"x": "y" * (48 << 20)}}
    verdicts = sandbox.judge(Task("chain_sum", pickle.dumps({})), [("5", entry)] * 8)
    assert [verdict.kind for verdict in verdicts] == ["right"] * 8


@needs_sandbox
def test_a_dead_sandbox_is_an_error_and_is_replaced(monkeypatch):
    monkeypatch.setattr(scorer_sandbox, "_opened", [])
    prompt = row("chain_sum", "5")
    assert label_problem("5", prompt.metadata) is None
    first = scorer_sandbox._opened[0]._process.first
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: has_ended(first), 10)
    assert "the sandbox of scorers" in label_problem("5", prompt.metadata)
    assert label_problem("5", prompt.metadata) is None
    scorer_sandbox._opened[0].close()


def test_without_a_sandbox_only_scorers_that_evaluate_nothing_run(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'no user namespaces here' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    sums, numbers = item("chain_sum"), [item("countdown")] * 3
    with open_pool(DataConfig(reward_workers=1, reward_timeout=60.0)) as pool:
        verifier = Verifier(pool, DataConfig())
        check_labels(pool, [sums], DataConfig())
        assert verifier.score([(sums, sums.label), (sums, "no")]) == [Score(1.0, True), WRONG]
        with pytest.raises(LabelError) as refused:
            check_labels(pool, numbers, DataConfig())
        (line,) = str(refused.value).splitlines()[1:]
        assert re.search(r"countdown.*needs the sandbox.*no user namespaces here.*code_rewards.md", line)
        assert verifier.score([(numbers[0], numbers[0].label)])[0].reward is None
    monkeypatch.setattr("megatron_ibpo.rewards.sandbox.bubblewrap.shutil.which", lambda *_, **__: None)
    monkeypatch.setattr(scorer_sandbox, "_opened", [])
    monkeypatch.setattr(scorer_sandbox, "_refusal", None)
    assert "apt-get install bubblewrap" in label_problem(numbers[0].label, numbers[0].metadata)


@needs_sandbox
def test_an_unavailable_sandbox_is_tried_again_later(monkeypatch):
    monkeypatch.setattr(scorer_sandbox, "_opened", [])
    monkeypatch.setattr(scorer_sandbox, "_refusal", None)
    numbers = item("countdown")
    with monkeypatch.context() as for_now:
        for_now.setattr("subprocess.Popen", raiser(BlockingIOError("no more processes")))
        assert "needs the sandbox: no more processes" in label_problem(numbers.label, numbers.metadata)
        assert label_problem("5", row("chain_sum", "5").metadata) is None
    assert "no more processes" in label_problem(numbers.label, numbers.metadata)
    monkeypatch.setattr(scorer_sandbox, "_RETRY_S", 0.0)
    assert label_problem("5", row("chain_sum", "5").metadata) is None
    assert not scorer_sandbox._opened
    assert label_problem(numbers.label, numbers.metadata) is None
    scorer_sandbox._opened[0].close()


# --------------------------------------------------------------------------------------- proofs of the lists

EVALUATES_OR_READS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "getattr",
    "setattr",
    "globals",
    "vars",
    "open",
}
HARMLESS_MODULES = {"copy", "enum", "json", "math", "numpy", "re", "zss", "reasoning_gym", "typing"}


def reached(task):
    """The functions of the library that a task's scorer reaches by name, as far as that can be seen; and the
    names that they use, and the modules of others' functions."""
    dataset, functions, names, modules = DATASETS[task][0], {}, set(), set()

    def visit(value):
        value = inspect.unwrap(value) if callable(value) else value
        is_module = isinstance(value, types.ModuleType)
        module = value.__name__ if is_module else getattr(value, "__module__", None) or "builtins"
        if isinstance(value, types.FunctionType) and module.startswith("reasoning_gym"):
            if value not in functions:
                functions[value] = ast.parse(textwrap.dedent(inspect.getsource(value)))
                for node in ast.walk(functions[value]):
                    name = getattr(node, "id", getattr(node, "attr", None))
                    names.add(name)
                    visit(value.__globals__.get(name))
                    visit(getattr(dataset, name or "", None))
        elif is_module or (callable(value) and not isinstance(value, type) and module != "builtins"):
            modules.add(module.partition(".")[0])

    visit(dataset.score_answer)
    return functions, names, modules


def reads_own_state(task, functions):
    """Whether a method of the task's dataset reads what its class does not have."""
    own = DATASETS[task][0]
    nodes = [
        node
        for function, tree in functions.items()
        if function.__qualname__.startswith(own.__name__)
        for node in ast.walk(tree)
    ]
    return any(
        isinstance(node, ast.Attribute)
        and getattr(node.value, "id", None) == "self"
        and not hasattr(own, node.attr)
        for node in nodes
    )


def test_only_named_scorers_reach_evaluation_or_parameters():
    assert not EVALUATE_NOTHING & set(EVALUATING)
    assert set(GRADED) == EVALUATE_NOTHING | set(EVALUATING)
    evaluating, reading = set(), set()
    for task in GRADED:
        functions, names, modules = reached(task)
        if names & EVALUATES_OR_READS or modules - HARMLESS_MODULES:
            evaluating.add(task)
        elif reads_own_state(task, functions):
            reading.add(task)
    assert evaluating == set(EVALUATING)
    assert reading == READ_PARAMETERS
