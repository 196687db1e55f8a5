//! Small kernels in ring 0, which any KVM runs: what a kernel finds at its start, and the devices
//! that a caller chooses.

use std::arch::global_asm;
use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use firn_memory::planners::{self, parse};
use firn_memory::{Sources, execute_in};
use firn_snapshot::{Snapshot, freeze};

use super::*;
use crate::config::{
    CpuChoice, Devices, Drive, DriveDisk, HostConfig, MAX_VCPUS, NetworkDevice, OverlayBase,
    Scratch,
};
use crate::kvm::{KVM_DEVICE, OpenKvm};
use crate::microvm::tests::to_directory;
use crate::microvm::{
    AssembleError, End, FrozenMachine, RestoreError, UpdateDeviceError, WireError,
};
use crate::open_file::OpenFile;
use crate::virtio::{BalloonConfig, DiskCache, Network, NetworkConfig, VsockListener};

/// The address at which a kernel is loaded.
const START: u64 = 0x10_0000;

// Prints its command line on COM1, then resets the machine through the keyboard controller.
global_asm!(
    ".globl firn_test_kernel",
    ".globl firn_test_kernel_end",
    "firn_test_kernel:",
    "mov ebx, [rsi + 0x228]",
    "mov edx, 0x3f8",
    "2: mov al, [rbx]",
    "test al, al",
    "jz 3f",
    "out dx, al",
    "inc rbx",
    "jmp 2b",
    "3: mov al, 0xfe",
    "out 0x64, al",
    "4: jmp 4b",
    "firn_test_kernel_end:",
);

// Prints what the keyboard controller has, and what comes on COM1, byte by byte.
global_asm!(
    ".globl firn_test_echo",
    ".globl firn_test_echo_end",
    "firn_test_echo:",
    "in al, 0x64",
    "test al, 1",
    "jz 2f",
    "in al, 0x60",
    "mov edx, 0x3f8",
    "out dx, al",
    "2: mov edx, 0x3fd",
    "in al, dx",
    "test al, 1",
    "jz firn_test_echo",
    "mov edx, 0x3f8",
    "in al, dx",
    "out dx, al",
    "jmp firn_test_echo",
    "firn_test_echo_end:",
);

unsafe extern "C" {
    static firn_test_kernel: u8;
    static firn_test_kernel_end: u8;
    static firn_test_echo: u8;
    static firn_test_echo_end: u8;
}

fn code(start: *const u8, end: *const u8) -> Vec<u8> {
    let len = end.addr() - start.addr();
    // SAFETY: the labels enclose instructions above, which are constant data of this program.
    unsafe { std::slice::from_raw_parts(start, len) }.to_vec()
}

fn printing() -> Vec<u8> {
    code(&raw const firn_test_kernel, &raw const firn_test_kernel_end)
}

fn echoing() -> Vec<u8> {
    code(&raw const firn_test_echo, &raw const firn_test_echo_end)
}

/// An ELF file with one segment.
fn elf(code: &[u8]) -> Vec<u8> {
    let len = code.len() as u64;
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    for half in [2u16, 62] {
        file.extend(half.to_le_bytes());
    }
    file.extend(1u32.to_le_bytes());
    for word in [START, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 1, 0, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    for half in [1u32, 5] {
        file.extend(half.to_le_bytes());
    }
    for word in [120, START, START, len, len, 16] {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file
}

/// A bzImage with one sector of setup.
fn bzimage(code: &[u8]) -> Vec<u8> {
    let mut file = vec![0; 0x400];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]);
    put(0x1fe, &[0x55, 0xaa]);
    put(0x202, b"HdrS");
    put(0x206, &0x20f_u16.to_le_bytes());
    // Loaded high, at 1 MiB.
    put(0x211, &[1]);
    put(0x214, &0x10_0000_u32.to_le_bytes());
    put(0x22c, &0x7fff_ffff_u32.to_le_bytes());
    // A 64-bit entry; the preferred address, and the memory from there.
    put(0x236, &1u16.to_le_bytes());
    put(0x258, &0x10_0000_u64.to_le_bytes());
    put(0x260, &0x10_0000_u32.to_le_bytes());
    file.extend([0; 0x200]);
    file.extend(code);
    file
}

fn file(dir: &Path, name: &str, bytes: &[u8]) -> OpenFile {
    fs::write(dir.join(name), bytes).unwrap();
    OpenFile::open(&dir.join(name)).unwrap()
}

fn writable(path: &Path) -> OpenFile {
    let file = File::options().read(true).write(true).open(path).unwrap();
    OpenFile { file, path: path.canonicalize().unwrap() }
}

fn kvm() -> OpenKvm {
    OpenKvm::open(KVM_DEVICE.as_ref()).unwrap()
}

/// A guest without any device.
fn config(kernel: OpenFile) -> BootConfig {
    BootConfig {
        kernel,
        initramfs: None,
        cmdline: "a=1".to_owned(),
        device_arguments: false,
        legacy_devices: true,
        track_writes: false,
        vcpus: 1,
        smt: false,
        cpu: CpuChoice::Best,
        memory: 16 << 20,
        devices: Devices::default(),
        host: HostConfig::default(),
    }
}

/// Files of the caller's, of which every other is read-only.
fn drives(dir: &Path, ids: &[String]) -> Vec<Drive> {
    let drive = |(number, id): (usize, &String)| {
        let path = dir.join(id);
        fs::write(&path, vec![0; 512 * (number + 1)]).unwrap();
        let cache = DiskCache::Writeback;
        let disk = DriveDisk::File { file: writable(&path), read_only: number % 2 == 1, cache };
        Drive { id: id.clone(), disk, limiter: None }
    };
    ids.iter().enumerate().map(drive).collect()
}

fn ids(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("drive{number}")).collect()
}

fn network(id: &str) -> NetworkDevice {
    NetworkDevice { id: id.to_owned(), config: NetworkConfig::default() }
}

#[test]
fn elf_and_bzimage_start_with_the_callers_command_line_and_reset_by_the_keyboard_controller() {
    let dir = tempfile::tempdir().unwrap();
    let devices = "virtio_mmio.device=4K@0xd0000000:6 virtio_mmio.device=4K@0xd0001000:7";
    let with_devices = format!("a=1 {devices}");
    let with_init = format!("a=1 {devices} -- b c");
    for image in [elf(&printing()), bzimage(&printing())] {
        for (cmdline, arguments, printed) in [
            ("a=1 -- b c", false, "a=1 -- b c"),
            ("a=1", true, &with_devices),
            ("a=1 -- b c", true, &with_init),
        ] {
            let config = BootConfig {
                cmdline: cmdline.to_owned(),
                device_arguments: arguments,
                initramfs: Some(file(dir.path(), "initramfs", &[7; 5000])),
                devices: Devices {
                    entropy: true,
                    balloon: Some(BalloonConfig::REPORTING),
                    ..Devices::default()
                },
                ..config(file(dir.path(), "kernel", &image))
            };
            let mut microvm = Microvm::boot(config, kvm()).unwrap();
            microvm.resume().unwrap();
            assert!(matches!(microvm.run().unwrap(), End::Reset));
            assert_eq!(microvm.console().tail(9), printed);
        }
    }
}

#[test]
fn invalid_bzimages_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    type Change = (&'static str, fn(&mut Vec<u8>));
    let changes: [Change; 5] = [
        ("no 64-bit entry", |image| image[0x236] = 0),
        ("no 64-bit entry", |image| image[0x206..0x208].copy_from_slice(&0x20b_u16.to_le_bytes())),
        ("not a bootable kernel", |image| image[0x211] = 0),
        ("not a bootable kernel", |image| image.truncate(0x300)),
        ("too small", |image| image[0x260..0x264].copy_from_slice(&0x100_0000_u32.to_le_bytes())),
    ];
    for (words, change) in changes {
        let mut image = bzimage(&printing());
        change(&mut image);
        let booted = Microvm::boot(config(file(dir.path(), "kernel", &image)), kvm());
        let error = booted.map(drop).unwrap_err();
        let text = firn_base::error_chain(&error);
        assert!(text.contains(words), "{text}");
    }
}

/// Runs the guest until its console has `text`.
fn until(microvm: &mut Microvm, text: &[u8]) {
    microvm.resume().unwrap();
    let (console, handle) = (microvm.console().clone(), microvm.handle());
    std::thread::scope(|scope| {
        let waiter = scope.spawn(move || {
            let begin = std::time::Instant::now();
            let found = || console.tail(1).len() >= String::from_utf8_lossy(text).len();
            while !found() && begin.elapsed() < Duration::from_secs(60) {
                std::thread::sleep(Duration::from_millis(1));
            }
            handle.call(|microvm| {
                microvm.pause().unwrap();
                microvm.stop();
            })
        });
        assert!(matches!(microvm.run().unwrap(), End::Stopped));
        waiter.join().unwrap().unwrap();
    });
    microvm.stopped = false;
    assert_eq!(microvm.console().tail(1), String::from_utf8_lossy(text));
}

#[test]
fn the_guest_gets_keys_and_console_input_before_and_after_a_freeze() {
    let keys = [0x14, 0x11, 0xe0, 0x71, 0xe0, 0xf0, 0x71, 0xf0, 0x11, 0xf0, 0x14];
    let dir = tempfile::tempdir().unwrap();
    let (input, output) = rustix::pipe::pipe().unwrap();
    let kernel = file(dir.path(), "kernel", &elf(&echoing()));
    let host = HostConfig { console_input: Some(input), ..HostConfig::default() };
    let mut microvm = Microvm::boot(BootConfig { host, ..config(kernel) }, kvm()).unwrap();
    rustix::io::write(&output, b"typed").unwrap();
    until(&mut microvm, b"typed");
    microvm.send_ctrl_alt_del().unwrap();
    until(&mut microvm, &[&b"typed"[..], &keys].concat());
    // The keys are still in the controller.
    microvm.send_ctrl_alt_del().unwrap();
    let path = dir.path().join("snapshot");
    freeze(&mut microvm, to_directory(&path)).unwrap();
    drop(microvm);
    let mut clone = restored(&path, HostConfig::default()).unwrap();
    until(&mut clone, &keys);

    let kernel = file(dir.path(), "kernel", &elf(&echoing()));
    let without = BootConfig { legacy_devices: false, ..config(kernel) };
    let error = Microvm::boot(without, kvm()).unwrap().send_ctrl_alt_del().unwrap_err();
    assert!(error.to_string().contains("no keyboard controller"), "{error}");
}

/// Restores in a standby, which knows nothing of devices.
fn restored(path: &Path, host: HostConfig) -> Result<Microvm, RestoreError> {
    let snapshot = Snapshot::open(path).unwrap();
    let plan = planners::plan(&snapshot, None, &*parse("firecracker").unwrap()).unwrap();
    let shape = FrozenMachine::open_on(&snapshot, kvm()).unwrap().shape(plan.largest_leaf());
    let mut standby = Standby::from(kvm());
    standby.make(&shape).unwrap();
    let mut frozen = FrozenMachine::open_on(&snapshot, standby).unwrap();
    let reserved = frozen.take_reservation();
    let sources = Sources::of(&snapshot, None).unwrap();
    let memory = execute_in(&plan, &sources, reserved).unwrap().memory;
    let (microvm, report) = Microvm::restore(frozen, memory, host)?;
    assert!(report.standby);
    Ok(microvm)
}

/// A guest with `drives` drives, two networks and all else.
fn many(dir: &Path, drives_of: usize) -> BootConfig {
    let kernel = file(dir, "kernel", &elf(&echoing()));
    let ids = ids(drives_of);
    let host = HostConfig {
        drives: drives(dir, &ids),
        vsock: Some(VsockListener::bind(&dir.join("vsock.sock")).unwrap()),
        ..HostConfig::default()
    };
    let devices = Devices {
        drives: ids,
        vsock: Some(42),
        entropy: true,
        balloon: Some(BalloonConfig::REPORTING),
        networks: vec![network("eth0"), network("eth1")],
    };
    BootConfig { devices, host, ..config(kernel) }
}

#[test]
fn devices_are_saved_by_id_and_restored_in_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    // As many as there are interrupts.
    let booted = many(dir.path(), 13);
    let devices = booted.devices.clone();
    let mut microvm = Microvm::boot(BootConfig { vcpus: 2, ..booted }, kvm()).unwrap();
    microvm.set_note(b"of the caller".to_vec());
    microvm.resume().unwrap();
    freeze(&mut microvm, to_directory(&path)).unwrap();
    drop(microvm);
    let snapshot = Snapshot::open(&path).unwrap();
    // What is the caller's is not in the manifest.
    assert!(snapshot.manifest().description.disks.is_empty() && snapshot.overlay().is_none());
    let frozen = FrozenMachine::open_on(&snapshot, kvm()).unwrap();
    assert_eq!((frozen.devices(), frozen.note()), (devices.clone(), &b"of the caller"[..]));

    let host = |ids: &[String], networks: &[&str], vsock: bool| {
        let of = |id: &&str| ((*id).to_owned(), Network::default());
        let bind = || VsockListener::bind(&dir.path().join("vsock.sock")).unwrap();
        HostConfig {
            drives: drives(dir.path(), ids),
            networks: networks.iter().map(of).collect(),
            vsock: vsock.then(bind),
            ..HostConfig::default()
        }
    };
    let refused = |host| {
        let error = restored(&path, host).map(drop).unwrap_err();
        firn_base::error_chain(&error)
    };
    // In any order, and a network device may have no other side.
    let mut other_order = host(&ids(13), &["eth1"], true);
    other_order.drives.reverse();
    let mut clone = restored(&path, other_order).unwrap();
    assert_eq!(clone.save().unwrap().devices(), devices);
    clone.resume().unwrap();
    drop(clone);

    let mut all = ids(13);
    all.swap(0, 1);
    let text = refused(host(&all, &[], true));
    assert!(text.contains("the guest had a disk of 1 sectors (read-only: false)"), "{text}");
    let text = refused(host(&all[1..], &[], true));
    assert!(
        text.contains("drive0, drive1") && text.contains("passed are drive0, drive2"),
        "{text}"
    );
    let more = [&ids(13)[..], &["other".to_owned()]].concat();
    let text = refused(host(&more, &[], true));
    assert!(text.contains("drive12, other"), "{text}");
    let text = refused(host(&ids(13), &["eth2"], true));
    assert!(text.contains("no network device eth2 (it has eth0, eth1)"), "{text}");
    let text = refused(host(&ids(13), &[], false));
    assert!(text.contains("vsock: true, listener: false"), "{text}");
}

fn wire_error(config: BootConfig) -> WireError {
    match Microvm::boot(config, kvm()).map(drop).unwrap_err() {
        BootError::Assemble(AssembleError::Wire(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_caller_cannot_have_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let error = wire_error(many(dir.path(), 14));
    assert!(error.to_string().contains("19 devices, and there are interrupts for 18"), "{error}");

    let mut twice = many(dir.path(), 1);
    twice.devices.drives = vec!["drive0".to_owned(); 2];
    let error = wire_error(twice);
    assert!(error.to_string().contains("drives have the same id"), "{error}");
    let mut twice = many(dir.path(), 1);
    twice.devices.networks = vec![network("eth0"), network("eth0")];
    let error = wire_error(twice);
    assert!(error.to_string().contains("network devices have the same id"), "{error}");

    let mut host = many(dir.path(), 1);
    host.devices.vsock = Some(2);
    let error = wire_error(host);
    assert!(matches!(error, WireError::Cid(2)), "{error}");

    let mut two = many(dir.path(), 2);
    for drive in &mut two.host.drives {
        let base = OverlayBase::File(file(dir.path(), "base", &[0; 4096]));
        let scratch: Option<Scratch> = None;
        drive.disk = DriveDisk::Overlay { base, size: 0, scratch };
    }
    let error = wire_error(two);
    assert!(error.to_string().contains("drive0, drive1 are overlays"), "{error}");
}

#[test]
fn only_a_file_of_the_callers_is_exchanged() {
    let dir = tempfile::tempdir().unwrap();
    let mut booted = many(dir.path(), 2);
    let image = OpenFile::open(&dir.path().join("drive1")).unwrap();
    booted.host.drives[1].disk = DriveDisk::Image(image);
    let mut microvm = Microvm::boot(booted, kvm()).unwrap();
    let other = dir.path().join("other");
    fs::write(&other, [0; 4096]).unwrap();
    microvm.replace_drive("drive0", writable(&other)).unwrap();
    let state = microvm.save().unwrap();
    let found = format!("{:?}", state.devices[0]);
    assert!(found.contains("config_generation: 1") && found.contains("sectors: 8"), "{found}");

    let refused = |error: Result<(), UpdateDeviceError>, words: &str| {
        let text = error.unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    };
    // The first stays writable.
    let read_only = || OpenFile::open(&other).unwrap();
    refused(microvm.replace_drive("drive0", read_only()), "open for reading only");
    refused(microvm.replace_drive("drive1", read_only()), "part of snapshots");
    refused(microvm.replace_drive("x", read_only()), "no drive x (it has drive0, drive1)");
    let limit = crate::virtio::RateLimit::default();
    refused(microvm.limit_drive("drive0", limit), "without a rate limiter");
    refused(microvm.limit_network("eth1", Some(limit), None), "without a rate limiter");
    refused(microvm.limit_network("eth2", None, None), "it has eth0, eth1");
    microvm.resume().unwrap();
}

#[test]
fn the_most_vcpus_start_freeze_and_continue() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    let kernel = file(dir.path(), "kernel", &elf(&echoing()));
    let booted = BootConfig { vcpus: MAX_VCPUS, ..config(kernel) };
    let mut microvm = Microvm::boot(booted, kvm()).unwrap();
    microvm.resume().unwrap();
    freeze(&mut microvm, to_directory(&path)).unwrap();
    assert_eq!(microvm.save().unwrap().vcpus.len(), usize::from(MAX_VCPUS));
    drop(microvm);
    let mut clone = restored(&path, HostConfig::default()).unwrap();
    clone.send_ctrl_alt_del().unwrap();
    until(&mut clone, &[0x14, 0x11, 0xe0, 0x71, 0xe0, 0xf0, 0x71, 0xf0, 0x11, 0xf0, 0x14]);
}
