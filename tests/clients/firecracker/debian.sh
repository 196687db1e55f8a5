# Sourced by the scripts of this folder: firn's cache, and the packages of Debian 12 in it.
cache=${FIRN_CACHE:-${XDG_CACHE_HOME:-${HOME:?HOME is not set: set FIRN_CACHE}/.cache}/firn}
mkdir -p "$cache/stamps" "$cache/firecracker"
cache=$(cd "$cache" && pwd)

fail() {
    echo "firn: error: $*" >&2
    exit 1
}

# require PROGRAM...
require() {
    local program
    for program in "$@"; do
        command -v "$program" >/dev/null || fail "$program is missing: run make kernel-tools go"
    done
}

# The private apt of `firn lab build`. Its package lists may name versions that the mirror has
# replaced since, so they are read again. A build of the lab and one of these scripts wait for each
# other, because the former removes unfinished files.
apt_set_up() {
    [[ -f $cache/apt/apt.conf ]] || fail "$cache/apt has no apt configuration: run make lab first"
    exec 9>>"$cache/.lock"
    flock 9
    apt -qq update || fail "apt cannot read the package lists: check the network and /etc/apt"
}

apt() {
    TMPDIR=$cache/apt/tmp apt-get -c "$cache/apt/apt.conf" "$@"
}

# download FOLDER PACKAGE...: without their dependencies.
download() {
    mkdir -p "$1"
    (cd "$1" && apt -qq download "${@:2}") ||
        fail "apt cannot download ${*:2}: check the network and /etc/apt"
}
