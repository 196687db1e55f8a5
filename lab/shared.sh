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

# Packs the guest's files into the disks that the lab's machine gets, where both the guest and the lab are built: one for what every guest boots
# from, one for the images other than the base.
pack_guest() {
    local file root key
    local -a files=(vmlinux initramfs.cpio root.erofs overlay.ext4 packages)
    for file in l1 qemu; do
        [[ -e $cache/lab/$file ]] || return 0
    done
    for file in "${files[@]}"; do
        [[ -e $cache/guest/$file ]] || return 0
    done
    key="2 $(for file in "${files[@]}"; do stat -c '%i %s %Y' "$cache/guest/$file"; done | sha256sum)"
    if ! built lab/guest.ext4 "$key"; then
        say "packing the guest's files for the lab"
        root=$(fresh lab/guest)
        mkdir -p "$root/guest/images"
        for file in "${files[@]}"; do
            ln "$cache/guest/$file" "$root/guest/$file"
        done
        pack_disk "$root" guest.ext4 "$key"
    fi
    for file in "$cache"/guest/images/*.erofs; do
        [[ -e $file ]] || return 0
    done
    key="1 $(stat -c '%n %i %s %Y' "$cache"/guest/images/*.erofs | sha256sum)"
    if ! built lab/images.ext4 "$key"; then
        say "packing the images for the lab"
        root=$(fresh lab/images)
        ln "$cache"/guest/images/*.erofs "$root"
        pack_disk "$root" images.ext4 "$key"
    fi
}

# pack_disk DIR NAME KEY: makes the lab's disk NAME of what DIR holds, and removes DIR.
pack_disk() {
    local size new=$cache/lab/$2.new
    size=$(du -sk "$1" | cut -f1)
    rm -f "$new"
    tool mke2fs -q -F -t ext4 -b 4096 -O ^has_journal -m 0 -N 64 -E root_owner=0:0 -d "$1" "$new" $((size + size / 20 + 8192))k >/dev/null
    rm -rf "$1"
    publish "lab/$2" "$3" "$new"
}
