#!/usr/bin/env bash
# Checks csrc/ against tables by the book, in a build with AddressSanitizer and UndefinedBehaviorSanitizer: first on
# random batches and long pairs, then on what libFuzzer finds by coverage. Every instruction set of this machine is run.
#
#   bash tests/native.sh [SECONDS of fuzzing, 10 by default] [CORPUS directory to start from and add to]
set -euo pipefail
seconds=${1:-10}
corpus=${2:+$(realpath "$2")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(bash tools/bootstrap.sh dev)
# the one wheel that brings libFuzzer's library; everything is compiled by the compiler that is here
libfuzzer=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/libclang_rt.fuzzer_no_main.a
if [[ ! -f $libfuzzer ]]; then
    echo "error: $libfuzzer is missing; it comes with atheris (requirements/dev.txt)" >&2
    exit 1
fi

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
sanitizers=-fsanitize=address,undefined
flags=(-std=c++17 -O1 -g1 "$sanitizers" -fno-sanitize-recover=all -Wall -Wextra -Werror)
compiling=()
# compile SOURCE FLAGS…: in the background.
compile() {
    "${CXX:-g++}" "${flags[@]}" "${@:2}" -c "$1" -o "$build/$(basename "$1").o" &
    compiling+=($!)
}
for source in csrc/isa/*.cpp tests/native/{agreement,long}.cpp; do # where the code that is tested gets compiled
    compile "$source" -fsanitize-coverage=trace-pc,trace-cmp
done
for source in tests/native/{fuzz,main,oracle,random}.cpp; do compile "$source"; done
for process in "${compiling[@]}"; do wait "$process"; done
# its answer to what GCC's instrumentation calls comes second: tests/native/fuzz.cpp has a better one
"${CXX:-g++}" "${flags[@]}" "$build"/*.o "$libfuzzer" -Wl,-z,muldefs -pthread -ldl -lm -o "$build/native"

"$build/native" random 1 15
"$build/native" long
mkdir "$build/corpus"
cd "$build" # where libFuzzer leaves an input that fails
if ! ./native fuzz -seed=1 -max_total_time="$seconds" -max_len=1000 -len_control=0 -timeout=60 -verbosity=0 \
    ${corpus:+"$corpus"} "$build/corpus" >fuzz.log 2>&1; then
    cat fuzz.log >&2
    for input in crash-* timeout-* oom-*; do
        [[ -f $input ]] && echo "the input, in base64: $(base64 -w 0 "$input")" >&2
    done
    exit 1
fi
echo "$seconds s of fuzzing: $(find "$build/corpus" -type f | wc -l) inputs reach different code, all agree"
