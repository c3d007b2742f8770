"""`ibpo convert to-megatron` as a script, under the name that earlier releases gave it."""

import sys

from megatron_ibpo.commands.convert import main

if __name__ == "__main__":
    sys.exit(main(["to-megatron", *sys.argv[1:]]))
