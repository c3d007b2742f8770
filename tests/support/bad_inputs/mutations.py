"""Ways to make a valid input wrong: its values, its bytes, or the kind of file that holds it."""

import copy
import json
import math
import os
from typing import Any

WORDS = [
    "nan", "NaN", "-nan", "inf", "-inf", "Infinity", "1e999", "-1e999", "99999999999999999999", "-1", "0", "",
    "--", "-", "=", "None", "true", "1e308", "5e-324", "9" * 5000, "0x10", "1_000", "x", "\x00", "\n", "é",
    "🙂" * 50, "a=b", "a=nan", "=", "a=inf", "adaptive", "../../etc/passwd", "/", "~", "a:b", ":",
    "import://x:y", "%s", "{}", "a" * 300, "2**63", "9223372036854775807", "9223372036854775808",
    "4611686018427387904", ".5", "1.", "+1", "1000000000000", "2147483648",
]  # fmt: skip
VALUES: list[Any] = [
    math.nan, math.inf, -math.inf, 10**20, -1, 0, 1, 1.5, "", "x", None, True, False, [], {}, [math.nan],
    {"a": math.inf}, [[]], "nan", "1e999", 10**400, 2**63, -(2**63) - 1, "\ud800", "a" * 10_000, {"": None},
    [1, "a", None], 1e308, "\x00", "../x", "/etc/passwd", "x.bin", 10**9, 2**31, 10**12,
]  # fmt: skip
TEXTS = [
    "{", "[" * 20_000, '{"a":' * 20_000, "&a [*a]", "!!python/object/apply:os.system [exit 1]", "? [a]\n: b",
    "\t", "%", "lr: &x [1]\nseed: *x", "2001-99-99", "!!map x", "!!int x", "!!float x", "<<: 3", "a: b: c",
    "- - -", "\x00", "\ufeff", "lr: .nan", "lr: .inf", "- 1", "lr: 1e-3\nlr: 2", "seed: 0o", "seed: 1:30",
    "seed: 0b", "!!binary x", "...", "---\n---",
]  # fmt: skip
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)  # nine levels of nine references each: a billion when written out
SPARSE_BYTES = 10 * 10**9  # size of a file that is too large for any kind, and takes no room on the disk


def mutated(rng, document):
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, 2)):
        places = list(_places(document))
        container, key = rng.choice(places) if places else (None, None)
        if container is None or rng.random() < 0.05:
            document = copy.deepcopy(rng.choice(VALUES))
        elif rng.random() < 0.2:
            del container[key]
        else:
            container[key] = copy.deepcopy(rng.choice(VALUES))
    return document


def mutated_json(rng, document):
    data = json.dumps(mutated(rng, json.loads(json.dumps(document)))).encode()
    return mutated_bytes(rng, data) if rng.random() < 0.25 else data


def _places(value):
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


def mutated_bytes(rng, data):
    at = rng.randrange(len(data)) if data else 0
    return rng.choice([
        lambda: data[:at],
        lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if data else b"\0",
        lambda: data[:at] + rng.randbytes(8) + data[at + 8 :],
        lambda: data[:at] + b"\xff" * 8 + data[at + 8 :],
        lambda: data[:at] + data[at : at + 50] * 2 + data[at + 50 :],
        lambda: rng.choice(TEXTS).encode(errors="surrogatepass"),
        lambda: rng.randbytes(40),
    ])()  # fmt: skip


SPOILED = ("fifo", "device", "sparse", "empty", "directory", "dangling", "loop")


def spoil(path, kind):
    """Put another kind of file in the place of a valid one."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind in (links := {"device": "/dev/zero", "dangling": path.with_name("nowhere"), "loop": path}):
        path.symlink_to(links[kind])
    else:
        path.touch()
        os.truncate(path, SPARSE_BYTES if kind == "sparse" else 0)


def spoiled(rng, path, share=0.2):
    """Spoil some of the files; whether this one was."""
    if is_one := rng.random() < share:
        spoil(path, rng.choice(SPOILED))
    return is_one
