"""The filter of system calls refuses what it names, by the numbers that the kernel gives them."""

import platform
import re
import subprocess

import pytest

from megatron_ibpo.rewards.sandbox import seccomp


@pytest.mark.parametrize(
    ("machine", "header"), [("x86_64", "asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")]
)
def test_the_numbers_of_refused_calls_are_those_of_the_kernels_headers(machine, header):
    if machine == "x86_64" and platform.machine() != machine:
        pytest.skip("the headers of x86-64 are on such machines only")
    has = ["-D__BITS_PER_LONG=64", "-D__ARCH_WANT_MEMFD_SECRET"]
    words = ["g++", "-E", "-dM", *has, "-include", header, "-x", "c++", "/dev/null"]
    macros = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", macros))
    refused = seccomp._REFUSED[machine]
    assert {name: numbers.get(name) for name in refused} == {name: str(at) for name, at in refused.items()}
    assert (str(seccomp._CLONE[machine]), str(seccomp._SOCKET[machine])) == (
        numbers["clone"],
        numbers["socket"],
    )
