"""Seeds by name: every draw of a run has its own, independent of the order of draws."""

import hashlib


def derive_seed(*keys: int | str) -> int:
    """Return a seed in [0, 2^63) that depends only on `keys`, such as ("pair", run seed, step, prompt,
    response), and is the same in every process and on every machine, unlike `hash`."""
    named = "\0".join([f"{type(key).__name__}:{key}" for key in keys])
    return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest(), "big") >> 1
