"""--help shows the right flags, and unknown flags, or another trainer's, are answered."""

import re
import subprocess
import sys

import pytest

from megatron_ibpo.commands import calibrate, evaluate, pass_rates, train
from megatron_ibpo.config import COMMON_FLAGS, ConfigError
from megatron_ibpo.config.all_fields import ENTRIES
from megatron_ibpo.config.peer_flags import FLAGS, KEYS
from megatron_ibpo.credit import REGISTRIES
from megatron_ibpo.run.settings import parse_config

PARAMETERS = {name for registry in REGISTRIES for one in registry.known for name in registry.entries(one)}
EVERY_FLAG = {*ENTRIES, *PARAMETERS}


@pytest.fixture
def shown(capsys, monkeypatch):
    """Return what a command line prints that only asks for help, on a terminal of so many columns."""

    def show(*words: str, columns: int = 100, main=parse_config) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code
        return capsys.readouterr().out

    return show


def flags_of(text: str) -> list[str]:
    """Return the names of the flags that a help lists."""
    names = [name.replace("-", "_") for name in re.findall(r"^  --([a-z0-9-]+)", text, re.MULTILINE)]
    return [name for name in names if name in EVERY_FLAG]


def test_help_shows_the_common_flags_within_the_terminal_and_defaults_of_recipes(shown, tmp_path):
    for columns in (60, 80, 200):
        text = shown("--help", columns=columns)
        assert flags_of(text) == list(COMMON_FLAGS)
        others = {"--help-all", "--help WORD", "--config", "--print-config"}
        assert others <= {*re.findall(r"--[a-z-]+(?: WORD)?", text)}
        assert max(map(len, text.splitlines())) <= min(columns, 100)
        assert shown("-h", columns=columns) == text
    (tmp_path / "mine.yaml").write_text("lr: 0.25\n")
    assert "[0.25]" in shown("--config", str(tmp_path / "mine.yaml"), "--help")


def test_all_flags_are_shown_with_their_text_and_those_of_the_method_alone(shown):
    for method in ("ibpo", "gspo", "wrong-weight", "ppo"):
        text = shown("--advantage-estimator", method, "--help-all")
        chosen = parse_config(["--advantage-estimator", method]).algorithm
        own = {name for one in REGISTRIES for name in one.entries(getattr(chosen, one.setting))}
        assert {*flags_of(text)} == {*ENTRIES, *own}
        assert not re.search(r"\]\n\n", text), "each has a text"
        assert max(map(len, text.splitlines())) <= 100


def test_help_is_searched_by_word(shown):
    for words, first, contains in (
        (["overlong"], "overlong_buffer_share", ["DAPO", "Range: between 0 and 1", "[0.0]"]),
        (["tensor", "size"], "tensor_model_parallel_size", ["INT"]),
        (["SandboxFusion"], "code_executor", []),
        (["num-generations"], None, ["--n-samples-per-prompt"]),
        (["ovrlong"], None, ["'overlong'"]),
        (["tensor-model-paralel-size"], None, ["'tensor-model-parallel-size'"]),
    ):
        text = shown("--help", *words)
        assert next(iter(flags_of(text)), None) == first
        assert [part for part in contains if part not in text] == []
    assert "{constant,linear,cosine}" in shown("--help=--lr-decay-style")


def test_each_command_shows_its_own_flags_first(shown):
    for main, words, first in (
        (evaluate.main, [], evaluate.FLAGS),
        (pass_rates.main, [], pass_rates.FLAGS),
        (calibrate.main, [], ("dry_run_hardware",)),
        (train.main, ["--dry-run"], train.OF_PLAN["common"]),
        (train.main, [], COMMON_FLAGS),
    ):
        assert tuple(flags_of(shown(*words, "--help", main=main))[: len(first)]) == first


def test_help_needs_no_torch_and_in_a_pipe_is_plain_text():
    program = """
import sys
from megatron_ibpo.commands.train import main
try:
    main(["--help"])
finally:
    print({"torch", "ray", "vllm"} & set(sys.modules), file=sys.stderr)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "set()"
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_flags_of_other_trainers_are_answered_with_flags_that_exist():
    words = [f"--{name}" for flags in FLAGS.values() for name in flags]
    for word in words + [f"{key}=1" for keys in KEYS.values() for key in keys]:
        with pytest.raises(ConfigError) as refused:
            parse_config([word])
        typed, _, answer = str(refused.value).partition(": ")
        assert typed == word.removesuffix("=1")
        assert "\n" not in answer
        named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z0-9-]+)", answer)}
        assert {name.removeprefix("no_") for name in named} <= EVERY_FLAG, word


def test_the_name_here_is_said_and_all_wrong_flags_of_a_command_are_answered():
    for words, ours in {
        "--ppo_mini_batch_size 8": "--num-steps-per-rollout",
        "+actor_rollout_ref.rollout.n=8": "--n-samples-per-prompt",
        "--actor-num-gpus-per-node 8": "GPUS_PER_NODE",
        "--actor_rollout_ref.actor.optim.lr=1e-6": "--lr",
        "--tensr-model-parallel-size 2": "'--tensor-model-parallel-size'",
        "--help-al": "'--help-all'",
        "--foo 3": "--foo: no such flag",
    }.items():
        with pytest.raises(ConfigError, match=rf"{re.escape(ours)}(\b|$|\W)"):
            parse_config(words.split())
    words = "--lr 1e-6 --beta 0.1 --qqqqqqqq 3 trainer.nnodes=2 --gae-lambda 1 --epsilon=0.2"
    with pytest.raises(ConfigError) as refused:
        parse_config(words.split())
    answered = [line.strip().partition(":")[0] for line in str(refused.value).splitlines()[1:]]
    assert answered == ["--beta", "--qqqqqqqq", "trainer.nnodes", "--gae-lambda", "--epsilon"]
