#!/bin/bash
# Builds the tests of firecracker-go-sdk and of fctools, unmodified, into firn's cache, in
# firecracker/clients: sdk, with the CNI plugins in cni, from the Go module proxy, and fctools from
# the registry of crates.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/debian.sh"
sdk=github.com/firecracker-microvm/firecracker-go-sdk
plugins=github.com/containernetworking/plugins/plugins
fctools=0.6.0

dir=$cache/firecracker/clients
stamp=$cache/stamps/firecracker-clients
key=$(cat "$here"/{build.sh,debian.sh} | sha256sum)
if [[ -d $dir && -f $stamp && $(<"$stamp") == "$key" ]]; then
    exit
fi
require cargo go
new=$dir.new
# Modules of Go are read-only.
trap '[[ ! -d $new ]] || { chmod -R u+w "$new"; rm -rf "$new"; }' EXIT
rm -rf "$new"
mkdir -p "$new"/{sdk,cni,fctools,source}

export CGO_ENABLED=0 GOFLAGS=-mod=mod
# A newer Go links what these versions' golang.org/x/net uses only without its check.
build=(-trimpath -ldflags "-s -w -checklinkname=0")
# module NAME REQUIREMENT...: makes a module that requires others, and enters it.
module() {
    mkdir "$new/source/$1"
    cd "$new/source/$1"
    go mod init "$1" 2>/dev/null
    go mod edit "${@:2}"
}
echo "firn: building the tests of firecracker-go-sdk and the plugins that they use" >&2
go mod download "$sdk@v1.0.0"
cp -r "$(go env GOMODCACHE)/$sdk@v1.0.0/." "$new/source/sdk"
chmod -R u+w "$new/source/sdk"
(cd "$new/source/sdk" && go test -c "${build[@]}" -o "$new/sdk/sdk.test" .)
cp -r "$new/source/sdk/testdata" "$new/sdk"
(module plugins "-require=github.com/containernetworking/plugins@v1.0.1" &&
    go build "${build[@]}" -o "$new/cni" "$plugins"/{main/ptp,ipam/host-local,ipam/static})
# The plugin has a module of its own now, which the proxy does not have.
(module tap "-require=$sdk@v0.21.0" &&
    go build "${build[@]}" -o "$new/cni" "$sdk/cni/cmd/tc-redirect-tap")

echo "firn: building the tests of fctools" >&2
(
    cargo init --quiet --vcs none --name fetch "$new/source/fetch"
    cd "$new/source/fetch"
    cargo add --quiet "fctools@=$fctools"
    cargo fetch --quiet
    source=$(cargo metadata --format-version 1 |
        grep -o '"manifest_path":"[^"]*/fctools-[^"]*/Cargo.toml"' | cut -d '"' -f 4)
    cp -r "$(dirname "$source")" "$new/source/fctools"
    cd "$new/source/fctools"
    # Static programs, which also run in the lab.
    CARGO_TARGET_DIR=$new/source/target RUSTFLAGS="-C target-feature=+crt-static" \
        cargo test --quiet --locked --no-run \
        --target x86_64-unknown-linux-gnu --features full,nix-syscall-backend \
        --message-format=json |
        grep -o '"executable":"[^"]*"' | cut -d '"' -f 4
) | while IFS= read -r program; do
    name=$(basename "$program")
    cp "$program" "$new/fctools/${name%-*}"
done
chmod -R u+w "$new/source"
rm -rf "$new/source" "$dir" "$stamp"
mv -T "$new" "$dir"
printf '%s\n' "$key" >"$stamp"
