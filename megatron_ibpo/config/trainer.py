"""Settings of the trainer: the policy, its layout over ranks, the optimizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from megatron_ibpo.config.algorithm import AlgorithmConfig, LossConfig
from megatron_ibpo.config.config_error import ConfigError, broken
from megatron_ibpo.config.paths import Kind, missing_model
from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.config.values import (
    BELOW_1,
    COUNT,
    MINUTES,
    NAMED_VALUES,
    NOT_NEGATIVE,
    POSITIVE,
    RANKS,
    TARGETS,
    UNIT,
    named_values,
    within,
)

NO_MODEL = "--hf-checkpoint: required, a directory in Hugging Face format, or owner/name"


@dataclass
class ModelConfig:
    """Settings of the policy and its computation."""

    hf_checkpoint: Annotated[Path | None, Kind.MODEL] = None
    """Directory in Hugging Face format (config.json, safetensors, tokenizer), or a model of the Hugging Face
    Hub, owner/name or owner/name@revision, which is downloaded at the start. Required."""
    ref_load: Annotated[Path | None, Kind.MODEL] = None
    """Reference policy for --kl-coef, in the same forms. None: the initial policy of the run."""
    bf16: bool | None = None
    """Train in bfloat16 with float32 master weights and gradients; otherwise in float32. None: bfloat16 on
    GPUs, since attention in float32 has no fast kernel there; float32 on CPUs, where it is as fast."""
    allow_local_modules: bool = False
    """Train on GPUs without Transformer Engine or flash-linear-attention if these are not installed. Off:
    plain torch is tens of times slower there, and such a slow run is usually a mistake."""
    share_prompts: bool | None = None
    """Compute the prompt of sequences that share it once per micro-batch, forward and backward, in place of
    once for each. Gradients are the same up to rounding. None: on CPUs, unless another setting excludes it;
    the kernels of GPUs take whole sequences."""
    max_tokens_per_gpu: Annotated[int, COUNT] = 16384
    """Tokens (prompt and response) packed into one micro-batch on one rank; a longer sequence gets its own
    micro-batch. Bounds activation memory. With --context-parallel-size, the limit holds for each of the ranks
    that share sequences."""
    log_probs_max_tokens_per_gpu: Annotated[int | None, COUNT] = None
    """The same limit for passes without a gradient, which keep no activations: old and reference log-probs,
    the critic's values. More tokens make fewer micro-batches; without --fuse-lm-head all their logits are
    held. None: --max-tokens-per-gpu, with the micro-batches of the update, so that log-probs under the same
    weights equal the update's to the last bit."""
    recompute_granularity: Literal["none", "full", "selective"] = "none"
    """Megatron's activation recomputation; "full" for long contexts on GPUs."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Choice of layers that "full" recomputes; Megatron's --recompute-method."""
    recompute_num_layers: Annotated[int, COUNT] = 1
    """Layers per recomputed chunk; Megatron's --recompute-num-layers."""
    moe_aux_loss_coeff: Annotated[float, NOT_NEGATIVE] = 0.0
    """Coefficient of the router load-balancing loss. 0: the objective is the policy loss alone."""
    mtp_num_layers: Annotated[int, within(0, 1)] = 0
    """Multi-token prediction layers to train with the policy, so that they keep drafting for it as it
    changes; Qwen's checkpoints have 1. 0: the checkpoint's layers are kept unchanged."""
    mtp_loss_scaling_factor: Annotated[float, POSITIVE] = 0.1
    """Factor on the gradient of the multi-token prediction loss; Megatron-LM's flag and default. This
    gradient is separate from the policy's, so the factor matters only in relation to --clip-grad and
    --adam-eps."""
    model_override: Annotated[tuple[str, ...], NAMED_VALUES] = ()
    """Any other field of Megatron's TransformerConfig, as name=value, such as fp8=hybrid or
    recompute_modules=[core_attn,moe]; in a recipe also a mapping."""
    lora_rank: Annotated[int | None, COUNT] = None
    """Rank of low-rank adapters to train in place of the weights. None: train the weights."""
    lora_alpha: Annotated[float | None, POSITIVE] = None
    """Scale of the adapters: their output is multiplied by this over --lora-rank. None: twice the rank, as is
    usual, so that one learning rate serves for every rank."""
    lora_targets: Annotated[tuple[str, ...], TARGETS] = ("all",)
    """Modules with adapters: names of Hugging Face modules such as q_proj, down_proj, in_proj_qkvz or
    out_proj, experts for all routed experts, or all. "all": adapters then come closest to training the
    weights themselves."""

    @property
    def hf_dir(self) -> Path:
        """--hf-checkpoint, once `problems` has checked that it is given."""
        if self.hf_checkpoint is None:
            raise ConfigError(NO_MODEL)
        return self.hf_checkpoint

    @property
    def tokens_without_gradient(self) -> int:
        """Tokens per micro-batch in passes without a gradient."""
        return self.log_probs_max_tokens_per_gpu or self.max_tokens_per_gpu

    def problems(self, loss: LossConfig, algorithm: AlgorithmConfig) -> list[str]:
        """Return the problems, one line each."""
        problems = []
        if self.hf_checkpoint is None:
            problems.append(NO_MODEL)
        problems += missing_model("--hf-checkpoint", self.hf_checkpoint)
        problems += missing_model("--ref-load", self.ref_load)
        if self.ref_load is not None and loss.kl_coef == 0:
            problems.append("--ref-load: --kl-coef 0 uses no reference policy; set one or drop the other")
        if self.lora_rank is not None:
            return problems + self._adapter_problems(algorithm)
        idle = {"--lora-alpha": self.lora_alpha is not None, "--lora-targets": self.lora_targets != ("all",)}
        return problems + [
            f"{flag}: has no effect without --lora-rank" for flag, given in idle.items() if given
        ]

    def _adapter_problems(self, algorithm: AlgorithmConfig) -> list[str]:
        given = named_values(self.model_override)
        around = [
            name
            for name in ("use_transformer_engine_op_fuser", "moe_shared_expert_overlap")
            if given.get(name, "false").lower() not in ("false", "none")
        ]
        rules = {
            "--lora-rank: a critic has no adapters, since all its weights are trained; take another "
            "--advantages, or drop --lora-rank": algorithm.trains_critic,
            "--mtp-num-layers: trains all weights of its layers, and --lora-rank trains adapters only; "
            "drop one of them": self.mtp_num_layers > 0,
            "--moe-aux-loss-coeff: balances routers, which --lora-rank does not train; drop one of "
            "them": self.moe_aux_loss_coeff > 0,
        }
        return broken(rules) + [
            f"--model-override {name}: bypasses the layers that --lora-rank adapts; drop one of them"
            for name in around
        ]


@dataclass
class ParallelConfig:
    """Layout of the trainer over its ranks. Data parallelism takes the rest of the world size."""

    tensor_model_parallel_size: Annotated[int, RANKS] = 1
    """TP: ranks that share each matrix."""
    pipeline_model_parallel_size: Annotated[int, RANKS] = 1
    """PP: pipeline stages, each a group of consecutive layers."""
    decoder_first_pipeline_num_layers: Annotated[int | None, COUNT] = None
    """Layers of the first pipeline stage, which also holds the embeddings; None: an even share."""
    decoder_last_pipeline_num_layers: Annotated[int | None, COUNT] = None
    """Layers of the last pipeline stage, which also holds the head; None: an even share."""
    expert_model_parallel_size: Annotated[int, RANKS] = 1
    """EP: ranks that share the experts of a layer."""
    expert_tensor_parallel_size: Annotated[int, RANKS] = 1
    """ETP: ranks that share one expert's matrices. 1, since experts are small and EP scales better."""
    make_vocab_size_divisible_by: Annotated[int, within(1, 65_536)] = 1
    """Pad the vocabulary so that each tensor-parallel rank holds a multiple of this many rows of embedding
    and head. Padding is never computed with, sent or exported. 1, where Megatron-LM has 128: rows are added
    only if TP does not divide the vocabulary, and published models that need more for speed already include
    it in their vocabulary."""
    context_parallel_size: Annotated[int, RANKS] = 1
    """CP: ranks that share every sequence, each with two of its 2 x CP pieces, for contexts that do not fit
    one rank's (or tensor-parallel group's) memory. 1: CP costs an exchange in every layer."""
    delta_net_cp: Literal["state", "heads"] = "state"
    """Exchange of delta nets under context parallelism. "state": the recurrent state and the last tokens
    between slices of a sequence. Its size does not depend on the length, and it works for any number of
    heads. "heads": Megatron's exchange of all tokens of some heads for some tokens of all heads. It needs
    flash-linear-attention and key heads divisible by TP x CP, and sends less for sequences below about a
    thousand tokens."""
    sequence_parallel: bool = True
    """Shard activations of norms over TP. On: MoE with TP needs it, and the gated delta net's norm gradient
    is wrong across TP ranks without it. Has no effect at TP=1."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks (ZeRO-1), for models that do not fit otherwise."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks in buckets during the backward pass. Off, as in Megatron-LM:
    one reduction after it, which sums in another order."""
    overlap_param_gather: bool = False
    """Gather the new weights of a sharded optimizer layer by layer during the next forward pass;
    Megatron-LM's flag. Off: it helps only between the optimizer steps of one rollout
    (--num-steps-per-rollout), since engines get the weights after the last one."""
    distributed_timeout_minutes: Annotated[float, MINUTES] = 30.0
    """Minutes until a collective times out. 30: a step's longest forward pass stays far below it."""

    def problems(self) -> list[str]:
        """Return the problems, one line each."""
        gathers_nothing = not (self.use_distributed_optimizer and self.overlap_grad_reduce)
        return broken(
            {
                "--overlap-param-gather: needs --use-distributed-optimizer, which leaves weights to gather, "
                "and --overlap-grad-reduce, which divides them into buckets": (
                    self.overlap_param_gather and gathers_nothing
                )
            }
        )


@dataclass
class OptimizerConfig:
    """AdamW and its schedule. Defaults are the paper's, or the usual ones where the paper gives none."""

    lr: Annotated[float, POSITIVE] = 5e-7
    """Peak learning rate (paper: 5e-7)."""
    critic_lr: Annotated[float, POSITIVE] = 5e-6
    """Peak learning rate of the critic (--advantages critic); ten times the policy's, as is usual, since the
    critic's head is untrained at the start."""
    min_lr_ratio: Annotated[float, UNIT] = 0.1
    """Final learning rate as a share of the peak (paper: 0.1)."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate's decay (paper: cosine)."""
    lr_warmup_fraction: Annotated[float, BELOW_1] = 0.03
    """Share of all optimizer steps spent in linear warm-up (paper: 3 %)."""
    adam_beta1: Annotated[float, BELOW_1] = 0.9
    """Decay rate of Adam's mean of gradients, per optimizer step. 0.9 as is usual."""
    adam_beta2: Annotated[float, BELOW_1] = 0.95
    """Decay rate of Adam's mean of squared gradients, per optimizer step. 0.95 as for large language
    models."""
    adam_eps: Annotated[float, POSITIVE] = 1e-8
    """Constant added to the root of that mean. 1e-8 as in Megatron-LM."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Decoupled weight decay. 0: reinforcement learning moves the weights so little that decay would
    dominate."""
    clip_grad: Annotated[float, POSITIVE] = 1.0
    """Largest global gradient norm. 1 as in Megatron-LM."""
    use_precision_aware_optimizer: bool = False
    """Let Transformer Engine's FusedAdam keep optimizer state in the types set by --optimizer-override, such
    as exp_avg_dtype=bf16. Master weights stay whole: Megatron cannot load a checkpoint of only the 16 bits
    that bf16 weights lack. Off, as in Megatron-LM."""
    optimizer_cpu_offload: bool = False
    """Keep optimizer state in host memory at all times and run the optimizer's steps there. The GPU then
    holds none of it, but gradients and weights are copied every step. For models that do not fit
    otherwise."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Copy one parameter's gradient while another parameter is updated, with --optimizer-cpu-offload. Off, as
    in Megatron-LM."""
    optimizer_override: Annotated[tuple[str, ...], NAMED_VALUES] = ()
    """Any other field of Megatron's OptimizerConfig, as name=value like --model-override, such as
    exp_avg_dtype=bf16."""

    def problems(self, model: ModelConfig, parallel: ParallelConfig, run: RunConfig) -> list[str]:
        """Return the problems, one line each."""
        precision_aware, offloads = self.use_precision_aware_optimizer, self.optimizer_cpu_offload
        follows_schedule = self.lr_decay_style != "constant" or self.lr_warmup_fraction > 0
        return broken(
            {
                "--use-precision-aware-optimizer: needs --use-distributed-optimizer": (
                    precision_aware and not parallel.use_distributed_optimizer
                ),
                "--use-precision-aware-optimizer: needs bfloat16 weights; add --bf16 True": (
                    precision_aware and model.bf16 is False
                ),
                "--optimizer-cpu-offload: needs --use-precision-aware-optimizer, as in Megatron-LM": (
                    offloads and not precision_aware
                ),
                "--overlap-cpu-optimizer-d2h-h2d: has no effect without --optimizer-cpu-offload": (
                    self.overlap_cpu_optimizer_d2h_h2d and not offloads
                ),
                "--budget: the number of steps is not known beforehand, so the learning rate cannot "
                "follow a schedule; use --lr-decay-style constant --lr-warmup-fraction 0": (
                    run.budget is not None and follows_schedule
                ),
            }
        )
