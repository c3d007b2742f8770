"""Transformer Engine 2.20's classes that Megatron's layers derive from: parameters without kernels."""

import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import torch

VERSION = "2.20.2"


class Module(torch.nn.Module):
    """The common part of Transformer Engine's modules: an extra state in checkpoints, empty without FP8,
    which a strict load misses where it is not there."""

    num_gemms = 1

    def __init__(self):
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def scale(self, generator: torch.Generator) -> None:
        """Compute in FP8 with delayed scaling, as after some steps: three scales forward and two backward for
        each product, each with a history of largest values."""
        self.fp8, recipe = True, DelayedScaling()
        self.fp8_meta |= {"recipe": recipe, "fp8_checkpoint": True, "num_gemms": self.num_gemms}
        for direction, kinds in (("fwd", 3), ("bwd", 2)):
            size = kinds * self.num_gemms
            self.fp8_meta[f"scale_{direction}"] = torch.rand(size, generator=generator)
            history = torch.rand(recipe.amax_history_len, size, generator=generator)
            self.fp8_meta[f"amax_history_{direction}"] = history

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.fp8_meta.items() if isinstance(value, torch.Tensor)}

    def get_extra_state(self):
        if not (self.fp8 or self.fp8_meta["fp8_checkpoint"]):
            return torch.empty(0, dtype=torch.uint8)
        plain = {"num_gemms": self.num_gemms, "fp8_checkpoint": True}
        state = {"recipe": self.fp8_meta["recipe"], **self.scales, "extra_fp8_variables": plain}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state):
        if state is None or state.numel() == 0:
            return
        found = pickle.loads(state.numpy().tobytes())
        self.fp8_meta |= found.pop("extra_fp8_variables") | found

    def add(self, name: str, *shape: int, dtype: Any, device: Any) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
        self.register_parameter(name, parameter)
        return parameter


class Linear(Module):
    def __init__(
        self,
        in_features,
        out_features,
        *,
        sequence_parallel=False,
        tp_size=1,
        bias=True,
        parallel_mode=None,
        params_dtype=None,
        device="cuda",
        **_,
    ):
        super().__init__()
        assert out_features % tp_size == in_features % tp_size == 0
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.use_bias, self.kind = bias, {"dtype": params_dtype, "device": device}
        self.add("weight", self.out_features, self.in_features, **self.kind)
        if bias:
            own: Any = self.add("bias", self.out_features, **self.kind)
            if parallel_mode == "row":
                own.sequence_parallel = sequence_parallel


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, normalization, zero_centered_gamma, **more):
        super().__init__(in_features, out_features, **more)
        assert normalization == "RMSNorm"
        norm: Any = self.add("layer_norm_weight", in_features, **self.kind)
        norm.sequence_parallel = more["sequence_parallel"]
        self.zero_centered_gamma = zero_centered_gamma


class GroupedLinear(Module):
    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        *,
        tp_size=1,
        bias=True,
        params_dtype=None,
        device="cuda",
        single_grouped_weight=False,
        single_grouped_bias=False,
        **_,
    ):
        super().__init__()
        assert not single_grouped_weight
        assert not single_grouped_bias
        self.num_gemms, self.use_bias, self.tp_size = num_gemms, bias, tp_size
        self.in_features, self.out_features = in_features, out_features
        for gemm in range(num_gemms):
            self.add(f"weight{gemm}", out_features, in_features, dtype=params_dtype, device=device)
            if bias:
                self.add(f"bias{gemm}", out_features, dtype=params_dtype, device=device)

    def init_fp8_metadata(self, num_gemms: int) -> None:
        pass


class RMSNorm(Module):
    def __init__(
        self,
        normalized_shape,
        *,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        device="cuda",
        **_,
    ):
        super().__init__()
        own: Any = self.add("weight", normalized_shape, dtype=params_dtype, device=device)
        own.sequence_parallel = sequence_parallel
        self.zero_centered_gamma = zero_centered_gamma


class DotProductAttention(Module):
    def __init__(self, num_attention_heads, *_, tp_size=1, softmax_type="vanilla", **__):
        super().__init__()

        def forget_that_it_is_missing(_: Any, incompatible: Any) -> None:
            for key in incompatible.missing_keys:  # changes the list that it goes through, as theirs does
                if "core_attention._extra_state" in key:
                    incompatible.missing_keys.remove(key)

        self.register_load_state_dict_post_hook(forget_that_it_is_missing)
        self.softmax_offset = None
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_attention_heads // tp_size))


class Kernel:
    """A function that exists; nothing is computed here."""


class FusedAdam(torch.optim.Optimizer):
    """Adam whose steps are counted by groups, without a `step` in the state of parameters."""

    def __init__(self, params, lr, betas, eps, weight_decay, capturable=False, adam_w_mode=True):
        assert adam_w_mode
        assert not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
                if parameter.grad is None:
                    continue
                decay1, decay2 = group["betas"]
                state["exp_avg"].lerp_(parameter.grad, 1 - decay1)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - decay2)
                mean = state["exp_avg"] / (1 - decay1 ** group["step"])
                square = state["exp_avg_sq"] / (1 - decay2 ** group["step"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(mean, square.sqrt() + group["eps"], value=-group["lr"])


class CudaRNGStatesTracker:
    pass


class DelayedScaling:
    amax_history_len = 4


DelayedScaling.__module__ = "transformer_engine.common.recipe"


class QuantizedTensor:
    """No parameter is one."""


def install() -> None:
    layers = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention)
    pytorch = _package(
        "transformer_engine.pytorch", **{layer.__name__: layer for layer in layers}, LayerNorm=RMSNorm,
        distributed=types.SimpleNamespace(CudaRNGStatesTracker=CudaRNGStatesTracker),
        ops=types.SimpleNamespace(Sequential=torch.nn.Sequential),
    )  # fmt: skip
    recipes = _package("transformer_engine.common.recipe", DelayedScaling=DelayedScaling)
    common = _package("transformer_engine.common", recipe=recipes)
    _package("transformer_engine", __version__=VERSION, pytorch=pytorch, common=common)
    for submodule, names in {
        "attention": "",
        "attention.rope": "apply_rotary_pos_emb",
        "optimizers": (
            "FusedSGD multi_tensor_applier multi_tensor_l2norm multi_tensor_scale multi_tensor_scale_tensor"
        ),
        "permutation": (
            "moe_permute moe_permute_with_probs moe_sort_chunks_by_index "
            "moe_sort_chunks_by_index_with_probs moe_unpermute"
        ),
        "fp8": "FP8GlobalStateManager fp8_autocast fp8_model_init",
        "router": ("fused_compute_score_for_moe_aux_loss fused_moe_aux_loss fused_topk_with_score_function"),
    }.items():
        _package(f"transformer_engine.pytorch.{submodule}", **dict.fromkeys(names.split(), Kernel))
    vars(sys.modules["transformer_engine.pytorch.optimizers"])["FusedAdam"] = FusedAdam
    _package("transformer_engine.pytorch.tensor", QuantizedTensor=QuantizedTensor)


def _package(name: str, **members: Any) -> types.ModuleType:
    package = types.ModuleType(name)
    package.__path__ = []  # a package, so that submodules it lacks are ImportErrors
    vars(package).update(members)
    sys.modules[name] = package
    return package


def describe(config_dir: Path, ep: int) -> dict[str, Any]:
    from megatron_ibpo.basics.distributed import World
    from megatron_ibpo.config import Config, ModelConfig, ParallelConfig
    from megatron_ibpo.models import read_hf_config
    from megatron_ibpo.models.backends import LOCAL, Backends
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.model import build_model

    layout = ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=ep)
    parallel.initialize(layout, World(0, 2, torch.device("cpu"), None), seed=0)
    config = Config(model=ModelConfig(bf16=True), parallel=layout)
    shape = read_hf_config(config_dir)

    import megatron.core.optimizer

    described: dict[str, Any] = {"optimizer": megatron.core.optimizer.Adam.__name__}
    for name, libraries in (
        ("te", Backends(transformer_engine=True, flash_linear_attention=False)),
        ("local", LOCAL),
    ):
        (model,) = build_model(shape, config, device="meta", libraries=libraries)
        described[name] = names_of(model)
    parallel.destroy()
    return described


def names_of(model: Any) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    sharded = model.sharded_state_dict()
    apply_factories(sharded)
    tensors = [value for value in nested_values(sharded) if isinstance(value, ShardedTensor)]
    assert all(parameter.is_meta for parameter in model.parameters())
    return {
        "parameters": {name: tuple(p.shape) for name, p in model.named_parameters()},
        "marks": {
            name: (
                getattr(p, "allreduce", True),
                bool(getattr(p, "sequence_parallel", False)),
                name.endswith("softmax_offset") and (str(p.dtype), p.tensor_model_parallel),
            )
            for name, p in model.named_parameters()
        },
        "checkpoint": sorted((t.key, t.global_shape, t.global_offset) for t in tensors),
        "classes": {name: type(module).__name__ for name, module in model.named_modules()},
        "centred": {
            name: module.zero_centered_gamma
            for name, module in model.named_modules()
            if hasattr(module, "zero_centered_gamma")
        },
    }


if __name__ == "__main__":
    install()
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    models = [argument.rpartition(":") for argument in sys.argv[1:]]
    print(json.dumps([describe(Path(directory), int(ep)) for directory, _, ep in models]))
