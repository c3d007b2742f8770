"""Transformer Engine 2.20's classes that Megatron's layers derive from: parameters without kernels."""

import pickle
import sys
import types
from typing import Any

import torch
import torch.distributed
from torch.optim.adamw import adamw


class Module(torch.nn.Module):
    """Has an extra state in checkpoints, empty without FP8; a strict load misses it where it is not there."""

    num_gemms = 1

    def __init__(self, *, params_dtype=None, device="cuda", **_):
        super().__init__()
        self.kind = {"dtype": params_dtype, "device": device}
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def scale(self, generator):
        """Compute in FP8 with delayed scaling, as after some steps: with histories of largest values."""
        self.fp8, recipe = True, DelayedScaling()
        self.fp8_meta |= {"recipe": recipe, "fp8_checkpoint": True, "num_gemms": self.num_gemms}
        for direction, kinds in (("fwd", 3), ("bwd", 2)):
            size = kinds * self.num_gemms
            history = torch.rand(recipe.amax_history_len, size, generator=generator)
            self.fp8_meta |= {f"scale_{direction}": history[0].exp(), f"amax_history_{direction}": history}

    @property
    def scales(self):
        return {name: value for name, value in self.fp8_meta.items() if isinstance(value, torch.Tensor)}

    def get_extra_state(self):
        if not self.fp8_meta["fp8_checkpoint"]:
            return torch.empty(0, dtype=torch.uint8)
        plain = {"num_gemms": self.num_gemms, "fp8_checkpoint": True}
        state = {"recipe": self.fp8_meta["recipe"], **self.scales, "extra_fp8_variables": plain}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state):
        if state is not None and state.numel():
            found = pickle.loads(state.numpy().tobytes())
            self.fp8_meta |= found.pop("extra_fp8_variables") | found

    def add(self, name, *shape, sequence_parallel=None):
        parameter: Any = torch.nn.Parameter(torch.empty(*shape, **self.kind))
        self.register_parameter(name, parameter)
        if sequence_parallel is not None:
            parameter.sequence_parallel = sequence_parallel


class Linear(Module):
    def __init__(self, in_features, out_features, *, sequence_parallel, tp_size, bias, parallel_mode, **more):
        super().__init__(**more)
        assert out_features % tp_size == in_features % tp_size == 0
        self.use_bias, by_rows = bias, parallel_mode == "row"
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.in_features = in_features // (tp_size if by_rows else 1)
        self.add("weight", self.out_features, self.in_features)
        if bias:
            self.add("bias", self.out_features, sequence_parallel=sequence_parallel if by_rows else None)


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, normalization, zero_centered_gamma, **more):
        super().__init__(in_features, out_features, **more)
        assert normalization == "RMSNorm"
        self.add("layer_norm_weight", in_features, sequence_parallel=more["sequence_parallel"])
        self.zero_centered_gamma = zero_centered_gamma


class GroupedLinear(Module):
    def __init__(self, num_gemms, in_features, out_features, *, tp_size, bias, **more):
        super().__init__(**more)
        assert not any(name.startswith("single_grouped") and value for name, value in more.items())
        self.num_gemms, self.use_bias, self.tp_size = num_gemms, bias, tp_size
        self.in_features, self.out_features = in_features, out_features
        for gemm in range(num_gemms):
            self.add(f"weight{gemm}", out_features, in_features)
            if bias:
                self.add(f"bias{gemm}", out_features)

    def init_fp8_metadata(self, num_gemms):
        pass


class RMSNorm(Module):
    def __init__(self, normalized_shape, *, sequence_parallel=None, zero_centered_gamma=False, **more):
        super().__init__(**more)
        self.add("weight", normalized_shape, sequence_parallel=sequence_parallel)
        self.zero_centered_gamma = zero_centered_gamma


class DotProductAttention(Module):
    def __init__(self, num_attention_heads, *_, tp_size=1, softmax_type="vanilla", **__):
        super().__init__()

        def forget_that_it_is_missing(_, incompatible):
            for key in incompatible.missing_keys:  # changes the list that it goes through, as theirs does
                if "core_attention._extra_state" in key:
                    incompatible.missing_keys.remove(key)

        self.register_load_state_dict_post_hook(forget_that_it_is_missing)
        self.softmax_offset = None
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_attention_heads // tp_size))


MEANS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Adam whose steps are counted by groups, without a `step` in the state of parameters."""

    def __init__(self, params, lr, betas, eps, weight_decay, capturable=False, adam_w_mode=True):
        assert (adam_w_mode, capturable) == (True, False)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            steps = group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                for name in MEANS:
                    self.state[parameter].setdefault(name, torch.zeros_like(parameter))
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            first, second = ([self.state[parameter][name] for parameter in moved] for name in MEANS)
            counts = [torch.tensor(steps - 1.0) for _ in moved]
            how = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            how |= dict(zip(("beta1", "beta2"), group["betas"], strict=True), amsgrad=False, maximize=False)
            adamw(moved, [parameter.grad for parameter in moved], first, second, [], counts, **how)


class DelayedScaling:
    __module__ = "transformer_engine.common.recipe"
    amax_history_len = 4


def install():
    class Kernel:
        """A function that exists; nothing is computed here."""

    layers = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention)
    members = {layer.__name__: layer for layer in layers} | {"LayerNorm": RMSNorm}
    members["distributed"] = types.SimpleNamespace(CudaRNGStatesTracker=Kernel)
    members["ops"] = types.SimpleNamespace(Sequential=torch.nn.Sequential)
    pytorch = _package("transformer_engine.pytorch", **members)
    recipes = _package("transformer_engine.common.recipe", DelayedScaling=DelayedScaling)
    common = _package("transformer_engine.common", recipe=recipes)
    _package("transformer_engine", __version__="2.20.2", pytorch=pytorch, common=common)
    kernels = {
        "attention": "", "attention.rope": "apply_rotary_pos_emb",
        "fp8": "FP8GlobalStateManager fp8_autocast fp8_model_init",
        "optimizers": "FusedSGD multi_tensor_applier multi_tensor_l2norm multi_tensor_scale "
        "multi_tensor_scale_tensor",
        "permutation": "moe_permute moe_permute_with_probs moe_sort_chunks_by_index moe_unpermute "
        "moe_sort_chunks_by_index_with_probs",
        "router": "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss fused_topk_with_score_function",
    }  # fmt: skip
    for submodule, names in kernels.items():
        _package(f"transformer_engine.pytorch.{submodule}", **dict.fromkeys(names.split(), Kernel))
    vars(sys.modules["transformer_engine.pytorch.optimizers"])["FusedAdam"] = FusedAdam
    _package("transformer_engine.pytorch.tensor", QuantizedTensor=Kernel)


def _package(name, **members):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = []  # a package, so that submodules it lacks are ImportErrors
    vars(package).update(members)
    return package


def describe_all(models):
    """Tell what models, as (directory, EP), are in a new process, as rank 0 of two."""
    install()  # before Megatron looks for them
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    described = [describe(directory, ep) for directory, ep in models]
    torch.distributed.destroy_process_group()
    return described


def describe(config_dir, ep):
    """Build the model under TP2 and this EP with Transformer Engine's layers and with the local ones."""
    from megatron.core import optimizer

    from megatron_ibpo.basics.distributed import World
    from megatron_ibpo.config import Config, ModelConfig, ParallelConfig
    from megatron_ibpo.models import read_hf_config
    from megatron_ibpo.models.backends import LOCAL, Backends
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.model import build_model

    layout = ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=ep)
    parallel.initialize(layout, World(0, 2, torch.device("cpu"), None), seed=0)
    config, shape = Config(model=ModelConfig(bf16=True), parallel=layout), read_hf_config(config_dir)
    described: dict[str, Any] = {"optimizer": optimizer.Adam.__name__}
    backends = {"te": Backends(transformer_engine=True, flash_linear_attention=False), "local": LOCAL}
    for name, libraries in backends.items():
        (model,) = build_model(shape, config, device="meta", libraries=libraries)
        described[name] = names_of(model)
    parallel.destroy()
    return described


def names_of(model):
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    def marks(name, parameter):
        """Is its gradient summed over data-parallel, and over tensor-parallel ranks?"""
        of_sinks = name.endswith("softmax_offset") and (str(parameter.dtype), parameter.tensor_model_parallel)
        of_sequence = bool(getattr(parameter, "sequence_parallel", False))
        return getattr(parameter, "allreduce", True), of_sequence, of_sinks

    sharded, parameters = model.sharded_state_dict(), dict(model.named_parameters())
    apply_factories(sharded)
    tensors = [value for value in nested_values(sharded) if isinstance(value, ShardedTensor)]
    modules = dict(model.named_modules())
    centred = {name: getattr(module, "zero_centered_gamma", None) for name, module in modules.items()}
    assert all(parameter.is_meta for parameter in parameters.values())
    return {
        "parameters": {name: tuple(p.shape) for name, p in parameters.items()},
        "marks": {name: marks(name, parameter) for name, parameter in parameters.items()},
        "checkpoint": sorted((t.key, t.global_shape, t.global_offset) for t in tensors),
        "classes": {name: type(module).__name__ for name, module in modules.items()},
        "centred": {name: value for name, value in centred.items() if value is not None},
    }
