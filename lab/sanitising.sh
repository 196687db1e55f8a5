#!/bin/sh
# Cost and gain of zeroing freed pages, in counts (docs/concepts/faasnap.md). In the lab, as root:
#   firn lab run --timeout 3000 --in guest/functions --in lab/sanitising.sh -- \
#       sh /in/sanitising.sh [FUNCTION]
# For each way a function is booted, invoked once and frozen. A run of that snapshot is recorded on
# the other input and frozen again, as FaaSnap does. Prints JSON objects, one per line: the first
# snapshot, the second, and its loading set.
set -eu
function=${1:-json}
inputs=/in/functions/$function
folder=$(mktemp -d)

measure() {
    name=$1 of=$2 words=$3
    firn boot --name "$name" --detach --cmdline "$words" "$of" >"$folder/log"
    firn invoke "$name" "@$inputs/input-a.json" >"$folder/log"
    # The guest reports free pages every two seconds.
    sleep 10
    echo "{\"way\": \"$name\", \"function\": \"$function\"}"
    firn freeze --dense --json "$name" "$folder/$name"
    firn profile record --json --invoke "@$inputs/input-a.json" --input a --freeze "$folder/$name-2" "$folder/$name" 2>"$folder/log"
    firn verify --json "$folder/$name-2"
    firn profile pack --json --planner faasnap "$folder/$name-2"
    firn thaw --json --planner faasnap --invoke "@$inputs/input-b.json" "$folder/$name-2"
    rm -r "$folder/$name" "$folder/$name-2"
}

# Without the balloon's driver the guest reports no free pages.
measure none "$inputs" module_blacklist=virtio_balloon
measure init-on-free "$inputs" "init_on_free=1 module_blacklist=virtio_balloon"
measure reporting "$inputs" quiet
measure reporting-order-0 "$inputs" page_reporting.page_reporting_order=0
measure both "$inputs" "init_on_free=1 page_reporting.page_reporting_order=0"
rm -r "$folder"
