"""Supervised training: its loss is transformers' cross-entropy, and a run that resumes equals a whole one."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout

import pytest
import torch

from megatron_ibpo.commands import sft
from megatron_ibpo.config import ConfigError
from megatron_ibpo.data import DataError, load_tokenizer, open_sources
from megatron_ibpo.data.demonstrations import DemonstrationReader
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.run.supervised import open_supervised, sequences_of, supervised
from support.paths import ROOT

MODEL = ROOT / "examples/tiny_qwen3"


@pytest.fixture
def rows(tmp_path):
    sums = [(f"{a}+{b}", a + b) for a in range(1, 10) for b in range(1, 10)]
    lines = [json.dumps({"prompt": f"{asked}\n", "response": f"{asked}={c}#{c}"}) for asked, c in sums]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    return path


def flags_for(rows, *more):
    return ("--hf-checkpoint", str(MODEL), "--prompt-data", str(rows), "--label-key", "response", *more)


def cross_entropy(rows, count):
    """Return transformers' mean loss of the first batch's tokens."""
    from transformers import AutoModelForCausalLM

    data, tokenizer, losses = parse_config(flags_for(rows)).data, load_tokenizer(MODEL), []
    source = open_sources(data.prompt_data, tokenizer, data, split="train", reader_type=DemonstrationReader)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for one in sequences_of(source.batch(0, count)):
        prompt = len(one.prompt_token_ids)
        ids = torch.tensor([*one.prompt_token_ids, *one.response_token_ids]).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0, prompt - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[prompt:], reduction="none"))
    return torch.cat(losses).mean().item()


def test_unused_sampling_settings_are_named_and_rl_only_ones_refused(rows):
    flags = flags_for(rows, "--kl-coef", "0.1", "--advantage-estimator", "ppo")
    config, idle = supervised(parse_config(flags))
    assert (config.loss.loss_variant, config.loss.kl_coef) == ("nll", 0)
    assert {"--kl-coef", "--advantage-estimator"} <= {*idle}
    said: list[str] = []
    plain = parse_config(flags_for(rows), note=said.append, unused=sft.UNUSED)
    assert (supervised(plain)[1], said) == ([], [])
    parse_config(flags_for(rows, "--rollout_max_response_len=7"), note=said.append, unused=sft.UNUSED)
    assert said == [*sft.UNUSED.values()]
    with pytest.raises(ConfigError, match=r"^--dry-run, --deduplicate: only `ibpo train` has it"):
        supervised(parse_config(flags_for(rows, "--dry-run", "--deduplicate")))


def test_prompts_without_responses_are_refused_before_a_trainer_starts(tmp_path):
    flags = ("--run-dir", str(tmp_path / "run"), "--rollout-backend", "lean")
    config = parse_config(flags_for("reasoning_gym://chain_sum", *flags))
    with pytest.raises(DataError, match="chain_sum has prompts without responses"), open_supervised(config):
        pass
    assert not (tmp_path / "run").exists()


def train(rows, run_dir, *more):
    flags = flags_for(rows, "--eval-prompt-data", str(rows), "--lr", "1e-3", "--run-dir", str(run_dir))
    command = [sys.executable, "-m", "megatron_ibpo.commands.sft", *flags, *more]
    subprocess.run(command, check=True, timeout=450, cwd=ROOT)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.forked
def test_supervised_training_in_one_process_learns_and_exports(rows, tmp_path):
    flags = "--rollout-backend lean --num-rollout 4 --rollout-batch-size 8 --export-interval 2"
    flags += f" --eval-num-prompts 8 --eval-prompt-data {rows} --lr 1e-3 --run-dir {tmp_path}/run"
    with redirect_stdout(io.StringIO()) as printed:
        assert sft.main(flags_for(rows, *flags.split())) == 0
    found = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in found if row["kind"] == "step"}
    assert list(steps) == [1, 2, 3, 4]
    assert steps[1]["loss"] == pytest.approx(cross_entropy(rows, 8), rel=1e-5)
    assert steps[4]["loss"] < steps[1]["loss"]
    assert steps[4]["epoch"] == 4 * 8 / 81
    assert steps[1]["tokens"] > steps[1]["loss_tokens"] > 0
    assert {"clip_fraction", "ratio_mean", "tokens_trained"}.isdisjoint(steps[1])
    exported = {path.parent.name for path in tmp_path.glob("run/*/model.safetensors")}
    assert exported == {"hf_step_000002", "hf_step_000004", "hf"}
    lines = [[cell.strip() for cell in line.split("│")] for line in printed.getvalue().splitlines()]
    table = {first: rest for first, *rest in lines}
    assert table["training loss per token"] == [f"{steps[step]['loss']:.4f}" for step in (1, 4)]
    assert float(table["held-out loss per token"][1]) < float(table["held-out loss per token"][0])
    assert table["tokens in the loss"][-1] == f"{sum(row['loss_tokens'] for row in steps.values()):,}"
    assert {"training reward", "accuracy, sampled"}.isdisjoint(table)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1000)
def test_supervised_training_on_two_ranks_resumes_bit_for_bit(rows, tmp_path):
    flags = "--num-trainers 2 --tensor-model-parallel-size 2 --num-rollout 6 --save-interval 3"
    flags = [*flags.split(), "--eval-num-prompts", "16"]
    whole = train(rows, tmp_path / "whole", *flags)
    checkpoint = tmp_path / "whole/checkpoints/step_000003"
    resumed = train(rows, tmp_path / "resumed", *flags, "--load", str(checkpoint))
    losses = [row["loss"] for row in whole if row["kind"] == "step"]
    assert losses[0] == pytest.approx(cross_entropy(rows, 32), rel=1e-5)
    assert losses[-1] < 0.2 * losses[0]
    held_out = [row["held_out_loss"] for row in whole if row["kind"] == "evaluation"]
    assert held_out[-1] < 0.2 * held_out[0]
    assert [row["loss"] for row in resumed if row["kind"] == "step"] == losses[3:]
    first, again = (tmp_path / name / "hf/model.safetensors" for name in ("whole", "resumed"))
    assert again.read_bytes() == first.read_bytes()
