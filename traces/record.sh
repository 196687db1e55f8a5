#!/bin/sh
# Records the traces of the functions: runs in the lab, where `make traces` starts it.
# Each function is booted and frozen once, and both inputs are recorded from that snapshot.
set -eu

# trace FUNCTION MEMORY
trace() {
    firn boot --name "$1" --memory "$2" --detach "/in/functions/$1"
    # The kernel's own start-up work goes on for a while. In this lab a guest that is idle waits in no time.
    sleep 20
    firn freeze "$1" snapshot
    for input in a b; do
        firn record snapshot --invoke "@/in/functions/$1/input-$input.json" --input "$input" --out "/out/$1-$input.trace" \
            --command 'make traces' >answer
        cmp answer "/in/functions/$1/expected-$input.json"
    done
    rm -r snapshot answer
}

trace hello 256M
trace json 256M
trace pyaes 256M
trace read-list 1G
trace mmap 1G
