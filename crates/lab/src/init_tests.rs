use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use super::exit_code;

#[test]
fn exit_codes_pass_and_signals_are_added_to_128() {
    for (raw, expected) in
        [(0, 0), (7 << 8, 7), (255 << 8, 255), (9, 137), (15, 143), (0x80 | 6, 134)]
    {
        assert_eq!(exit_code(ExitStatus::from_raw(raw)), expected, "wait status {raw:#x}");
    }
}
