#!/bin/bash
# Makes the root file system of the guests in the tests of Firecracker's clients, in firn's cache:
# firecracker/root.ext4, Debian 12 with sshd and the program in guest/, and firecracker/ssh-key, the
# private key for root. In the lab the clients themselves run in it too (l1.sh), so it has their
# programs, and modules for the lab's kernel.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/debian.sh"
packages=(bash busybox-static curl e2fsprogs iproute2 nftables openssh-server procps)
# Dependencies that only maintainer scripts, package managers and PAM use.
unused='adduser|base-files|debconf|debianutils|dpkg|init-system-helpers|libdb5.3|libfile-.*'
unused+='|libgdbm.*|libnumber-.*|libpam-modules.*|libpam-runtime|libperl.*|libsemanage.*'
unused+='|libsepol2|libtext-.*|lsb-base|mawk|passwd|perl.*|runit-helper|sensible-utils'
unused+='|sysvinit-utils|tar|ucf|usrmerge'
modules=(act_mirred cls_u32 dummy libcrc32c nf_conntrack nf_defrag_ipv4 nf_defrag_ipv6 nf_nat
    nf_tables nfnetlink nft_chain_nat nft_ct nft_masq nft_nat sch_ingress veth)

dir=$cache/firecracker
stamp=$cache/stamps/firecracker-root
[[ -d $cache/kernel/lib/modules ]] || fail "$cache has no kernel of the lab: run make lab first"
key=$(cat "$here"/{root.sh,debian.sh} "$here"/root/* "$here"/guest/* "$cache/stamps/kernel" |
    sha256sum)
if [[ -f $dir/root.ext4 && -f $dir/ssh-key && -f $stamp && $(<"$stamp") == "$key" ]]; then
    exit
fi
PATH=$PATH:/usr/sbin:/sbin
require go mke2fs xz
apt_set_up

new=$dir/root.new
root=$new/root
trap 'rm -rf "$new"' EXIT
rm -rf "$new"
mkdir -p "$root"/{cache,dev,etc/ssh,in,mnt,out,proc,root,run,scratch,srv,sys,tmp,var/lib/cni} \
    "$root"/usr/{bin,sbin,lib,lib64}
chmod 755 "$root"
chmod 700 "$root/root"
ln -s usr/{bin,sbin,lib,lib64} "$root"
ln -s /run "$root/var/run"
mapfile -t resolved < <(apt -qq --simulate install "${packages[@]}" |
    awk '/^Inst/ {print $2}' | grep -vxE "$unused")
((${#resolved[@]})) || fail "apt cannot resolve ${packages[*]}: check /etc/apt"
echo "firn: downloading ${#resolved[@]} packages for: ${packages[*]}" >&2
download "$new/packages" "${resolved[@]}"
for package in "$new"/packages/*.deb; do
    dpkg-deb --fsys-tarfile "$package" |
        tar -x -C "$root" --keep-directory-symlink --no-same-owner
done
rm -rf "$root"/usr/share/{bash-completion,doc,info,initramfs-tools,lintian,locale,man} \
    "$root"/usr/lib/{systemd,x86_64-linux-gnu/gconv} "$root"/{lib/init,var/cache} \
    "$root"/etc/{cron*,init*,rc*,systemd}

# Busybox is init, and every program that has no package.
"$root/bin/busybox" --list-full | while IFS= read -r applet; do
    [[ -e $root/$applet || -L $root/$applet ]] || ln -s /bin/busybox "$root/$applet"
done
cp "$here"/root/{fstab,group,inittab,passwd} "$root/etc/"
cp "$here/root/sshd_config" "$root/etc/ssh/"
ln -s /proc/mounts "$root/etc/mtab"
printf '127.0.0.1 localhost\n' >"$root/etc/hosts"
# A CNI plugin reads it.
printf 'nameserver 127.0.0.1\n' >"$root/etc/resolv.conf"
(cd "$here/guest" && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$root/usr/bin/guest") ||
    fail "Go does not build the guest's program (messages above): it needs Go 1.21 or newer"

# The root's own ssh-keygen: the host may have none.
keygen() {
    "$root/lib64/ld-linux-x86-64.so.2" --library-path "$root/lib/x86_64-linux-gnu" \
        "$root/usr/bin/ssh-keygen" -q -t ed25519 -N "" -C firn -f "$1"
}
keygen "$root/etc/ssh/ssh_host_ed25519_key"
keygen "$new/ssh-key"
cp "$new/ssh-key.pub" "$root/etc/ssh/authorized_keys"

version=$(ls "$cache/kernel/lib/modules")
folder=$root/lib/modules/$version
mkdir -p "$folder"
for module in "${modules[@]}"; do
    file=$(find "$cache/kernel/lib/modules/$version" -name "$module.ko.xz")
    [[ $file ]] || fail "the lab's kernel $version has no module $module"
    xz -dc "$file" >"$folder/$module.ko"
done
"$root/bin/busybox" depmod -b "$root" "$version"

echo "firn: making $dir/root.ext4" >&2
# Root must own the files for sshd. Another user is root in a user namespace.
namespace=()
((UID == 0)) || namespace=(unshare -r)
truncate -s 80M "$new/root.ext4"
"${namespace[@]}" mke2fs -q -t ext4 -b 4096 -O ^has_journal -m 0 -E root_owner=0:0,nodiscard \
    -d "$root" "$new/root.ext4"
rm -f "$stamp"
mv -T "$new/ssh-key" "$dir/ssh-key"
mv -T "$new/root.ext4" "$dir/root.ext4"
printf '%s\n' "$key" >"$stamp"
