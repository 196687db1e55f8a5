#!/bin/sh
# record.sh FUNCTION [PERIOD|sizes|paper|holders|marking]: records the traces of a function. `make
# traces` starts it in the lab. The function is booted and frozen once, and both inputs are recorded
# from that snapshot.
# With a period, input a is recorded alone, with repeated accesses and a second invocation (-a2).
# With `sizes` or `paper` it is booted with 1 GiB, and the inputs in that folder of traces are
# recorded.
# With `holders` input a is recorded with what held the pages, beside the other traces.
# With `marking` input a is recorded with the pages that the guest's kernel allocated meanwhile,
# which the kernel prints into its log, and the function reads there.
set -eu
function=$1
what=${2-}
folder=/in/functions/$function

# exact: removes from an answer the numbers for which function.toml has a tolerance. The rest is the
# same on every processor. `make test-workloads` compares the numbers.
exact() {
    inexact=$(sed -n '/^\[tolerance\]/,$ s/ = .*//p' "$folder/function.toml" | tr '\n' '|')
    sed -E "s/\"(${inexact%|})\": [^,}]*//g"
}

# once INPUT EVENT NAME [OPTION...]: records one invocation. With an unpatched QEMU
# (docs/start/lab.md) a guest may hang: such a recording fails, leaves no trace, and is repeated.
# The time limit is in the lab's time: 120,000 million instructions.
once() {
    input=$1 event=$2 name=$3
    shift 3
    for attempt in 1 2 3; do
        if firn record snapshot --invoke "$event" --input "$input" --out "$name.trace" \
            --time-limit 120 --command "make traces FUNCTIONS=$function$ending" "$@" >answer; then
            cat answer
            return
        fi
        echo "$name: recording $attempt failed" >&2
    done
    return 1
}

# known INPUT NAME [OPTION...]: records an input whose answer is known. A wrong answer is an error.
known() {
    input=$1 name=$2
    shift 2
    once "$input" "@$folder/input-$input.json" "$name" "$@"
    exact <"$folder/expected-$input.json" >expected
    exact <answer | cmp - expected
    mv "$name.trace" /out
}

listed() {
    sed -n "s/^$function //p" "/in/$what/inputs"
}

memory=
case $what in
'') ending= ;;
sizes | paper) ending=-$what memory="--memory 1G" ;;
holders) ending=-holders ;;
marking)
    ending=-marking
    cp -r /in/functions /in/allocations /tmp
    mv "/tmp/functions/$function/handler.py" "/tmp/functions/$function/work.py"
    cp /in/allocations/handler.py "/tmp/functions/$function"
    folder=/tmp/functions/$function
    # With the log.
    memory="--memory 2G"
    printed="trace_event=kmem:mm_page_alloc tp_printk log_buf_len=64M sysctl.kernel.dmesg_restrict=0 loglevel=0"
    ;;
*) ending=-a2 ;;
esac
# shellcheck disable=SC2086 # It is two words or none.
firn boot --name one --time-limit 900 $memory ${printed:+--cmdline "$printed"} --detach "$folder"
# The kernel's own start-up work takes a while. In this lab idle time passes at once.
sleep 20
if [ "$function-$what" = ffmpeg-sizes ]; then
    # Its videos are made before the freeze, as those of inputs a and b are.
    listed | while read -r _ event; do
        firn invoke one "$event"
    done
fi
if [ "$what" = marking ]; then
    # The log is read from here on.
    firn invoke one null >/dev/null
fi
firn freeze one snapshot
case $what in
'')
    for input in a b; do
        known "$input" "$function-$input"
    done
    ;;
sizes | paper)
    mkdir -p "/out/$what"
    listed | while read -r input event; do
        once "$input" "$event" "$function-$input"
        mv "$function-$input.trace" "/out/$what"
    done
    ;;
holders)
    once a "@$folder/input-a.json" "$function-a" --holders "$function-a.json"
    mkdir -p /out/holders
    mv "$function-a.json" "$function-a.trace" /out/holders
    ;;
marking)
    once a "@$folder/input-a.json" "$function-a"
    mkdir -p /out/marking
    sed -E 's/.*"allocated": ?/{"allocated": /' answer >"/out/marking/$function-a.json"
    mv "$function-a.trace" /out/marking
    ;;
*) known a "$function-a2" --again "$what" ;;
esac
