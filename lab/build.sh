#!/bin/bash
# Builds the lab into firn's cache: QEMU, the kernel and the initramfs of L1 (the Debian machine that QEMU emulates), a
# formatted scratch disk, an empty file system for DAX.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=apt.sh
. "$here/apt.sh"
# shellcheck source=shared.sh
. "$here/shared.sh"
# shellcheck source=modules.sh
. "$here/modules.sh"

scratch_size=8G
fsdax_size=512M
modules=(virtio_blk kvm_amd nfit nd_pmem dax_pmem device_dax erofs loop)

build_shared

key="1 qemu-system-x86 $backports"
if ! built lab/qemu "$key"; then
    dir=$(fresh lab/qemu)
    unpack "$dir" '.*' -t "$backports" qemu-system-x86
    rm -rf "${dir:?}"/{etc,var,usr/share/{doc,man,locale,alsa,lintian,bash-completion}}
    publish lab/qemu "$key" "$dir"
fi

key=$(cat "$here/init" "$here/modules.sh" "$cache/kernel.packages" <(echo "${modules[@]}") | sha256sum)
if ! built lab/l1 "$key"; then
    say "making the initramfs of L1"
    dir=$(fresh lab/l1)
    root=$dir/root
    mkdir -p "$root"/{bin,dev,proc,sys,tmp,run,in,out,cache,scratch,etc}
    cp "$tools/bin/busybox" "$root/bin/busybox"
    install -m 755 "$here/init" "$root/init"
    printf 'root:x:0:0:root:/root:/bin/sh\n' >"$root/etc/passwd"
    printf 'root:x:0:\n' >"$root/etc/group"
    printf '127.0.0.1 localhost\n' >"$root/etc/hosts"
    collect_modules "$cache/kernel" "$root/modules" "${modules[@]}"
    (cd "$root" && find . | sort | "$tools/bin/busybox" cpio -o -H newc) >"$dir/initramfs.cpio" 2>/dev/null
    rm -rf "$root"
    cp "$cache"/kernel/boot/vmlinuz-* "$dir/vmlinuz"
    publish lab/l1 "$key" "$dir"
fi

key="1 $scratch_size"
if ! built lab/scratch.ext4 "$key"; then
    say "formatting the scratch disk"
    rm -f "$cache/lab/scratch.ext4.new"
    truncate -s "$scratch_size" "$cache/lab/scratch.ext4.new"
    tool mke2fs -q -F -t ext4 -b 4096 -O ^has_journal -m 0 -E lazy_itable_init=1,nodiscard,root_owner=0:0 "$cache/lab/scratch.ext4.new"
    publish lab/scratch.ext4 "$key" "$cache/lab/scratch.ext4.new"
fi
key="1 $fsdax_size"
if ! built lab/fsdax.ext4 "$key"; then
    say "formatting the file system for DAX"
    rm -f "$cache/lab/fsdax.ext4.new"
    truncate -s "$fsdax_size" "$cache/lab/fsdax.ext4.new"
    # Files begin at multiples of 2 MiB, so that the kernel can map them at such leaves.
    tool mke2fs -q -F -t ext4 -b 4096 -T largefile4 -m 0 -E stride=512,stripe_width=512,nodiscard,lazy_itable_init=1,root_owner=0:0 \
        "$cache/lab/fsdax.ext4.new"
    publish lab/fsdax.ext4 "$key" "$cache/lab/fsdax.ext4.new"
fi
pack_guest
say "the lab is built in $cache/lab"
