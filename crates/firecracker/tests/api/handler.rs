//! Guest memory from a page fault handler of another process, as Firecracker hands it over.

use std::fs::File;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_memory::uffd::{Event, Fill, Uffd, UffdError};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};

use crate::player::{Player, has_kvm, replay};
use crate::process::Process;

const PAGE: u64 = 4096;

/// Serves faults from a memory file, and counts the pages. It ends with the test.
fn serve(socket: &Path, memory: PathBuf) -> Arc<AtomicU64> {
    let listener = UnixListener::bind(socket).unwrap();
    let served = Arc::new(AtomicU64::new(0));
    let count = served.clone();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = vec![0; 4096];
        let mut buffers = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let len = recvmsg(&stream, &mut buffers, &mut ancillary, flags).unwrap().bytes;
        let fd = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
            _ => None,
        });
        let regions: Vec<Value> = serde_json::from_slice(&bytes[..len]).unwrap();
        let [region] = &regions[..] else { panic!("{regions:?}") };
        let field = |name: &str| region[name].as_u64().unwrap();
        assert_eq!((field("offset"), field("page_size"), field("page_size_kib")), (0, PAGE, PAGE));
        let (base, file) = (field("base_host_virt_addr"), File::open(memory).unwrap());
        assert_eq!(field("size"), file.metadata().unwrap().len());
        let uffd = Uffd::of(fd.unwrap()).unwrap();
        let mut page = [0; 4096];
        loop {
            poll(&mut [PollFd::new(&uffd, PollFlags::IN)], None).unwrap();
            for event in uffd.events().unwrap() {
                let Event::Fault(fault) = event else { continue };
                file.read_exact_at(&mut page, fault.address - base).unwrap();
                match uffd.copy(fault.address, &page, Fill::empty()) {
                    Ok(()) => drop(count.fetch_add(1, Ordering::SeqCst)),
                    Err(UffdError::Present { .. }) => {}
                    Err(UffdError::ProcessEnded) => return,
                    Err(error) => panic!("{error}"),
                }
            }
        }
    });
    served
}

#[test]
fn a_page_fault_handler_provides_memory() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let process = Process::start();
    Player::new(dir.path()).boot(&process);
    process.pause();
    let files = |name: &str| json!({ "snapshot_path": path(name), "mem_file_path": path(&format!("{name}.memory")) });
    process.put("/snapshot/create", &files("first"));
    drop(process);

    let mut process = Process::start();
    let backend = json!({ "backend_type": "Uffd", "backend_path": path("handler") });
    let load = json!({ "snapshot_path": path("first"), "mem_backend": backend });
    let error = process.refused("PUT", "/snapshot/load", &load);
    assert!(error.starts_with("cannot connect to the page fault handler"), "{error}");
    process.put("/firn/planner", &json!({ "planner": "dram_cached" }));
    let error = process.refused("PUT", "/snapshot/load", &load);
    assert_eq!(error, "the planner dram_cached is for backend_type \"File\", not \"Uffd\"");
    process.put("/firn/planner", &json!({ "planner": "firecracker" }));
    drop(process);

    process = Process::start();
    let served = serve(&path("handler"), path("first.memory"));
    process.put("/snapshot/load", &load);
    process.resume();
    replay(&mut process);
    assert!(served.load(Ordering::SeqCst) > 1024, "{}", served.load(Ordering::SeqCst));
    // What the guest has not touched is the handler's, too.
    process.pause();
    process.put("/snapshot/create", &files("second"));
    let (first, second) =
        (std::fs::read(path("first.memory")), std::fs::read(path("second.memory")));
    let (first, second) = (first.unwrap(), second.unwrap());
    let pages =
        |bytes: &[u8]| bytes.chunks(4096).filter(|page| page.iter().any(|b| *b != 0)).count();
    assert!(pages(&second) >= pages(&first), "{} {}", pages(&second), pages(&first));
}
