#!/bin/bash
# initramfs.sh AGENT: makes guest/initramfs.cpio in firn's cache: AGENT, a static program, as /init, and the kernel modules that it inserts
# (/modules/order names them in order).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
agent=${1:?usage: initramfs.sh AGENT}
# shellcheck source=../lab/apt.sh
. "$here/../lab/apt.sh"
# shellcheck source=../lab/shared.sh
. "$here/../lab/shared.sh"
# shellcheck source=../lab/modules.sh
. "$here/../lab/modules.sh"

modules=(virtio_mmio virtio_blk erofs overlay vsock vmw_vsock_virtio_transport virtio_rng virtio_balloon)

[[ -f $agent ]] || die "the guest's agent $agent is missing: build it with cargo build --release -p firn-agent"
build_shared

key=$(cat "$here/initramfs.sh" "$here/../lab/modules.sh" "$cache/kernel.packages" "$agent" | sha256sum)
if ! built guest/initramfs.cpio "$key"; then
    say "making the guest's initramfs"
    root=$(fresh guest/initramfs)
    mkdir -p "$root"/{dev,proc,sys,root}
    install -m 755 "$agent" "$root/init"
    collect_modules "$cache/kernel" "$root/modules" "${modules[@]}"
    # Not compressed: under emulation unpacking takes longer than reading.
    (cd "$root" && find . | sort | "$tools/bin/busybox" cpio -o -H newc 2>/dev/null) >"$cache/guest/initramfs.cpio.new"
    rm -rf "$root"
    publish guest/initramfs.cpio "$key" "$cache/guest/initramfs.cpio.new"
fi
cat "$cache/kernel.packages" "$cache/guest/root.packages" >"$cache/guest/packages"

pack_guest
say "the guest is built in $cache/guest"
