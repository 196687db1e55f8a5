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

# mend_qemu PROGRAM: keeps QEMU from delivering some interrupts twice. It delivers an interrupt that KVM injects (helper_vmrun, the case
# SVM_EVTINJ_TYPE_INTR; in all versions up to 10.2 at least), and leaves the vector in exception_index, as if it were an exception that waits.
# If it leaves its inner loop before the guest's next exit or exception does away with that, as it does at every timer under --icount, it delivers the
# interrupt once more, whether the guest has interrupts enabled or not: the guest hangs in a spin lock, or crashes. Nothing
# reads what that store writes but this mistake, so the store becomes a no-operation. Its test is crates/cli/tests/lab_interrupts.rs.
mend_qemu() {
    perl -e '
        open my $program, "+<:raw", $ARGV[0] or die "$ARGV[0]: $!\n";
        local $/;
        my ($bytes, @found) = <$program>;
        # mov %r32, exception_index; movl $0, exception_is_int; movq $-1, exception_next_eip; testb $2, loglevel; jne; mov $1, %edx
        push @found, $-[0] while $bytes =~ /\x89[\x80-\xbf].{4}(?=\xc7[\x80-\x87].{4}\0{4}\x48\xc7[\x80-\x87].{4}\xff{4}\xf6\x05.{4}\x02\x0f\x85.{4}\xba\x01\0{3})/gs;
        exit 1 if @found != 1;
        seek $program, $found[0], 0;
        print $program "\x66\x0f\x1f\x44\0\0";
        close $program or die "$ARGV[0]: $!\n";
    ' "$1" || say "this QEMU is another than the one that is mended here: where the lab counts instructions, guests may now and then hang"
}

build_shared

key="2 qemu-system-x86 $backports"
if ! built lab/qemu "$key"; then
    dir=$(fresh lab/qemu)
    unpack "$dir" '.*' -t "$backports" qemu-system-x86
    mend_qemu "$dir/usr/bin/qemu-system-x86_64"
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
