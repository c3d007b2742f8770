"""Compiles every kernel with every loss variant ahead of time, without a GPU, and prints what came out.

    PYTHONPATH=tests python -m support.aot_kernels 90          # one compute capability; a JSON object a line
    PYTHONPATH=tests python -m support.aot_kernels --save      # all of them, into tools/results

Run as a program of its own: Triton's interpreter, which other tests use, cannot share a process with the
compiler.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_ibpo.kernels import row_logprobs, row_statistics, segment_loss, set_rows
from megatron_ibpo.loss import VARIANTS, make_objective
from megatron_ibpo.loss.objective import KL_ESTIMATORS
from support.paths import ROOT

RECORD = ROOT / "tools/results/compiled_kernels.json"
CAPABILITIES = (80, 90, 100)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {
    "targets_ptr": "*i64", "mask_ptr": "*i1", "cu_ptr": "*i32", "clipped_ptr": "*i1",
    "ids_ptr": "*i32", "starts_ptr": "*i64", "stops_ptr": "*i64",
    "row_stride": "i64", "out_row_stride": "i64", "constant": "fp32", "kl_coef": "fp32",
}  # fmt: skip
"""Of arguments that are not "*fp32" (…_ptr) or "i32"."""


def compile_kernel(kernel, capability, num_warps, types, constants, params):
    """(SASS, resource usage) of one kernel; pointers, strides and widths divide by 16."""
    signature, fixed, attributes = {"parameters": ("fp32",) * params, "pointers": ()}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            fixed[(place,)] = constants[name]
        elif name not in signature:
            default = "*fp32" if name.endswith("_ptr") else "i32"
            signature[name] = types.get(name, TYPES.get(name, default))
            if name.endswith(("_ptr", "_stride", "_columns")):
                attributes[(place,)] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(compiled.asm["cubin"])
        sass, usage = (
            subprocess.run([CUOBJDUMP, option, cubin.name], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "--dump-resource-usage")
        )
    return sass, usage


def loops(sass):
    """Instructions of every loop: from the target of a backward branch to the branch."""
    lines = [(int(a, 16), t) for a, t in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]+);", sass)]
    places = {address: place for place, (address, _) in enumerate(lines)}
    for place, (address, text) in enumerate(lines):
        target = re.search(r"BRA.*?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            yield [text for _, text in lines[places[int(target[1], 16)] : place + 1]]


def describe(sass, usage):
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    report = {"registers": registers, "stack": stack, "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass))}
    report["instructions"] = len(re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?!\s|NOP)", sass))
    # one exponential an element; the loop of the rows that are read again is the one with barriers
    bodies = [loop for loop in loops(sass) if not any(line.startswith("BAR") for line in loop)]
    sizes = [(sum("MUFU.EX2" in line for line in body), len(body)) for body in bodies]
    elements, size = max(sizes, key=lambda pair: pair[0], default=(0, 0))
    if elements:
        report["instructions_per_element"] = round(size / elements, 2)
    for kind, instruction in (("load", "LDG"), ("store", "STG")):
        wide = re.findall(rf"\b{instruction}\S*?\.(64|128)\b", sass)
        report[f"widest_{kind}_bits"] = max(map(int, wide), default=32)
    return report


def cases():
    """(name, kernel, warps, constants, argument types, number of parameters)."""
    plain = {"TEMPERATURE_PER_ROW": False, "BLOCK": row_statistics.BLOCK_V}
    for dtype in ("bf16", "fp32"):
        logits = {"logits_ptr": f"*{dtype}", "out_ptr": "*fp32"}
        for entropy in (False, True):
            name = f"row_statistics{'+entropy' if entropy else ''} {dtype}"
            kernel, warps = row_statistics.row_statistics_kernel, row_statistics.NUM_WARPS
            yield name, kernel, warps, {**plain, "ENTROPY": entropy}, logits, 0
        kernel, warps = row_logprobs.logits_gradient_kernel, row_logprobs.NUM_WARPS
        plain["BLOCK"] = row_logprobs.BLOCK_V
        yield f"logits_gradient {dtype}", kernel, warps, plain, {**logits, "out_ptr": f"*{dtype}"}, 0
        yield from set_cases(dtype)
    yield "combine", row_statistics.combine_kernel, 4, {"BLOCK": row_statistics.BLOCK_N}, {}, 0
    for variant, kl in [
        *((v, None) for v in VARIANTS),
        *((v, kl) for kl in KL_ESTIMATORS for v in ("gspo", "grpo")),
    ]:
        yield from segment_cases(variant, kl)


def set_cases(dtype):
    fixed, warps = {"TEMPERATURE_PER_ROW": True, "BLOCK": set_rows.BLOCK, "ENTROPY": True}, set_rows.NUM_WARPS
    yield (
        f"set_statistics {dtype}", set_rows.set_statistics_kernel, warps, fixed,
        {"logits_ptr": f"*{dtype}"}, 0,
    )  # fmt: skip
    yield f"set_gradient {dtype}", set_rows.set_gradient_kernel, warps, fixed, {"out_ptr": f"*{dtype}"}, 0


def segment_cases(variant, kl):
    registered = VARIANTS[variant]
    terms = segment_loss.traced_terms(make_objective(variant, aggregation=1.0, kl=kl or "k3"), ())
    name = variant if kl is None else f"{variant}+{kl}"
    warps, params = segment_loss.NUM_WARPS, len(registered.params)
    tokens = {"TOKEN_TERM": terms.token, "KL": terms.kl if kl else None, "ADVANTAGE_PER_TOKEN": False}
    tokens |= {"BLOCK": segment_loss.BLOCK, "token_weights_ptr": None}
    tokens |= {} if kl else {"ref_ptr": None, "kl_ptr": None}
    tokens |= {} if terms.token else {"clipped_ptr": None}
    sums = tokens | ({} if registered.sequence_ratio else {"mean_log_ratio_ptr": None})
    yield f"segment_sums {name}", segment_loss.segment_sums_kernel, warps, sums, {}, params
    for number, aggregation in enumerate(("sequence-mean", "token-mean", "constant")):
        constants = {"SEQUENCE_TERM": terms.sequence, "HAS_TOKEN_TERM": terms.token is not None}
        constants |= {"AGGREGATION": number, "BLOCK": segment_loss.BLOCK_S}
        kernel = segment_loss.sequence_loss_kernel
        yield f"sequence_loss {name} {aggregation}", kernel, warps, constants, {}, params
    coefficients = {**tokens, "SEQUENCE_RATIO": registered.sequence_ratio}
    kernel = segment_loss.token_coefficients_kernel
    yield f"token_coefficients {name}", kernel, warps, coefficients, {}, params


def sources_hash():
    terms = [ROOT / "megatron_ibpo/loss" / name for name in ("variants.py", "objective.py")]
    launches = Path(__file__).with_name("dry_launches.py")
    files = [*sorted((ROOT / "kernels").glob("*.py")), *terms, Path(__file__), launches]
    read = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(read + triton.__version__.encode()).hexdigest()


def compile_all(capability):
    done = {}  # variants that share a term share its kernels
    for name, kernel, warps, constants, types, params in cases():
        fixed = {key: value for key, value in constants.items() if key in kernel.arg_names}
        terms = [(key, getattr(value, "__module__", value)) for key, value in fixed.items()]
        same = id(kernel), *terms, *types.items(), params
        if same not in done:
            done[same] = describe(*compile_kernel(kernel, capability, warps, types, fixed, params))
        yield {"kernel": name, **done[same]}


if __name__ == "__main__":
    asked = sys.argv[1]
    if asked == "--save":
        reports = {str(capability): list(compile_all(capability)) for capability in CAPABILITIES}
        bound = subprocess.check_output([sys.executable, "-m", "support.dry_launches"])
        about = {"hash": sources_hash(), "triton": triton.__version__, "launches": int(bound)}
        about["reports"] = reports
        RECORD.write_text(json.dumps(about, indent=1) + "\n")
    else:
        for report in compile_all(int(asked)):
            print(json.dumps(report), flush=True)
