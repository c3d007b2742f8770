"""Settings of the algorithm: credit, the groups to train on, the loss and the corrections of its ratios."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megatron_ibpo.config.config_error import broken
from megatron_ibpo.config.hooks import is_import_path, load_hook
from megatron_ibpo.config.values import AROUND_1, COUNT, NAMED_VALUES, NOT_NEGATIVE, POSITIVE, UNIT


@dataclass
class AlgorithmConfig:
    """Credit settings: how scored responses become advantages. `advantage_estimator` names a preset, and the
    other fields default to that preset's values. The choices of --ibpo-operator, --token-credit and
    --advantages have their own parameters (credit/), which are flags and recipe keys only when chosen."""

    advantage_estimator: str = "ibpo"
    """Preset in `megatron_ibpo.config.PRESETS`: ibpo, ibpo-ratio, ibpo-mask, ibpo-k1, ibpo-shaping-only,
    ibpo-joint-only, ibpo-rewrite-penalty, gspo, wrong-weight, grpo, dr-grpo, dapo, ppo, ciw,
    ciw-inverted, cipo."""
    ibpo_operator: str = "compare-and-correct"
    """Method that compares responses. "compare-and-correct": the policy corrects wrong responses (the
    paper's). "none": no comparison; rewards alone decide. "span-masking": affects token weights only; a
    step's weight is the drop in the probability of the response's answer when the step is masked (CIW). Or
    the import path of another method, package.module:name or path/to/file.py:name, such as those in
    examples/credit/."""
    token_credit: str = "uniform"
    """Weights of the tokens of wrong responses in groups that have a correct one, on top of the operator's.
    "uniform": all equal. "wrong-weight": --token-credit-weight for every token. "wrong-weight-by-length":
    equal weights that sum to --token-credit-tokens. "divergence-window": a window of tokens after the longest
    prefix shared with a correct response. "divergence-cut": every token after that prefix. "self-teacher":
    more weight on tokens that the policy finds less likely once it is shown a correct response (after SDPO).
    Or an import path, package.module:name or path/to/file.py:name."""
    advantages: str = "group"
    """Baseline and scale of a reward. "group": the group's mean and population std (the paper's).
    "group-bessel": the group's mean and Bessel-corrected std, as in verl, TRL, slime and oat. "maxrl": the
    group's mean, also as the divisor. "group-mean": the group's mean, no division (Dr. GRPO).
    "leave-one-out": the mean of the other responses. "critic": a critic's value for each token (PPO). Or an
    import path, package.module:name or path/to/file.py:name."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the three choices above, by name. A parameter left out has its default."""
    group_filter: str | None = None
    """Import path (package.module:name or path/to/file.py:name) of a function that returns whether to train
    on a scored group; None trains on all groups."""
    dynamic_sampling: bool = False
    """DAPO: replace prompts whose responses are all right or all wrong by other prompts;
    --dynamic-sampling-by defines which groups those are."""
    dynamic_sampling_by: Literal["rewards", "credit"] = "credit"
    """Criterion for resampling a group. "rewards": all or no responses are correct, before any correction, as
    in DAPO. "credit": in addition, no response or correction has an advantage. Groups without a correct
    response are then corrected first, and kept if some corrections succeed. "credit" is the default where
    there are corrections, because those groups need them most; it also spends corrections on groups that are
    dropped in the end."""
    dynamic_sampling_rounds: Annotated[int, COUNT] = 10
    """Most batches of --rollout-batch-size prompts that a step may sample for that. Prompts of rounds that a
    step does not need are skipped, so that the order of prompts does not depend on results. 10 as in DAPO."""
    overlong_buffer_share: Annotated[float, UNIT] = 0.0
    """DAPO: share of --rollout-max-response-len, at its end, in which a response loses reward, up to 1 at the
    full length. 0: off; DAPO uses 0.2 (4,096 of 20,480 tokens)."""

    @property
    def trains_critic(self) -> bool:
        """True if the estimator of --advantages declares `needs_critic`: a critic is trained beside the
        policy. Raises ConfigError if the user's estimator cannot be loaded."""
        if not is_import_path(self.advantages):
            return self.advantages == "critic"  # the only one of the package
        return bool(getattr(load_hook("--advantages", self.advantages), "needs_critic", False))

    @property
    def num_models(self) -> int:
        """Number of trained models: the policy, and the critic if there is one, which has about its size."""
        return 2 if self.trains_critic else 1


@dataclass
class LossConfig:
    """The policy-gradient loss."""

    loss_variant: str = "gspo"
    """Name in `megatron_ibpo.loss.VARIANTS`: gspo, gspo-token, gspo-dual-clip, grpo, ppo-clip, dual-clip,
    dapo, dr-grpo, cispo, sapo, gmpo, nll; or an import path package.module:VARIANT. A variant owns its
    parameters: naming another variant discards the clips and --loss-param given for the previous one."""
    loss_param: Annotated[tuple[str, ...], NAMED_VALUES] = ()
    """Parameters of the loss variant as name=value, such as sapo's tau_pos=1.2; in a recipe also a mapping.
    Each variant defines their defaults and ranges."""
    eps_clip: float | None = None
    """Lower clip range, the variant's parameter eps_low. None: the variant's own, 3e-4 for gspo, as is usual
    with its length-normalised ratio, .2 for grpo."""
    eps_clip_high: float | None = None
    """Upper clip range, the variant's parameter eps_high. None: --eps-clip if given, otherwise the variant's
    own, 4e-4 for gspo, .2 for grpo, .28 for dapo."""
    loss_aggregation: Literal["variant", "sequence-mean", "token-mean", "constant"] = "variant"
    """Divisor of a sequence's sum over tokens. "sequence-mean": its own length. "token-mean": the mean length
    of the mini-batch, so that every token counts the same. "constant": --rollout-max-response-len. "variant":
    as published for the variant."""
    loss_backend: Literal["auto", "triton", "torch"] = "auto"
    """Implementation of the loss. "auto": the Triton kernels on GPUs wherever they can be used, plain torch
    otherwise; the choice is printed at start."""
    fuse_lm_head: bool = False
    """Compute logits, loss and gradient in chunks of rows inside the loss, so that logits are never held
    whole. Saves tokens per micro-batch times vocabulary of memory, and takes one or two fp32 matrices of the
    LM head's size. Off because its speed on GPUs has not been measured."""
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the KL divergence from the reference policy (--ref-load) in the loss. 0: no reference, as in
    the paper."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of that divergence from the sampled tokens: -d, d²/2 or e^d - d - 1 of the log-ratio d = log
    π_ref - log π. "k3" is unbiased and never negative."""
    value_clip: Annotated[float, POSITIVE] = 0.2
    """Largest move of the critic's value from its old one that its loss still follows (PPO)."""
    old_logprobs: Literal["recompute", "engine"] = "recompute"
    """Log-probs of the sampled tokens in the denominator of the loss's ratios. "recompute": the trainer's
    own, under its weights at the first optimizer step of a rollout, from a forward pass where one is needed.
    Differences from the engine are left to the importance corrections. "engine": the log-probs that the
    engine sampled by. Saves the pass, but ratios and clips then also act on that difference."""
    use_routing_replay: bool = False
    """Mixture-of-experts models: in a rollout's optimizer steps, routers reuse the experts chosen in the pass
    for the old log-probs, so that a ratio does not compare two different models. Off: each pass routes by
    itself. A mini-batch whose own pass gives its old log-probs (the first, without importance corrections,
    in one epoch) has nothing to replay."""
    use_tis: bool = False
    """Importance correction: weight the gradient of each token by its ratio of trainer to engine, at most
    --tis-clip (ibpo step 14, per token). Off, as in the paper."""
    tis_clip: Annotated[float, POSITIVE] = 2.0
    """Largest such weight. 2 as published."""
    icepop: Annotated[tuple[float, float] | None, AROUND_1] = None
    """Importance correction instead of --use-tis, LOW HIGH: weight tokens by that ratio, and by 0 where it
    lies outside. Published: 0.5 5."""
    sequence_rejection: Annotated[tuple[float, float] | None, AROUND_1] = None
    """Importance correction, alone or with one of the above, LOW HIGH: weight a sequence by 0 if the
    geometric mean of its tokens' ratios lies outside. The mean is near 1, so use tight bounds, such as 0.99
    1.01."""
    num_steps_per_rollout: Annotated[int, COUNT] = 1
    """Optimizer steps (mini-batches of whole prompts) per epoch over a rollout. With 1, and one epoch, all
    ratios to recomputed log-probs are 1."""
    num_epochs_per_rollout: Annotated[int, COUNT] = 1
    """Passes over a rollout's responses (PPO's epochs, the μ of GRPO). Each pass trains on the same
    mini-batches in the same order; old log-probs stay those before the first step, so ratios and clips act
    from the second pass on. Each pass costs an update; the learning-rate schedule counts all optimizer
    steps."""

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps per rollout, over all epochs."""
        return self.num_steps_per_rollout * self.num_epochs_per_rollout

    @property
    def corrections(self) -> list[str]:
        """Flags of the importance corrections that are on."""
        on = {
            "--use-tis": self.use_tis,
            "--icepop": self.icepop is not None,
            "--sequence-rejection": self.sequence_rejection is not None,
        }
        return [name for name, chosen in on.items() if chosen]

    @property
    def engine_logprob_readers(self) -> list[str]:
        """Flags under which the loss reads the log-probs of sampling."""
        return [*self.corrections, *(["--old-logprobs engine"] if self.old_logprobs == "engine" else [])]

    def problems(self, size: int) -> list[str]:
        """Return the problems at this --rollout-batch-size, one line each."""
        from_engine, steps = self.old_logprobs == "engine", self.num_steps_per_rollout
        return broken(
            {
                f"--num-steps-per-rollout {steps}: does not divide --rollout-batch-size {size}, and "
                "mini-batches must hold equally many whole prompts": steps >= 1 and size % steps > 0,
                "--use-tis and --icepop both weight tokens by the same ratio: take one of them": (
                    self.use_tis and self.icepop is not None
                ),
                f"{' and '.join(self.corrections)} cannot be combined with --old-logprobs engine, which "
                "recomputes no log-probs to compare with the engine's; drop one of the two": (
                    bool(self.corrections) and from_engine
                ),
                "--use-routing-replay: replays the trainer's pass for old log-probs, which --old-logprobs "
                "engine does not run; use --use-rollout-routing-replay": self.use_routing_replay
                and from_engine,
            }
        )
