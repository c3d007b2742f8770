"""What pyproject.toml cannot say: the C++ extension. csrc/ holds its sources."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile().install()  # an object file per processor: setuptools takes one after the other

setup(
    ext_modules=[
        Pybind11Extension(
            "megatron_ibpo._edit_distance",
            ["csrc/module.cpp", *sorted(map(str, Path("csrc/isa").glob("*.cpp")))],
            depends=["setup.py", *sorted(map(str, Path("csrc").rglob("*.hpp")))],
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
        )
    ]
)
