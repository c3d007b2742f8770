"""Top-k and top-p are refused where the loss would compare probabilities of two distributions."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from megatron_ibpo.basics.sampling_mask import unrestricted
from megatron_ibpo.config import ConfigError
from megatron_ibpo.engines.registry import all_readers, check_recorded, check_truncation
from megatron_ibpo.run.settings import check_run, check_settings, parse_config
from support.paths import ROOT
from support.train_sequences import sequence

ALONE = ("--hf-checkpoint", str(ROOT / "examples/tiny_qwen3"), "--prompt-data", "reasoning_gym://chain_sum")
CUTS = (
    "--rollout-top-p 0.8",
    "--rollout-top-k 20",
    "--rollout-top-p-cycle 1 0.9",
    "--rollout-top-k-cycle -1 20",
)
READERS = (
    "--use-tis", "--icepop 0.5 5", "--sequence-rejection 0.99 1.01", "--old-logprobs engine",
    "--max-staleness 1", "--loss-variant reading:VARIANT",
)  # fmt: skip
WITH_RECORD = "--rollout-top-k 20 --eval-top-k 20"


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    """A variant that reads the engine's log-probs, and engines of three kinds."""
    (tmp_path / "reading.py").write_text("""
import torch
from megatron_ibpo.loss import Variant
def term(log_ratio, rollout_logprobs, advantages):
    return -advantages * torch.exp(log_ratio) * torch.exp(rollout_logprobs), log_ratio > 9
VARIANT = Variant(token_term=term)
""")
    (tmp_path / "engines_of_mine.py").write_text("""
from megatron_ibpo.engines import Engine
class Silent(Engine):
    sampling_mask_obstacle = None
class Recording(Silent):
    @staticmethod
    def sampling_mask_obstacle(config, on_gpu):
        return None
class Counted(Engine): ...
""")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def config_of(*flags):
    return parse_config([*ALONE, *" ".join(flags).split()], note=lambda _: None)


def refusals(check, config, **more):
    try:
        check(config, **more)
    except ValueError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(("cut", "reader"), list(product(CUTS, READERS)))
def test_ratios_to_truncated_log_probs_are_refused_with_their_flags(cut, reader):
    config = config_of(cut, reader)
    cut_flag, reader_flag = cut.split()[0], reader.split()[0]
    for on_gpu, way_out in ((True, "add --rollout-top-k 1000"), (False, "take --rollout-backend lean")):
        if on_gpu and cut == "--rollout-top-k 20":
            continue  # vLLM records it
        (line,) = refusals(check_truncation, config, readers=all_readers(config), on_gpu=on_gpu)
        assert line.startswith(f"{cut_flag} with {reader_flag}"), way_out
        assert "scaled by the probability that was cut off" in line, way_out
        assert way_out in line
    refused = refusals(check_run, config)
    assert any(cut_flag in line and reader_flag in line for line in refused) == (cut != "--rollout-top-k 20")
    if "loss-variant" not in reader:  # whose terms take torch to read
        assert refusals(check_settings, config) == refused
    for allowed in (config_of(cut), config_of(reader), config_of(cut, reader, "--debug-rollout-only")):
        check_truncation(allowed, all_readers(allowed), on_gpu=False)


def test_engines_that_record_the_sampling_mask_are_accepted():
    for flags, on_gpu, says in (
        ("--rollout-backend lean", False, None),
        (WITH_RECORD, True, None),
        ("--rollout-top-k 20 --eval-top-k -1", True, "set --eval-top-k 1000"),
        ("--rollout-top-k 20 --eval-top-k -1 --eval-num-prompts 0", True, None),
        ("--rollout-top-k 20 --eval-top-k -1 --eval-temperature 0", True, None),
        (
            "--rollout-top-k 20 --eval-top-k -1 --eval-temperature 0 --eval-other-temperatures 1",
            True,
            "set --eval-top-k 1000",
        ),
        ("--rollout-top-k 20 --rollout-top-k-cycle 5 -1", True, "add --rollout-top-k 1000"),
        ("--rollout-backend engines_of_mine:Recording", False, None),
        ("--rollout-backend engines_of_mine:Counted --rollout-top-k 20", True, None),
        ("--rollout-backend engines_of_mine:Counted --rollout-top-k 20", False, "only on GPUs"),
        (
            "--rollout-backend engines_of_mine:Silent",
            True,
            "engines_of_mine:Silent does not say that it records",
        ),
    ):
        config = config_of("--rollout-top-p 0.8 --use-tis", flags)
        lines = refusals(check_truncation, config, on_gpu=on_gpu)
        assert len(lines) == (says is not None), (flags, lines)
        assert says is None or says in lines[0], (flags, lines)


def test_sampling_that_the_trainer_cannot_reproduce_is_always_refused():
    for name in ("logits_processors=[a:b]", "watermark_config={}"):
        for cut in ("", WITH_RECORD):
            config = config_of("--use-tis", cut)
            config.rollout.parameters["vllm_arg"] = (name,)
            (line,) = refusals(check_truncation, config)
            assert line.startswith(f"--vllm-arg {name.split('=')[0]} with --use-tis: "), (name, cut)
            config.loss.use_tis = False
            check_truncation(config)


def test_the_dry_run_refuses_truncation_as_a_run_does():
    with pytest.raises(ConfigError, match=r"--rollout-top-p with --use-tis: "):
        check_run(config_of("--rollout-top-p 0.8 --use-tis --dry-run"))


def test_recorded_samples_without_their_mask_are_not_trained_on():
    config = config_of("--rollout-top-p-cycle 1 0.8 --use-tis --load-debug-rollout-data", str(Path.cwd()))
    plain = sequence([1], [2, 3], advantage=1.0, weight=1.0, group=0)
    uncut, cut = (replace(plain, index=index) for index in (0, 1))
    masked = replace(cut, sampling_mask=unrestricted(2))
    correction = replace(cut, kind="correction")  # with --rollout-top-p, which is 1
    elsewhere = replace(cut, off_policy=True)
    check_truncation(config)  # nothing is sampled
    check_recorded(config, [uncut, masked, correction, elsewhere])
    with pytest.raises(
        ValueError, match=r"^--rollout-top-p-cycle with --use-tis: .* 2 sequences have no record"
    ):
        check_recorded(config, [cut, uncut, cut])
    config.loss.use_tis = False
    check_recorded(config, [cut])
