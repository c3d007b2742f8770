"""Every knob of a run: typed, with its range, its unit and the reason for its default.

The dataclasses are the one source of flags (`--tensor-model-parallel-size 2`), of recipe keys (YAML, same
names) and of `--print-config`. Spelling follows Megatron-LM where it has the flag, and otherwise what users
of Megatron-based RL systems type.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from megatron_ibpo.config.paths import Kind
from megatron_ibpo.config.ranges import (
    AROUND_1,
    BELOW_1,
    BYTES,
    COUNT,
    EVAL_SETS,
    JSON_OBJECT,
    MINUTES,
    NAMED_VALUES,
    NOT_NEGATIVE,
    POSITIVE,
    RANKS,
    SECONDS,
    SEED,
    SHARE,
    SHARES,
    SOURCES,
    TARGETS,
    UNIT,
    above,
    at_least,
    each,
    or_word,
    within,
)

UseAppendAction: Any = None
"""tyro's mark of a flag that may be repeated. A trainer reads no flags, so that it does without tyro."""
NO_FLAG: tuple[Any, ...] = (None,)
"""tyro's marks of a field that is no flag."""
with suppress(ModuleNotFoundError):
    from tyro.conf import Fixed, Suppress, UseAppendAction

    NO_FLAG = (Fixed, Suppress)


@dataclass
class ModelConfig:
    """The policy and how it is computed."""

    hf_checkpoint: Path | None = None
    """Directory in Hugging Face format: config.json, safetensors, tokenizer. Required."""
    ref_load: Path | None = None
    """Directory in Hugging Face format of the reference policy of --kl-coef. None: the policy that the run
    starts from."""
    bf16: bool | None = None
    """Train in bfloat16 with float32 master weights and gradients; otherwise in float32. None: on GPUs yes,
    since attention in float32 has no fast kernel there; on CPUs no, where float32 is as fast."""
    allow_local_modules: bool = False
    """On GPUs, train without Transformer Engine or flash-linear-attention where these are not installed. Off:
    plain torch takes tens of times as long there, and a run that is so slow is most often a mistake."""
    max_tokens_per_gpu: Annotated[int, COUNT] = 16384
    """Tokens (prompt and response) packed into one micro-batch on one rank; a longer sequence gets a
    micro-batch of its own. Bounds activation memory. Ranks that share sequences (--context-parallel-size)
    have so many each."""
    log_probs_max_tokens_per_gpu: Annotated[int | None, COUNT] = None
    """The same for passes without a gradient, which keep no activations: old and reference log-probs, the
    critic's values. More tokens make fewer micro-batches; without --fuse-lm-head all their logits are held.
    None: --max-tokens-per-gpu, and the very micro-batches of the update, so that log-probs under the same
    weights are the update's to the last bit."""
    recompute_granularity: Literal["none", "full", "selective"] = "none"
    """Megatron's activation recomputation; "full" for long contexts on GPUs."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Which layers "full" recomputes; Megatron's --recompute-method."""
    recompute_num_layers: Annotated[int, COUNT] = 1
    """Layers per recomputed chunk; Megatron's --recompute-num-layers."""
    moe_aux_loss_coeff: Annotated[float, NOT_NEGATIVE] = 0.0
    """Router load-balancing loss. 0: the objective is the policy loss alone."""
    mtp_num_layers: Annotated[int, within(0, 1)] = 0
    """Multi-token prediction layers to train beside the policy, so that they go on drafting for it as it
    changes; 1 is what Qwen's checkpoints have. 0: the checkpoint's is kept as it is."""
    mtp_loss_scaling_factor: Annotated[float, POSITIVE] = 0.1
    """Of the gradient of their loss; Megatron-LM's flag and default. It never meets the policy's: it matters
    beside --clip-grad and --adam-eps alone."""
    model_override: Annotated[tuple[str, ...], UseAppendAction, NAMED_VALUES] = ()
    """Any other field of Megatron's TransformerConfig, name=value, such as fp8=hybrid or
    recompute_modules=[core_attn,moe]; in a recipe also a mapping."""
    lora_rank: Annotated[int | None, COUNT] = None
    """Train low-rank adapters beside the weights, of this rank, and nothing else. None: train the weights."""
    lora_alpha: Annotated[float | None, POSITIVE] = None
    """What adapters add is multiplied by this over --lora-rank. None: twice the rank, as is usual, so that a
    learning rate serves for every rank."""
    lora_targets: Annotated[tuple[str, ...], TARGETS] = ("all",)
    """What has adapters: names of Hugging Face modules such as q_proj, down_proj, in_proj_qkvz or out_proj,
    experts for all routed experts, or all. "all": adapters then come closest to training the weights
    themselves."""

    @property
    def tokens_without_gradient(self) -> int:
        """Tokens per micro-batch of a pass without a gradient."""
        return self.log_probs_max_tokens_per_gpu or self.max_tokens_per_gpu


@dataclass
class ParallelConfig:
    """Layout of the trainer over its ranks. Data parallel is what remains of the world size."""

    tensor_model_parallel_size: Annotated[int, RANKS] = 1
    """TP: ranks that share each matrix."""
    pipeline_model_parallel_size: Annotated[int, RANKS] = 1
    """PP: consecutive groups of layers."""
    decoder_first_pipeline_num_layers: Annotated[int | None, COUNT] = None
    """Layers of the first pipeline stage, which also holds the embeddings; an even share when None."""
    decoder_last_pipeline_num_layers: Annotated[int | None, COUNT] = None
    """Layers of the last pipeline stage, which also holds the head; an even share when None."""
    expert_model_parallel_size: Annotated[int, RANKS] = 1
    """EP: ranks that share the experts of a layer."""
    expert_tensor_parallel_size: Annotated[int, RANKS] = 1
    """ETP: ranks that share one expert's matrices. 1, since experts are small and EP scales better."""
    make_vocab_size_divisible_by: Annotated[int, within(1, 65_536)] = 1
    """Rows of embedding and head on each tensor-parallel rank are a multiple of this: the vocabulary is
    padded to the next multiple of this times TP. Padding has no part in what is computed, sent or exported.
    1, where Megatron-LM has 128: rows are added only where TP does not divide the vocabulary, and the
    published models that need more for speed have it in their vocabulary already."""
    context_parallel_size: Annotated[int, RANKS] = 1
    """CP: ranks that share every sequence, each with two of its 2 x CP pieces, for contexts that one rank (or
    tensor-parallel group) has no memory for. 1: it costs an exchange in every layer."""
    delta_net_cp: Literal["state", "heads"] = "state"
    """What delta nets exchange where ranks share sequences. "state": the recurrent state and the last tokens
    between slices of a sequence, as many bytes whatever its length, and any number of heads. "heads":
    Megatron's exchange of all tokens of some heads for some tokens of all heads, which needs
    flash-linear-attention and key heads that TP x CP divides, and sends less for sequences below about a
    thousand tokens."""
    sequence_parallel: bool = True
    """Shard activations of norms over TP. On: MoE with TP needs it, and the gated delta net's norm
    gradient is wrong across TP ranks without it. Has no effect at TP=1."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks (ZeRO-1). For models that do not fit otherwise."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks in buckets while the backward pass goes on. Off, as in
    Megatron-LM: one reduction after it, in an order of sums of its own."""
    overlap_param_gather: bool = False
    """Gather the new weights of a sharded optimizer layer by layer during the next forward pass, as
    Megatron-LM's flag. Off: there is such a pass only between the steps of --num-steps-per-rollout, since
    engines get the weights after the last one."""
    distributed_timeout_minutes: Annotated[float, MINUTES] = 30.0
    """Minutes after which a collective gives up. 30: a step's longest forward pass stays far below it."""


@dataclass
class OptimizerConfig:
    """AdamW and its schedule. Defaults are the paper's, and the field's where the paper is silent."""

    lr: Annotated[float, POSITIVE] = 5e-7
    """Peak learning rate (paper: 5e-7)."""
    critic_lr: Annotated[float, POSITIVE] = 5e-6
    """Peak learning rate of the critic (--advantages critic); ten times the policy's, as is usual, since its
    head starts from nothing."""
    min_lr_ratio: Annotated[float, UNIT] = 0.1
    """Final learning rate as a share of the peak (paper: 0.1)."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    """Paper: cosine."""
    lr_warmup_fraction: Annotated[float, BELOW_1] = 0.03
    """Share of all optimizer steps spent in linear warm-up (paper: 3 %)."""
    adam_beta1: Annotated[float, BELOW_1] = 0.9
    """Decay of Adam's mean of gradients, per optimizer step. 0.9 as everywhere."""
    adam_beta2: Annotated[float, BELOW_1] = 0.95
    """Decay of Adam's mean of squared gradients, per optimizer step. 0.95 as for large language models."""
    adam_eps: Annotated[float, POSITIVE] = 1e-8
    """Added to the root of that mean. 1e-8 as in Megatron-LM."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """0: reinforcement learning moves the weights so little that decay would dominate."""
    clip_grad: Annotated[float, POSITIVE] = 1.0
    """Largest global gradient norm. 1 as in Megatron-LM."""
    use_precision_aware_optimizer: bool = False
    """Let Transformer Engine's FusedAdam keep optimizer state in the types that --optimizer-override names,
    such as exp_avg_dtype=bf16. Master weights stay whole: Megatron cannot load a checkpoint of the 16 bits
    that bf16 weights lack. Off, as in Megatron-LM."""
    optimizer_cpu_offload: bool = False
    """Keep optimizer state in host memory at all times and take the optimizer's steps there: nothing of it on
    the GPU, at the price of a copy of gradients and weights a step. For models that do not fit otherwise."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """With --optimizer-cpu-offload, copy one parameter's gradient while the step of another is taken. Off, as
    in Megatron-LM."""
    optimizer_override: Annotated[tuple[str, ...], UseAppendAction, NAMED_VALUES] = ()
    """Any other field of Megatron's OptimizerConfig, such as exp_avg_dtype=bf16, as --model-override."""


@dataclass
class LossConfig:
    """The policy-gradient loss."""

    loss_variant: str = "gspo"
    """Name in `megatron_ibpo.loss.VARIANTS`: gspo, gspo-token, gspo-dual-clip, grpo, ppo-clip, dual-clip,
    dapo, dr-grpo, cispo, sapo, gmpo; or an import path package.module:VARIANT. It owns its parameters: naming
    another one forgets the clips and --loss-param that were given for the one before."""
    loss_param: Annotated[tuple[str, ...], UseAppendAction, NAMED_VALUES] = ()
    """Parameters of the loss variant as name=value, such as sapo's tau_pos=1.2; in a recipe also a mapping.
    Defaults and ranges stand with the variant."""
    eps_clip: float | None = None
    """Lower clip range, the variant's parameter eps_low. Its own when None: 3e-4 for gspo, as the field uses
    with its length-normalised ratio, .2 for grpo."""
    eps_clip_high: float | None = None
    """Upper clip range, the variant's parameter eps_high. When None equal to --eps-clip, or where that is
    None too the variant's own: 4e-4 for gspo, .2 for grpo, .28 for dapo."""
    loss_aggregation: Literal["variant", "sequence-mean", "token-mean", "constant"] = "variant"
    """What a sequence's sum over tokens is divided by: its own length, the mean length of the mini-batch
    (every token counts the same), or --rollout-max-response-len. "variant" is as it was published."""
    loss_backend: Literal["auto", "triton", "torch"] = "auto"
    """What computes the loss. "auto" takes the Triton kernels on GPUs wherever they can be used, else plain
    torch; the one in use is printed at start."""
    fuse_lm_head: bool = False
    """Compute logits, loss and gradient a chunk of rows at a time inside the loss, so that logits are never
    held whole: saves their memory, tokens per micro-batch times vocabulary, and takes one or two fp32
    matrices of the LM head's size. Off because its speed on GPUs has not been measured."""
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the KL divergence from the reference policy (--ref-load) in the loss. 0: no reference, as in
    the paper."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of that divergence from the sampled tokens: -d, d²/2 or e^d - d - 1 of the log-ratio
    d = log π_ref - log π. "k3" has no bias and is never negative."""
    value_clip: Annotated[float, POSITIVE] = 0.2
    """How far the critic's new value may move from its old one before its loss stops following (PPO)."""
    old_logprobs: Literal["recompute", "engine"] = "recompute"
    """Whose log-probs of the sampled tokens the loss's ratios are to. "recompute": the trainer's own, of its
    weights at the first of a rollout's optimizer steps, in a forward pass where one is needed; what the
    engine did differently is left to the importance corrections. "engine": those that the engine sampled by,
    which saves the pass, and ratios and clips then act on that difference too."""
    use_routing_replay: bool = False
    """For mixtures of experts: in a rollout's optimizer steps the routers choose the experts that they chose
    in the pass for the old log-probs, so that a ratio is not one between two different models. Off: each pass
    routes by itself. A mini-batch whose own pass gives its old log-probs (the first, without importance
    corrections) has nothing to replay."""
    use_tis: bool = False
    """Importance correction: the gradient of each token is weighted by its ratio of trainer to engine, at
    most --tis-clip (ibpo step 14, token by token). Off, as in the paper."""
    tis_clip: Annotated[float, POSITIVE] = 2.0
    """Largest such weight. 2 as published."""
    icepop: Annotated[tuple[float, float] | None, AROUND_1] = None
    """Importance correction instead of --use-tis, LOW HIGH: tokens are weighted by that ratio, and by 0 where
    it lies outside. Published: 0.5 5."""
    sequence_rejection: Annotated[tuple[float, float] | None, AROUND_1] = None
    """Importance correction, alone or with one of the above, LOW HIGH: a sequence weighs 0 where the
    geometric mean of its tokens' ratios lies outside. The mean is near 1, so bounds are tight, such as
    0.99 1.01."""
    num_steps_per_rollout: Annotated[int, COUNT] = 1
    """Optimizer steps (mini-batches of whole prompts) per rollout. With 1 all ratios to recomputed log-probs
    are 1."""

    @property
    def corrections(self) -> list[str]:
        """Flags of the importance corrections that are on."""
        on = {
            "--use-tis": self.use_tis,
            "--icepop": self.icepop is not None,
            "--sequence-rejection": self.sequence_rejection is not None,
        }
        return [name for name, chosen in on.items() if chosen]


@dataclass
class AlgorithmConfig:
    """Credit: from scored responses to advantages. `advantage_estimator` names a preset; the other
    fields default to what that preset says. What --ibpo-operator, --token-credit and --advantages name has
    parameters of its own (credit/), which are flags and recipe keys where it is chosen."""

    advantage_estimator: str = "ibpo"
    """Preset in `megatron_ibpo.config.PRESETS`: ibpo, ibpo-ratio, ibpo-mask, ibpo-k1, ibpo-shaping-only,
    ibpo-joint-only, ibpo-rewrite-penalty, gspo, wrong-weight, grpo, dr-grpo, dapo, ppo, ciw,
    ciw-inverted, cipo."""
    ibpo_operator: str = "compare-and-correct"
    """What compares responses. "compare-and-correct": corrections of wrong ones by the policy (the paper's);
    "none": nothing, rewards alone decide; "agreement": without any generation, the share of their steps that
    correct ones of the group have too; "span-masking": for token weights alone, what the probability of a
    response's answer loses when a step of it is masked (CIW); "reset-groups": wrong responses are begun
    again, --ibpo-corrections times each, where they leave what they share with a correct one; or an import
    path package.module:name."""
    token_credit: str = "uniform"
    """Which tokens of a wrong response learn how much, in groups that have a correct one, beside what the
    operator says. "uniform": all alike; "wrong-weight": all --token-credit-weight; "wrong-weight-by-length":
    all so much that together they count as --token-credit-tokens; "divergence-window": so many tokens where
    it leaves the longest prefix that it shares with a correct one; "divergence-cut": all from there on;
    "random-window": so many tokens at a random place, the control; "self-teacher": the more, the less likely
    the policy finds them once it is shown a correct response (after SDPO); or an import path
    package.module:name."""
    advantages: str = "group"
    """What a reward is relative to: the mean of its group's rewards, over their population std ("group", the
    paper's), over Bessel's ("group-bessel", as verl, TRL, slime and oat), over that mean ("maxrl") or over
    nothing ("group-mean", Dr. GRPO); the mean of the others ("leave-one-out"); token by token what a critic
    expected ("critic", PPO); or an import path package.module:name."""
    parameters: Annotated[dict[str, Any], *NO_FLAG] = field(default_factory=dict)
    """Parameters of what the three fields above name, by name; one that is left out has its default."""
    group_filter: str | None = None
    """Import path package.module:name of a function that says of a scored group whether to train on it; all
    groups are when None."""
    dynamic_sampling: bool = False
    """DAPO: sample other prompts in the place of those that all or no responses answer correctly, or
    correct: --dynamic-sampling-by."""
    dynamic_sampling_by: Literal["rewards", "credit"] = "credit"
    """When dynamic sampling passes a group over. "rewards": where all or no responses are correct, before
    anything is corrected, as in DAPO. "credit": where besides no response or correction has an advantage; so
    groups without a correct response are corrected first, and stay if some corrections succeed. The default
    where there are corrections, which those groups need most; it costs the corrections of groups that are
    passed over in the end."""
    dynamic_sampling_rounds: Annotated[int, COUNT] = 10
    """Batches of --rollout-batch-size prompts that a step may sample for that. Prompts of rounds that a step
    does not need are passed over, so that the order of prompts depends on no result. 10 as in DAPO."""
    overlong_buffer_share: Annotated[float, UNIT] = 0.0
    """DAPO: the last part of --rollout-max-response-len in which a response loses reward, up to 1 at the full
    length. 0: off; DAPO has 0.2 (4,096 of 20,480 tokens)."""


@dataclass
class DataConfig:
    """Where prompts come from and who scores the responses."""

    prompt_data: Annotated[tuple[str, ...], Kind.FILE_OR_URL, SOURCES] = ()
    """Where prompts come from: a file or directory (JSONL, parquet, a Hugging Face data set on disk); a
    generated task such as reasoning_gym://chain_sum?min_terms=5&max_terms=7&min_digits=1&max_digits=1; or a
    source of your own, import://package.module:function. Several are mixed. Settings of one source follow it
    as ?weight=2&suffix=…; in a recipe a source may be a mapping (docs/data.md). Required."""
    eval_prompt_data: Annotated[str | tuple[str, ...] | None, Kind.FILE_OR_URL, EVAL_SETS] = None
    """Held-out prompts, same forms, or a benchmark's published file, such as aime25://DIR/aime25.jsonl (see
    docs/evaluation.md). Several sets: NAME=SPEC NAME=SPEC …, or the flag once for each; metrics are then
    eval/NAME/…. Required when evaluation is on. A generated task is drawn with its own seed, disjoint from
    training's."""
    input_key: str = "prompt"
    """Field of a row with the question: text, or a list of chat messages."""
    label_key: str = "label"
    """Field of a row with the ground truth."""
    apply_chat_template: bool = False
    """Wrap questions with the tokenizer's chat template."""
    apply_chat_template_kwargs: Annotated[str | None, JSON_OBJECT] = None
    """What the chat template is given besides the messages, as a JSON object, such as {"enable_thinking":
    false}; in a recipe also a mapping."""
    system_prompt: str | None = None
    """System message of chats that have none of their own; needs --apply-chat-template."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used, count them and show the first few, instead of ending with an error.
    Off: a bad row is most often a sign that the whole file was not meant so."""
    drop_long_prompts: bool = False
    """Leave out, and count, prompts that do not fit the context next to --rollout-max-response-len, instead
    of ending with an error."""
    deduplicate: bool = False
    """Leave out, and count, rows whose question equals an earlier one of the same source but for white space.
    A large file is read through for that before the first step."""
    filter_pass_rate: Annotated[tuple[float, float] | None, SHARES] = None
    """LOW HIGH: leave out, and count, prompts of which the policy solves less than LOW or more than HIGH of
    the samples that --pass-rates records. None: all prompts."""
    pass_rates: Path | None = None
    """File that `ibpo pass-rates` writes, for --filter-pass-rate."""
    rm_type: str = "reasoning_gym"
    """Verifier: reasoning_gym, math, code, composite, or an import path package.module:function. A prompt
    whose metadata has an rm_type is scored by that one."""
    reward_part: Annotated[tuple[str, ...], UseAppendAction, NAMED_VALUES] = ()
    """Of --rm-type composite: a verifier and its weight, such as math=0.9; in a recipe also a mapping. The
    reward is the weighted sum within 0 and 1. The first is the main one: the others alone must stay below
    --reward-threshold."""
    reward_threshold: float = 1.0
    """A response is correct when its reward is at least this."""
    reward_timeout: Annotated[float, SECONDS] = 10.0
    """Seconds a verifier may take for one response before it is killed and counted as an error. Other than
    after a death it is not asked again: it would only take as long once more."""
    reward_workers: Annotated[int | None, within(1, 1024)] = None
    """Verifier processes on each node of the cluster. None: half as many as the node has processors, at least
    2; the other half is for trainers and engines."""
    code_timeout: Annotated[float, SECONDS] = 6.0
    """Seconds that a program may take for one test of a code problem. All tests of a response have to fit
    into --reward-timeout. 6: LiveCodeBench's."""
    code_memory_mb: Annotated[int, within(64, 2**24)] = 1024
    """MiB of address space that a program of a code problem may take. 1024: what most judges allow."""
    code_executor: str | None = None
    """Server that runs the programs of code problems, http://HOST:PORT, by SandboxFusion's protocol. None: in
    sandboxes on the nodes of the run."""
    unsafe_code_execution: bool = False
    """Run programs that a model wrote WITHOUT a sandbox, with your rights: they can read and delete your
    files and use the network. Only for a machine that may be lost."""
    data_seed: Annotated[int, SEED] = 0
    """Order of prompts and drawing of generated tasks."""


@dataclass
class RolloutConfig:
    """Sampling, by vLLM where nothing else is said."""

    rollout_backend: Literal["vllm", "lean"] = "vllm"
    """What samples. "lean": the trainer's own process in plain torch and float32, without Ray; for studies of
    dense Qwen3 of up to 4 M parameters on a processor, where starting vLLM takes longer than training
    (docs/studies.md)."""
    rollout_batch_size: Annotated[int, COUNT] = 32
    """P: prompts per rollout."""
    n_samples_per_prompt: Annotated[int, COUNT] = 8
    """G: responses per prompt."""
    rollout_max_response_len: Annotated[int, COUNT] = 8192
    """Tokens a response may have."""
    rollout_max_context_len: Annotated[int | None, COUNT] = None
    """Tokens that prompt and response may have together; the model's own limit when None."""
    rollout_temperature: Annotated[float, above(0, "greedy samples of a prompt are all the same")] = 1.0
    """Divides the logits before sampling. 1: the policy that the trainer sees."""
    rollout_top_p: Annotated[float, SHARE] = 1.0
    """Sample from the likeliest tokens that together have this probability. 1: off, for the reason below."""
    rollout_top_k: Annotated[int, or_word(-1, at_least(1), "off")] = -1
    """Sample from this many of the likeliest tokens. -1: off, since cutting the distribution makes it differ
    from the trainer's; the difference is logged."""
    rollout_temperature_cycle: Annotated[tuple[float, ...], each(POSITIVE)] = ()
    """Temperatures of a group's responses in turn, for more diverse trajectories; corrections and evaluation
    stay at --rollout-temperature, and so do the responses when it is empty."""
    rollout_top_p_cycle: Annotated[tuple[float, ...], each(SHARE)] = ()
    """The same for --rollout-top-p."""
    rollout_top_k_cycle: Annotated[tuple[int, ...], each(or_word(-1, at_least(1), "off"))] = ()
    """The same for --rollout-top-k."""
    rollout_prompt_suffixes: tuple[str, ...] = ()
    """Texts appended to the question in turn over a group's responses (prompt perturbation); an empty one
    leaves it as it is. Each response is trained on with the prompt that it answered."""
    rollout_num_gpus_per_engine: Annotated[int, RANKS] = 1
    """Tensor-parallel size of one engine."""
    colocate: bool = True
    """Engines share the trainers' devices and sleep while those train."""
    offload_train: bool = True
    """While engines sample on the trainers' GPUs, weights, gradients and optimizer state of the trainers wait
    in pinned host memory (gradients are dropped): 18 bytes less a parameter of the rank's part on the GPU, 14
    more in host memory. On: they move in about a second. Has no effect with --no-colocate and on CPUs."""
    rollout_num_gpus: Annotated[int | None, RANKS] = None
    """GPUs of the engines in all, where they have some of their own (--no-colocate)."""
    vllm_arg: Annotated[tuple[str, ...], UseAppendAction, NAMED_VALUES] = ()
    """Any other argument of vLLM's engine, name=value with the names of its EngineArgs; in a recipe also a
    mapping."""
    vllm_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of sampling. auto: the trainer's on GPUs and float32 on CPUs, but bfloat16 where vLLM takes
    no float32: beside quantization, and on CPUs for models with delta nets."""
    vllm_gpu_memory_utilization: Annotated[float, SHARE] = 0.6
    """Share of a GPU's memory for weights and KV cache of a colocated engine."""
    vllm_kv_cache_bytes: Annotated[int | None, BYTES] = None
    """KV-cache bytes per engine rank. On CPUs 512 MiB when None (vLLM's default takes a share of all
    RAM); on GPUs None leaves it to the utilization."""
    vllm_max_num_seqs: Annotated[int, COUNT] = 256
    """Sequences decoded at once by one engine."""
    vllm_enforce_eager: bool = False
    """Do not compile or capture graphs. Always so on CPUs, where compiling was 20x slower."""
    vllm_start_timeout: Annotated[float | None, SECONDS] = None
    """Seconds an engine may take to start. None: 600, for compiling and capturing graphs, and what reading
    the model's files takes at 0.25 GB/s; 1,240 for 160 GB."""
    engine_stall_timeout: Annotated[float, SECONDS] = 300.0
    """Seconds in which an engine that has requests must write a token; one that does not is ended and
    replaced. 300: the longest step, many long prompts at once, takes a minute."""
    max_staleness: Annotated[int, within(0, 1000)] = 0
    """How many steps older than the policy that is trained the weights behind a batch's oldest token may be.
    0: sampling waits for every update (on-policy). With S ≥ 1 it runs ahead of training by up to S batches,
    and running responses go on with new weights as these come."""
    over_sampling_batch_size: Annotated[int | None, COUNT] = None
    """Groups to have under way for a batch of --rollout-batch-size, of which the first that are complete are
    taken. The others go on, up to --max-staleness; past that they are given up, counted, and their prompts
    are asked again. Favours short responses (metric length_bias). None: no more than are taken."""
    keep_order: bool = False
    """With --max-staleness, take groups in the order in which their prompts were asked instead of the first
    that are complete: no bias, and a batch waits for its longest response."""
    recompute_kv_after_update: bool = True
    """When new weights come while responses run, compute their caches anew, so that every later token is the
    new policy's alone. Off: what was asked before the update goes on from the old policy's cache, which saves
    that time; what is asked after it shares nothing with that."""
    use_rollout_routing_replay: bool = False
    """For mixtures of experts: engines record which experts their routers chose for each token, and the
    trainer's routers choose them again, for old log-probs and in the optimizer steps (R3, arXiv 2510.11370).
    Off: it takes layers x experts per token bytes (two each above 255 experts) of record a token, on the way,
    in the journal and in the driver's memory: 960 for Qwen3-Next-80B."""
    update_weight_buffer_size: Annotated[int, BYTES] = 512 * 1024**2
    """Bytes of one bucket of the weight update. It costs a trainer at most two of them on top of its weights.
    512 MiB: large enough to keep the transport busy."""
    update_weight_timeout: Annotated[float, SECONDS] = 600.0
    """Seconds that one stage of a weight update may take. 600: 150 GB at 0.25 GB/s."""
    check_weight_update_equal: bool = False
    """After each update compare checksums at receipt, and once per run the engine's output with that of
    a freshly loaded engine."""

    @property
    def runs_ahead(self) -> bool:
        """Whether groups are sampled before the steps before them are over."""
        return self.max_staleness > 0 or (self.over_sampling_batch_size or 0) > self.rollout_batch_size


@dataclass
class RunConfig:
    """The run itself: how long, what is kept, what is shown."""

    run_dir: Annotated[Path, Kind.WRITTEN] = Path("runs/latest")
    """Everything of the run lands here: metrics.jsonl, summary.json, curves.png, config.yaml, versions,
    checkpoints, hf."""
    num_rollout: Annotated[int, at_least(1)] = 60
    """Steps: one rollout and its updates each."""
    num_epoch: Annotated[int | None, at_least(1)] = None
    """Times that the prompts are gone through. --num-rollout then follows from their number, and what was
    given for it is not used. None: --num-rollout decides."""
    budget: Annotated[float | None, POSITIVE] = None
    """Stop after the step with which so much is spent, in --budget-unit; --num-rollout steps at most. What
    only observes (evaluation, saving, reports, the gradient meter) is free. None: no such limit."""
    budget_unit: Literal[
        "accelerator-seconds", "tokens", "flops", "tokens-shared-prefixes", "flops-shared-prefixes"
    ] = "accelerator-seconds"
    """What --budget counts: seconds of the loop times accelerators, tokens through the model, or estimated
    floating-point operations; and of the last two what is left where a beginning that several sequences of a
    pass share is computed once."""
    seed: Annotated[int, SEED] = 0
    """Seeds sampling, pairing and initialisation."""
    save: bool = True
    """Write a Megatron checkpoint and a Hugging Face export at the end."""
    save_interval: Annotated[int | None, at_least(1)] = None
    """Steps between Megatron checkpoints; None leaves it to --save-interval-minutes."""
    save_interval_minutes: Annotated[float | None, POSITIVE] = 10.0
    """Minutes after which a Megatron checkpoint is due, at the end of the step that is under way; None leaves
    it to --save-interval. 10: what a closed terminal or a lost machine may cost."""
    keep_checkpoints: Annotated[int, at_least(1)] = 2
    """Megatron checkpoints that stay: the newest. An older one is removed once a newer one is whole. 2: one
    to go on from, and one in case that it is damaged."""
    keep_checkpoint_every: Annotated[int | None, at_least(1)] = None
    """Checkpoints of steps that are multiples of this are never removed; None: no such steps."""
    export_interval: Annotated[int | None, at_least(1)] = None
    """Steps between Hugging Face exports, weights alone, into run_dir/hf_step_N; only at the end, into
    run_dir/hf, when None. All of them stay."""
    disk_wait: Annotated[float, NOT_NEGATIVE] = 600.0
    """Seconds that a run waits for room when its disk is full before it stops. 600: time to free some."""
    journal_keep: Annotated[float, POSITIVE] = 1.0
    """GiB of the journal (run_dir/journal: every scored response) that stay although the newest checkpoint
    makes them dispensable; after as many new ones a checkpoint is forced. 1: thousands of steps of the tiny
    models, and little beside a large model's checkpoints."""
    load: Path | None = None
    """Run directory or its checkpoints directory to resume from."""
    eval_interval: Annotated[int | None, at_least(1)] = None
    """Steps between evaluations; only at start and end when None."""
    eval_num_prompts: Annotated[int, within(0, 10_000_000)] = 2048
    """Held-out prompts used; 0 turns evaluation off."""
    eval_preset: str | None = None
    """How held-out prompts are sampled where no flag below says so: qwen3-32b or qwen3-next-80b-a3b, the
    paper's settings of these models (avg@64). None: a benchmark's own number of samples, and training's
    settings."""
    n_samples_per_eval_prompt: Annotated[int | None, within(1, 65_536)] = None
    """Responses per held-out prompt at --eval-temperature; greedy is evaluated as well. With several,
    pass@k, maj@k and best-of-k of them too. None: what --eval-preset or the benchmark says, else 1."""
    eval_temperature: Annotated[float | None, POSITIVE] = None
    """Divides the logits before held-out prompts are sampled. None: as --eval-preset says, else
    --rollout-temperature."""
    eval_other_temperatures: Annotated[tuple[float, ...], each(POSITIVE)] = ()
    """Temperatures at which every set of held-out prompts is sampled too, as a set of its own called SET@T. A
    method that only makes the policy surer of itself gains at temperature 1 and not at a low one."""
    eval_half: Literal["all", "tuning", "test"] = "all"
    """Which held-out prompts are used: those whose text falls into the half for choosing settings, or into
    the half for judging what was chosen; no text is in both. Studies that tune set it. all: both halves."""
    eval_top_p: Annotated[float | None, SHARE] = None
    """The same for --rollout-top-p."""
    eval_top_k: Annotated[int | None, or_word(-1, at_least(1), "off")] = None
    """The same for --rollout-top-k."""
    eval_max_response_len: Annotated[int | None, COUNT] = None
    """Tokens that a response to a held-out prompt may have. None: as --eval-preset says, else
    --rollout-max-response-len."""
    eval_compare_and_correct: bool = False
    """At evaluation, also let the policy correct every sample alongside --ibpo-k - 1 others of its prompt.
    They are drawn without knowing which are right (the paper's GSPO+Prompt). As many more responses as there
    are samples."""
    save_debug_rollout_data: bool = False
    """Keep every step's records as readable JSON in run_dir/rollouts, with token weights and the trainer's
    log-probs before and after the update: two more forward passes per step. `ibpo.sh serve` shows them."""
    load_debug_rollout_data: Path | None = None
    """Train on the records kept in this directory instead of sampling; no engine is started."""
    debug_rollout_only: bool = False
    """Sample and score, do not train."""
    gradient_meter_interval: Annotated[int | None, at_least(1)] = None
    """Steps between measurements of the policy gradient's noise over prompts, for the objective in use and
    for GSPO on the same responses; never when None."""
    gradient_meter_blocks: Annotated[int, within(2, 10_000_000, "a spread needs two of them")] = 4
    """Parts that the prompts of a measurement are cut into, a backward pass each. From --rollout-batch-size
    on each prompt is one, which is exact; 2 are two halves, the cheapest. All are unbiased; more are less
    scattered. 4 keeps the cost at interval 10 near a tenth of a run of the tiny models."""
    operator_skill_prompts: Annotated[int, within(0, 100_000)] = 16
    """Prompts on which a run that has responses corrected measures, before its first step, whether
    corrections succeed more often than another try. Each is answered as in training, and two of its wrong
    responses are corrected and answered anew: G + 4 samples. 0: not measured. 16: about the sampling of one
    step of the tiny runs, and a difference known to about .3; `ibpo.sh skill` measures more closely."""
    use_wandb: bool = False
    """Also log to Weights & Biases."""
    max_reward_error_rate: Annotated[float, UNIT] = 0.5
    """Share of a step's responses whose verifier failed above which the run stops. 0.5: single failures are
    counted and left out, but a verifier that fails on most responses is broken."""
    max_nonfinite_steps: Annotated[int, at_least(1)] = 3
    """Stop after this many steps in a row were skipped for a loss or gradient that is not finite."""
    dry_run: bool = False
    """Print the plan (layout, memory, batch sizes, who runs where) and exit."""
    dry_run_world_size: Annotated[int | None, RANKS] = None
    """Ranks to plan for in a dry run; the launcher's world size when None."""
    dry_run_gpu_memory_gib: Annotated[float, within(1, 1_000_000)] = 80.0
    """Memory of one GPU that the plan must fit."""
    dry_run_gpus_per_node: Annotated[int, RANKS] = 8
    """GPUs of one node in a dry run."""
    dry_run_hardware: Annotated[str | None, Kind.NAME_OR_YAML] = None
    """Kind of GPU, such as h100, for which a dry run predicts the seconds of a step; docs/planner.md lists
    them, with the errors of its predictions. Or a file of `ibpo calibrate` that describes this machine. A run
    compares the same prediction with what it took. None: a dry run predicts no time, and a run that of the
    GPUs that it has, where they are known."""
    dry_run_response_len: Annotated[int | None, COUNT] = None
    """Mean tokens of a response in that prediction. None: half of --rollout-max-response-len, since nothing
    tells before the first step."""
    gpu_hour_price: Annotated[float | None, NOT_NEGATIVE] = None
    """Price of a GPU for an hour, in any currency: a predicted run's cost is shown in it."""


@dataclass
class ClusterConfig:
    """The machines and processes of a run."""

    ray_address: str | None = None
    """Address of a Ray cluster to join, HOST:PORT or "auto". None: $RAY_ADDRESS where that is set, else a Ray
    of the run's own."""
    num_trainers: Annotated[int | None, RANKS] = None
    """Trainer processes in all, one per GPU. None: one for every GPU of the cluster that engines of their own
    leave; 1 without GPUs."""
    node_wait: Annotated[float, NOT_NEGATIVE] = 600.0
    """Seconds for which a run that has lost a node with trainers, or all its engines, waits until the cluster
    has room for it again. 600: time for a scheduler to bring another node."""
    object_store_bytes: Annotated[int | None, BYTES] = None
    """Shared memory of each node's object store, through which records travel. Follows the size of a step's
    records when None."""


@dataclass
class Config:
    """All of it, by section. Flags and recipe keys do not name the section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def replays_routing(self) -> bool:
        """The trainer's routers choose experts that were chosen before."""
        return self.rollout.use_rollout_routing_replay or self.loss.use_routing_replay
