#!/bin/bash
# Builds what a guest boots from, into firn's cache: guest/vmlinux, guest/root.erofs (read-only root), guest/overlay.ext4 (its writable disk).
# The initramfs, which holds the agent, is made by initramfs.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=../lab/apt.sh
. "$here/../lab/apt.sh"
# shellcheck source=../lab/shared.sh
. "$here/../lab/shared.sh"

root_packages=(python3 python3-pyaes)
# Every package of the closure but these, which only installing needs.
needed='(?!(dpkg|tar|libacl1|libmd0|libselinux1|libpcre2-8-0)=)[^=]+'
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

# make_root DIR: a root file system needs no maintainer scripts, only the packages' files and the few that base-files and base-passwd make.
make_root() {
    local root=$1 folder library
    mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{dev,etc,mnt,opt,proc,root,run,srv,sys,tmp,var/tmp}
    for folder in bin sbin lib lib64; do
        ln -s "usr/$folder" "$root/$folder"
    done
    unpack "$root" "$needed" "${root_packages[@]}"
    rm -rf "${root:?}"/usr/share/{applications,bash-completion,bug,doc,doc-base,info,lintian,locale,man,menu,pixmaps}
    chmod 1777 "$root/tmp" "$root/var/tmp"
    printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n' >"$root/etc/passwd"
    printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"
    printf 'passwd: files\ngroup: files\nhosts: files\n' >"$root/etc/nsswitch.conf"
    printf '127.0.0.1 localhost\n::1 localhost\n' >"$root/etc/hosts"
    printf 'firn\n' >"$root/etc/hostname"

    # The root is read-only in the guest: bytecode is made now, and never checked against its source.
    library=$root/usr/lib/x86_64-linux-gnu
    PYTHONHOME=$root/usr PYTHONDONTWRITEBYTECODE=1 \
        "$library/ld-linux-x86-64.so.2" --library-path "$library" "$root/usr/bin/python3.11" \
        -m compileall -q -f -s "$root" -p / --invalidation-mode unchecked-hash \
        "$root/usr/lib/python3.11" "$root/usr/lib/python3" >&2
}

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

key=$(sha256sum <"$here/build.sh")
if ! built guest/root.erofs "$key"; then
    root=$(fresh guest/root)
    make_root "$root"
    say "making the guest's root file system"
    # Not compressed: unpacking would cost the guest more than reading does.
    tool mkfs.erofs --quiet -T0 --all-root -x-1 "$cache/guest/root.erofs.new" "$root" >&2
    rm -rf "$root"
    publish guest/root.erofs "$key" "$cache/guest/root.erofs.new"
fi
