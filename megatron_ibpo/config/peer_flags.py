"""Flags and keys of TRL, slime, OpenRLHF, verl and NeMo-RL: their names here, and where a meaning differs.

They are answered and not accepted, because batch sizes, steps and clips are counted in other units there.
"""


def _renamed(pairs: str) -> dict[str, str]:
    """Return names that mean the same here, from "theirs=ours …"."""
    return {theirs: f"--{ours}" for theirs, ours in (pair.split("=") for pair in pairs.split())}


_MODEL = "--hf-checkpoint, a directory or owner/name on the Hugging Face Hub"
_DATA = "--prompt-data, a file, a directory or owner/name on the Hugging Face Hub"
_CLIP = "--eps-clip; --loss-variant gspo clips a sequence's ratio, at 3e-4 or so: for 0.2 take grpo or dapo"
_CLIP_HIGH = _CLIP.replace("--eps-clip", "--eps-clip-high")
_LONG = "--rollout-max-context-len, for prompt and response; --drop-long-prompts drops those that do not fit"
_NODES = "the variable {} of examples/run.sh; --num-trainers counts the trainers' GPUs over all nodes"
_PARALLEL = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
_NO_KL_REWARD = "none: the KL divergence is a term of the loss (--kl-coef), never of the reward"
_PACKED = "--max-tokens-per-gpu, in tokens, since sequences are packed"
_ALWAYS_PACKED = "nothing: sequences are always packed, up to --max-tokens-per-gpu"
_NO_ENTROPY = "none: the loss has no entropy bonus"
_REWARD = "--rm-type, a verifier such as math, or your own as path/to/file.py:function"
_GAE = "{}, with --advantages critic"
_RECOMPUTE = "--recompute-granularity full"
_SHUFFLED = "nothing: prompts are always shuffled, by --data-seed"
_EPISODES = "--environment module:Class for several turns; docs/extending.md lists what else can be yours"
_TRACKED = "none: --use-wandb logs to the project megatron_ibpo, under the name of --run-dir"
_STD = "--advantages, group-bessel to divide by the standard deviation and group-mean not to"

TRL = _renamed("""
    output-dir=run-dir learning-rate=lr lr-scheduler-type=lr-decay-style warmup-ratio=lr-warmup-fraction
    max-grad-norm=clip-grad adam-epsilon=adam-eps save-steps=save-interval save-total-limit=keep-checkpoints
    eval-steps=eval-interval num-generations=n-samples-per-prompt temperature=rollout-temperature
    num-generations-eval=n-samples-per-eval-prompt max-completion-length=rollout-max-response-len
    vllm-tensor-parallel-size=rollout-num-gpus-per-engine vllm-max-model-length=rollout-max-context-len
    lora-r=lora-rank lora-target-modules=lora-targets report-to=use-wandb resume-from-checkpoint=load
    use-peft=lora-rank top-p=rollout-top-p hub-model-id=push-to-hub
    num-iterations=num-epochs-per-rollout num-ppo-epochs=num-epochs-per-rollout
""") | {
    "model-name-or-path": _MODEL,
    "dataset-name": _DATA,
    "reward-funcs": _REWARD,
    "num-train-epochs": "--num-epoch, a whole number; without it --num-rollout gives the number of steps",
    "max-steps": "--num-rollout, which counts rollouts, each of --num-steps-per-rollout optimizer steps",
    "gradient-checkpointing": _RECOMPUTE, "logging-steps": "nothing: all are logged",
    "per-device-train-batch-size": "--rollout-batch-size, prompts over all devices, not responses per device",
    "gradient-accumulation-steps": "nothing: micro-batches follow from --max-tokens-per-gpu",
    "steps-per-generation": "--num-steps-per-rollout, in optimizer steps rather than micro-batches",
    "max-prompt-length": _LONG,
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

_SHAPE = """
    num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels vocab-size
    rotary-base norm-epsilon normalization swiglu qk-layernorm group-query-attention rotary-percent
    untie-embeddings-and-output-weights use-rotary-position-embeddings disable-bias-linear num-experts
"""
SLIME = _renamed("train-iters=num-rollout seq-length=rollout-max-context-len offload=offload-train") | {
    "actor-num-nodes": _NODES.format("NNODES"), "actor-num-gpus-per-node": _NODES.format("GPUS_PER_NODE"),
    "num-gpus-per-node": _NODES.format("GPUS_PER_NODE"),
    "global-batch-size": "--num-steps-per-rollout, which is the responses of a rollout / global-batch-size",
    "micro-batch-size": _PACKED, "use-dynamic-batch-size": _ALWAYS_PACKED,
    "balance-data": "nothing: sequences are always balanced over the data-parallel ranks",
    "rollout-shuffle": _SHUFFLED, "rollout-seed": "--seed, and --data-seed for the order of prompts",
    "rollout-max-prompt-len": _LONG, "entropy-coef": _NO_ENTROPY,
    "rollout-stop": "none: a response ends with an end-of-sequence token of the checkpoint",
    "gamma": _GAE.format("--gae-gamma"), "lambd": _GAE.format("--gae-lambda"),
    "use-rollout-logprobs": "--old-logprobs engine", "disable-grpo-std-normalization": _STD,
    "dynamic-sampling-filter-path": "--dynamic-sampling, or your own --group-filter module:function",
    "partial-rollout": "--max-staleness above 0: responses continue while the weights change",
    "rollout-function-path": _EPISODES, "custom-generate-function-path": _EPISODES,
    "custom-rm-path": _REWARD, "custom-loss-function-path": "--loss-variant module:NAME",
    "custom-advantage-function-path": "--advantages module:function",
    "eval-config": "--eval-prompt-data NAME=SPEC …, one for each set",
    "debug-train-only": "--load-debug-rollout-data", "save-hf": "--export-interval; a run exports at its end",
    "sglang-mem-fraction-static": "--vllm-gpu-memory-utilization, since vLLM samples",
    "sglang-server-concurrency": "--vllm-max-num-seqs, since vLLM samples",
    "offload-rollout": "nothing: engines that share the trainers' GPUs (--colocate) sleep while those train",
    "optimizer": "nothing: AdamW is the only one", "min-lr": "--min-lr-ratio, a share of --lr",
    "lr-warmup-iters": "--lr-warmup-fraction, a share of all optimizer steps",
    "attention-backend": "--model-override attention_backend=VALUE",
    "moe-token-dispatcher-type": "--model-override moe_token_dispatcher_type=VALUE",
    "accumulate-allreduce-grads-in-fp32": "nothing: gradients are summed in float32",
    "use-tensorboard": "nothing: TensorBoard's files are always written",
    **dict.fromkeys(("wandb-project", "wandb-group", "wandb-key", "wandb-team", "wandb-run-name"), _TRACKED),
    **dict.fromkeys(_SHAPE.split(), "nothing: config.json of --hf-checkpoint says it"),
}  # fmt: skip

OPENRLHF = _renamed("""
    save-path=run-dir ckpt-path=run-dir load-checkpoint=load max-ckpt-num=keep-checkpoints
    num-episodes=num-epoch generate-max-len=rollout-max-response-len max-len=rollout-max-context-len
    max-norm=clip-grad l2=weight-decay actor-learning-rate=lr lr-warmup-ratio=lr-warmup-fraction
    lr-scheduler=lr-decay-style policy-loss-type=loss-variant aux-loss-coef=moe-aux-loss-coeff
    ring-attn-size=context-parallel-size ds-tensor-parallel-size=tensor-model-parallel-size
    train-max-tokens-per-gpu=max-tokens-per-gpu rollout-max-tokens-per-gpu=log-probs-max-tokens-per-gpu
    colocate-all-models=colocate async-queue-size=max-staleness enable-vllm-is-correction=use-tis
    vllm-is-truncated-threshold=tis-clip dynamic-filtering=dynamic-sampling eval-dataset=eval-prompt-data
    eval-n-samples-per-prompt=n-samples-per-eval-prompt adam-offload=optimizer-cpu-offload
    max-epochs=num-epochs-per-rollout
""") | {
    "pretrain": _MODEL, "prompt-max-len": _LONG, "entropy-loss-coef": _NO_ENTROPY,
    "reward-pretrain": "--rm-type http_score with --rm-url: a reward model runs on a server of its own",
    "remote-rm-url": "--rm-url, with --rm-type http_score or http_judge",
    "critic-pretrain": "--advantages critic; no critic of your own can be named",
    "critic-learning-rate": _GAE.format("--critic-lr"), "agent-func-path": _EPISODES,
    "micro-train-batch-size": _PACKED, "micro-rollout-batch-size": _PACKED, "packing-samples": _ALWAYS_PACKED,
    "use-dynamic-batch": _ALWAYS_PACKED, "no-advantage-std-norm": _STD, "async-train": "--max-staleness 1",
    "init-kl-coef": "--kl-coef, which is always a term of the loss",
    "eps-clip-low-high": "--eps-clip LOW and --eps-clip-high HIGH",
    "dual-clip": "--loss-variant dual-clip",
    "zero-stage": "--use-distributed-optimizer, which shards the optimizer's state as stage 1 does",
    "vllm-num-engines": "--rollout-num-gpus with --no-colocate, over --rollout-num-gpus-per-engine",
    "save-hf-ckpt": "--export-interval; a run exports at its end", "target-modules": "--lora-targets",
    "overlong-buffer-len": "--overlong-buffer-share, a share of the longest response",
    "prompt-data-probs": "the setting weight of each source, as in --prompt-data 'a.jsonl?weight=2'",
    "attn-implementation": "--model-override attention_backend=VALUE",
    **dict.fromkeys(("ref-num-nodes", "ref-num-gpus-per-node", "colocate-actor-ref"),
                    "nothing: the reference shares the trainers' GPUs"),
    **dict.fromkeys(("vllm-enable-sleep", "deepspeed-enable-sleep"), "nothing: --colocate implies it"),
}  # fmt: skip
FLAGS = {"TRL": TRL, "slime": SLIME, "OpenRLHF": OPENRLHF}
"""Project → flag, without dashes → what it is here."""

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
        kl_loss_coef=kl-coef policy_loss.loss_mode=loss-variant ppo_epochs=num-epochs-per-rollout
    """) | {
        **{f"megatron.{of}_parallel_size": f"--{of}-parallel-size".replace("_", "-") for of in _PARALLEL},
        "ppo_mini_batch_size": "--num-steps-per-rollout, which is train_batch_size / ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu": _PACKED,
        "use_dynamic_bsz": _ALWAYS_PACKED,
        "clip_ratio": _CLIP, "clip_ratio_low": _CLIP, "clip_ratio_high": _CLIP_HIGH,
        "entropy_coeff": _NO_ENTROPY,
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
    "critic": {"optim.lr": _GAE.format("--critic-lr")},
    "algorithm": {
        "gamma": _GAE.format("--gae-gamma"), "lam": _GAE.format("--gae-lambda"),
        "filter_groups.enable": "--dynamic-sampling",
        "adv_estimator": "--advantage-estimator, a preset such as grpo; --advantages for the estimator alone",
        "norm_adv_by_std_in_grpo": _STD,
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
_NEMO_RL_SECTIONS = {
    "grpo": _renamed("""
        num_prompts_per_step=rollout-batch-size num_generations_per_prompt=n-samples-per-prompt seed=seed
        max_num_steps=num-rollout max_num_epochs=num-epoch val_period=eval-interval
        max_rollout_turns=max-turns max_val_samples=eval-num-prompts use_dynamic_sampling=dynamic-sampling
        async_grpo.max_trajectory_age_steps=max-staleness
    """) | {
        "async_grpo.enabled": "--max-staleness above 0", "normalize_rewards": _STD,
        "use_leave_one_out_baseline": "--advantages leave-one-out",
        "val_at_start": "nothing: a run evaluates at its start",
        "overlong_filtering": TRL["mask-truncated-completions"],
    },
    "loss_fn": {
        "reference_policy_kl_penalty": "--kl-coef", "ratio_clip_min": _CLIP, "ratio_clip_max": _CLIP_HIGH,
        "ratio_clip_c": "--loss-variant dual-clip", "use_importance_sampling_correction": "--use-tis",
        "sequence_level_importance_ratios": "--loss-variant, gspo for true and grpo for false",
        "token_level_loss": "--loss-aggregation, token-mean for true and sequence-mean for false",
    },
    "checkpointing": _renamed("enabled=save checkpoint_dir=run-dir save_period=save-interval") | {
        "keep_top_k": "--keep-checkpoints, which keeps the newest",
    },
    "policy": _renamed("""
        max_total_sequence_length=rollout-max-context-len max_grad_norm=clip-grad precision=bf16
        optimizer.kwargs.lr=lr optimizer.kwargs.weight_decay=weight-decay
        sequence_packing.train_mb_tokens=max-tokens-per-gpu
    """) | {
        "model_name": _MODEL, "tokenizer.name": "nothing: the tokenizer of --hf-checkpoint",
        "train_global_batch_size": SLIME["global-batch-size"], "train_micro_batch_size": _PACKED,
        "logprob_batch_size": "--log-probs-max-tokens-per-gpu, in tokens, since sequences are packed",
        "sequence_packing.enabled": _ALWAYS_PACKED, "dynamic_batching.enabled": _ALWAYS_PACKED,
        "dtensor_cfg.enabled": "nothing: Megatron-core trains",
    },
    "policy.megatron_cfg": _renamed("""
        optimizer.lr=lr optimizer.weight_decay=weight-decay sequence_parallel=sequence-parallel
    """) | {
        **{f"{of}_parallel_size": f"--{of}-parallel-size".replace("_", "-") for of in _PARALLEL},
        "enabled": "nothing: Megatron-core trains", "activation_checkpointing": _RECOMPUTE,
    },
    "policy.generation": _renamed("""
        backend=rollout-backend max_new_tokens=rollout-max-response-len temperature=rollout-temperature
        top_p=rollout-top-p top_k=rollout-top-k colocated.enabled=colocate
        vllm_cfg.tensor_parallel_size=rollout-num-gpus-per-engine vllm_cfg.enforce_eager=vllm-enforce-eager
        vllm_cfg.gpu_memory_utilization=vllm-gpu-memory-utilization
        vllm_cfg.max_model_len=rollout-max-context-len
    """),
    "data": _renamed("val_data_path=eval-prompt-data input_key=input-key output_key=label-key") | {
        "dataset_name": _DATA, "train_data_path": _DATA, "max_input_seq_length": _LONG, "shuffle": _SHUFFLED,
    },
    "logger": _renamed("log_dir=run-dir wandb_enabled=use-wandb") | {"wandb.project": _TRACKED},
    "cluster": {
        "num_nodes": _NODES.format("NNODES"), "gpus_per_node": _NODES.format("GPUS_PER_NODE"),
    },
}  # fmt: skip


def _keys(sections: dict[str, dict[str, str]]) -> dict[str, str]:
    return {f"{section}.{key}": text for section, keys in sections.items() for key, text in keys.items()}


VERL = _keys(_SECTIONS)
KEYS = {"verl": VERL, "NeMo-RL": _keys(_NEMO_RL_SECTIONS)}
"""Project → key → what it is here."""
_FLAGS = {leaf.replace("_", "-"): key for key in VERL if "_" in (leaf := key.rpartition(".")[2])}
"""Last part of a key, as a flag → the key."""


def peer_answer(typed: str) -> str | None:
    """Return what a setting of another trainer is called here; None for any other name.

    Args:
        typed: a flag with its dashes, a key of a recipe, or a keyword of Python.
    """
    name = typed.removeprefix("--").replace("_", "-")
    for project, flags in FLAGS.items():
        if name in flags:
            return f"{typed}: a flag of {project}; here {flags[name]}"
    return _key_answer(typed, _FLAGS.get(name, typed.removeprefix("--")))


def peer_override(word: str) -> str | None:
    """Return the answer of `peer_answer` for a word of the command line that is a Hydra override, KEY=VALUE;
    None for other words."""
    key, is_pair, _ = word.lstrip("+").partition("=")
    return _key_answer(key, key) if is_pair else None


def _key_answer(typed: str, key: str) -> str | None:
    for project, keys in KEYS.items():
        if key in keys:
            origin = f"a key of {project}" if typed.removeprefix("--") == key else f"{project}'s {key}"
            return f"{typed}: {origin}; here {keys[key]}"
    return None


_SYNONYMS = """
    model model-path model-name pretrained-model base-model hf-model checkpoint=hf-checkpoint
    data dataset train-data train-files train-dataset prompts=prompt-data
    eval-data eval-files test-data val-data validation-data eval-prompts=eval-prompt-data
    reward reward-fn reward-func reward-function reward-model verifier grader rm=rm-type
    steps num-steps total-steps iterations num-iterations-total train-steps=num-rollout
    epochs num-epochs total-epochs=num-epoch
    update-epochs mu=num-epochs-per-rollout
    batch-size train-batch-size num-prompts prompts-per-step=rollout-batch-size
    group-size num-samples num-responses samples-per-prompt n-samples rollouts-per-example n
    num-return-sequences=n-samples-per-prompt
    max-tokens max-new-tokens max-response-length response-length max-response-len=rollout-max-response-len
    max-model-len max-length context-length max-context-len max-seq-len=rollout-max-context-len
    algorithm algo method=advantage-estimator
    estimator baseline advantage advantage-fn=advantages
    loss loss-fn policy-loss=loss-variant
    clip clip-range clip-ratio cliprange clip-eps clip-low=eps-clip
    clip-high clip-ratio-high eps-high cliphigh=eps-clip-high
    kl kl-beta kl-weight kl-loss-coef kl-coeff kl-penalty=kl-coef
    tp tp-size tensor-parallel-size=tensor-model-parallel-size
    pp pp-size pipeline-parallel-size=pipeline-model-parallel-size
    ep ep-size expert-parallel-size=expert-model-parallel-size
    cp cp-size=context-parallel-size
    num-gpus gpus n-gpus world-size=num-trainers
    engine backend sampler inference-engine generation-backend=rollout-backend
    env env-id env-name environment-class=environment
    filter filter-fn group-filter-fn=group-filter
    resume resume-from load-checkpoint-path=load
    output output-path out-dir save-dir log-dir exp-name=run-dir
    random-seed=seed
    eval-freq eval-every eval-steps-interval=eval-interval
    save-every checkpoint-interval checkpoint-every=save-interval
    ref-model ref-policy reference-model=ref-load
    staleness max-lag async-level max-async-level off-policy-steps=max-staleness
    operator correction-operator=ibpo-operator
    variant=ibpo-variant
    corrections num-corrections=ibpo-corrections
    lambda bonus-weight=ibpo-lambda
"""
"""Names that other people use for our settings, in lines of "theirs theirs … =ours"."""


def _synonyms(text: str) -> dict[str, str]:
    names: dict[str, str] = {}
    pending: list[str] = []
    for word in text.split():
        theirs, ends, ours = word.partition("=")
        pending.append(theirs)
        if ends:
            names |= dict.fromkeys(pending, ours)
            pending = []
    return names


SYNONYMS = _synonyms(_SYNONYMS)
"""Another word for a setting, with dashes → the setting."""

VALUES = {
    "--loss-variant": {
        **dict.fromkeys(("ppo", "ppo-clipped", "vanilla", "clip", "pg", "policy-loss"), "ppo-clip"),
        **dict.fromkeys(("drgrpo", "dr_grpo"), "dr-grpo"),
        **dict.fromkeys(("sft", "reinforce", "cross-entropy"), "nll"),
        "dual_clip": "dual-clip", "bnpo": "ppo-clip", "ibpo": "gspo", "gspo_token": "gspo-token",
    },
    "--advantages": {
        **dict.fromkeys(("gae", "ppo", "value"), "critic"),
        **dict.fromkeys(("rloo", "loo", "leave_one_out"), "leave-one-out"),
        **dict.fromkeys(("grpo", "gspo", "z-score", "group-norm", "ibpo"), "group"),
        **dict.fromkeys(("dr-grpo", "dr_grpo", "mean", "none", "group_norm"), "group-mean"),
    },
    "--advantage-estimator": {
        **dict.fromkeys(("gae", "critic"), "ppo"),
        **dict.fromkeys(("dr_grpo", "drgrpo", "group-mean"), "dr-grpo"),
        "group": "grpo", "cispo": "grpo", "rloo": "grpo",
    },
    "--rollout-backend": {
        **dict.fromkeys(("sglang", "vllm-cpu", "tgi"), "vllm"),
        **dict.fromkeys(("hf", "huggingface", "torch"), "transformers"),
    },
    "--rm-type": {
        **dict.fromkeys(("math-verify", "math_verify", "deepscaler", "dapo", "gsm8k", "boxed"), "math"),
        **dict.fromkeys(("prime", "sandbox", "sandbox_fusion", "livecodebench", "codeforces"), "code"),
        **dict.fromkeys(("llm_judge", "judge", "llm-judge", "genrm"), "http_judge"),
        **dict.fromkeys(("remote_rm", "remote", "reward-model", "http"), "http_score"),
        "gym": "reasoning_gym", "reasoning-gym": "reasoning_gym", "sum": "composite",
    },
    "--ibpo-operator": {
        **dict.fromkeys(("ibpo", "correct", "compare", "compare_and_correct"), "compare-and-correct"),
        **dict.fromkeys(("ciw", "mask"), "span-masking"), "off": "none",
    },
    "--token-credit": {"none": "uniform", "off": "uniform", "self_distillation": "self-teacher"},
}  # fmt: skip
"""Flag → a value of other trainers, or another word → the value here."""
