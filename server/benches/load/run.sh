#!/usr/bin/env bash
# Load test of the real server over loopback: a thousand streams at once, a great many short requests, and slow or
# vanishing clients beside others. Prints figures, and fails if a guarantee is broken.
#
# server/benches/load/run.sh [--whole] [--server PROGRAM]
#
# Needs oha (cargo install oha; or its path in OHA), python3 and curl, and a release build of the server; installs
# nothing. The short run takes about a minute, the whole one has 100,000 short requests.
set -euo pipefail

cd "$(dirname "$0")/../../.."
oha=${OHA:-oha}
server=${CARGO_TARGET_DIR:-target}/release/tidegate
streams=1000 rounds=2 short=5000 seconds=5
while [ $# -gt 0 ]; do
    case $1 in
        --whole) rounds=4 short=100000 seconds=15 ;;
        --server) server=$2; shift ;;
        *) printf 'load: %s is no flag; --whole and --server PROGRAM are\n' "$1" >&2; exit 2 ;;
    esac
    shift
done
for tool in "$oha" "$server" python3 curl; do
    command -v "$tool" >/dev/null || { printf 'load: %s is missing\n' "$tool" >&2; exit 1; }
done
# Each stream needs a connection, in the client and in the server.
ulimit -n 8192

folder=$(mktemp -d)
pid=''
finish() {
    [ -z "$pid" ] || kill "$pid" 2>/dev/null || true
    rm -rf "$folder"
}
trap finish EXIT

"$server" serve --port 0 --data-dir "$folder/data" --log warn,tidegate=info --queue 1024 2>"$folder/log" &
pid=$!
for _ in $(seq 240); do
    url=$(sed -n 's/.*listening on \(http:[^,]*\),.*/\1/p' "$folder/log")
    [ -z "$url" ] || ! curl -sf --max-time 5 "$url/ready" >/dev/null || break
    kill -0 "$pid" || { cat "$folder/log" >&2; exit 1; }
    sleep 0.25
done

load() { cut -d' ' -f1 /proc/loadavg; }
rss() { awk '/^VmRSS/ { print $2 }' "/proc/$pid/status"; }
# metric NAME: prints the sum of the samples of a metric.
metric() { curl -sf "$url/metrics" | awk -v name="tidegate_$1" 'index($1, name) == 1 { sum += $2 } END { print sum + 0 }'; }
# idle: waits until no request runs or waits.
idle() {
    for _ in $(seq 100); do
        [ "$(metric num_requests_running)$(metric num_requests_waiting)" != 00 ] || return 0
        sleep 0.1
    done
    printf 'load: requests are stuck\n' >&2
    return 1
}
# post COUNT CLIENTS BODY: sends requests with oha and prints its report as JSON.
post() {
    "$oha" -n "$1" -c "$2" -t 120s -m POST -T application/json -d "$3" --no-tui --output-format json "$url/v1/completions"
}
# check FILE STATUS...: prints the statuses and times of oha's report; fails on any other status and on any error.
check() {
    python3 - "$@" <<'END'
import json, sys
account = json.load(open(sys.argv[1]))
statuses, errors = account["statusCodeDistribution"], account["errorDistribution"]
times, summary = account["latencyPercentiles"], account["summary"]
print(f"statuses {statuses}, errors {errors}, {summary['requestsPerSec']:.0f} requests/s, "
      f"p50 {times['p50']:.3f} s, p99 {times['p99']:.3f} s, slowest {summary['slowest']:.3f} s")
sys.exit(f"load: only {sys.argv[2:]} are promised" if errors or set(statuses) - set(sys.argv[2:]) else 0)
END
}

printf 'machine: %s cores, load %s\n' "$(nproc)" "$(load)"

# at_once CLIENTS REQUESTS: runs streams; all that the server accepts must finish.
at_once() {
    local before whole
    before=$(metric request_success_total)
    post "$2" "$1" '{"prompt":"Once upon a time","max_tokens":32,"ignore_eos":true,"stream":true}' >"$folder/a"
    check "$folder/a" 200 429
    idle
    whole=$(($(metric request_success_total) - before))
    python3 - "$folder/a" "$whole" <<'END'
import json, sys
taken, whole = json.load(open(sys.argv[1]))["statusCodeDistribution"].get("200", 0), int(sys.argv[2])
print(f"{taken} streams were taken, {whole} came to their end")
sys.exit(taken != whole)
END
}

printf '\n(a) %d streams at once, then more than may run and wait; 32 tokens each\n' "$streams"
at_once "$streams" $((streams * rounds))
at_once $((streams * 3 / 2)) $((streams * 3 / 2))

printf '\n(b) %d short requests\n' "$short"
short_body='{"prompt":"Once upon a time","max_tokens":1}'
# A warm-up, after which all one-time allocations have been made.
post 2000 64 "$short_body" >/dev/null
idle
first=$(rss)
post "$short" 64 "$short_body" >"$folder/b" &
posting=$!
peak=$first
while kill -0 "$posting" 2>/dev/null; do
    now=$(rss)
    [ "$now" -le "$peak" ] || peak=$now
    sleep 0.5
done
wait "$posting"
check "$folder/b" 200
idle
printf 'resident memory: first %d KiB, last %d KiB, peak %d KiB; load %s\n' "$first" "$(rss)" "$peak" "$(load)"
[ "$(rss)" -le $((first + first / 10)) ] || { printf 'load: memory has grown\n' >&2; exit 1; }

printf '\n(c) slow and vanishing clients beside 16 others\n'
python3 server/benches/load/beside.py "$url" "$seconds"
idle
printf 'cancelled: %d; load %s\n' "$(metric request_cancelled_total)" "$(load)"

kill -TERM "$pid"
wait "$pid"
pid=''
printf '\nthe server drained and ended with 0\n'
