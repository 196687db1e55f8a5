#!/bin/bash
# Builds what a guest boots from, into firn's cache: guest/vmlinux, guest/overlay.ext4 (its writable disk).
# The initramfs, which holds the agent, is made by initramfs.sh; the read-only root by image.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=../lab/apt.sh
. "$here/../lab/apt.sh"
# shellcheck source=../lab/shared.sh
. "$here/../lab/shared.sh"

overlay_size=512M

# extract_vmlinux BZIMAGE FILE: the ELF kernel within, by the header of the boot protocol (Linux Documentation/arch/x86/boot.rst).
extract_vmlinux() {
    local sectors offset length magic
    sectors=$(od -An -tu1 -j $((0x1f1)) -N 1 "$1")
    offset=$(od -An -tu4 -j $((0x248)) -N 4 "$1")
    length=$(od -An -tu4 -j $((0x24c)) -N 4 "$1")
    offset=$(((sectors + 1) * 512 + offset))
    magic=$(od -An -tx1 -j $offset -N 4 "$1" | tr -d ' ')
    # The payload's last four bytes are its unpacked size; only gzip has that in its own format.
    case $magic in
        28b52ffd) payload "$1" $offset $((length - 4)) | tool zstd -qdc >"$2" ;;
        fd377a58) payload "$1" $offset $((length - 4)) | tool xz -qdc >"$2" ;;
        1f8b*) payload "$1" $offset "$length" | gzip -dc >"$2" ;;
        *) die "$1 is compressed in an unknown way (magic $magic)" ;;
    esac
    [[ $(od -An -tx1 -N 4 "$2" | tr -d ' ') == 7f454c46 ]] || die "what $1 holds is no ELF file"
}

payload() { dd if="$1" bs=1M iflag=skip_bytes,count_bytes skip="$2" count="$3" status=none; }

build_shared
mkdir -p "$cache/guest"

key="1 $(sha256sum <"$cache/kernel.packages")"
if ! built guest/vmlinux "$key"; then
    say "extracting the guest's kernel"
    extract_vmlinux "$(echo "$cache"/kernel/boot/vmlinuz-*)" "$cache/guest/vmlinux.new"
    publish guest/vmlinux "$key" "$cache/guest/vmlinux.new"
fi

key="1 $overlay_size"
if ! built guest/overlay.ext4 "$key"; then
    say "formatting the guest's writable disk"
    rm -f "$cache/guest/overlay.ext4.new"
    truncate -s "$overlay_size" "$cache/guest/overlay.ext4.new"
    tool mke2fs -q -F -t ext4 -b 4096 -O ^has_journal -m 0 -E lazy_itable_init=1,nodiscard,root_owner=0:0 "$cache/guest/overlay.ext4.new"
    publish guest/overlay.ext4 "$key" "$cache/guest/overlay.ext4.new"
fi
