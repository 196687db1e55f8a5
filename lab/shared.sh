# Sourced by the build scripts, after apt.sh: what the lab and the guest have in common, the tools and the kernel.
# shellcheck shell=bash disable=SC2154  # cache and the like are apt.sh's

# Programs that only the building needs. They come from Debian too, so that a build depends on nothing that a system may lack.
tools_packages=(busybox-static e2fsprogs erofs-utils xz-utils zstd)

build_shared() {
    local dir key
    key="1 ${tools_packages[*]}"
    if ! built tools "$key"; then
        dir=$(fresh tools)
        unpack "$dir" '.*' "${tools_packages[@]}"
        publish tools "$key" "$dir"
    fi
    # The same kernel, unmodified, serves the lab's machine and the guests.
    key="1 linux-image-cloud-amd64/$backports"
    if ! built kernel "$key"; then
        dir=$(fresh kernel)
        unpack "$dir" 'linux-image-[0-9].*' "linux-image-cloud-amd64/$backports"
        publish kernel "$key" "$dir"
    fi
}

# Packs the guest's files into the disk that the lab's machine gets, where both the guest and the lab are built.
pack_guest() {
    local file root size key
    local -a files=(vmlinux initramfs.cpio root.erofs overlay.ext4 packages)
    for file in l1 qemu; do
        [[ -e $cache/lab/$file ]] || return 0
    done
    for file in "${files[@]}"; do
        [[ -e $cache/guest/$file ]] || return 0
    done
    key=$(cat "$cache"/stamps/guest-* | sha256sum)
    if ! built lab/guest.ext4 "1 $key"; then
        say "packing the guest's files for the lab"
        root=$(fresh lab/guest)
        mkdir "$root/guest"
        for file in "${files[@]}"; do
            ln "$cache/guest/$file" "$root/guest/$file"
        done
        size=$(du -sk "$root" | cut -f1)
        rm -f "$cache/lab/guest.ext4.new"
        tool mke2fs -q -F -t ext4 -b 4096 -O ^has_journal -m 0 -N 64 -E root_owner=0:0 -d "$root" \
            "$cache/lab/guest.ext4.new" $((size + size / 20 + 8192))k >/dev/null
        rm -rf "$root"
        publish lab/guest.ext4 "1 $key" "$cache/lab/guest.ext4.new"
    fi
}
