"""The tables of torch's elementwise operators as Triton says them, exactly as torch computes them in float32
and bool, NaN and infinity included. (`tl.minimum` and `tl.maximum` drop NaN unless they are told to propagate
it.)

Derivatives take one liberty: where a `where` chose 0, products and quotients with it are 0, also where the
other operand is infinite or NaN. So derivatives of terms that overflow may be 0 where they are NaN in torch.
"""

import torch

aten = torch.ops.aten
PROPAGATE_NAN = "tl.PropagateNan.ALL"

ARITHMETIC = {
    aten.mul: "{} * {}", aten.add: "{} + {}", aten.sub: "{} - {}", aten.div: "{} / {}",
    aten.minimum: f"tl.minimum({{}}, {{}}, {PROPAGATE_NAN})",
    aten.maximum: f"tl.maximum({{}}, {{}}, {PROPAGATE_NAN})",
    aten.fmin: "tl.minimum({}, {})", aten.fmax: "tl.maximum({}, {})",
}  # fmt: skip
"""Operators from two floats to a float."""
COMPARISONS = {
    aten.lt: "{} < {}", aten.gt: "{} > {}", aten.le: "{} <= {}", aten.ge: "{} >= {}",
    aten.eq: "{} == {}", aten.ne: "{} != {}",
}  # fmt: skip
"""Operators from two floats to a bool."""
LOGICAL = {
    aten.logical_and: "{} & {}", aten.logical_or: "{} | {}", aten.logical_xor: "{} ^ {}",
    aten.bitwise_and: "{} & {}", aten.bitwise_or: "{} | {}", aten.bitwise_xor: "{} ^ {}",
    aten.mul: "{} & {}", aten.add: "{} | {}", aten.minimum: "{} & {}", aten.maximum: "{} | {}",
}  # fmt: skip
"""Operators from two bools to a bool."""
UNARY = {
    aten.exp: "tl.exp({})", aten.exp2: "tl.exp2({})", aten.log: "tl.log({})", aten.log2: "tl.log2({})",
    aten.sqrt: "tl.sqrt({})", aten.rsqrt: "1.0 / tl.sqrt({})", aten.reciprocal: "1.0 / {}", aten.neg: "-{}",
    aten.abs: "tl.abs({})", aten.sin: "tl.sin({})", aten.cos: "tl.cos({})", aten.erf: "tl.erf({})",
    aten.sigmoid: "tl.sigmoid({})", aten.tanh: "tanh_of({})", aten.expm1: "expm1_of({})",
    aten.log1p: "log1p_of({})", aten.sign: "sign_of({})",
    aten.relu: f"tl.maximum({{}}, 0.0, {PROPAGATE_NAN})",
    aten.floor: "tl.floor({})", aten.ceil: "tl.ceil({})",
}  # fmt: skip
"""Operators from a float to a float."""
TESTS = {aten.isnan: "{0} != {0}", aten.isinf: "tl.abs({}) == float('inf')", aten.logical_not: "{} == (0.0)"}
"""Operators from a float to a bool."""
IDENTITIES = (
    aten.detach, aten.detach_copy, aten.alias, aten.alias_copy, aten.clone, aten.lift_fresh_copy, aten.view,
    aten.view_copy, aten.expand, aten.expand_copy,
)  # fmt: skip
CREATED = {aten.full_like: 1, aten.full: 1, aten.scalar_tensor: 0, aten.new_full: 2}
"""Operators that make a tensor of one number, and the argument that is the number."""
SELECTED = {aten.lt: aten.minimum, aten.gt: aten.maximum}
"""where(x < y, x, y) by the comparison."""
KEEP_NAN = {
    aten.mul, aten.add, aten.sub, aten.neg, aten.exp, aten.clamp, aten.sigmoid, aten.minimum, aten.maximum,
    *IDENTITIES,
}  # fmt: skip
"""Operators that are NaN if an operand is, and make none of finite operands."""
LARGEST_POWER = 8
"""Powers up to this are written out as products."""
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
LAYOUT = ("dtype", "layout", "device", "pin_memory", "memory_format", "implicit", "size", "non_blocking")
"""Arguments of operators that do not change numbers, other than by the dtype of the result."""

IMPORTS = "import triton\nimport triton.language as tl\n"
PREAMBLE = """

@triton.jit
def sign_of(x):  # of NaN 0, as in torch
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def log1p_of(x):  # Kahan's: the rounding of 1 + x cancels
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.where(x == float("inf"), x, tl.log(u) * (x / (u - 1.0))))


@triton.jit
def expm1_of(x):  # Kahan's
    u = tl.exp(x)
    near = tl.abs(x) < 1.0
    return tl.where(u == 1.0, x, tl.where(near, (u - 1.0) * (x / tl.log(tl.where(near, u, 2.0))), u - 1.0))


@triton.jit
def tanh_of(x):
    t = expm1_of(-2.0 * tl.abs(x))
    return tl.where(x != x, x, sign_of(x) * (-t / (t + 2.0)))


"""
