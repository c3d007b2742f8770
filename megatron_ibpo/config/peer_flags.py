"""Flags of TRL and keys of verl: what each is called here, and where its meaning differs.

They are answered and not accepted, because batch sizes, steps and clips are counted in other units there.
"""


def _renamed(pairs: str) -> dict[str, str]:
    """Return names that mean the same here, from "theirs=ours …"."""
    return {theirs: f"--{ours}" for theirs, ours in (pair.split("=") for pair in pairs.split())}


_LOCAL = "; names of the Hugging Face hub are not downloaded"
_CLIP = "--eps-clip; --loss-variant gspo clips a sequence's ratio, at 3e-4 or so: for 0.2 take grpo or dapo"
_CLIP_HIGH = _CLIP.replace("--eps-clip", "--eps-clip-high")
_ONCE = "none: each response is trained on once; --num-steps-per-rollout splits a rollout"
_LONG = "--rollout-max-context-len, for prompt and response; --drop-long-prompts drops those that do not fit"
_NODES = "the variable {} of examples/run.sh; --num-trainers counts the trainers' GPUs over all nodes"
_PARALLEL = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
_NO_KL_REWARD = "none: the KL divergence is a term of the loss (--kl-coef), never of the reward"

TRL = _renamed("""
    output-dir=run-dir learning-rate=lr lr-scheduler-type=lr-decay-style warmup-ratio=lr-warmup-fraction
    max-grad-norm=clip-grad adam-epsilon=adam-eps save-steps=save-interval save-total-limit=keep-checkpoints
    eval-steps=eval-interval num-generations=n-samples-per-prompt temperature=rollout-temperature
    num-generations-eval=n-samples-per-eval-prompt max-completion-length=rollout-max-response-len
    vllm-tensor-parallel-size=rollout-num-gpus-per-engine vllm-max-model-length=rollout-max-context-len
    lora-r=lora-rank lora-target-modules=lora-targets report-to=use-wandb resume-from-checkpoint=load
    use-peft=lora-rank top-p=rollout-top-p
""") | {
    "model-name-or-path": f"--hf-checkpoint, a directory{_LOCAL}",
    "dataset-name": f"--prompt-data, a file or directory{_LOCAL}",
    "reward-funcs": "--rm-type, a verifier such as math, or your own as path/to/file.py:function",
    "num-train-epochs": "--num-epoch, a whole number; without it --num-rollout gives the number of steps",
    "max-steps": "--num-rollout, which counts rollouts of --num-steps-per-rollout optimizer steps each",
    "gradient-checkpointing": "--recompute-granularity full", "logging-steps": "nothing: all are logged",
    "per-device-train-batch-size": "--rollout-batch-size, prompts over all devices, not responses per device",
    "gradient-accumulation-steps": "nothing: micro-batches follow from --max-tokens-per-gpu",
    "steps-per-generation": "--num-steps-per-rollout, in optimizer steps rather than micro-batches",
    "num-iterations": _ONCE, "max-prompt-length": _LONG,
    "top-k": "--rollout-top-k, where -1 is off instead of 0",
    "use-vllm": "nothing: vLLM samples (--rollout-backend)",
    "vllm-mode": "--colocate, or --no-colocate with --rollout-num-gpus; the run starts vLLM itself",
    "beta": "--kl-coef, the weight of the KL divergence in the loss",
    "epsilon": _CLIP, "epsilon-high": _CLIP_HIGH,
    "loss-type": "--loss-variant: grpo, dapo, dr-grpo, cispo or sapo; --loss-aggregation for the mean alone",
    "importance-sampling-level": "--loss-variant, grpo for token and gspo for sequence",
    "scale-rewards": "--advantages: group-bessel is group, group-mean is none, maxrl is mean",
    "mask-truncated-completions": "none; --overlong-buffer-share lowers the reward of long responses",
}  # fmt: skip
"""Flag, without dashes → what it is here."""

_SECTIONS = {
    "data": _renamed("""
        train_files=prompt-data val_files=eval-prompt-data prompt_key=input-key
        max_response_length=rollout-max-response-len filter_overlong_prompts=drop-long-prompts
    """) | {"train_batch_size": "--rollout-batch-size, in prompts as there", "max_prompt_length": _LONG},
    "actor_rollout_ref.model": {
        **_renamed("lora_rank=lora-rank lora_alpha=lora-alpha target_modules=lora-targets"),
        "path": TRL["model-name-or-path"], "enable_gradient_checkpointing": TRL["gradient-checkpointing"],
    },
    "actor_rollout_ref.actor": _renamed("""
        optim.lr=lr optim.lr_warmup_steps_ratio=lr-warmup-fraction optim.min_lr_ratio=min-lr-ratio
        optim.weight_decay=weight-decay grad_clip=clip-grad ppo_max_token_len_per_gpu=max-tokens-per-gpu
        kl_loss_coef=kl-coef policy_loss.loss_mode=loss-variant
    """) | {
        **{f"megatron.{of}_parallel_size": f"--{of}-parallel-size".replace("_", "-") for of in _PARALLEL},
        "ppo_mini_batch_size": "--num-steps-per-rollout, which is train_batch_size / ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu": "--max-tokens-per-gpu, in tokens, since sequences are packed",
        "use_dynamic_bsz": "nothing: sequences are always packed, up to --max-tokens-per-gpu",
        "clip_ratio": _CLIP, "clip_ratio_low": _CLIP, "clip_ratio_high": _CLIP_HIGH,
        "ppo_epochs": _ONCE, "entropy_coeff": "none: the loss has no entropy bonus",
        "use_kl_loss": "--kl-coef above 0", "kl_loss_type": "--kl-estimator; low_var_kl is k3",
        "loss_agg_mode": "--loss-aggregation; seq-mean-token-mean is sequence-mean",
    },
    "actor_rollout_ref.rollout": _renamed("""
        name=rollout-backend n=n-samples-per-prompt temperature=rollout-temperature top_p=rollout-top-p
        top_k=rollout-top-k tensor_model_parallel_size=rollout-num-gpus-per-engine
        gpu_memory_utilization=vllm-gpu-memory-utilization max_num_seqs=vllm-max-num-seqs
        enforce_eager=vllm-enforce-eager val_kwargs.top_p=eval-top-p val_kwargs.top_k=eval-top-k
    """) | {
        "max_num_batched_tokens": "--vllm-arg max_num_batched_tokens=VALUE",
        "val_kwargs.n": "--n-samples-per-eval-prompt, in addition to greedy decoding",
        "val_kwargs.temperature": "--eval-temperature, above 0; greedy decoding is evaluated as well",
    },
    "critic": {"optim.lr": "--critic-lr, with --advantages critic"},
    "algorithm": {
        "gamma": "--gae-gamma, with --advantages critic", "lam": "--gae-lambda, with --advantages critic",
        "filter_groups.enable": "--dynamic-sampling",
        "adv_estimator": "--advantage-estimator, a preset such as grpo; --advantages for the estimator alone",
        "norm_adv_by_std_in_grpo": "--advantages, group-bessel for true and group-mean for false",
        "use_kl_in_reward": _NO_KL_REWARD, "kl_ctrl.kl_coef": _NO_KL_REWARD,
    },
    "custom_reward_function": dict.fromkeys(("path", "name"), "--rm-type path/to/file.py:function"),
    "trainer": _renamed("""
        total_training_steps=num-rollout save_freq=save-interval test_freq=eval-interval
        default_local_dir=run-dir resume_from_path=load logger=use-wandb
    """) | {
        "total_epochs": TRL["num-train-epochs"],
        "nnodes": _NODES.format("NNODES"), "n_gpus_per_node": _NODES.format("GPUS_PER_NODE"),
    },
}  # fmt: skip
VERL = {f"{section}.{key}": text for section, keys in _SECTIONS.items() for key, text in keys.items()}
"""Key → what it is here."""
_FLAGS = {leaf.replace("_", "-"): key for key in VERL if "_" in (leaf := key.rpartition(".")[2])}
"""Last part of a key, as a flag → the key."""


def peer_answer(word: str) -> str | None:
    """Return what a flag of TRL or a key of verl is called here; None for any other word."""
    typed, is_pair, _ = word.lstrip("+").partition("=")
    name = typed.removeprefix("--").replace("_", "-")
    if typed.startswith("--") and name in TRL:
        return f"{typed}: a flag of TRL; here {TRL[name]}"
    key = _FLAGS.get(name, typed[2:]) if typed.startswith("--") else typed if is_pair else ""
    origin = "a key of verl" if typed == key else f"verl's {key}"
    return f"{typed}: {origin}; here {VERL[key]}" if key in VERL else None
