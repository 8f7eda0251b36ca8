#!/usr/bin/env bash
# Builds docker/Dockerfile and tests the image on a machine without a container engine and an image
# registry. It creates the builder's image itself, from Debian's packages (debootstrap) and this machine's
# Rust toolchain. Then it starts the image, runs its health check and requests a completion.
#
#     docker/build-local.sh            build, test, print the sizes
#     docker/build-local.sh builder    create the builder's image only
#
# Needs root on Debian, python3, and Debian's and Rust's package servers. The images stay in
# target/image (TIDEGATE_IMAGE_DIR), and a second run uses the builder's image again.
set -euo pipefail

cd "$(dirname "$0")/.."
work=${TIDEGATE_IMAGE_DIR:-$PWD/target/image}
image=localhost/tidegate:local
suite=bookworm

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'build-local.sh: %s\n' "$*" >&2; exit 1; }

# The default of an ARG in the Dockerfile, which is the only place that names the base images; without the digest, which
# an image that this script makes cannot have.
default_of() { sed -n "s/^ARG $1=\([^@]*\).*/\1/p" docker/Dockerfile; }
rust_image=$(default_of RUST_IMAGE)

# vfs and chroot work without a kernel module, a user namespace and a container network.
b() {
    local command=$1
    shift
    buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$command" "$@"
}
have_image() { b inspect --type image "$1" >/dev/null 2>&1; }

container=''
server=''
cleanup() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    [ -z "$container" ] || b rm "$container" >/dev/null 2>&1 || true
}
trap cleanup EXIT

[ "$(id -u)" = 0 ] || fail 'must run as root: debootstrap and chroot need it'
for tool in buildah debootstrap curl; do
    command -v "$tool" >/dev/null && continue
    say "installing $tool"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$tool" >/dev/null
done
mkdir -p "$work"

# bootstrap IMAGE PACKAGES [PREPARE [OPTION...]]: commits an image of a minimal Debian with the packages.
# PREPARE names a function that adds files to it; the options are those of `buildah config`.
bootstrap() {
    local name=$1 packages=$2 prepare=${3:-true} folder
    shift $(($# < 3 ? $# : 3))
    container=$(b from scratch)
    folder=$(b mount "$container")
    debootstrap --variant=minbase --include="$packages" "$suite" "$folder" >"$work/debootstrap.log" 2>&1 ||
        fail "debootstrap failed, see $work/debootstrap.log"
    rm -rf "$folder"/var/cache/apt/archives/*.deb "$folder"/var/lib/apt/lists/*
    "$prepare" "$folder"
    b umount "$container" >/dev/null
    b config --cmd bash --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@" "$container"
    b commit --quiet "$container" "$name" >/dev/null
    b rm "$container" >/dev/null
    container=''
}

# Like the official Rust image: cargo and rustc on the path, and CARGO_HOME; with the target of the static program.
add_rust() {
    local folder=$1 sysroot settings
    rustup target add "$(uname -m)-unknown-linux-musl"
    sysroot=$(rustc --print sysroot)
    cp -a "$sysroot/bin" "$sysroot/lib" "$folder/usr/local/"
    mkdir -p "$folder/usr/local/cargo"
    # The builder reaches crates.io in the same way, and trusts the same certificates, as this machine.
    settings=${CARGO_HOME:-$HOME/.cargo}/config.toml
    [ ! -f "$settings" ] || cp "$settings" "$folder/usr/local/cargo/config.toml"
    cp -L /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/ca-certificates.crt"
}

if ! have_image "$rust_image"; then
    say "builder image $rust_image, with $(rustc --version)"
    bootstrap "$rust_image" ca-certificates,gcc,libc6-dev add_rust --env CARGO_HOME=/usr/local/cargo \
        --env PATH=/usr/local/cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
fi
[ "${1:-}" != builder ] || exit 0

say 'building'
started=$SECONDS
# --format docker: the OCI format has no health check. --layers: the next build reuses the layer of the
# dependencies unless a manifest has changed.
b bud --isolation chroot --network host --pull-never --format docker --layers --quiet \
    --build-arg RUST_IMAGE="$rust_image" --file docker/Dockerfile --tag "$image" .
say "built in $((SECONDS - started)) s"

say 'running'
free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
port=$(free_port)
admin_port=$(free_port)
container=$(b from --pull-never "$image")
folder=$(b mount "$container")
# The container shares this machine's network, so the server listens on the loopback address only. In a
# chroot it is an ordinary process of this machine, known by its port.
in_image() {
    b run --isolation chroot --network host --env TIDEGATE_HOST=127.0.0.1 --env TIDEGATE_PORT="$port" \
        --env TIDEGATE_ADMIN_ADDR="127.0.0.1:$admin_port" "$container" -- "$@"
}
in_image tidegate serve >"$work/server.log" 2>&1 &
launcher=$!
for _ in $(seq 120); do
    curl -sf "http://127.0.0.1:$port/ready" >/dev/null && break
    kill -0 "$launcher" 2>/dev/null || { cat "$work/server.log" >&2; fail 'the server exited during startup'; }
    sleep 0.5
done
server=$(for pid in $(pgrep -x tidegate); do
    ! grep -qzx "TIDEGATE_PORT=$port" "/proc/$pid/environ" || echo "$pid"
done | head -n 1)
printf 'running as user %s\n' "$(stat -c %u "/proc/$server")"
[ "$(stat -c %u "/proc/$server")" != 0 ] || fail 'the server runs as root'

# The health check exactly as the image defines it.
mapfile -d '' -t check < <(b inspect --type image "$image" | python3 -c '
import json, sys
test = json.load(sys.stdin)["Docker"]["config"]["Healthcheck"]["Test"]
assert test[0] == "CMD", test
sys.stdout.write("\0".join(test[1:]) + "\0")')
in_image "${check[@]}" || fail 'the health check failed'
echo 'health check: healthy'

answer=$(curl -sf "http://127.0.0.1:$port/v1/completions" -H 'content-type: application/json' \
    -d '{"prompt": "Once upon a time", "max_tokens": 48, "temperature": 0.8, "seed": 1}')
printf '%s' "$answer" | python3 -c '
import json, sys
text = json.load(sys.stdin)["choices"][0]["text"]
assert text.strip(), "the completion is empty"
print("Once upon a time" + text)'

kill "$server"
wait "$launcher" || fail "the server did not exit cleanly on SIGTERM, see $work/server.log"
server=''

say 'sizes'
size() { b images --format '{{.Size}}' "$1"; }
printf 'image %s, of which the program, with the shipped model, %s\n' "$(size "$image")" \
    "$(du -h "$folder/usr/local/bin/tidegate" | cut -f1)"
