#!/bin/sh
# What zeroing freed pages costs, in instructions (docs/concepts/faasnap.md). In the lab, as root:
# firn lab run --icount --timeout 3600 --in guest/functions --in lab/sanitising-costs.sh -- sh
# /in/sanitising-costs.sh For each way one JSON object: millions of instructions of the monitor's
# process, its guest's included. `boot` until the function is loaded; `first_rest` the 20 s after
# that, and `rest` 20 s after ten requests, when nothing is asked: reporting works there; `request`
# one of the ten, `function` the guest's own share of it, the medians. Then a thaw of its snapshot:
# the first request, `thaw_function`.
set -eu
function=${1:-json}
inputs=/in/functions/$function
folder=$(mktemp -d)

# What the threads of a process have executed. The lab's clock counts instructions.
executed() {
    cat /proc/"$pid"/task/*/schedstat | awk '{sum += $1} END {printf "%d", sum / 1e6}'
}

# The middle one of the lines that are numbers, in millions.
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

# Without the balloon's driver nothing is reported.
measure none module_blacklist=virtio_balloon
measure init-on-free "init_on_free=1 module_blacklist=virtio_balloon"
measure reporting quiet
measure reporting-order-0 page_reporting.page_reporting_order=0
rm -r "$folder"
