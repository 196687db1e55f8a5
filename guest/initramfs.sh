#!/bin/bash
# initramfs.sh AGENT: makes guest/initramfs.cpio in firn's cache: AGENT, a static program, as /init, and the kernel modules that it inserts
# (/modules/order names them in order). Then packs the guest's files into the disk that the lab's machine gets.
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
files=(vmlinux initramfs.cpio root.erofs overlay.ext4 packages)

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

key=$(cat "$here/initramfs.sh" "$cache"/stamps/guest-* | sha256sum)
if ! built lab/guest.ext4 "$key"; then
    say "packing the guest's files for the lab"
    root=$(fresh lab/guest)
    mkdir "$root/guest"
    for file in "${files[@]}"; do
        ln "$cache/guest/$file" "$root/guest/$file"
    done
    size=$(du -sk "$root" | cut -f1)
    rm -f "$cache/lab/guest.ext4.new"
    tool mke2fs -q -F -t ext4 -b 4096 -O ^has_journal -m 0 -N 64 -E root_owner=0:0 -d "$root" "$cache/lab/guest.ext4.new" $((size + size / 20 + 8192))k >/dev/null
    rm -rf "$root"
    publish lab/guest.ext4 "$key" "$cache/lab/guest.ext4.new"
fi
say "the guest is built in $cache/guest"
