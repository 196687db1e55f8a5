#!/bin/bash
# A guest with the kernel and the root of this folder, as a client of the API drives it: each
# device, a snapshot and a chain of diffs that is loaded with another tap device, a balloon, a drive
# whose process is killed, and a bzImage with an initrd. Runs in the lab, in root.ext4 (l1.sh).
# Usage: guest.sh PROGRAMS, a folder with firn-firecracker, vmlinux, bzImage, root.ext4 and ssh-key.
set -euo pipefail
programs=$(cd "$1" && pwd)
work=$(mktemp -d)
cd "$work"
# Each line is printed with the seconds since the start.
report() { echo "guest: $SECONDS s: $*"; }

fail() {
    [[ ! -f console ]] || tail -n 40 console
    report "$*" >&2
    exit 1
}

# request METHOD PATH JSON
request() {
    curl -sS --fail-with-body --unix-socket api -X "$1" "http://localhost/$2" -d "$3" ||
        fail "$1 /$2 failed"
}
put() { request PUT "$@"; }
patch() { request PATCH "$@"; }
get() { curl -sS --fail-with-body --unix-socket api "http://localhost/$1" || fail "GET /$1 failed"; }

# attempt COMMAND...: repeats it, for 60 seconds at most.
attempt() {
    local end=$((SECONDS + 60))
    until "$@"; do
        ((SECONDS < end)) || fail "$* does not succeed"
        sleep 0.5
    done
}

remote() {
    ssh -i ssh-key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
        -o LogLevel=ERROR root@172.16.0.2 "$@"
}

# vsock REQUEST: prints the answer of the guest's port 8000.
vsock() {
    { printf 'CONNECT 8000\n' && sleep 1 && printf '%b' "$1" && sleep 2; } |
        curl -sS --unix-socket "$vsock" telnet://localhost
}

# tap NAME: replaces the tap device.
tap() {
    [[ ! ${tap-} ]] || ip link delete "$tap"
    tap=$1
    ip tuntap add "$tap" mode tap
    ip address add 172.16.0.1/30 dev "$tap"
    ip link set "$tap" up
}

# process ARGUMENT...: starts firn-firecracker.
process() {
    rm -f api "$vsock"
    "$programs/firn-firecracker" --api-sock api "$@" >console 2>&1 &
    process=$!
    attempt test -S api
}

kill_process() {
    kill -KILL "$process"
    wait "$process" || true
}

# save TYPE NAME: the files NAME.state and NAME.memory.
save() {
    patch vm '{"state": "Paused"}'
    put snapshot/create "{\"snapshot_type\": \"$1\", \"snapshot_path\": \"$2.state\", \"mem_file_path\": \"$2.memory\"}"
    report "$2 takes $(du -k "$2.memory" | cut -f 1) KiB"
}

# merge MEMORY DIFF: writes what is in the file of a diff over a memory file.
merge() {
    filefrag -b4096 -es "$2" | tr -d : | awk '$1 ~ /^[0-9]+$/ {print $2 + 0, $3 - $2 + 1}' |
        while read -r block count; do
            dd if="$2" of="$1" bs=4096 skip="$block" seek="$block" count="$count" conv=notrunc status=none
        done
}

# load NAME: in a new process with another tap device and another vsock.
load() {
    vsock=$1.vsock
    tap "tap-$1"
    process
    put snapshot/load "{\"snapshot_path\": \"$1.state\", \"track_dirty_pages\": true, \"resume_vm\": true,
        \"mem_backend\": {\"backend_type\": \"File\", \"backend_path\": \"full.memory\"},
        \"network_overrides\": [{\"iface_id\": \"eth0\", \"host_dev_name\": \"$tap\"}],
        \"vsock_override\": {\"uds_path\": \"$vsock\"}}"
    attempt remote true
    report "the guest of $1 answers in a new process"
}

check_vsock() {
    local body='{"a":4,"b":5}'
    [[ $(vsock "POST /ping HTTP/1.0\r\nContent-Length: ${#body}\r\n\r\n$body") == *'{"c":20}'* ]] ||
        fail "vsock port 8000 does not answer"
}

check_mmds() {
    put mmds "{\"latest\": {\"meta-data\": {\"name\": \"$1\"}}}"
    # shellcheck disable=SC2016 # the guest expands it
    [[ $(remote 'address=http://169.254.169.254/latest
        token=$(curl -sS -X PUT "$address/api/token" -H "X-metadata-token-ttl-seconds: 60")
        curl -sS "$address/meta-data/name" -H "X-metadata-token: $token"') == "$1" ]] ||
        fail "MMDS does not answer"
}

resident() { awk '/^VmRSS/ {print $2}' "/proc/$process/status"; }
balloon_has() { [[ $(get balloon/statistics) == *"\"actual_mib\":$1,"* ]]; }

# check_balloon KIB: the balloon takes memory, of which the guest has used at least that much.
check_balloon() {
    local use='dd if=/dev/zero of=/tmp/large bs=1M count=32 status=none && rm /tmp/large'
    remote "$use"
    local before after
    before=$(resident)
    patch balloon '{"amount_mib": 32}'
    attempt balloon_has 32
    after=$(resident)
    ((after < before - $1)) || fail "32 MiB in the balloon: VmRSS was $before kB, is $after kB"
    patch balloon '{"amount_mib": 0}'
    attempt balloon_has 0
    remote "$use"
    report "32 MiB in the balloon: VmRSS fell from $before to $after kB"
}

cp "$programs"/ssh-key .
chmod 600 ssh-key
for device in root disk; do
    cp "$programs/root.ext4" "$device.ext4"
done
vsock=vsock
tap tap-first

process
put machine-config '{"vcpu_count": 2, "mem_size_mib": 128, "track_dirty_pages": true}'
put boot-source "{\"kernel_image_path\": \"$programs/vmlinux\", \"boot_args\": \"console=ttyS0 reboot=k panic=1 pci=off acpi=off ip=172.16.0.2::172.16.0.1:255.255.255.252::eth0:off\"}"
put drives/root '{"drive_id": "root", "path_on_host": "root.ext4", "is_root_device": true, "is_read_only": true}'
put drives/disk '{"drive_id": "disk", "path_on_host": "disk.ext4", "is_root_device": false, "is_read_only": false, "cache_type": "Writeback"}'
put network-interfaces/eth0 "{\"iface_id\": \"eth0\", \"host_dev_name\": \"$tap\"}"
put vsock "{\"guest_cid\": 3, \"uds_path\": \"$vsock\"}"
put mmds/config '{"version": "V2", "network_interfaces": ["eth0"]}'
put balloon '{"amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 1}'
put entropy '{}'
put actions '{"action_type": "InstanceStart"}'
attempt grep -q 'Linux has started' console
report "init has started"
attempt remote true
remote 'uname -a; nproc; cat /proc/cmdline /proc/interrupts; ip route add 169.254.169.254 dev eth0'
[[ $(remote nproc) == 2 ]] || fail "the guest does not have 2 processors"
check_vsock
[[ $(vsock 'POST /run HTTP/1.0\r\nContent-Length: 6\r\n\r\nexit 7') == *'Exit-Code: 7'* ]] ||
    fail "vsock port 8000 does not run a script"
check_mmds first
report "vsock and MMDS answer"
check_balloon 24576
synced=$(remote 'mount /dev/vdb /mnt && head -c 1048576 /dev/urandom >/mnt/synced &&
    dd if=/mnt/synced of=/mnt/copy bs=64k conv=fsync status=none && md5sum </mnt/copy')

save Full full
patch vm '{"state": "Resumed"}'
first=$(remote 'head -c 4194304 /dev/urandom >/tmp/first && md5sum </tmp/first')
save Diff diff-1
patch vm '{"state": "Resumed"}'
second=$(remote 'head -c 4194304 /dev/urandom >/tmp/second && head -c 2097152 /dev/zero >/tmp/first &&
    md5sum </tmp/second')
zeros=$(head -c 2097152 /dev/zero | md5sum)
[[ $first != "$zeros" ]]
save Diff diff-2
kill_process
[[ $(debugfs -R "cat copy" disk.ext4 2>/dev/null | md5sum) == "$synced" ]] ||
    fail "the drive lacks what the guest has synced"
report "the drive has what the guest has synced"

merge full.memory diff-1.memory
merge full.memory diff-2.memory
load diff-2
[[ $(remote 'md5sum </tmp/second && md5sum </tmp/first') == "$second"$'\n'"$zeros" ]] ||
    fail "the loaded guest has other memory"
[[ $(remote 'md5sum </mnt/copy') == "$synced" ]] || fail "the loaded guest has another drive"
check_vsock
check_mmds second
# A diff of what it has written since the load, into a file of its own.
third=$(remote 'head -c 4194304 /dev/urandom >/tmp/third && md5sum </tmp/third')
save Diff diff-3
kill_process
merge full.memory diff-3.memory
load diff-3
[[ $(remote 'md5sum </tmp/third && md5sum </tmp/second') == "$third"$'\n'"$second" ]] ||
    fail "the guest of three diffs has other memory"
# It also takes what was not used since the load.
check_balloon 4096
remote 'umount /mnt'
put actions '{"action_type": "SendCtrlAltDel"}'
wait "$process" || fail "firn-firecracker ended with exit code $?"
report "Ctrl-Alt-Del has ended the microVM"

mkdir -p initrd/bin
cp /bin/busybox initrd/bin
cat >initrd/init <<'INIT'
#!/bin/busybox sh
/bin/busybox echo "the initrd has started"
/bin/busybox reboot -f
INIT
chmod +x initrd/init
(cd initrd && find . | cpio -o -H newc | gzip) >initrd.gz
cat >configuration.json <<JSON
{"machine-config": {"vcpu_count": 1, "mem_size_mib": 128}, "drives": [], "boot-source": {
    "kernel_image_path": "$programs/bzImage", "initrd_path": "initrd.gz",
    "boot_args": "console=ttyS0 reboot=k panic=1 pci=off"}}
JSON
rm api
"$programs/firn-firecracker" --api-sock api --config-file configuration.json >console 2>&1 ||
    fail "firn-firecracker ended with exit code $?"
grep -q 'the initrd has started' console || fail "the initrd has not started"
report "a bzImage has started its initrd"
rm -r "$work"
