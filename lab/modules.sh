# Sourced by the build scripts: kernel modules with what they depend on, for an initramfs.
# shellcheck shell=bash

# collect_modules TREE DIR MODULE...: decompresses the modules of TREE (an unpacked kernel package) and those they need into DIR, and lists
# their files in DIR/order, each after those it depends on. Modules built into the kernel are left out.
collect_modules() {
    local tree=$1 dir=$2
    shift 2
    local -A seen=()
    mkdir -p "$dir"
    : >"$dir/order"
    local module
    for module in "$@"; do
        collect_module "${module//-/_}"
    done
}

# A package holds no modules.dep (depmod writes it when the package is installed), so the modules' own information is read.
collect_module() {
    local name=$1 file needed
    [[ -z ${seen[$name]:-} ]] || return 0
    seen[$name]=1
    if grep -qE "/${name//_/[-_]}\.ko$" "$tree"/lib/modules/*/modules.builtin; then
        return 0
    fi
    file=$(find "$tree/lib/modules" -name "${name//_/[-_]}.ko*" -print -quit)
    [[ -n $file ]] || die "the kernel package has no module $name"
    case $file in
        *.ko.xz) tool xz -dc "$file" >"$dir/$name.ko" ;;
        *.ko.zst) tool zstd -qdc "$file" >"$dir/$name.ko" ;;
        *.ko) cp "$file" "$dir/$name.ko" ;;
        *) die "unknown compression: $file" ;;
    esac
    # "depends=a,b", among NUL-terminated strings.
    for needed in $(tr '\0' '\n' <"$dir/$name.ko" | sed -nE 's/^depends=(.*)/\1/p' | tr ',' ' '); do
        collect_module "${needed//-/_}"
    done
    printf '%s\n' "$name.ko" >>"$dir/order"
}
