//! Real guests, whose monitors get their pages from a pager.

use std::sync::{Arc, Mutex};

use firn_player::format::{REPORT_ADDRESS, register};
use firn_snapshot::Snapshot;
use firn_vmm::{
    End, FrozenMachine, HostConfig, KVM_DEVICE, Microvm, MmioDevice, MmioWindow, OpenKvm, open_kvm,
};

use super::*;

/// The number of wrong pages that a player reports.
struct Reports(Arc<Mutex<Option<u64>>>);

impl MmioDevice for Reports {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let value = data.try_into().map(u64::from_le_bytes).unwrap();
        let mut wrong = self.0.lock().unwrap();
        if offset == register::DONE || offset == register::END {
            *wrong = Some(wrong.unwrap_or_default() + value);
        }
        if offset == register::WRONG_OWN {
            *wrong = Some(u64::MAX);
        }
    }
}

/// Runs a player on memory that the pager serves, and returns how many wrong pages it found.
#[test]
#[ignore = "the monitor process of the other tests"]
fn monitor_with_a_guest() {
    let snapshot = Snapshot::open(std::env::var_os("SNAPSHOT").unwrap()).unwrap();
    let memory = GuestMemory::anonymous(snapshot.manifest().layout.clone()).unwrap();
    let uffd = Uffd::open(Features::REMOVE).unwrap();
    memory.register(&uffd, RegisterMode::MISSING).unwrap();
    let regions = snapshot.manifest().layout.regions().zip(memory.slots());
    let regions: Vec<_> =
        regions.map(|(at, slot)| region(slot.host_addr, slot.len, at.image_offset)).collect();
    let _socket = hand_over(Some(&uffd), &json!(regions).to_string());
    // From here on, only the pager's descriptor prevents reads of zeros.
    drop(uffd);
    let wrong = Arc::new(Mutex::new(None));
    let device = Box::new(Reports(wrong.clone()));
    let window = MmioWindow { start: REPORT_ADDRESS, len: PAGE_SIZE, device };
    let host = HostConfig { windows: vec![window], ..HostConfig::default() };
    let frozen =
        FrozenMachine::open_on(&snapshot, OpenKvm::open(KVM_DEVICE.as_ref()).unwrap()).unwrap();
    let (mut microvm, _) = Microvm::restore(frozen, memory, host).unwrap();
    microvm.resume().unwrap();
    println!("resumed");
    assert!(matches!(microvm.run().unwrap(), End::TripleFault));
    println!("reads {}", wrong.lock().unwrap().unwrap());
}

/// A folder with a player's snapshot.
fn player(trace: &str) -> Option<TempDir> {
    if !firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok()) {
        return None;
    }
    let folder = TempDir::new().unwrap();
    let mut make = Command::new(env!("CARGO_BIN_EXE_firn"));
    make.args(["player", "--dense", "--trace", trace, "--out", "player"]);
    assert!(make.current_dir(folder.path()).stdout(Stdio::null()).status().unwrap().success());
    Some(folder)
}

fn guest(pager: &Pager) -> Monitor {
    let (socket, snapshot) = (pager.socket(), pager.folder.path().join("player"));
    let variables =
        [("SOCKET", socket.to_str().unwrap()), ("SNAPSHOT", snapshot.to_str().unwrap())];
    Monitor::of("guests::monitor_with_a_guest", &variables)
}

#[test]
fn a_real_guest_reads_all_its_memory_correctly() {
    let Some(folder) = player("sequential-read:16M") else { return };
    let pager = Pager::start(folder, &["--snapshot", "player"]);
    let mut monitor = guest(&pager);
    assert_eq!(monitor.answer(), Some(0));
    assert!(monitor.end().success());
    assert_eq!(pager.end(), (Some(0), String::new()));
}

#[test]
fn a_damaged_page_ends_a_real_guest() {
    let Some(folder) = player("sequential-read:16M") else { return };
    let path: &Path = &folder.path().join("player/memory.img");
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(&[1], 0x90_0008).unwrap();
    let pager = Pager::start(folder, &["--snapshot", "player", "--granule", "64"]);
    let mut monitor = guest(&pager);
    assert_eq!(monitor.answer(), None);
    monitor.was_killed();
    let (code, error) = pager.end();
    assert!(code == Some(1) && error.contains("page 2304 of the image is damaged"), "{error}");
}

/// Kills one of a pager's processes while a guest reads its memory and the server is stopped.
fn killed_under_a_guest(killed: Process) {
    // The guest's reads take longer than the following steps, because each fault installs one page.
    let Some(folder) = player("sequential-read:64M") else { return };
    let mut pager = Pager::start(folder, &["--snapshot", "player", "--granule", "1"]);
    let (server, killed) = (pager.server(), killed(&pager));
    let mut monitor = guest(&pager);
    monitor.printed("resumed").unwrap();
    kill_process(server, Signal::STOP).unwrap();
    kill_process(killed, Signal::KILL).unwrap();
    // This has no effect on a killed server.
    kill_process(server, Signal::CONT).unwrap();
    // A guest that reads zeros reports wrong pages.
    assert_eq!(monitor.answer(), None);
    monitor.was_killed();
    let error = pager.errors();
    // On a busy host the guest may run into its first fault before the guardian has its monitor.
    let known = ["ended unexpectedly", "ended before it served pages"];
    assert!(known.iter().any(|text| error.contains(text)), "{error}");
    pager.process.wait().unwrap();
}

#[test]
fn killing_the_server_ends_a_real_guest() {
    killed_under_a_guest(Pager::server);
}

#[test]
fn killing_the_guardian_ends_a_real_guest() {
    killed_under_a_guest(Pager::guardian);
}
