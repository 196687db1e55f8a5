#!/bin/sh
# Executes a command in the lab's L1 in root.ext4, which has the programs and the kernel modules
# that Firecracker's clients need. In L1's own root, which is the kernel's initramfs, a jailer
# cannot pivot_root.
# Usage: firn lab run --in root.ext4 --in l1.sh --in FILE... -- sh /in/l1.sh COMMAND...
set -eu
root=/scratch/root
mkdir -p "$root" /scratch/tmp /scratch/srv
# Tests copy the image, so nothing writes to it.
mount -o loop,ro /in/root.ext4 "$root"
for folder in cache dev in out proc scratch sys; do
    mount -o rbind "/$folder" "$root/$folder"
done
# Jailers make device nodes in /srv, and tests copy images to /tmp.
mount -o bind /scratch/srv "$root/srv"
mount -o bind /scratch/tmp "$root/tmp"
chmod 1777 /scratch/tmp
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/var/lib/cni"
mkdir "$root/run/netns"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:/in HOME=/root TMPDIR=/tmp
chroot "$root" modprobe -a act_mirred cls_u32 dummy nft_chain_nat nft_ct nft_masq nft_nat \
    sch_ingress veth
exec chroot "$root" "$@"
