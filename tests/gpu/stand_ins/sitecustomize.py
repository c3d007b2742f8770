"""Stand-ins for packages that vLLM imports when it starts and that a sampling engine does not use.

Python imports this file in every process that has its folder on PYTHONPATH, also in vLLM's own. An installed
package comes before its stand-in. Another sitecustomize, further along the path, is run, too.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

PACKAGES = {
    *("anthropic", "mcp", "mistral_common", "model_hosting_container_standards", "openai_harmony"),
    *("partial_json_parser", "prometheus_fastapi_instrumentator"),
    *("llguidance", "lmformatenforcer", "outlines_core", "xgrammar"),  # constrained decoding
}
# opentelemetry is not among them: vLLM does without it if it cannot be imported


class StandInType(type):
    """A class that has every public constant, as a string: vLLM tabulates members of enumerations."""

    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class StandInModule(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        members = {
            "__module__": self.__name__,
            "__init__": lambda self, *arguments, **named: None,
            "__get_pydantic_core_schema__": classmethod(_any_schema),
        }
        stand_in = StandInType(name, (), members)
        setattr(self, name, stand_in)
        return stand_in


def _any_schema(cls, source, handler):
    """Let fields of pydantic's models have a stand-in as their type."""
    from pydantic_core import core_schema

    return core_schema.any_schema()


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in PACKAGES else None

    def create_module(self, spec):
        return StandInModule(spec.name)

    def exec_module(self, module):
        pass


def run_next_sitecustomize():
    folder = Path(__file__).resolve().parent
    paths = [path for path in sys.path if Path(path).resolve() != folder]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


sys.meta_path.append(Finder())  # the last finder: an installed package wins
run_next_sitecustomize()
