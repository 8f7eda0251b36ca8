#!/usr/bin/env bash
# Runs every check and measurement of the CUDA decoder, in one call of less than 10 minutes.
#
# On a machine with Rust:   model/benches/cuda/run.sh build [FOLDER]   default of FOLDER: target/cuda-measure
# On a machine with a GPU:  FOLDER/run.sh [OUT]                        default of OUT: $OUT, else FOLDER/out
# `build` needs nvcc from the CUDA toolkit ($CUDA_HOME); without it, the GPU machine needs NVRTC. The GPU machine needs the
# driver, python3 ($PYTHON) with torch for the PyTorch baseline, and compute-sanitizer for the sanitizers.
#
# OUT/: measure.jsonl (a line for each number), results.json, table.md, curve.jsonl (for `tidegate-experiments cost`), log.txt,
# tests.log, sanitizer.log. If a part fails or takes too long, the table says so, and the other parts still run.
#
# TIDEGATE_NCU=1 records the hardware counters of each kernel (ncu.txt) instead of running the sanitizers.
# To try this script without a GPU, on the emulator: TIDEGATE_EMULATED=1 FOLDER/run.sh
set -u

here=$(cd "$(dirname "$0")" && pwd)

build() {
    set -e
    local root folder features=tidegate-model/cuda-emulator
    root=$(cd "$here/../../.." && pwd)
    folder=${1:-$root/target/cuda-measure}
    cd "$root"
    # Same search order as model/build.rs; exported so that both use the same toolkit.
    local home
    for home in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
        if [ -n "$home" ] && [ -x "$home/bin/nvcc" ]; then
            export CUDA_HOME=$home
            break
        fi
    done
    [ -x "${CUDA_HOME:-}/bin/nvcc" ] || command -v nvcc >/dev/null ||
        echo "no nvcc: the kernels will be compiled where they run, by NVRTC" >&2
    rm -rf "$folder"
    mkdir -p "$folder"
    # The tests use the profile of `cargo test`, whose build may exist already; the measurements use that of `cargo bench`.
    put tests '"name":"cuda"' cargo test --no-run --locked --workspace --features "$features" --test cuda
    if [ "${TIDEGATE_KERNEL_TESTS:-1}" = 1 ]; then
        put kernel-tests '"name":"tidegate_model"' cargo test --no-run --locked --workspace --features "$features" --lib
    fi
    put cuda '"name":"cuda"' cargo bench --no-run --locked --workspace --features "$features" --bench cuda
    cp "$here/run.sh" "$here/softmax.py" "$folder/"
    mkdir "$folder/checkpoint"
    cp weights/checkpoints/tidegate-tiny/config.json weights/checkpoints/tidegate-tiny/model.safetensors "$folder/checkpoint/"
    du -b "$folder"/* | sort -n
    du -sh "$folder"
}

# put NAME TARGET CARGO...: builds one program and copies it, stripped of symbols, into $folder.
put() {
    local name=$1 target=$2 file
    shift 2
    file=$("$@" --message-format=json | grep '"reason":"compiler-artifact"' | grep "$target" |
        grep -o '"executable":"[^"]*"' | tail -1 | cut -d'"' -f4)
    [ -n "$file" ] || { echo "$name: cargo names no program" >&2; exit 1; }
    cp "$file" "$folder/$name"
    strip "$folder/$name"
}

if [ "${1:-}" = build ]; then
    shift
    build "$@"
    exit
fi

# ---- On the machine with the GPU

# When run from the source tree, uses the default folder of `build`.
[ -x "$here/cuda" ] || here=$(cd "$here/../../.." && pwd)/target/cuda-measure
[ -x "$here/cuda" ] || { echo "$here/cuda is not there: run.sh build makes it" >&2; exit 1; }
out=${1:-${OUT:-$here/out}}
mkdir -p "$out"
lines=$out/measure.jsonl
: >"$lines"
: >"$out/log.txt"
: >"$out/tests.log"
: >"$out/sanitizer.log"

begin=$SECONDS
all=${TIDEGATE_SECONDS:-560} # of the 600 that a call has
left() { echo $((all - (SECONDS - begin))); }
say() { echo "[$((SECONDS - begin)) s] $*" | tee -a "$out/log.txt"; }

export PATH=$PATH:/usr/local/cuda/bin
# The driver caches the kernels that it has compiled, for all processes.
export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$(mktemp -d)}
export CUDA_CACHE_MAXSIZE=1073741824
if [ "${TIDEGATE_EMULATED:-}" = 1 ]; then
    device=(--emulated)
else
    device=(--device 0)
    export TIDEGATE_TEST_DEVICE=cuda:0
fi

# noted PART OUTCOME SECONDS NOTE: records and logs the outcome of a part.
noted() {
    local note
    note=$(printf '%s' "$4" | tr -d '"\134' | tr '\n\t' '  ' | tr -d '\000-\037\177' | cut -c1-300)
    printf '{"what":"part","part":"%s","outcome":"%s","seconds":%s,"note":"%s"}\n' "$1" "$2" "$3" "$note" >>"$lines"
    say "$1: $2 in $3 s. $note"
}

# limited SECONDS COMMAND...: runs a command for at most SECONDS, and within the total time less 30 s for the table.
limited() {
    local limit=$1 rest
    shift
    rest=$(($(left) - 30))
    [ "$rest" -lt "$limit" ] && limit=$rest
    if [ "$limit" -lt 5 ]; then
        echo "no time was left"
        return 125
    fi
    timeout -k 5 "$limit" "$@"
}

outcome() {
    case $1 in
        0) echo passed ;;
        124 | 137) echo "ran out of time" ;;
        125) echo skipped ;;
        *) echo failed ;;
    esac
}

# on_device PROGRAM: whether the tests of a program run on the GPU. If they do, they fail with status 101, as Rust tests do,
# when told to use a device that does not exist. Checked once per program.
declare -A failed_without
on_device() {
    [ "${TIDEGATE_EMULATED:-}" = 1 ] && return 0
    [ "$opened" = 0 ] || return 1
    if [ -z "${failed_without[$1]:-}" ]; then
        TIDEGATE_TEST_DEVICE=cuda:1000 timeout -k 5 30 "$1" --test-threads=1 sixteen_bit_weights_agree swiglu >/dev/null 2>&1
        failed_without[$1]=$?
    fi
    [ "${failed_without[$1]}" = 101 ]
}

# tests PART SECONDS PROGRAM ARGUMENTS...: runs a test program as a part.
tests() {
    local part=$1 limit=$2 start=$SECONDS from code
    shift 2
    if [ ! -x "$1" ]; then
        noted "$part" absent 0 "$(basename "$1") was not built"
        return 0
    fi
    if ! on_device "$1"; then
        noted "$part" failed 0 "there is no device, or $(basename "$1") does not heed TIDEGATE_TEST_DEVICE: nothing was tested on one"
        return 0
    fi
    from=$(wc -l <"$out/tests.log")
    limited "$limit" "$@" >>"$out/tests.log" 2>&1
    code=$?
    noted "$part" "$(outcome $code)" $((SECONDS - start)) \
        "$(tail -n +$((from + 1)) "$out/tests.log" | grep -E '^test result|panicked at|FAILED$|^error' | head -6)"
    return $code
}

# table: writes and prints the table of all lines so far.
table() {
    timeout -k 5 20 "$here/cuda" table "$lines" --out "$out" --date "$(date -u +%F)" 2>&1
}

say "output: $out"
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu --format=csv 2>&1 | tee -a "$out/log.txt"

# The driver compiles the kernels once, before anything is timed.
start=$SECONDS
limited 90 "$here/cuda" open "${device[@]}" >>"$out/log.txt" 2>&1
code=$?
opened=$code
noted open "$(outcome $code)" $((SECONDS - start)) "$(tail -1 "$out/log.txt")"
if [ "$opened" -ne 0 ]; then
    ldd "$here/cuda" 2>&1 | grep -i 'not found' | tee -a "$out/log.txt"
fi

# After a failure, runs the tests again one at a time, which shows whether threads are the cause.
tests tests 100 "$here/tests" --test-threads=4
case $? in
    0 | 124 | 125 | 137) ;; # what took too long would again
    *) tests "tests one by one" 60 "$here/tests" --test-threads=1 ;;
esac
tests "kernel tests" 40 "$here/kernel-tests" --test-threads=4 cuda::

say "measuring"
start=$SECONDS
# The program watches this limit itself, so that it finishes what it has begun.
seconds=$(($(left) - 150))
[ "$seconds" -gt 260 ] && seconds=260
arguments=("${device[@]}" --checkpoint "$here/checkpoint" --seconds "$seconds")
if "${PYTHON:-python3}" -c 'import torch' 2>>"$out/log.txt"; then
    arguments+=(--softmax "$here/softmax.py")
else
    noted softmax.py absent 0 "no python3 with torch"
fi
limited 300 "$here/cuda" measure "${arguments[@]}" 2> >(tee -a "$out/log.txt" >&2) >>"$lines"
code=$?
# A program that was stopped may have left an incomplete line.
[ -z "$(tail -c 1 "$lines")" ] || echo >>"$lines"
noted measurements "$(outcome $code)" $((SECONDS - start)) "$(grep -c . "$lines") lines"
# Writes the table now, so that nothing is lost if a later part hangs.
table >/dev/null

# sanitizer TOOL SECONDS TESTS...: runs these tests, which launch every kernel, under compute-sanitizer.
sanitizer() {
    local tool=$1 limit=$2 start=$SECONDS from code note
    shift 2
    if [ "${TIDEGATE_NCU:-}" = 1 ]; then
        noted "$tool" absent 0 "left out, for TIDEGATE_NCU"
        return
    fi
    if ! command -v "${SANITIZER:=compute-sanitizer}" >/dev/null; then
        noted "$tool" absent 0 "compute-sanitizer is not installed"
        return
    fi
    if ! on_device "$here/tests"; then
        noted "$tool" absent 0 "the tests do not run on a device"
        return
    fi
    from=$(wc -l <"$out/sanitizer.log")
    limited "$limit" "$SANITIZER" --tool "$tool" --error-exitcode 9 --print-limit 20 \
        "$here/tests" --test-threads=1 "$@" >>"$out/sanitizer.log" 2>&1
    code=$?
    note=$(tail -n +$((from + 1)) "$out/sanitizer.log" | grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|^test result|Device not supported|========= (Invalid|Error|Warning|Race)' | head -6)
    case $note in *"Device not supported"*) code=absent ;; esac
    if [ $code = absent ]; then
        noted "$tool" absent $((SECONDS - start)) "$note"
    else
        noted "$tool" "$(outcome $code)" $((SECONDS - start)) "$note"
    fi
}
sanitizer memcheck 70 logits_and_states_agree sixteen_bit_weights_agree products_of_few
sanitizer racecheck 70 logits_and_states_agree sixteen_bit_weights_agree
sanitizer synccheck 30 logits_and_states_agree sixteen_bit_weights_agree

# With TIDEGATE_NCU=1: the hardware counters of one launch of each kernel and grid.
if [ "${TIDEGATE_NCU:-}" = 1 ]; then
    start=$SECONDS
    limited 120 ncu --clock-control none --filter-mode per-launch-config --launch-count 1 --section SpeedOfLight \
        --section MemoryWorkloadAnalysis --section Occupancy --section WarpStateStats --section LaunchStats \
        "$here/cuda" measure "${device[@]}" --only kernels --seconds 60 >"$out/ncu.txt" 2>&1
    noted ncu "$(outcome $?)" $((SECONDS - start)) "$(grep -c 'Context 1' "$out/ncu.txt") launches in ncu.txt"
fi

say "the table"
table | tee -a "$out/log.txt"
say "done: $out"
ls -l "$out"
