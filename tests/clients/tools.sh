#!/bin/bash
# Installs tools that deploy functions into firn's cache, for `make test-tools`: the folder
# deploy-tools has osls and cdk from npm, and sam from PyPI.
set -euo pipefail
script=${BASH_SOURCE[0]}
cache=${FIRN_CACHE:-${XDG_CACHE_HOME:-${HOME:?HOME is not set: set FIRN_CACHE}/.cache}/firn}

mkdir -p "$cache/stamps"
cache=$(cd "$cache" && pwd)
dir=$cache/deploy-tools
stamp=$cache/stamps/deploy-tools
key=$(sha256sum <"$script")
if [[ -d $dir && -f $stamp && $(<"$stamp") == "$key" ]]; then
    exit
fi
if (($(node -p 'process.versions.node.split(".")[0]') < 20)); then
    echo "firn: error: the tools need Node 20 or newer, and this is $(node -v): install a newer one" >&2
    exit 1
fi

trap 'rm -rf "$dir.new"' EXIT
rm -rf "$dir.new"
mkdir "$dir.new"
echo "firn: downloading osls, cdk and sam (450 MB on the disk)" >&2
npm install --silent --no-audit --no-fund --prefix "$dir.new" osls@4.3.1 aws-cdk@2.1148.1 >&2
python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
    --target "$dir.new/sam" aws-sam-cli==1.170.0 >&2
rm -rf "$dir" "$stamp"
mv -T "$dir.new" "$dir"
printf '%s\n' "$key" >"$stamp"
