#!/bin/bash
# Starts firn-firecracker with the kernel and the root of this folder, and uses each device once.
# Usage: make firecracker-guest; firn lab run --cpus 1 --timeout 600 --in root.ext4 --in vmlinux
#        --in ssh-key --in firn-firecracker --in l1.sh --in smoke.sh -- sh /in/l1.sh /in/smoke.sh
set -euo pipefail
cd /tmp
chmod 600 /in/ssh-key
vmlinux=${VMLINUX:-/in/vmlinux}
arguments="console=ttyS0 reboot=k panic=1 pci=off ${ARGUMENTS-acpi=off}"
arguments+=" ip=172.16.0.2::172.16.0.1:255.255.255.252::eth0:off"

fail() {
    tail -n 40 console
    echo "smoke: $*" >&2
    exit 1
}

# put PATH JSON
put() {
    curl -sS --fail-with-body --unix-socket api -X PUT "http://localhost/$1" -d "$2" ||
        fail "PUT /$1 failed"
}

# vsock PORT REQUEST: prints the answer to the REQUEST.
vsock() {
    { printf 'CONNECT %s\n' "$1" && sleep 1 && printf '%b' "$2" && sleep 2; } |
        curl -sS --unix-socket vsock telnet://localhost
}

# attempt COMMAND...: repeats it, for 60 seconds at most.
attempt() {
    local end=$((SECONDS + 60))
    until "$@"; do
        ((SECONDS < end)) || fail "$* does not succeed"
        sleep 0.5
    done
}

remote() {
    ssh -i /in/ssh-key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
        -o LogLevel=ERROR root@172.16.0.2 "$@"
}

for device in root disk; do
    cp /in/root.ext4 "$device.ext4"
done
ip tuntap add tap0 mode tap
ip address add 172.16.0.1/30 dev tap0
ip link set tap0 up

/in/firn-firecracker --api-sock api >console 2>&1 &
process=$!
attempt test -S api
put machine-config '{"vcpu_count": '"${VCPUS:-2}"', "mem_size_mib": 128}'
put boot-source "{\"kernel_image_path\": \"$vmlinux\", \"boot_args\": \"$arguments\"}"
put drives/root '{"drive_id": "root", "path_on_host": "root.ext4", "is_root_device": true, "is_read_only": true}'
put drives/disk '{"drive_id": "disk", "path_on_host": "disk.ext4", "is_root_device": false, "is_read_only": false}'
put network-interfaces/eth0 '{"iface_id": "eth0", "host_dev_name": "tap0"}'
put vsock '{"guest_cid": 3, "uds_path": "vsock"}'
put entropy '{}'
put actions '{"action_type": "InstanceStart"}'
start=${EPOCHREALTIME/./}
attempt grep -q 'Linux has started' console
echo "smoke: init starts after $(((${EPOCHREALTIME/./} - start) / 1000)) ms"
attempt remote true
echo "smoke: sshd answers after $(((${EPOCHREALTIME/./} - start) / 1000)) ms"
cat console

remote 'uname -a; nproc; cat /proc/cmdline /proc/interrupts; df; free; ip address show dev eth0'
remote 'mount /dev/vdb /mnt && echo written >/mnt/file && umount /mnt && sync'
[[ $(debugfs -R "cat file" disk.ext4 2>/dev/null) == written ]] || fail "the drive has no file"
body='{"a":4,"b":5}'
answer=$(vsock 8000 "POST /ping HTTP/1.0\r\nContent-Length: ${#body}\r\n\r\n$body")
echo "$answer"
[[ $answer == *'{"c":20}'* ]] || fail "vsock port 8000 does not answer"
answer=$(vsock 8000 "POST /run HTTP/1.0\r\nContent-Length: 6\r\n\r\nexit 7")
[[ $answer == *'Exit-Code: 7'* ]] || fail "vsock port 8000 does not run a script: $answer"

put actions '{"action_type": "SendCtrlAltDel"}'
start=${EPOCHREALTIME/./}
wait "$process" || fail "firn-firecracker ended with exit code $?"
echo "smoke: Ctrl-Alt-Del ends the microVM in $(((${EPOCHREALTIME/./} - start) / 1000)) ms"
