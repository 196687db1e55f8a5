#!/bin/bash
# Installs the clients of the daemon's tests into firn's cache: the folder clients has boto3 and the
# aws command from PyPI, from the index that pip is configured with. Of their service models only
# AWS Lambda's is kept, because all of them are 150 MB.
set -euo pipefail
script=${BASH_SOURCE[0]}
cache=${FIRN_CACHE:-${XDG_CACHE_HOME:-${HOME:?HOME is not set: set FIRN_CACHE}/.cache}/firn}
packages=(boto3 awscli)

mkdir -p "$cache/stamps"
cache=$(cd "$cache" && pwd)
dir=$cache/clients
stamp=$cache/stamps/clients
key=$(sha256sum <"$script")
if [[ -d $dir && -f $stamp && $(<"$stamp") == "$key" ]]; then
    exit
fi

trap 'rm -rf "$dir.new"' EXIT
rm -rf "$dir.new"
echo "firn: downloading wheels for: ${packages[*]}" >&2
python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-compile \
    --only-binary=:all: --implementation cp --python-version 3.11 \
    --platform manylinux2014_x86_64 --target "$dir.new" "${packages[@]}" >&2 || {
    echo "firn: error: pip cannot install ${packages[*]} (its messages are above): check the" \
        "network and pip's configuration" >&2
    exit 1
}
rm -rf "$dir.new"/{bin,awscli/examples,awscli/topics}
# The aws command lists the names of all services, and reads the models of a few.
find "$dir.new"/{botocore,awscli/botocore}/data -mindepth 2 -type f ! -path '*/lambda/*' \
    ! -path '*/sts/*' -print0 |
    while IFS= read -rd '' file; do
        rm "$file"
        [[ $file != */service-2.json* ]] ||
            echo '{"metadata": {}, "operations": {}, "shapes": {}}' >"${file%.gz}"
    done
# The folder is read-only in the tests. A Python of the same version uses this bytecode.
python3 -m compileall -q --invalidation-mode unchecked-hash "$dir.new" >&2
rm -rf "$dir" "$stamp"
mv -T "$dir.new" "$dir"
printf '%s\n' "$key" >"$stamp"
