"""A digest that identifies a policy by the content of its files, regardless of their location."""

import hashlib
from pathlib import Path

_PIECES, _PIECE_BYTES = 64, 64 * 1024
"""Number and size of the pieces of each weight file that are read. Training changes nearly every number, so a
few megabytes distinguish two policies without reading a checkpoint of 160 GB."""


def policy_digest(hf_dir: Path) -> str:
    """Return 16 hexadecimal digits from the configuration, and from names, sizes and pieces of the weight
    files."""
    digest = hashlib.blake2b(digest_size=8)
    files = sorted(file for kind in ("*.safetensors", "*.bin") for file in hf_dir.glob(kind))
    for file in [hf_dir / "config.json", *files]:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for piece in range(_PIECES):
                content.seek(piece * max(0, size - _PIECE_BYTES) // (_PIECES - 1))
                digest.update(content.read(_PIECE_BYTES))
                if size <= _PIECE_BYTES:
                    break
    return digest.hexdigest()
