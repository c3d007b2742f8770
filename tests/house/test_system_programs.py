"""Programs that pip does not have are installed where apt-get may, and named where it may not."""

import os
import shutil
import subprocess

import pytest

from support.paths import ROOT

SCRIPT = ROOT / "tools/system_programs.sh"


def path_of(program):
    found = shutil.which(program)
    assert found is not None
    return found


def run(programs, *names):
    return subprocess.run(
        [path_of("bash"), SCRIPT, *names],
        env={"PATH": str(programs)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip


@pytest.fixture
def bare(tmp_path):
    """A PATH with what the script itself calls, and no more."""
    (tmp_path / "timeout").symlink_to(path_of("timeout"))
    return tmp_path


def test_what_is_missing_is_named_with_how_to_get_it(bare):
    said = run(bare, "bubblewrap", "chromium").stdout.splitlines()
    assert [line.partition(" ")[0] for line in said] == ["bubblewrap", "chromium"]
    assert said[0].endswith("apt-get install bubblewrap, as root, gets it")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may install")
def test_root_gets_what_is_missing_and_nothing_else(bare):
    """A made-up apt-get that installs what it is asked for, once it has its lists of packages."""
    (bare / "chromium").symlink_to("/bin/true")
    script = f"""#!/bin/bash
echo "$@" >> {bare}/asked
if [[ $1 == update ]]; then : > {bare}/lists; exit; fi
[[ -e {bare}/lists ]] && : > {bare}/bwrap && {path_of("chmod")} +x {bare}/bwrap
"""
    (bare / "apt-get").write_text(script)
    (bare / "apt-get").chmod(0o755)
    assert run(bare, "bubblewrap", "chromium").stdout == ""
    asked = (bare / "asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == ["bubblewrap", "update", "bubblewrap"]
