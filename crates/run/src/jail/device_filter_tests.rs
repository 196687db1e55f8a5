use std::process::{Command, Stdio};

use super::*;
use crate::jail::tests::group_v2;

#[test]
fn the_program_has_the_bytes_of_bpf() {
    let bytes: Vec<[u8; 8]> = PROGRAM
        .iter()
        .map(|insn| {
            let ([a, b], [c, d, e, f]) = (insn.offset.to_le_bytes(), insn.immediate.to_le_bytes());
            [insn.code, insn.registers, a, b, c, d, e, f]
        })
        .collect();
    let expected = [
        // r2 = access and type, r3 = major, r4 = minor.
        [0x61, 0x12, 0, 0, 0, 0, 0, 0],
        [0x61, 0x13, 4, 0, 0, 0, 0, 0],
        [0x61, 0x14, 8, 0, 0, 0, 0, 0],
        [0xb7, 0x00, 0, 0, 0, 0, 0, 0],
        // To the end, unless it is a read of character device 1:8 or 1:9.
        [0x55, 0x02, 4, 0, 2, 0, 2, 0],
        [0x55, 0x03, 3, 0, 1, 0, 0, 0],
        [0x15, 0x04, 1, 0, 8, 0, 0, 0],
        [0x55, 0x04, 1, 0, 9, 0, 0, 0],
        [0xb7, 0x00, 0, 0, 1, 0, 0, 0],
        [0x95, 0x00, 0, 0, 0, 0, 0, 0],
    ];
    assert_eq!(bytes, expected);
    let allowed = [RANDOM, URANDOM].map(|minor| format!("c {MEMORY_MAJOR}:{minor} r"));
    assert_eq!(ALLOWED.map(ToOwned::to_owned), allowed);
}

#[test]
fn a_group_of_version_2_opens_the_allowed_devices_and_no_other() {
    let Some((group, open)) = group_v2("devices") else { return };
    attach(&open).unwrap();
    let devices = ["/dev/random", "/dev/urandom", "/dev/null", "/dev/zero"];
    for (device, allowed) in devices.into_iter().zip([true, true, false, false]) {
        let door = group.path().join("cgroup.procs");
        let script = format!("echo 0 > {} && exec < {device}", door.display());
        let mut shell = Command::new("sh");
        let done = shell.args(["-c", &script]).stdin(Stdio::null()).output().unwrap();
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.success(), allowed, "{device}: {text}");
        assert_eq!(text.contains("Operation not permitted"), !allowed, "{device}: {text}");
    }
}
