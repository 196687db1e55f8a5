//! The ELF under this monitor's Linux boot path, on this host's KVM.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use firn_memory::planners::{self, parse};
use firn_memory::{Sources, execute};
use firn_player::format::{PAGE, boot};
use firn_snapshot::{Destination, FreezeRequest, Snapshot};
use firn_vmm::{
    BootConfig, CpuChoice, DEFAULT_CMDLINE, Devices, Drive, End, FrozenMachine, HostConfig,
    KVM_DEVICE, Microvm, OpenFile, OpenKvm, OverlayBase, VsockListener, open_root_disk,
};
use uuid::Uuid;

use super::{another_trace, some_trace};
use crate::player::{Leaves, PlayerElfError, PlayerInputs, PlayerOptions, elf};
use crate::traces::{NamedTrace, load};

fn host(dir: &Path, root: OpenFile, base: OverlayBase) -> HostConfig {
    HostConfig {
        drives: Drive::of_firn(root, base, 0, None),
        vsock: Some(VsockListener::bind(&dir.join("vsock.sock")).unwrap()),
        generation: Some(Uuid::new_v4()),
        ..HostConfig::default()
    }
}

fn one(trace: &NamedTrace) -> PlayerInputs {
    PlayerInputs::new(vec![trace.clone()]).unwrap()
}

fn boot_elf(trace: &NamedTrace, dir: &Path) -> Microvm {
    let options = PlayerOptions { leaves: Leaves::Recorded, ..PlayerOptions::default() };
    let player = elf(&one(trace), &options, KVM_DEVICE.as_ref()).unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        std::fs::write(&path, bytes).unwrap();
        OpenFile::open(&path).unwrap()
    };
    let config = BootConfig {
        kernel: file("player.elf", &player.bytes),
        initramfs: None,
        cmdline: DEFAULT_CMDLINE.to_owned(),
        device_arguments: false,
        track_writes: false,
        legacy_devices: false,
        vcpus: 1,
        smt: false,
        cpu: CpuChoice::Best,
        memory: player.memory.next_multiple_of(1 << 20),
        devices: Devices::of_firn(None),
        host: host(dir, file("root", &[0; 4096]), OverlayBase::File(file("overlay", &[0; 4096]))),
    };
    Microvm::boot(config, OpenKvm::open(KVM_DEVICE.as_ref()).unwrap()).unwrap()
}

/// Runs the guest until its console prints `word` as a line or as the first word of a line; returns
/// the console.
fn until(microvm: &mut Microvm, word: &str) -> String {
    microvm.resume().unwrap();
    let console = microvm.console().clone();
    let handle = microvm.handle();
    let (word, (sender, text)) = (word.to_owned(), channel());
    let waiter = std::thread::spawn(move || {
        // A guest that prints nothing within a minute has failed.
        for _ in 0..6000 {
            let text = console.tail(100);
            if text.lines().any(|line| line.split(' ').next() == Some(&word)) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // Whole lines: the numbers come after the word.
        std::thread::sleep(Duration::from_millis(50));
        sender.send(console.tail(100)).unwrap();
        let paused = handle.call(|microvm| {
            microvm.pause().unwrap();
            microvm.stop();
        });
        assert!(paused.is_ok());
    });
    let end = microvm.run().unwrap();
    waiter.join().unwrap();
    assert!(matches!(end, End::Stopped), "{end:?}");
    text.recv().unwrap()
}

fn thaw(snapshot: &Snapshot, dir: &Path) -> Microvm {
    let plan = planners::plan(snapshot, None, &*parse("firecracker").unwrap()).unwrap();
    let executed = execute(&plan, &Sources::of(snapshot, None).unwrap()).unwrap();
    let frozen =
        FrozenMachine::open_on(snapshot, OpenKvm::open(KVM_DEVICE.as_ref()).unwrap()).unwrap();
    let root = open_root_disk(snapshot.manifest(), None).unwrap().unwrap();
    let host = host(dir, root, OverlayBase::of_snapshot(snapshot).unwrap().unwrap());
    Microvm::restore(frozen, executed.memory, host).unwrap().0
}

fn replayed(microvm: &mut Microvm) -> String {
    assert_eq!(microvm.write_serial(b"g").unwrap(), 1);
    until(microvm, "END")
}

#[test]
fn the_elf_boots_freezes_while_it_waits_and_replays_in_every_clone() {
    let dir = tempfile::tempdir().unwrap();
    let trace = some_trace();
    let mut microvm = boot_elf(&trace, dir.path());
    assert_eq!(until(&mut microvm, "READY"), "READY");
    let destination = dir.path().join("snapshot");
    let request = FreezeRequest {
        destination: Destination::Directory(destination.clone()),
        dense: false,
        function: None,
    };
    firn_snapshot::freeze(&mut microvm, request).unwrap();
    drop(microvm);

    let snapshot = Snapshot::open(&destination).unwrap();
    for _ in 0..2 {
        let console = replayed(&mut thaw(&snapshot, dir.path()));
        let done = format!("DONE {} ", trace.trace.touched_pages());
        assert!(console.starts_with(&done) && console.ends_with("\nEND 0"), "{console}");
        assert_eq!(console.lines().count(), 2, "{console}");
    }

    // Page 7 is read, page 9 is not touched.
    let image = OpenOptions::new().write(true).open(destination.join("memory.img")).unwrap();
    image.write_all_at(&[0; 4096], 7 * PAGE).unwrap();
    image.write_all_at(&[1], 9 * PAGE).unwrap();
    let console = replayed(&mut thaw(&snapshot, dir.path()));
    let bad: Vec<&str> = console.lines().skip(1).collect();
    assert_eq!(bad, ["BAD 7", "BAD 7", "BAD 9", "END 2"], "{console}");
}

#[test]
fn the_elf_replays_without_a_freeze() {
    let dir = tempfile::tempdir().unwrap();
    let trace = load("sequential-write:8M").unwrap();
    let mut microvm = boot_elf(&trace, dir.path());
    // The byte may come before the guest asks for it.
    let console = replayed(&mut microvm);
    assert!(console.starts_with("READY\nDONE 2048 "), "{console}");
    assert!(console.ends_with("\nEND 0"), "{console}");
}

#[test]
fn the_elf_has_what_the_loaders_of_other_monitors_require() {
    let player = elf(&one(&some_trace()), &PlayerOptions::default(), KVM_DEVICE.as_ref()).unwrap();
    let word = |at: usize| u64::from_le_bytes(player.bytes[at..at + 8].try_into().unwrap());
    assert_eq!(&player.bytes[..4], b"\x7fELF");
    assert_eq!(word(24), boot::START + boot::ENTRY);
    // The note follows the three program headers: 12 bytes, a name, the PVH entry.
    let note = 64 + 3 * 56;
    assert_eq!(&player.bytes[note + 12..note + 16], b"Xen\0");
    assert_eq!(word(note + 16), boot::START + boot::PVH_ENTRY);
    assert_eq!(player.bytes[0x1280], 0xbc, "the entry is an instruction, mov to esp");
    // The trace's 8 MiB, and the player's own region above it.
    assert!(player.memory > 8 << 20 && player.memory < 9 << 20);

    let both = PlayerInputs::new(vec![some_trace(), another_trace()]).unwrap();
    let refused = elf(&both, &PlayerOptions::default(), KVM_DEVICE.as_ref());
    assert!(matches!(refused, Err(PlayerElfError::Inputs(2))));
}
