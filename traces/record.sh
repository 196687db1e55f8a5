#!/bin/sh
# record.sh FUNCTION [PERIOD]: records the traces of a function. `make traces` starts it in the lab.
# The function is booted and frozen once, and both inputs are recorded from that snapshot. With a
# period, input a is recorded alone, with repeated accesses and a second invocation (-a2).
set -eu
function=$1
period=${2-}
folder=/in/functions/$function

# exact: removes from an answer the numbers for which function.toml has a tolerance. The rest is the
# same on every processor. `make test-workloads` compares the numbers.
exact() {
    inexact=$(sed -n '/^\[tolerance\]/,$ s/ = .*//p' "$folder/function.toml" | tr '\n' '|')
    sed -E "s/\"(${inexact%|})\": [^,}]*//g"
}

# once INPUT NAME [OPTION...]: records one invocation. With an unpatched QEMU (docs/start/lab.md) a
# guest may hang: such a recording fails, leaves no trace, and is repeated. A wrong answer is not.
# The time limit is in the lab's time: 120,000 million instructions.
once() {
    input=$1 name=$2
    shift 2
    exact <"$folder/expected-$input.json" >expected
    for attempt in 1 2 3; do
        if firn record snapshot --invoke "@$folder/input-$input.json" --input "$input" \
            --out "$name.trace" --time-limit 120 \
            --command "make traces FUNCTIONS=$function${period:+-a2}" "$@" >answer; then
            cat answer
            exact <answer | cmp - expected
            mv "$name.trace" /out
            return
        fi
        echo "$name: recording $attempt failed" >&2
    done
    return 1
}

firn boot --name one --time-limit 900 --detach "$folder"
# The kernel's own start-up work takes a while. In this lab idle time passes at once.
sleep 20
firn freeze one snapshot
if [ -n "$period" ]; then
    once a "$function-a2" --again "$period"
    exit
fi
for input in a b; do
    once "$input" "$function-$input"
done
