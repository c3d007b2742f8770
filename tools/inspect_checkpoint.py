"""`ibpo inspect` as a script, under the name that earlier releases gave it."""

import sys

from megatron_ibpo.commands.inspect_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
