# Sourced by the build scripts. Downloads and unpacks Debian packages into firn's cache, without root and without
# touching the system: apt runs on its own sources, state and cache, and on an empty dpkg status, so that it resolves the
# whole closure of what it is asked for. Everything built here is keyed by a stamp and put in place by a rename.
# shellcheck shell=bash

cache=${FIRN_CACHE:-${XDG_CACHE_HOME:-${HOME:?HOME is not set: set FIRN_CACHE}/.cache}/firn}
mkdir -p "$cache/stamps" "$cache/apt"
cache=$(cd "$cache" && pwd)
apt_dir=$cache/apt
tools=$cache/tools
suite=bookworm
backports=$suite-backports

say() { printf 'firn: %s\n' "$*" >&2; }
die() { printf 'firn: error: %s\n' "$*" >&2; exit 1; }
set -E
trap 'say "error: line $LINENO of ${BASH_SOURCE[0]##*/} failed: $BASH_COMMAND"' ERR

[[ $(uname -m) == x86_64 ]] || die "this machine is $(uname -m); firn runs on x86_64 only"
for command in apt-get apt-config dpkg-deb flock perl tar; do
    command -v "$command" >/dev/null || die "$command is missing: the lab and the guest are built from Debian packages; run this on Debian or Ubuntu, or install apt, dpkg, perl, tar and util-linux"
done

# One build at a time per cache; a second one waits and then finds everything built.
exec {build_lock}>"$cache/.lock"
flock "$build_lock"

# What a build that fails has made so far goes with it; what a killed one leaves goes with the next that makes the same.
remove_unfinished() {
    local left
    for left in "$cache"/{,*/,*/*/}*.new; do
        [[ -e $left ]] || continue
        chmod -R u+w "$left"
        rm -rf "$left"
    done
}
trap remove_unfinished EXIT

# built NAME KEY: does the artefact $cache/NAME exist, made from what KEY describes? KEY names all that it is made of, or starts with a number
# that is raised when the way of making it changes.
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

# The system's own Debian mirror with the backports suite of the same mirror added. Which of the system's sources are Debian's is told by
# their Release files, read into lists of our own: the system's may be empty, and other repositories use Debian's suite names.
apt_setup() {
    local uri release component architecture created file options='' sources=''
    local keys=/usr/share/keyrings/debian-archive-keyring.gpg
    rm -rf "${apt_dir:?}"/{tmp,lists,sources}
    mkdir -p "$apt_dir"/{tmp,lists/partial,sources/partial,archives/partial,etc/preferences.d}
    : >"$apt_dir/status"
    cat >"$apt_dir/apt.conf" <<CONF
#clear APT::Update;
#clear DPkg;
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
APT::Get::Assume-Yes "true";
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Retries "3";
$(printf 'Acquire::IndexTargets::deb::%s::DefaultEnabled "false";\n' DEP-11 DEP-11-icons{-small,,-hidpi})
Dir::State "$apt_dir";
Dir::State::extended_states "$apt_dir/extended_states";
Dir::State::lists "$apt_dir/sources";
Dir::State::status "$apt_dir/status";
Dir::Cache "$apt_dir";
Dir::Cache::archives "$apt_dir/archives";
Dir::Cache::pkgcache "$apt_dir/pkgcache.bin";
Dir::Cache::srcpkgcache "";
Dir::Log "$apt_dir/log";
CONF
    say "reading the package lists"
    # A repository of others that cannot be reached is no matter; a missing Debian is found out below.
    private_apt apt-get -qq -o Acquire::IndexTargets::deb::Packages::DefaultEnabled=false update || true
    [[ ! -f $keys ]] || options="[signed-by=$keys] "
    # shellcheck disable=SC2016  # the fields are apt's
    while IFS='|' read -r uri release component architecture created file; do
        file=${file%"_${component}_binary-amd64_Packages"}
        [[ $created == Packages && $component == main && $architecture == amd64 ]] || continue
        grep -qxs 'Origin: Debian' "${file}_InRelease" "${file}_Release" || continue
        case $release in
            "$suite") sources+="deb $options$uri $release main"$'\n'"deb $options$uri $backports main"$'\n' ;;
            "$suite-updates" | "$suite-security" | "$suite/updates") sources+="deb $options$uri $release main"$'\n' ;;
        esac
    done < <(private_apt apt-get --no-release-info indextargets \
        --format '$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ARCHITECTURE)|$(CREATED_BY)|$(FILENAME)')
    [[ $sources == *"$backports"* ]] ||
        die "no Debian mirror with $suite answers: check the network, and that /etc/apt names one (suite $suite, component main)"
    printf '%s' "$sources" >"$apt_dir/etc/sources.list"
    cat >>"$apt_dir/apt.conf" <<CONF
APT::Update::Error-Mode "any";
Dir::Etc::preferences "-";
Dir::Etc::preferencesparts "$apt_dir/etc/preferences.d";
Dir::Etc::sourcelist "$apt_dir/etc/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$apt_dir/lists";
CONF
    private_apt apt-get -qq update || die "apt could not read the package lists (its messages are above): check the network and /etc/apt"
}

# unpack DIR PATTERN APT-ARGUMENTS...: resolves the closure of what APT-ARGUMENTS install, downloads those packages of it whose
# name matches the regular expression (Perl's) PATTERN, unpacks them into DIR and lists them ("name version") in a file beside it, NAME.packages.
# What they say of themselves is added to the dpkg status in DIR, if it has one.
apt_ready=
need_apt() {
    if [[ -z $apt_ready ]]; then
        apt_setup
        apt_ready=1
    fi
}

unpack() {
    local dir=$1 pattern=$2 status=$1/var/lib/dpkg/status name version file
    local -a plan
    shift 2
    need_apt
    # "Inst NAME (VERSION ORIGIN [ARCH])", one line a package. An upgrade has its old version before that, and is not made.
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
            [[ ! -f $status ]] || { dpkg-deb --field "$file" && printf 'Status: install ok installed\n\n'; } >>"$status"
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
