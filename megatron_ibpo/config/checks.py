"""What cannot work, as far as that shows without a model, data or another room's registry."""

import importlib.util
import os
from collections.abc import Callable, Iterable

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.all_fields import ENTRIES, flag
from megatron_ibpo.config.config_error import ConfigError, nearest
from megatron_ibpo.config.eval_sampling import EVAL_PRESETS
from megatron_ibpo.config.fields import Config, LossConfig, ModelConfig
from megatron_ibpo.config.hooks import is_import_path
from megatron_ibpo.config.parameters import out_of_range
from megatron_ibpo.config.paths import searched
from megatron_ibpo.config.presets import PRESETS, unknown_preset
from megatron_ibpo.config.ranges import named_values


def check_config(
    config: Config, rooms: Iterable[Callable[[Config], object]] = (), *, trains: bool = True
) -> None:
    """Refuse what cannot work.

    Args:
        rooms: checks of those who know more, such as which loss variants there are; each raises ValueError
            with a line for every problem.
        trains: otherwise the policy is evaluated and no more.

    Raises:
        ConfigError: with all problems at once, each naming its flag.
    """
    problems = [*_out_of_range(config), *_missing_inputs(config, trains), *_contradictions(config)]
    if config.algorithm.advantage_estimator not in PRESETS:
        problems.append(unknown_preset(config.algorithm.advantage_estimator))
    for check in rooms:
        try:
            check(config)
        except ValueError as error:
            problems += str(error).splitlines()
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{count} in the configuration:", *problems]))


def _out_of_range(config: Config) -> list[str]:
    """Each field by itself."""
    problems = []
    for entry in ENTRIES.values():
        value = entry.get(config)
        if problem := out_of_range(entry, value):
            problems.append(problem)
    return problems


def _missing_inputs(config: Config, trains: bool) -> list[str]:
    """What has to be named or to exist; a dry run needs the model only."""
    run, data = config.run, config.data
    problems = []
    if config.model.hf_checkpoint is None:
        problems.append("--hf-checkpoint: required, a directory in Hugging Face format")
    for name in ("hf_checkpoint", "ref_load", "load", "load_debug_rollout_data"):
        path = ENTRIES[name].get(config)
        if path is not None and not os.path.isdir(path):  # pathlib's raises where a name is too long
            problems.append(f"{flag(name)}: {path} is not a directory{searched(path)}")
    if run.use_wandb and importlib.util.find_spec("wandb") is None:
        problems.append("--use-wandb: the package wandb is not installed; pip install wandb")
    if run.dry_run or run.load_debug_rollout_data is not None:
        return problems
    if trains and not data.prompt_data:
        problems.append(
            "--prompt-data: required, a file or directory, a generated task such as "
            "reasoning_gym://chain_sum, or import://package.module:function"
        )
    if run.eval_num_prompts > 0 and not data.eval_prompt_data:
        problems.append(
            "--eval-prompt-data: required for evaluation"
            + ("; --eval-num-prompts 0 turns evaluation off" if trains else "")
        )
    if not trains and config.rollout.rollout_backend == "lean":
        problems.append("--rollout-backend lean: is for runs that train; evaluate with vllm")
    if not trains and run.eval_num_prompts == 0:
        problems.append("--eval-num-prompts: must be at least 1 for an evaluation, is 0")
    return problems


def _contradictions(config: Config) -> list[str]:
    """Fields that are fine alone and not together."""
    rollout, loss, run = config.rollout, config.loss, config.run
    problems = []
    if loss.num_steps_per_rollout >= 1 and rollout.rollout_batch_size % loss.num_steps_per_rollout:
        problems.append(
            f"--num-steps-per-rollout: {loss.num_steps_per_rollout} mini-batches of whole prompts cannot be "
            f"made equally from --rollout-batch-size {rollout.rollout_batch_size}"
        )
    advantages = config.algorithm.advantages
    if rollout.n_samples_per_prompt == 1 and advantages != "critic" and not is_import_path(advantages):
        problems.append(
            "--n-samples-per-prompt: 1 leaves nothing to compare; at least 2, or --advantages critic"
        )
    problems += _eval_problems(config)
    context = rollout.rollout_max_context_len
    if context is not None and context <= rollout.rollout_max_response_len:
        problems.append(
            f"--rollout-max-context-len: {context} leaves no room for a prompt next to "
            f"--rollout-max-response-len {rollout.rollout_max_response_len}"
        )
    if rollout.rollout_num_gpus is not None and rollout.colocate:
        problems.append(
            "--rollout-num-gpus: only engines with GPUs of their own count them; add --no-colocate"
        )
    problems += _size_problems(config)
    problems += _staleness_problems(config)
    problems += _lean_problems(config)
    problems += _data_problems(config)
    if config.model.ref_load is not None and loss.kl_coef == 0:
        problems.append("--ref-load: --kl-coef 0 uses no reference policy; set one or drop the other")
    problems += _contradictory_corrections(loss)
    problems += _optimizer_problems(config)
    problems += _lora_problems(config)
    schedule = config.optimizer
    if run.budget is not None and (schedule.lr_decay_style != "constant" or schedule.lr_warmup_fraction > 0):
        problems.append(
            "--budget: how many steps it allows is not known beforehand, so the learning rate can follow no "
            "schedule; use --lr-decay-style constant --lr-warmup-fraction 0"
        )
    if run.debug_rollout_only and run.load_debug_rollout_data is not None:
        problems.append("--debug-rollout-only: cannot be combined with --load-debug-rollout-data")
    return problems


MOST_SEQUENCES = 4_000_000
"""Responses of a step, or corrections: each is a record in the driver's memory."""


def _size_problems(config: Config) -> list[str]:
    """Sizes that are fine alone and too large together."""
    rollout = config.rollout
    groups = max(rollout.rollout_batch_size, rollout.over_sampling_batch_size or 0)
    responses = groups * rollout.n_samples_per_prompt
    corrections = config.algorithm.parameters.get("ibpo_corrections", 0)
    if responses * max(1, corrections) <= MOST_SEQUENCES:
        return []
    return [
        f"--n-samples-per-prompt: {groups} prompts of {rollout.n_samples_per_prompt} responses, each with up "
        f"to {corrections} corrections, are more than the {MOST_SEQUENCES} sequences "
        "that a step may have"
    ]


def _optimizer_problems(config: Config) -> list[str]:
    """What Megatron's optimizers need along with them."""
    chosen, problems = config.optimizer, []
    if chosen.use_precision_aware_optimizer and not config.parallel.use_distributed_optimizer:
        problems.append("--use-precision-aware-optimizer: needs --use-distributed-optimizer")
    if chosen.use_precision_aware_optimizer and config.model.bf16 is False:
        problems.append("--use-precision-aware-optimizer: is about weights in bfloat16; add --bf16 True")
    if chosen.optimizer_cpu_offload and not chosen.use_precision_aware_optimizer:
        problems.append("--optimizer-cpu-offload: needs --use-precision-aware-optimizer, as in Megatron-LM")
    parallel = config.parallel
    if parallel.overlap_param_gather and not (
        parallel.use_distributed_optimizer and parallel.overlap_grad_reduce
    ):
        problems.append(
            "--overlap-param-gather: needs --use-distributed-optimizer, which leaves weights to gather, and "
            "--overlap-grad-reduce, which divides them into buckets"
        )
    if chosen.overlap_cpu_optimizer_d2h_h2d and not chosen.optimizer_cpu_offload:
        problems.append("--overlap-cpu-optimizer-d2h-h2d: has no meaning without --optimizer-cpu-offload")
    return problems


def _lora_problems(config: Config) -> list[str]:
    """What adapters cannot be had with, and what has no meaning without them."""
    model, problems = config.model, []
    if model.lora_rank is None:
        if model.lora_alpha is not None:
            problems.append("--lora-alpha: has no meaning without --lora-rank")
        if model.lora_targets != ModelConfig().lora_targets:
            problems.append("--lora-targets: has no meaning without --lora-rank")
        return problems
    if config.algorithm.advantages == "critic":
        problems.append(
            "--lora-rank: a critic is trained with all its weights, and adapters are not built for it; take "
            "another --advantages, or drop --lora-rank"
        )
    if model.mtp_num_layers:
        problems.append(
            "--mtp-num-layers: is trained with all its weights, and --lora-rank trains adapters alone; drop "
            "one of them"
        )
    if model.moe_aux_loss_coeff > 0:
        problems.append(
            "--moe-aux-loss-coeff: balances routers, which --lora-rank leaves as they are; drop one of them"
        )
    given = named_values(model.model_override)
    problems += [
        f"--model-override {name}: computes around the layers beside which --lora-rank puts adapters; drop "
        "one of them"
        for name in ("use_transformer_engine_op_fuser", "moe_shared_expert_overlap")
        if given.get(name, "false").lower() not in ("false", "none")
    ]
    return problems


def _eval_problems(config: Config) -> list[str]:
    preset = config.run.eval_preset
    if preset is None or preset in EVAL_PRESETS:
        return []
    known = ", ".join(EVAL_PRESETS)
    return [f"--eval-preset: no preset {shown(preset)}; there are {known}{nearest(preset, EVAL_PRESETS)}"]


def _data_problems(config: Config) -> list[str]:
    data, algorithm = config.data, config.algorithm
    problems: list[str] = []
    if not data.apply_chat_template:
        problems += [
            f"{flag(name)}: only a chat template uses it; add --apply-chat-template"
            for name in ("system_prompt", "apply_chat_template_kwargs")
            if ENTRIES[name].get(config) is not None
        ]
    if (data.filter_pass_rate is None) != (data.pass_rates is None):
        problems.append("--filter-pass-rate and --pass-rates need each other: bounds, and what was measured")
    if data.pass_rates is not None and not os.path.isfile(data.pass_rates):
        problems.append(
            f"--pass-rates: {data.pass_rates} is not a file{searched(data.pass_rates)}; `ibpo pass-rates` "
            "makes it"
        )
    if config.run.num_epoch is not None and (
        algorithm.dynamic_sampling or algorithm.group_filter is not None
    ):
        problems.append(
            "--num-epoch: --dynamic-sampling and --group-filter pass prompts over, so how many steps an "
            "epoch takes is not known; use --num-rollout"
        )
    return problems


def _staleness_problems(config: Config) -> list[str]:
    rollout, problems = config.rollout, []
    over, size, ahead = rollout.over_sampling_batch_size, rollout.rollout_batch_size, rollout.runs_ahead
    if over is not None and over < size:
        problems.append(f"--over-sampling-batch-size: {over} groups do not fill --rollout-batch-size {size}")
    if rollout.keep_order and not ahead:
        problems.append("--keep-order: has no meaning unless --max-staleness lets sampling run ahead")
    if ahead and rollout.check_weight_update_equal:
        problems.append(
            "--check-weight-update-equal: asks engines that rest, and with --max-staleness or "
            "--over-sampling-batch-size they go on through an update; check once without these"
        )
    if ahead and config.run.load_debug_rollout_data is not None:
        problems.append("--load-debug-rollout-data: recorded rollouts cannot run ahead; drop --max-staleness")
    return problems


def _lean_problems(config: Config) -> list[str]:
    """What a run in one process cannot do."""
    if config.rollout.rollout_backend != "lean":
        return []
    rules = {
        "--max-staleness: one process does one thing after another, and sampling cannot run ahead": (
            config.rollout.max_staleness > 0
        ),
        "--num-trainers: one process trains": (config.cluster.num_trainers or 1) > 1,
        "--ray-address: it uses no Ray": config.cluster.ray_address is not None,
        "--vllm-arg: it uses no vLLM": bool(config.rollout.vllm_arg),
        "--use-rollout-routing-replay: it samples dense models alone": (
            config.rollout.use_rollout_routing_replay
        ),
        "--load-debug-rollout-data: a replay samples nothing": (
            config.run.load_debug_rollout_data is not None
        ),
    }
    return [f"--rollout-backend lean with {problem}" for problem, broken in rules.items() if broken]


def _contradictory_corrections(loss: LossConfig) -> list[str]:
    """Importance corrections that cannot act together, or not at all."""
    problems = []
    if loss.use_tis and loss.icepop is not None:
        problems.append("--use-tis and --icepop both weight tokens by the same ratio: take one of them")
    if loss.corrections and loss.old_logprobs == "engine":
        problems.append(
            f"--old-logprobs engine: {' and '.join(loss.corrections)} would correct what recomputed "
            "log-probs and the engine's differ by, and nothing is recomputed; drop one or the other"
        )
    if loss.use_routing_replay and loss.old_logprobs == "engine":
        problems.append(
            "--use-routing-replay: replays the trainer's pass for old log-probs, and --old-logprobs engine "
            "has none; use --use-rollout-routing-replay"
        )
    return problems
