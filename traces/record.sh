#!/bin/sh
# record.sh FUNCTION: records the traces of a function. `make traces` starts it in the lab. The
# function is booted and frozen once, and both inputs are recorded from that snapshot.
set -eu
function=$1
folder=/in/functions/$function

# exact: removes from an answer the numbers for which function.toml has a tolerance. The rest is the
# same on every processor. `make test-workloads` compares the numbers.
exact() {
    inexact=$(sed -n '/^\[tolerance\]/,$ s/ = .*//p' "$folder/function.toml" | tr '\n' '|')
    sed -E "s/\"(${inexact%|})\": [^,}]*//g"
}

# once INPUT: records one invocation. With an unpatched QEMU (docs/start/lab.md) a guest may hang:
# such a recording fails, leaves no trace, and is repeated. A wrong answer is not. The time limit is
# in the lab's time: 120,000 million instructions.
once() {
    exact <"$folder/expected-$1.json" >expected
    for attempt in 1 2 3; do
        if firn record snapshot --invoke "@$folder/input-$1.json" --input "$1" --out "$function-$1.trace" \
            --time-limit 120 --command "make traces FUNCTIONS=$function" >answer; then
            cat answer
            exact <answer | cmp - expected
            mv "$function-$1.trace" /out
            return
        fi
        echo "$function, input $1: recording $attempt failed" >&2
    done
    return 1
}

firn boot --name one --time-limit 900 --detach "$folder"
# The kernel's own start-up work takes a while. In this lab idle time passes at once.
sleep 20
firn freeze one snapshot
for input in a b; do
    once "$input"
done
