#!/usr/bin/env bash
# Gets programs that pip does not have, where this machine lets it: bubblewrap holds the programs of code rewards, and a
# headless Chromium shows the page of runs to its tests.
#
#   bash tools/system_programs.sh bubblewrap chromium
#
# What is here already costs nothing. apt-get installs the rest as root; elsewhere a line says what is missing, what that
# means and how to get it. The status is 0 either way: what needs a program refuses, or is skipped, by itself.
set -uo pipefail

# here NAME: whether the program is there.
here() {
    case $1 in
        bubblewrap) command -v bwrap ;;
        chromium) command -v chromium-headless-shell || command -v chromium || command -v chromium-browser || command -v google-chrome ;;
    esac >/dev/null
}

# install PACKAGE…: within eight minutes; a fresh machine may have no lists of packages yet.
install() {
    local command=(apt-get -o DPkg::Lock::Timeout=60 install --yes --no-install-recommends "$@")
    timeout 180 "${command[@]}" || { timeout 120 apt-get update && timeout 180 "${command[@]}"; }
}

declare -A packages=([bubblewrap]=bubblewrap [chromium]=chromium-headless-shell)
declare -A serves=(
    [bubblewrap]="programs of code rewards cannot run, and no test of the sandbox does"
    [chromium]="no test of the page in a browser runs"
)
missing=()
for name in "$@"; do
    here "$name" || missing+=("${packages[$name]}")
done
if ((${#missing[@]} && EUID == 0)) && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}" >&2
    install "${missing[@]}" >/dev/null 2>&1
fi
for name in "$@"; do
    here "$name" || echo "$name is not here: ${serves[$name]}; apt-get install ${packages[$name]}, as root, gets it"
done
