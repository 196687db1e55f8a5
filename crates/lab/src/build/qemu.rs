//! QEMU from Debian's backports, with one instruction changed.

use std::fs;
use std::path::Path;

use super::apt::{BACKPORTS, Suite};
use super::store::remove_tree;
use super::{BuildError, Builder};

const PROGRAM: &str = "usr/bin/qemu-system-x86_64";
/// Folders of the packages that QEMU does not read.
const UNUSED: [&str; 8] = [
    "etc",
    "var",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/alsa",
    "usr/share/lintian",
    "usr/share/bash-completion",
];

impl Builder<'_> {
    /// Unpacks QEMU.
    pub(super) fn qemu(&mut self) -> Result<(), BuildError> {
        let key = format!("2 qemu-system-x86 {BACKPORTS}");
        if self.store.is_built("lab/qemu", &key) {
            return Ok(());
        }
        let folder = self.store.fresh_folder("lab/qemu")?;
        let list = self.store.path("lab/qemu.packages");
        let apt = self.apt(Suite::Bookworm)?;
        self.unpack(&apt, &folder, &list, |_| true, &["-t", BACKPORTS, "qemu-system-x86"])?;
        if !patch(&folder.join(PROGRAM))? {
            (self.progress)(
                "this QEMU does not contain the instruction that the lab changes: in labs that count instructions, guests may \
                 hang now and then",
            );
        }
        for unused in UNUSED.map(|part| folder.join(part)) {
            remove_tree(&unused).map_err(BuildError::file("remove", &unused))?;
        }
        self.store.publish("lab/qemu", &key)
    }
}

/// Keeps QEMU from delivering some interrupts twice. Returns whether the program contained the
/// instruction.
///
/// QEMU delivers an interrupt that KVM injects (`helper_vmrun`, the case `SVM_EVTINJ_TYPE_INTR`, in
/// all versions up to 10.2 at least), and leaves the vector in `exception_index` like a pending
/// exception. If QEMU leaves its inner loop before the guest's next exit or exception, as at every
/// timer with `-icount`, it delivers the interrupt again, even if the guest has interrupts
/// disabled: the guest hangs in a spin lock, or crashes. Only this mistake reads the stored value,
/// so a no-operation replaces the store. The test is `crates/cli/tests/lab_interrupts.rs`.
fn patch(program: &Path) -> Result<bool, BuildError> {
    let mut bytes = fs::read(program).map_err(BuildError::file("read", program))?;
    let Some(at) = find_store(&bytes) else { return Ok(false) };
    bytes[at..at + NOP.len()].copy_from_slice(&NOP);
    fs::write(program, bytes).map_err(BuildError::file("write", program))?;
    Ok(true)
}

/// `nopw 0(%rax,%rax,1)`, as long as the store.
const NOP: [u8; 6] = [0x66, 0x0f, 0x1f, 0x44, 0, 0];

/// Bytes of the pattern, as inclusive ranges.
type Pattern = [(u8, u8)];

const ANY: (u8, u8) = (0, 0xff);

const fn is(byte: u8) -> (u8, u8) {
    (byte, byte)
}

/// The store and the instructions after it.
#[rustfmt::skip]
const STORE: &Pattern = &[
    // mov %r32, exception_index
    is(0x89), (0x80, 0xbf), ANY, ANY, ANY, ANY,
    // movl $0, exception_is_int
    is(0xc7), (0x80, 0x87), ANY, ANY, ANY, ANY, is(0), is(0), is(0), is(0),
    // movq $-1, exception_next_eip
    is(0x48), is(0xc7), (0x80, 0x87), ANY, ANY, ANY, ANY, is(0xff), is(0xff), is(0xff), is(0xff),
    // testb $2, loglevel
    is(0xf6), is(0x05), ANY, ANY, ANY, ANY, is(0x02),
    // jne
    is(0x0f), is(0x85), ANY, ANY, ANY, ANY,
    // mov $1, %edx
    is(0xba), is(0x01), is(0), is(0), is(0),
];

/// The offset of the store, if the program contains it once.
fn find_store(program: &[u8]) -> Option<usize> {
    let matches = |window: &[u8]| {
        window.iter().zip(STORE).all(|(byte, (low, high))| (low..=high).contains(&byte))
    };
    let mut found = program.windows(STORE.len()).enumerate().filter(|(_, window)| matches(window));
    match (found.next(), found.next()) {
        (Some((at, _)), None) => Some(at),
        _ => None,
    }
}

#[cfg(test)]
#[path = "qemu_tests.rs"]
mod tests;
