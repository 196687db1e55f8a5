#!/bin/bash
# image.sh NAME: builds one of firn's own images, listed in images.sh, after the layers below it.
# image.sh --out NAME|FILE [--from NAME|FILE] [--packages A,B] [--requirements FILE]: builds one from packages of the caller's choice.
# An image is a root file system (erofs) for a guest. NAME lies in firn's cache and is built again only when what it is made of changes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=../lab/apt.sh
. "$here/../lab/apt.sh"
# shellcheck source=../lab/shared.sh
. "$here/../lab/shared.sh"
# shellcheck source=images.sh
. "$here/images.sh"

usage="usage: image.sh NAME | --out NAME|FILE [--from NAME|FILE] [--packages A,B] [--requirements FILE]"

# image_place NAME: where the image of that name lies in the cache.
image_place() { if [[ $1 == base ]]; then echo guest/root.erofs; else echo "guest/images/$1.erofs"; fi; }
is_name() { [[ $1 =~ ^[a-z0-9][a-z0-9-]{0,63}$ ]]; }

# root_python ROOT ARGUMENTS...: runs the Python of the root file system ROOT by its own loader and libraries.
root_python() {
    local root=$1 library=$1/usr/lib/x86_64-linux-gnu
    shift
    PYTHONHOME=$root/usr PYTHONDONTWRITEBYTECODE=1 "$library/ld-linux-x86-64.so.2" --library-path "$library" "$root/usr/bin/python3.11" "$@"
}

# make_skeleton ROOT: folders, and the few files that Debian's base-files and base-passwd make.
make_skeleton() {
    local root=$1 folder
    mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{dev,etc,mnt,opt,proc,root,run,srv,sys,tmp,var/tmp,var/lib/dpkg}
    for folder in bin sbin lib lib64; do
        ln -s "usr/$folder" "$root/$folder"
    done
    chmod 1777 "$root/tmp" "$root/var/tmp"
    printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n' >"$root/etc/passwd"
    printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"
    printf 'passwd: files\ngroup: files\nhosts: files\n' >"$root/etc/nsswitch.conf"
    printf '127.0.0.1 localhost\n::1 localhost\n' >"$root/etc/hosts"
    printf 'firn\n' >"$root/etc/hostname"
    : >"$root/var/lib/dpkg/status"
}

# add_packages ROOT NAME...: unpacks the packages, and what they need and the root does not have. A root file system needs no maintainer
# scripts, only the packages' files and a few links that they would make.
add_packages() {
    local root=$1 library
    local -a left_out
    shift
    need_apt
    # To apt the root is a system. What is left out looks installed there, unless it is asked for by name.
    mapfile -t left_out < <(printf '%s\n' "${unneeded[@]}" | grep -vxFf <(printf '%s\n' "$@" && sed -n 's/^Package: //p' "$root/var/lib/dpkg/status"))
    {
        cat "$root/var/lib/dpkg/status"
        private_apt apt-cache show --no-all-versions "${left_out[@]}" |
            sed -nE 's/^Package:.*/&\nStatus: hold ok installed/p; /^(Version|Architecture|Multi-Arch|Provides):/p; /^$/p'
    } >"$apt_dir/status"
    unpack "$root" '.*' "$@"
    : >"$apt_dir/status"
    rm -rf "${root:?}"/usr/include "$root"/usr/share/{applications,bash-completion,bug,doc,doc-base,icons,info,lintian,locale,man,menu,pixmaps}
    find "$root/usr/lib" -name '*.a' -delete
    find "$root/usr/lib/python3/dist-packages" -depth -type d -name tests -exec rm -rf {} +
    # What update-alternatives would choose.
    for library in blas/libblas.so.3 lapack/liblapack.so.3 openblas-pthread/lib{blas.so.3,lapack.so.3,openblas.so.0}; do
        [[ ! -e $root/usr/lib/x86_64-linux-gnu/$library ]] || ln -sfn "$library" "$root/usr/lib/x86_64-linux-gnu/${library#*/}"
    done
}

# add_wheels ROOT PIP-ARGUMENTS...: by the root's own Python, so that pip finds what the packages brought.
add_wheels() {
    local root=$1 dir
    shift
    if ! built pip 1; then
        dir=$(fresh pip)
        unpack "$dir" 'python3-(pip|distutils|lib2to3)' python3-pip
        publish pip 1 "$dir"
    fi
    say "installing wheels: $*"
    PYTHONPATH=$cache/pip/usr/lib/python3/dist-packages:$cache/pip/usr/lib/python3.11 root_python "$root" \
        -m pip install --quiet --disable-pip-version-check --no-warn-script-location --root-user-action=ignore \
        --break-system-packages --no-compile --only-binary=:all: "$@" >&2 ||
        die "pip could not install $* (its messages are above): check the names, the network and pip's configuration"
}

# list_contents ROOT: "name version" of its packages and wheels, one a line.
list_contents() {
    local folder
    sed -nE 's/^Package: //p; s/^Version: //p' "$1/var/lib/dpkg/status" | paste -d' ' - -
    for folder in "$1"/var/runtime/*.dist-info "$1"/usr/local/lib/python3.11/dist-packages/*.dist-info; do
        [[ ! -d $folder ]] || basename "$folder" .dist-info | tr - ' '
    done
}

# make_image NEW: makes the image NEW from the layer $below (a file, or nothing), $packages, $wheels (pip's arguments) and $runtime_wheels.
make_image() {
    local new=$1 root folder
    local -a python=()
    root=$(fresh guest/image)
    if [[ -n $below ]]; then
        tool fsck.erofs --extract="$root" --overwrite --no-preserve-owner --preserve-perms "$below" >&2
    else
        make_skeleton "$root"
    fi
    ((${#packages[@]} == 0)) || add_packages "$root" "${packages[@]}"
    ((${#runtime_wheels[@]} == 0)) || add_wheels "$root" --target "$root/var/runtime" "${runtime_wheels[@]}"
    ((${#wheels[@]} == 0)) || add_wheels "$root" "${wheels[@]}"
    # The client goes without its native part where that does not load, and fails at the first request.
    if [[ -d $root/var/runtime ]]; then
        PYTHONPATH=$root/var/runtime root_python "$root" -c 'import runtime_client, awslambdaric.bootstrap, snapshot_restore_py' ||
            die "AWS Lambda's runtime interface client does not load in the guest's root file system"
    fi
    say "making $new"
    # The root is read-only in the guest: bytecode is made now, and never checked against its source.
    for folder in usr/lib/python3.11 usr/lib/python3 usr/local/lib/python3.11 var/runtime; do
        [[ ! -d $root/$folder ]] || python+=("$root/$folder")
    done
    root_python "$root" -m compileall -q -f -j 0 -s "$root" -p / --invalidation-mode unchecked-hash "${python[@]}" >&2
    # Not compressed: unpacking would cost the guest more than reading does.
    tool mkfs.erofs --quiet -T0 --all-root -x-1 "$new.new" "$root" >&2 || {
        rm -f "$new.new"
        die "$new cannot be made (the message is above): is there room for it?"
    }
    list_contents "$root" >"${new%.erofs}.packages"
    chmod -R u+w "$root"
    rm -rf "$root" "${root%.new}.packages"
}

# check_place NAME|FILE: fails for what is neither a name nor looks like a file.
check_place() {
    is_name "$1" || [[ $1 == */* ]] ||
        die "$1 is neither a name (1 to 64 of a-z, 0-9 and -) nor a file: write a file with its folder, such as ./$1"
}

# find_image NAME|FILE: sets `below` to its file and `below_key` to what tells it from others, after building it where it is firn's own.
find_image() {
    local place
    if is_name "$1"; then
        place=$(image_place "$1")
        (image_contents "$1") && build_own "$1"
        [[ -f $cache/$place ]] || die "there is no image $1: firn's own are base, science, learning and media"
        below=$cache/$place below_key=$(<"$cache/stamps/${place//\//-}")
    else
        [[ -f $1 ]] || die "there is no image at $1"
        below=$1 below_key="$1 $(stat -c '%s %Y' "$1")"
    fi
}

# build_named NAME: builds the image of that name in the cache, unless it is there and made of the same things.
build_named() {
    local place key
    place=$(image_place "$1")
    key=$(printf '%s\n' "$below_key" -- "${packages[@]}" -- "${wheels[@]}" "$requirements" -- "${runtime_wheels[@]}" -- "${unneeded[@]}" | sha256sum)
    key="1 $key"
    if ! built "$place" "$key"; then
        mkdir -p "$(dirname "$cache/$place")"
        make_image "$cache/$place"
        publish "$place" "$key" "$cache/$place.new"
    fi
}

# build_own NAME: builds one of firn's own images, after the layers below it.
build_own() {
    local from below='' below_key='' requirements=''
    local -a packages wheels runtime_wheels
    image_contents "$1"
    [[ -z $from ]] || find_image "$from"
    image_contents "$1"
    build_named "$1"
}

build_shared
mkdir -p "$cache/guest"
if (($# == 1)) && [[ $1 != --* ]]; then
    (image_contents "$1") || die "firn has no image $1: it has base, science, learning and media"
    build_own "$1"
else
    out='' below='' below_key='' requirements=''
    packages=() wheels=() runtime_wheels=()
    from=base
    while (($# > 1)); do
        case $1 in
            --out) out=$2 ;;
            --from) from=$2 ;;
            --packages) IFS=, read -ra packages <<<"$2" ;;
            --requirements)
                [[ -r $2 ]] || die "the requirements $2 cannot be read"
                wheels=(-r "$2") requirements=$(sha256sum <"$2")
                ;;
            *) die "$usage" ;;
        esac
        shift 2
    done
    [[ $# == 0 && -n $out ]] || die "$usage"
    check_place "$out"
    check_place "$from"
    find_image "$from"
    if is_name "$out"; then
        ! (image_contents "$out") || die "$out is the name of one of firn's own images: choose another"
        build_named "$out"
    else
        make_image "$out"
        mv -T "$out.new" "$out"
    fi
fi
pack_guest
