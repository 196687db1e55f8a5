# Sourced by the build scripts: what the lab and the guest have in common, the tools and the kernel.
# shellcheck shell=bash

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
