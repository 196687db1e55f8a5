#!/bin/sh
# Records the traces of the functions: runs in the lab, where `make traces` starts it.
# Each function is booted and frozen once, and both inputs are recorded from that snapshot.
set -eu

# once FUNCTION INPUT: records one invocation. The emulated processor now and then loses its guest in the middle of a fault: such
# a recording fails, leaves no trace, and is made again. A wrong answer is not.
once() {
    for attempt in 1 2 3; do
        if firn record snapshot --invoke "@/in/functions/$1/input-$2.json" --input "$2" --out "/out/$1-$2.trace" \
            --command 'make traces' >answer; then
            cmp answer "/in/functions/$1/expected-$2.json"
            return
        fi
        echo "$1, input $2: recording $attempt failed" >&2
    done
    return 1
}

# trace FUNCTION MEMORY
trace() {
    firn boot --name "$1" --memory "$2" --detach "/in/functions/$1"
    # The kernel's own start-up work goes on for a while. In this lab a guest that is idle waits in no time.
    sleep 20
    firn freeze "$1" snapshot
    for input in a b; do
        once "$1" "$input"
    done
    rm -r snapshot answer
}

trace hello 256M
trace json 256M
trace pyaes 256M
trace read-list 1G
trace mmap 1G
