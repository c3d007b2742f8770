"""`ibpo audit` as a script, under the name that earlier releases gave it."""

import sys

from megatron_ibpo.commands.audit import main

if __name__ == "__main__":
    sys.exit(main())
