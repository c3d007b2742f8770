"""Merged weights compared with vLLM's own adapters: what an engine loads, how long that takes, how fast it
samples.

    "$(bash tools/bootstrap.sh dev)" tools/bench_adapters.py --save tools/results/bench_adapters.json

Each case is an engine in a separate process, on the same random model with the same random adapters: once
with the merged weights, once with the plain ones and the adapter beside them. Both should sample the same
greedy tokens, except for rounding.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import bench
import torch

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.weights.weight_errors import first_line

TARGETS = {
    "qwen3": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3_next attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qwen3_next delta nets": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
}
"""Modules with adapters in each case."""
Form = Literal["merged", "adapter"]


@dataclass
class Arguments(bench.Saving):
    rank: int = 8
    prompts: int = 32
    prompt_tokens: int = 64
    tokens: int = 64
    """Tokens of each response; the end of sequence is ignored."""
    rounds: int = 5
    """Rounds of sampling, after one that is not counted."""


def make_model(directory: Path, case: str) -> Path:
    """Write random weights: a dense Qwen3 of 0.1 B parameters in float32, or a Qwen3-Next in bfloat16, as
    vLLM's CPU kernels require."""
    import transformers

    shared: dict[str, Any] = {
        "vocab_size": 8192, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 64, "max_position_embeddings": 512, "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any
    if case == "qwen3":
        dense = transformers.Qwen3Config(**shared, num_hidden_layers=24, intermediate_size=2048)
        model = transformers.Qwen3ForCausalLM(dense)
    else:
        hybrid = transformers.Qwen3NextConfig(
            **shared, num_hidden_layers=8, linear_num_key_heads=4,
            linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
            linear_conv_kernel_dim=4, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256,
            shared_expert_intermediate_size=256, intermediate_size=1024,
        )  # fmt: skip
        model = transformers.Qwen3NextForCausalLM(hybrid)
        model = model.to(torch.bfloat16)
    model.save_pretrained(directory / "plain")
    return directory / "plain"


def add_adapters(plain: Path, directory: Path, targets: tuple[str, ...], rank: int) -> None:
    """Write `adapter` with a random B as well, and `merged`, made by PEFT."""
    import peft
    import transformers

    base: Any = transformers.AutoModelForCausalLM.from_pretrained(plain)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(targets), init_lora_weights=False
    )
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(str(directory / "adapter"))
    merged: Any = adapted.merge_and_unload()
    merged.save_pretrained(directory / "merged")


def sample(case: str, directory: Path, form: Form, arguments: Arguments, answers: Any) -> None:
    """Sample in a separate process; store the measurements, or why this engine cannot."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import PromptType, TokensPrompt
    from vllm.lora.request import LoRARequest

    try:
        with_adapter = form == "adapter"
        lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": max(8, arguments.rank)}
        engine = LLM(
            str(directory / ("plain" if with_adapter else "merged")),
            skip_tokenizer_init=True,
            max_model_len=256,
            kv_cache_memory_bytes=512 * 1024**2,
            enforce_eager=True,
            enable_prefix_caching=False,
            dtype="float32" if case == "qwen3" else "bfloat16",
            **(lora if with_adapter else {}),
        )
        request = LoRARequest("a", 1, str(directory / "adapter")) if with_adapter else None
        found: dict[str, Any] = {}
        if request is not None:
            began = time.perf_counter()
            engine.llm_engine.add_lora(request)
            found["seconds_to_load_adapter"] = time.perf_counter() - began
        parameters = SamplingParams(
            temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True, detokenize=False
        )
        draw = torch.Generator().manual_seed(1)
        shape = (arguments.prompts, arguments.prompt_tokens)
        drawn = torch.randint(3, 8000, shape, generator=draw).tolist()
        prompts: list[PromptType] = [TokensPrompt(prompt_token_ids=ids) for ids in drawn]
        seconds: list[float] = []
        written: list[list[int]] = []
        for _ in range(arguments.rounds + 1):
            began = time.perf_counter()
            outputs = engine.generate(prompts, parameters, lora_request=request, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
            written = [list(own.outputs[0].token_ids) for own in outputs]
        answers.put({"seconds": seconds[1:], **found, "written": written})
    except Exception as error:  # any error of vLLM is the answer
        answers.put({"error": f"{type(error).__name__}: {first_line(error)}"})


def in_a_process(case: str, directory: Path, form: Form, arguments: Arguments) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=sample, args=(case, directory, form, arguments, answers))
    process.start()
    try:
        found: dict[str, Any] = answers.get(timeout=600)
    finally:
        process.join(30)
        process.kill()
    return found


def measure(case: str, arguments: Arguments) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="adapters-") as scratch:
        directory = Path(scratch)
        add_adapters(make_model(directory, case), directory, TARGETS[case], arguments.rank)
        forms: tuple[Form, ...] = ("merged", "adapter")
        result: dict[str, Any] = {"case": case, "targets": TARGETS[case]}
        written = {}
        for form in forms:
            size = sum(file.stat().st_size for file in (directory / form).glob("*.safetensors"))
            found = in_a_process(case, directory, form, arguments)
            if "seconds" in found:
                written[form] = found.pop("written")
                tokens = arguments.prompts * arguments.tokens
                found["tokens_per_second"] = tokens / statistics.median(found["seconds"])
            result[form] = {"bytes": size, **found}
            shutil.rmtree(directory / form)
        if len(written) == len(forms):
            pairs = [(a, b) for own in zip(*written.values(), strict=True) for a, b in zip(*own, strict=True)]
            result["share_of_equal_tokens"] = sum(a == b for a, b in pairs) / len(pairs)
    return result


def main(arguments: Arguments) -> None:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    options = {name: value for name, value in vars(arguments).items() if name != "save"}
    measured_on = machine("peft") | {"load_average_before": os.getloadavg()[0]}
    results = []
    for case in TARGETS:
        results.append(measure(case, arguments))
        print(json.dumps(results[-1], indent=2), flush=True)
        record = {"machine": measured_on, "options": options, "results": results}
        bench.write(arguments.save, record)  # after each case, since some take minutes


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
