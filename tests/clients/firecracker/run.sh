#!/bin/bash
# Runs the tests of firecracker-go-sdk and of fctools against firn-firecracker, with firn's player
# as the guest's kernel (player), and those that need Linux with it (linux; in the lab, by l1.sh).
# The lists name the tests that do not run, for which docs/firecracker.md has the reasons.
# Usage: run.sh player|linux CLIENTS PROGRAMS. The folder PROGRAMS has firn-firecracker and jailer,
# and firn for a player, or vmlinux, root.ext4 and ssh-key for Linux.
set -euo pipefail
guest=$1
clients=$(cd "$2" && pwd)
programs=$(cd "$3" && pwd)
((UID == 0)) || {
    echo "firn: error: the clients' tests need root, for tap devices and a jailer" >&2
    exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=()

# Their patterns are for Firecracker before 1.4 and 1.10.
sdk_skipped='TestMicroVMExecution.*/TestGetFirecrackerVersion|TestLogAndMetrics/#00|TestLogAndMetrics/Error'
# Firecracker's snapshot-editor.
fctools_skipped=(snapshot_editor installation_verifies)
# They wait for a guest that answers the keyboard, the network, a vsock or the balloon.
needs_linux=(vm_can_shut_down_via_ctrl_alt_del vm_can_take_pipes vm_can_boot_with_simple
    vm_can_boot_with_namespaced vm_tracks_state_with_graceful_exit vmm_can_recv_ctrl_alt_del
    vmm_can_take_out_pipes vm_api_can_get_balloon_statistics mmds vsock_can)
if [[ $guest == player ]]; then
    sdk_skipped+='|CNI|TestLoadSnapshot/.*via_ssh'
    sdk_selected=.
    fctools_skipped+=("${needs_linux[@]}")
    waits='{"shutdown_timeout_ms": 2000, "boot_wait_ms": 300, "boot_socket_timeout_ms": 5000}'
    fctools_selected=()
    threads=2
    attempts=1
    "$programs/firn" player --elf --trace sequential-read:4M --out "$work/vmlinux"
    truncate -s 16M "$work/root.ext4"
    touch "$work/ssh-key"
else
    sdk_selected='CNI|TestLoadSnapshot/.*via_ssh'
    export FIRECRACKER_GO_SDK_INIT_TIMEOUT_SECONDS=20
    export FIRECRACKER_GO_SDK_REQUEST_TIMEOUT_MILLISECONDS=10000
    waits='{"shutdown_timeout_ms": 30000, "boot_wait_ms": 15000, "boot_socket_timeout_ms": 20000}'
    fctools_selected=("${needs_linux[@]}")
    # A process that one test forks has the tap device that another one makes until it runs its
    # program, and the device is in use as long. A test also boots two guests at once.
    threads=1
    # Those of CNI give a microVM and its plugins 3 s to end, while others of ten boot on the same
    # emulated processors.
    attempts=3
    cp "$programs"/{vmlinux,root.ext4,ssh-key} "$work"
fi
cp "$programs/firn-firecracker" "$work/firecracker"
cp "$programs/jailer" "$work"

data=$work/sdk
mkdir -p "$data/logs"
cp "$work"/{firecracker,jailer,vmlinux} "$clients"/sdk/testdata/* "$data"
chmod +x "$data/sigprint.sh"
ln -s "$clients/cni" "$data/bin"
for name in root-drive root-drive-with-ssh; do
    cp "$work/root.ext4" "$data/$name.img"
done
cp "$work/ssh-key" "$data/root-drive-ssh-key"
ip tuntap add fc-test-tap0 mode tap
trap 'rm -rf "$work"; ip link delete fc-test-tap0' EXIT
echo "firn: the tests of firecracker-go-sdk ($guest)"
# They leave sockets behind.
cp -r "$clients/sdk" "$work/run"
sdk() {
    (cd "$work/run" && FC_TEST_DATA_PATH=$data FC_TEST_BIN=$data/firecracker \
        FC_TEST_JAILER_BIN=$data/jailer ./sdk.test -test.v -test.timeout 10m \
        -test.run "$sdk_selected" -test.skip "$sdk_skipped") 2>&1 |
        tee "$work/sdk.log" | awk '/^--- |^    --- FAIL/ {print; fflush()}'
}
until sdk; do
    if ((--attempts == 0)); then
        failed+=(firecracker-go-sdk)
        break
    fi
    echo "firn: the tests of firecracker-go-sdk again"
done
[[ ! ${failed[*]} ]] || cat "$work/sdk.log"

export FCTOOLS_TESTDATA_PATH=$work/fctools
mkdir -p "$work"/fctools/{toolchain,assets,configs} /srv/jailer
cp "$work"/{firecracker,jailer} "$work/fctools/toolchain"
printf '#!/bin/sh\necho Firecracker v0\n' >"$work/fctools/toolchain/firecracker-wrong-version"
# There is none: the tests that use it do not run. The version of this one is checked beside others.
printf '#!/bin/sh\necho snapshot-editor v1.16.0\n' >"$work/fctools/toolchain/snapshot-editor"
chmod +x "$work"/fctools/toolchain/*
cp "$work/vmlinux" "$work/fctools/assets/kernel"
cp "$work/root.ext4" "$work/fctools/assets/rootfs.ext4"
printf '{"toolchain": {"version": "v1.16.0", "snapshot_version": ""}, "waits": %s,
    "network_interface": "lo", "jailer_uid": 123, "jailer_gid": 100}' "$waits" \
    >"$work/fctools/options.json"
# config FOLDER READ-ONLY
config() {
    printf '{"boot-source": {"kernel_image_path": "%s/kernel",
        "boot_args": "console=ttyS0 reboot=k panic=1 pci=off"},
        "drives": [{"drive_id": "rootfs", "path_on_host": "%s/rootfs.ext4", "is_root_device": true,
        "is_read_only": %s}], "machine-config": {"vcpu_count": 1, "mem_size_mib": 128}}' \
        "$1" "$1" "$2"
}
config "$work/fctools/assets" true >"$work/fctools/configs/unrestricted.json"
config "" false >"$work/fctools/configs/jailed.json"
# The jailed user reads the kernel and the root.
chmod -R a+rX "$work"
for suite in other process vm vm_api extensions; do
    echo "firn: the tests of fctools, $suite ($guest)"
    timeout 1200 "$clients/fctools/$suite" --test-threads="$threads" \
        "${fctools_skipped[@]/#/--skip=}" "${fctools_selected[@]}" || failed+=("fctools $suite")
done
[[ ! ${failed[*]} ]] || {
    echo "firn: error: tests failed: ${failed[*]}" >&2
    exit 1
}
