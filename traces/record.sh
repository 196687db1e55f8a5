#!/bin/sh
# record.sh FUNCTION: records the traces of a function. It runs in the lab, where `make traces`
# starts it. The function is booted and frozen once, and both inputs are recorded from that
# snapshot.
set -eu
function=$1
folder=/in/functions/$function

# exact: what of an answer is the same on every processor: all but the numbers that function.toml
# has a tolerance for. Those are what `make test-workloads` compares.
exact() {
    inexact=$(sed -n '/^\[tolerance\]/,$ s/ = .*//p' "$folder/function.toml" | tr '\n' '|')
    sed -E "s/\"(${inexact%|})\": [^,}]*//g"
}

# once INPUT: records one invocation. A QEMU that the lab could not mend (docs/start/lab.md) loses
# its guest now and then: such a recording fails, leaves no trace, and is made again. A wrong answer
# is not. The time limit is the lab's: 120,000 million instructions.
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
# The kernel's own start-up work goes on for a while. In this lab a guest that is idle waits in no
# time.
sleep 20
firn freeze one snapshot
for input in a b; do
    once "$input"
done
