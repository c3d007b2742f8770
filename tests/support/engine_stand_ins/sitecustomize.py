"""Engines started with this folder on PYTHONPATH get `transfer_stand_ins` for NCCL."""

import importlib.util
import sys

WHEN = "vllm.distributed.weight_transfer.nccl_common"


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != WHEN:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_install(module):
            from support.transfer_stand_ins import install

            run(module)
            install()

        spec.loader.exec_module = run_and_install
        return spec


sys.meta_path.insert(0, Finder())
