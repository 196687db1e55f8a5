#!/bin/bash
# Builds the kernel of the guests in the tests of Firecracker's clients into firn's cache, from
# Debian's source and kernel.config: firecracker/vmlinux and firecracker/bzImage.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/debian.sh"

dir=$cache/firecracker
stamp=$cache/stamps/firecracker-kernel
key=$(cat "$here"/{kernel.sh,debian.sh,kernel.config} | sha256sum)
if [[ -f $dir/vmlinux && -f $dir/bzImage && -f $stamp && $(<"$stamp") == "$key" ]]; then
    exit
fi
require bc bison flex gcc make strip
apt_set_up

new=$dir/kernel.new
trap 'rm -rf "$new"' EXIT
rm -rf "$new"
echo "firn: downloading the source of Linux 6.1 (140 MB, 1.5 GB unpacked)" >&2
download "$new" linux-source-6.1
mkdir "$new/source"
dpkg-deb --fsys-tarfile "$new"/*.deb | tar -xO ./usr/src/linux-source-6.1.tar.xz |
    tar -xJ -C "$new/source" --strip-components=1

# A build does not name its user, host and time.
make=(make -s -C "$new/source" "-j$(nproc)" KBUILD_BUILD_USER=firn KBUILD_BUILD_HOST=firn
    "KBUILD_BUILD_TIMESTAMP=1 January 2026")
"${make[@]}" KCONFIG_ALLCONFIG="$here/kernel.config" allnoconfig >&2
# kconfig drops options whose dependencies are off, without a message.
missing=$(grep '^CONFIG_' "$here/kernel.config" | grep -vxFf "$new/source/.config" || true)
[[ -z $missing ]] || fail "this Linux does not have:" $missing
echo "firn: compiling Linux" >&2
"${make[@]}" bzImage >&2 || fail "Linux does not compile (messages above)"
strip "$new/source/vmlinux"
rm -f "$stamp"
mv -T "$new/source/vmlinux" "$dir/vmlinux"
mv -T "$new/source/arch/x86/boot/bzImage" "$dir/bzImage"
printf '%s\n' "$key" >"$stamp"
