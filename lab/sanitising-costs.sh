#!/bin/sh
# Cost of zeroing freed pages, in instructions (docs/concepts/faasnap.md). In the lab, as root:
#   firn lab run --icount --timeout 3600 --in guest/functions --in lab/sanitising-costs.sh -- \
#       sh /in/sanitising-costs.sh [FUNCTION]
# Prints one JSON object for each way, in millions of instructions of the monitor's process, the
# guest's included:
#   boot            until the function is loaded
#   first_rest      the 20 s after the boot
#   request         one of ten requests
#   function        the guest's own share of a request, the median
#   rest            20 s without requests, after the ten; the guest reports free pages meanwhile
#   thaw_function   the first request after a thaw of the snapshot
set -eu
function=${1:-json}
inputs=/in/functions/$function
folder=$(mktemp -d)

# Instructions that the threads of the monitor have executed. The lab's clock counts them.
executed() {
    cat /proc/"$pid"/task/*/schedstat | awk '{sum += $1} END {printf "%d", sum / 1e6}'
}

# The median of the lines, in millions.
median() {
    sort -n | awk '{of[NR] = $1} END {printf "%.2f", of[int((NR + 1) / 2)] / 1e6}'
}

measure() {
    name=$1 words=$2
    firn boot --json --name "$name" --detach --time-limit 900 --cmdline "$words" "$inputs" >"$folder/boot"
    pid=$(sed -nE 's/.*"pid": ?([0-9]+).*/\1/p' "$folder/boot")
    boot=$(executed)
    sleep 20
    first_rest=$(($(executed) - boot))
    before=$(executed)
    for request in 1 2 3 4 5 6 7 8 9 10; do
        firn invoke --json "$name" "@$inputs/input-a.json"
    done >"$folder/requests"
    after=$(executed)
    function_work=$(sed -nE 's/.*"function_ns": ?([0-9]+).*/\1/p' "$folder/requests" | median)
    sleep 20
    rest=$(($(executed) - after))
    firn freeze --dense --json "$name" "$folder/$name" >"$folder/frozen"
    firn thaw --json --invoke "@$inputs/input-b.json" "$folder/$name" >"$folder/thawed"
    thawed=$(sed -nE 's/.*"function_ns": ?([0-9]+).*/\1/p' "$folder/thawed" | median)
    echo "{\"way\": \"$name\", \"boot\": $boot, \"first_rest\": $first_rest, \"request\": $(((after - before) / 10)), \"function\": $function_work, \"rest\": $rest, \"thaw_function\": $thawed}"
    rm -r "$folder/$name"
}

# Without the balloon's driver the guest reports no free pages.
measure none module_blacklist=virtio_balloon
measure init-on-free "init_on_free=1 module_blacklist=virtio_balloon"
measure reporting quiet
measure reporting-order-0 page_reporting.page_reporting_order=0
rm -r "$folder"
