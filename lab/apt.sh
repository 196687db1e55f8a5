# Sourced by the build scripts. Downloads and unpacks Debian packages into firn's cache, without root and without
# touching the system: apt runs on its own sources, state and cache, and on an empty dpkg status, so that it resolves the
# whole closure of what it is asked for. Everything built here is keyed by a stamp and put in place by a rename.
# shellcheck shell=bash

cache=${FIRN_CACHE:-${XDG_CACHE_HOME:-${HOME:?HOME is not set: set FIRN_CACHE}/.cache}/firn}
suite=bookworm
backports=$suite-backports
apt_dir=$cache/apt
tools=$cache/tools
mkdir -p "$cache/stamps" "$apt_dir"
cache=$(cd "$cache" && pwd)

say() { printf 'firn: %s\n' "$*" >&2; }
die() { printf 'firn: error: %s\n' "$*" >&2; exit 1; }
set -E
trap 'say "error: line $LINENO of ${BASH_SOURCE[0]##*/} failed: $BASH_COMMAND"' ERR

[[ $(uname -m) == x86_64 ]] || die "this machine is $(uname -m); firn runs on x86_64 only"
for command in apt-get apt-config dpkg-deb flock tar; do
    command -v "$command" >/dev/null || die "$command is missing: the lab and the guest are built from Debian packages; run this on Debian or Ubuntu, or install apt, dpkg, tar and util-linux"
done

# One build at a time per cache; a second one waits and then finds everything built.
exec {build_lock}>"$cache/.lock"
flock "$build_lock"

# built NAME KEY: does the artefact $cache/NAME exist, made from what KEY describes?
built() { [[ -e $cache/$1 && -f $cache/stamps/${1//\//-} && $(<"$cache/stamps/${1//\//-}") == "$2" ]]; }

# publish NAME KEY NEW: puts NEW, a file or a directory beside its place, into place as $cache/NAME.
publish() {
    rm -f "$cache/stamps/${1//\//-}"
    [[ ! -d $cache/$1 ]] || rm -rf "${cache:?}/$1"
    mv -T "$3" "$cache/$1"
    printf '%s\n' "$2" >"$cache/stamps/${1//\//-}.new"
    mv "$cache/stamps/${1//\//-}.new" "$cache/stamps/${1//\//-}"
}

# fresh NAME: prints an empty directory beside $cache/NAME to build in; what an interrupted build left there is removed.
fresh() {
    mkdir -p "$(dirname "$cache/$1")"
    chmod -R u+w "$cache/$1.new" 2>/dev/null || true
    rm -rf "${cache:?}/$1.new"
    mkdir "$cache/$1.new"
    printf '%s\n' "$cache/$1.new"
}

# apt's own temporary files stay in the cache too, where the next run removes what an interrupted one left.
private_apt() {
    TMPDIR=$apt_dir/tmp "$@" -c "$apt_dir/apt.conf"
}

# The system's own Debian mirror (URI and key ring), with the backports suite of the same mirror added.
apt_setup() {
    local uri release component origin created options='' sources=''
    rm -rf "$apt_dir/tmp"
    mkdir -p "$apt_dir"/{lists/partial,archives/partial,etc/preferences.d,tmp}
    : >"$apt_dir/status"
    local keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [[ ! -f $keys ]] || options="[signed-by=$keys] "
    while IFS='|' read -r uri release component origin created; do
        [[ $created == Packages && $component == main ]] || continue
        [[ $origin == Debian || $origin == *ORIGIN* ]] || continue
        case $release in
            "$suite") sources+="deb $options$uri $release main"$'\n'"deb $options$uri $backports main"$'\n' ;;
            "$suite-updates" | "$suite-security" | "$suite/updates") sources+="deb $options$uri $release main"$'\n' ;;
        esac
    done < <(apt-get indextargets --format '$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)|$(CREATED_BY)')
    [[ $sources == *"$backports"* ]] || die "no Debian $suite mirror is configured in /etc/apt: add one (component main) to its sources"
    printf '%s' "$sources" >"$apt_dir/etc/sources.list"
    cat >"$apt_dir/apt.conf" <<CONF
#clear APT::Update;
#clear DPkg;
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "";
APT::Get::Assume-Yes "true";
APT::Update::Error-Mode "any";
Acquire::Retries "3";
Acquire::Languages "none";
Acquire::GzipIndexes "true";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::IndexTargets::deb::DEP-11-icons-small::DefaultEnabled "false";
Acquire::IndexTargets::deb::DEP-11-icons::DefaultEnabled "false";
Acquire::IndexTargets::deb::DEP-11-icons-hidpi::DefaultEnabled "false";
Dir::Etc::sourcelist "$apt_dir/etc/sources.list";
Dir::Etc::sourceparts "-";
Dir::Etc::preferences "-";
Dir::Etc::preferencesparts "$apt_dir/etc/preferences.d";
Dir::State "$apt_dir";
Dir::State::lists "$apt_dir/lists";
Dir::State::status "$apt_dir/status";
Dir::State::extended_states "$apt_dir/extended_states";
Dir::Cache "$apt_dir";
Dir::Cache::archives "$apt_dir/archives";
Dir::Cache::pkgcache "$apt_dir/pkgcache.bin";
Dir::Cache::srcpkgcache "";
Dir::Log "$apt_dir/log";
CONF
    say "reading the package lists"
    private_apt apt-get -qq update || die "apt could not read the package lists (its messages are above): check the network and /etc/apt"
}

# unpack DIR PATTERN APT-ARGUMENTS...: resolves the closure of what APT-ARGUMENTS install, downloads those packages of it whose
# name matches the regular expression (Perl's) PATTERN, unpacks them into DIR and lists them ("name version") in a file beside it, NAME.packages.
apt_ready=
unpack() {
    local dir=$1 pattern=$2 name version file
    local -a plan
    shift 2
    if [[ -z $apt_ready ]]; then
        apt_setup
        apt_ready=1
    fi
    # "Inst NAME (VERSION ORIGIN [ARCH])", one line a package.
    mapfile -t plan < <(trap - ERR; private_apt apt-get -qq --simulate install "$@" | sed -nE 's/^Inst ([^ ]+) \(([^ ]+) .*/\1=\2/p' | grep -P "^($pattern)=")
    ((${#plan[@]} > 0)) || die "apt cannot resolve: $*"
    say "downloading ${#plan[@]} packages for: $*"
    (cd "$apt_dir/archives" && private_apt apt-get -qq download "${plan[@]}") || die "apt could not download: ${plan[*]}"
    : >"${dir%.new}.packages"
    for package in "${plan[@]}"; do
        name=${package%%=*} version=${package#*=}
        for file in "$apt_dir/archives/${name}_${version//:/%3a}"_{amd64,all}.deb; do
            [[ -f $file ]] || continue
            dpkg-deb --fsys-tarfile "$file" | tar -x -C "$dir" --keep-directory-symlink --no-same-owner
            rm "$file"
            printf '%s %s\n' "$name" "$version" >>"${dir%.new}.packages"
            continue 2
        done
        die "apt did not leave $name $version in $apt_dir/archives"
    done
}

# tool NAME ARGUMENTS...: runs a program of the unpacked tools by their own loader and libraries.
tool() {
    local name=$1 place
    shift
    for place in bin sbin usr/bin usr/sbin; do
        [[ -x $tools/$place/$name ]] || continue
        "$tools/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2" --library-path "$tools/lib/x86_64-linux-gnu:$tools/usr/lib/x86_64-linux-gnu" \
            "$tools/$place/$name" "$@"
        return
    done
    die "$name is not among the tools"
}
