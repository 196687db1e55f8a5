//! Networks that `firn boot` refuses, each with the reason. Requires root, tap devices and any kind
//! of KVM.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::Command;

use firn_required::{TapDevice, in_own_network};
use firn_vmm::{KVM_DEVICE, open_kvm, open_tap};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};

/// A user that owns a device, and runs nothing here.
const OTHER_USER: u32 = 0x7fff_0000;

/// A boot that ends before its guest's files are read.
fn boot(options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
    command.arg("boot").args(options);
    for file in ["--kernel", "--initramfs", "--root", "--overlay"] {
        command.args([file, "/dev/null"]);
    }
    command
}

/// Fails unless a command is refused with this exit code and these words.
#[track_caller]
fn refused(mut command: Command, code: i32, words: &[&str]) {
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{command:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{command:?}: {text}");
    }
}

#[test]
fn options_that_are_not_valid_are_named() {
    let wrong = [
        ("tun:t0", "is not a network: use none, proxy or tap:NAME"),
        ("tap:t0,address=10.0.0.2/33", "\"10.0.0.2/33\" is not an IPv4 address with the bits"),
        ("tap:t0,address=10.0.0.2", "such as 10.0.0.2/24"),
        ("tap:t0,address=10.0.0.2/24,gateway=10.0.1.1", "the gateway 10.0.1.1 is not in the guest"),
        ("proxy,mtu=1000", "use 1280 to 65520 bytes"),
    ];
    for (network, word) in wrong {
        refused(boot(&["--net", network]), 2, &["--net <NETWORK>", word]);
    }
}

#[test]
fn rules_that_are_not_valid_are_named() {
    let has_kvm = firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok());
    if !has_kvm {
        return;
    }
    let wrong = [
        ("allow:10.0.0.0/33", "has no valid address, network or host name, such as 10.0.0.0/8"),
        ("allow:10.0.0/8", "has no valid address, network or host name"),
        ("allow:10.0.0.0/8:0", "has no valid port; ports are 1 to 65535"),
        ("10.0.0.0/8", "begins with neither \"allow:\" nor \"deny:\""),
    ];
    for (rule, word) in wrong {
        let words = [&format!("firn: error: egress rule \"{rule}\""), word];
        refused(boot(&["--net", "proxy", "--egress", rule]), 1, &words);
    }
    let rule = ["--net", "tap:t0", "--egress", "allow:10.0.0.0/8"];
    refused(boot(&rule), 1, &["--egress needs --net proxy"]);
}

#[test]
fn ports_that_cannot_be_published_are_named() {
    let has_kvm = firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok());
    if !has_kvm {
        return;
    }
    let port = TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port();
    let [all, one] = [format!("0.0.0.0:{port}"), format!("127.0.0.1:{port}")];
    let of = |first: &str, second: &str| {
        let [first, second] = [format!("{first}:80"), format!("{second}:81")];
        boot(&["--net", "proxy", "--publish", &first, "--publish", &second])
    };
    for [first, second] in [[&all, &one], [&one, &all]] {
        let words = format!("firn: error: cannot publish {second}: it overlaps {first}, which is");
        refused(of(first, second), 1, &[&words]);
    }
    refused(of(&one, &port.to_string()), 1, &[&format!("{one} is published twice")]);

    let taken = TcpListener::bind(&one).unwrap();
    let words = [&format!("cannot publish {one}: it is in use"), "`ss -lxtnp` shows it"];
    refused(boot(&["--net", "proxy", "--publish", &format!("{port}:80")]), 1, &words);
    drop(taken);
}

#[test]
fn tap_devices_that_cannot_be_used_are_named() {
    let has_kvm = firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok());
    if !has_kvm {
        return;
    }
    in_own_network(|| {
        let of = |device: &str| boot(&["--net", &format!("tap:{device}")]);
        let unknown = "there is no network interface tap9: make it with `ip tuntap add dev tap9";
        refused(of("tap9"), 1, &[unknown]);
        refused(of("lo"), 1, &["lo is not a tap device with one queue"]);
        refused(of("a/b"), 1, &["\"a/b\" is not the name of a network interface"]);

        let device = TapDevice::create("tap0", Ipv4Addr::new(10, 9, 0, 1)).unwrap();
        let busy = open_tap("tap0").unwrap();
        refused(of("tap0"), 1, &["tap0 is in use: give each microVM a tap device of its own"]);
        drop(busy);
        device.give_to(OTHER_USER).unwrap();
        let mut without_rights = of("tap0");
        let drop_right = || Ok(remove_capability_from_bounding_set(CapabilitySet::NET_ADMIN)?);
        // SAFETY: it makes one system call.
        unsafe { without_rights.pre_exec(drop_right) };
        let words = ["no permission for the tap device tap0", "user USER`, or run as root"];
        refused(without_rights, 1, &words);
    });
}
