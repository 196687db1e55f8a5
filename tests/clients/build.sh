#!/bin/bash
# Builds the clients that the daemon is tested with into firn's cache: clients/ holds boto3 and the aws command from PyPI, by whatever index and
# settings pip is configured with here. Of their service models only AWS Lambda's is kept: all of them are 150 MB.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=../../lab/apt.sh
. "$here/../../lab/apt.sh"

packages=(boto3 awscli)

key=$(sha256sum <"$here/build.sh")
if ! built clients "$key"; then
    say "downloading wheels for: ${packages[*]}"
    dir=$(fresh clients)
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-compile \
        --only-binary=:all: --implementation cp --python-version 3.11 --platform manylinux2014_x86_64 \
        --target "$dir" "${packages[@]}" >&2 ||
        die "pip could not install ${packages[*]} (its messages are above): check the network and pip's configuration"
    rm -rf "$dir"/{bin,awscli/examples,awscli/topics}
    # The aws command asks for the names of all services, and looks into the models of a few.
    find "$dir"/{botocore,awscli/botocore}/data -mindepth 2 -type f ! -path '*/lambda/*' ! -path '*/sts/*' -print0 |
        while IFS= read -rd '' file; do
            rm "$file"
            [[ $file != */service-2.json* ]] || echo '{"metadata": {}, "operations": {}, "shapes": {}}' >"${file%.gz}"
        done
    # Read from a folder that is not written to; of use where the Python that runs it is of the same version.
    python3 -m compileall -q --invalidation-mode unchecked-hash "$dir" >&2
    publish clients "$key" "$dir"
fi
