//! `firn pager`, and monitors that hand over their memory as Firecracker does. A monitor is another
//! process of this test program, which runs the ignored test `monitor`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "the monitor process reports on standard output")]

mod guests;
mod signals;

use std::fs::{File, OpenOptions, Permissions, set_permissions};
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use firn_base::PAGE_SIZE;
use firn_memory::GuestMemory;
use firn_memory::uffd::{Features, RegisterMode, Uffd};
use firn_snapshot::{
    Contents, Description, Destination, FreezeRequest, Machine, MemoryLayout, freeze,
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

const SIZE: u64 = 8 << 20;
/// The time limit for the pager to kill a monitor.
const KILL_LIMIT: Duration = Duration::from_secs(20);

/// The first word of a page.
fn word(page: u64) -> u64 {
    page.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

/// A folder with a memory file.
fn memory_file() -> TempDir {
    let folder = TempDir::new().unwrap();
    let image = File::create(folder.path().join("memory")).unwrap();
    image.set_len(SIZE).unwrap();
    for page in 0..SIZE / PAGE_SIZE {
        image.write_all_at(&word(page).to_le_bytes(), page * PAGE_SIZE).unwrap();
    }
    folder
}

/// One of a pager's two processes.
type Process = fn(&Pager) -> Pid;

struct Pager {
    process: Child,
    folder: TempDir,
}

impl Pager {
    /// Starts a pager in `folder` with these arguments.
    fn start(folder: TempDir, arguments: &[&str]) -> Self {
        Self::by(Command::new(env!("CARGO_BIN_EXE_firn")), folder, arguments)
    }

    fn by(mut command: Command, folder: TempDir, arguments: &[&str]) -> Self {
        command.args(["pager", "--socket", "socket"]).args(arguments).current_dir(folder.path());
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "firn pager listens on socket\n");
        Self { process, folder }
    }

    /// Serves a memory file.
    fn of_image(arguments: &[&str]) -> Self {
        Self::start(memory_file(), &[&["--image", "memory"], arguments].concat())
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn guardian(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// The process that serves pages.
    fn server(&self) -> Pid {
        let id = self.process.id();
        let children = format!("/proc/{id}/task/{id}/children");
        let children = std::fs::read_to_string(children).unwrap();
        Pid::from_raw(children.trim().parse().unwrap()).unwrap()
    }

    /// Waits until it exits, and returns its exit code and its errors.
    fn end(mut self) -> (Option<i32>, String) {
        let error = self.errors();
        let status = self.process.wait().unwrap();
        assert!(!self.socket().exists());
        (status.code(), error)
    }

    /// All errors that its two processes print.
    fn errors(&mut self) -> String {
        let mut error = String::new();
        self.process.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        error
    }
}

/// A process with memory that the pager serves.
struct Monitor {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Monitor {
    /// Starts a monitor that sends `message`, with addresses relative to its memory.
    fn start(pager: &Pager, message: fn(u64) -> Value) -> Self {
        Self::at(&pager.socket(), &message(0), &[])
    }

    fn at(socket: &Path, message: &Value, more: &[(&str, &str)]) -> Self {
        let (message, socket) = (message.to_string(), socket.to_str().unwrap());
        let variables = [&[("MESSAGE", message.as_str()), ("SOCKET", socket)], more].concat();
        Self::of("monitor", &variables)
    }

    /// Starts a monitor that is connected to a pager. If `sent` is false, it waits for a line
    /// before it sends its message.
    fn connected(pager: &Pager, sent: bool) -> Self {
        let more: &[_] = if sent { &[] } else { &[("LATE", "1")] };
        let mut monitor = Self::at(&pager.socket(), &whole(0), more);
        monitor.printed(if sent { "sent" } else { "connected" }).unwrap();
        monitor
    }

    fn of(test: &str, variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--ignored", "--nocapture"]);
        command.envs(variables.iter().copied());
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self { process, input, output }
    }

    /// The first word of a page as the monitor reads it; `None` if it is killed first.
    fn read(&mut self, page: u64) -> Option<u64> {
        // The write fails if the monitor was killed.
        let _ = writeln!(self.input.as_mut().unwrap(), "{page}");
        self.answer()
    }

    fn answer(&mut self) -> Option<u64> {
        self.printed("reads ").map(|number| number.parse().unwrap())
    }

    /// The text that it prints after a word; `None` if it exits first.
    fn printed(&mut self, word: &str) -> Option<String> {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some((_, rest)) = line.split_once(word) {
                return Some(rest.trim().to_owned());
            }
            line.clear();
        }
        None
    }

    fn end(mut self) -> ExitStatus {
        drop(self.input.take());
        self.process.wait().unwrap()
    }

    /// Checks that the monitor is killed within the time limit.
    #[track_caller]
    fn was_killed(mut self) {
        let begin = Instant::now();
        while self.process.try_wait().unwrap().is_none() && begin.elapsed() < KILL_LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        // A monitor that was not killed exits when its standard input closes.
        assert_eq!(self.end().signal(), Some(9));
    }
}

/// A message, and a part of the pager's error.
type Case = (fn(u64) -> Value, &'static str);

fn region(address: u64, size: u64, offset: u64) -> Value {
    json!({"base_host_virt_addr": address, "size": size, "offset": offset, "page_size": 4096,
        "page_size_kib": 4096})
}

/// All memory in two regions, like the memory of a guest of more than 3 GiB.
fn whole(at: u64) -> Value {
    json!([region(at, SIZE / 2, 0), region(at + SIZE / 2, SIZE / 2, SIZE / 2)])
}

/// Exit code of a monitor whose message has no receiver.
const NO_RECEIVER: i32 = 3;

fn hand_over(uffd: Option<&Uffd>, message: &str) -> UnixStream {
    let socket = UnixStream::connect(std::env::var_os("SOCKET").unwrap()).unwrap();
    println!("connected");
    if std::env::var_os("LATE").is_some() {
        std::io::stdin().read_line(&mut String::new()).unwrap();
    }
    let descriptors: Vec<_> = uffd.iter().map(|uffd| uffd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
    }
    let bytes = [IoSlice::new(message.as_bytes())];
    if sendmsg(&socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL).is_err() {
        std::process::exit(NO_RECEIVER);
    }
    println!("sent");
    socket
}

/// Reads the pages that standard input names. The message's addresses are relative to the start of
/// guest memory.
#[test]
#[ignore = "the monitor process of the other tests"]
fn monitor() {
    let memory = GuestMemory::anonymous(MemoryLayout::for_size(SIZE).unwrap()).unwrap();
    let uffd = Uffd::open(Features::REMOVE).unwrap();
    memory.register(&uffd, RegisterMode::MISSING).unwrap();
    let message = std::env::var("MESSAGE").unwrap();
    let mut value: Value = serde_json::from_str(&message).unwrap_or_default();
    for region in value.as_array_mut().into_iter().flatten() {
        let address = region["base_host_virt_addr"].as_u64().unwrap_or_default();
        region["base_host_virt_addr"] = json!(address + memory.slots()[0].host_addr);
    }
    let message = if value.is_null() { message } else { value.to_string() };
    let with = std::env::var_os("ALONE").is_none();
    let _socket = hand_over(with.then_some(&uffd), &message);
    // Firecracker keeps its userfaultfd open. Here only the pager's descriptor prevents reads of
    // zeros.
    drop(uffd);
    for line in std::io::stdin().lines() {
        let page: u64 = line.unwrap().parse().unwrap();
        let view = memory.vm_memory();
        let found: u64 = view.read_obj(GuestAddress(page * PAGE_SIZE)).unwrap();
        println!("reads {found}");
    }
}

#[test]
fn pages_are_served_until_the_monitor_ends() {
    for arguments in [&["--granule", "1"][..], &[], &["--granule", "512"]] {
        let pager = Pager::of_image(arguments);
        let mut monitor = Monitor::start(&pager, whole);
        for page in [0, 1, 17, 1023, 1024, 2047, 5, 17] {
            assert_eq!(monitor.read(page), Some(word(page)));
        }
        assert!(monitor.end().success());
        assert_eq!(pager.end(), (Some(0), String::new()));
    }
}

#[test]
fn killing_the_server_kills_the_monitor() {
    let pager = Pager::of_image(&["--granule", "1"]);
    let mut monitor = Monitor::start(&pager, whole);
    assert_eq!(monitor.read(3), Some(word(3)));
    kill_process(pager.server(), Signal::KILL).unwrap();
    assert_eq!(monitor.read(900), None);
    monitor.was_killed();
    let (code, error) = pager.end();
    assert_eq!(code, Some(1));
    assert!(error.contains("the server process ended unexpectedly (signal: 9"), "{error}");
}

#[test]
fn killing_the_guardian_kills_the_monitor() {
    let mut pager = Pager::of_image(&["--granule", "1"]);
    let mut monitor = Monitor::start(&pager, whole);
    assert_eq!(monitor.read(3), Some(word(3)));
    pager.process.kill().unwrap();
    // The monitor prints nothing more.
    assert_eq!(monitor.answer(), None);
    monitor.was_killed();
    let error = pager.errors();
    assert!(error.contains("the guardian process ended unexpectedly"), "{error}");
    pager.process.wait().unwrap();
}

/// Kills the guardian or the server during a handover, before or after the monitor has sent its
/// message. Stopping the guardian delays the accept, stopping the server delays the receipt of the
/// message.
fn killed_during_the_handover(sent: bool, stopped: Option<Process>, killed: Process) {
    let mut pager = Pager::of_image(&["--granule", "1"]);
    let (stopped, killed) = (stopped.map(|process| process(&pager)), killed(&pager));
    if let Some(stopped) = stopped {
        kill_process(stopped, Signal::STOP).unwrap();
    }
    let mut monitor = Monitor::connected(&pager, sent);
    // Time for the running processes to reach the step that is delayed.
    std::thread::sleep(Duration::from_millis(100));
    kill_process(killed, Signal::KILL).unwrap();
    if let Some(stopped) = stopped.filter(|stopped| *stopped != killed) {
        kill_process(stopped, Signal::CONT).unwrap();
    }
    // The pager may serve the page before the kill, but never with zeros.
    let read = monitor.read(900);
    assert!([None, Some(word(900))].contains(&read), "{read:?}");
    monitor.was_killed();
    let error = pager.errors();
    assert!(error.contains("ended unexpectedly") || error.contains("ended before"), "{error}");
    pager.process.wait().unwrap();
}

#[test]
fn killing_guardian_or_server_during_the_handover_kills_the_monitor() {
    for sent in [true, false] {
        for stopped in [None, Some(Pager::guardian as Process), Some(Pager::server)] {
            killed_during_the_handover(sent, stopped, Pager::guardian);
            killed_during_the_handover(sent, stopped, Pager::server);
        }
    }
}

#[test]
fn killing_the_server_before_a_connection_ends_the_pager() {
    let pager = Pager::of_image(&[]);
    kill_process(pager.server(), Signal::KILL).unwrap();
    let (code, error) = pager.end();
    assert_eq!(code, Some(1));
    assert!(
        error.contains("the server process ended before it served pages (signal: 9"),
        "{error}"
    );
}

#[test]
fn a_second_connection_beside_the_monitor_is_refused() {
    let pager = Pager::of_image(&["--granule", "1"]);
    kill_process(pager.guardian(), Signal::STOP).unwrap();
    let mut monitor = Monitor::connected(&pager, true);
    let other = Monitor::connected(&pager, true);
    kill_process(pager.guardian(), Signal::CONT).unwrap();
    assert_eq!(monitor.read(3), Some(word(3)));
    other.was_killed();
    assert_eq!(monitor.read(4), Some(word(4)));
    assert!(monitor.end().success());
    assert_eq!(pager.end(), (Some(0), String::new()));
}

/// A new process with a free PID; `None` if other processes take the PID.
fn with_pid(pid: Pid) -> Option<Child> {
    (0..20).find_map(|_| {
        let before = (pid.as_raw_pid() - 1).to_string();
        std::fs::write("/proc/sys/kernel/ns_last_pid", before).unwrap();
        let mut process = Command::new("sleep").arg("1000").spawn().unwrap();
        if Pid::from_child(&process) == pid {
            return Some(process);
        }
        process.kill().unwrap();
        process.wait().unwrap();
        None
    })
}

/// Whether a process survives that reuses the PID of a monitor that has exited since it connected;
/// `None` if no process got that PID.
fn survives_with_the_reused_pid() -> Option<bool> {
    let pager = Pager::of_image(&[]);
    kill_process(pager.guardian(), Signal::STOP).unwrap();
    let mut monitor = Monitor::connected(&pager, true);
    let number = Pid::from_child(&monitor.process);
    monitor.process.kill().unwrap();
    monitor.process.wait().unwrap();
    let other = with_pid(number);
    kill_process(pager.guardian(), Signal::CONT).unwrap();
    // The pager exits without a monitor, or on this signal.
    kill_process(pager.guardian(), Signal::TERM).unwrap();
    pager.end();
    other.map(|mut other| {
        let lives = other.try_wait().unwrap().is_none();
        other.kill().unwrap();
        other.wait().unwrap();
        lives
    })
}

#[test]
fn a_process_with_the_reused_pid_of_the_monitor_survives() {
    if firn_required::has("root", geteuid().is_root()) {
        assert_eq!((0..5).find_map(|_| survives_with_the_reused_pid()), Some(true));
    }
}

/// Starts a pager that cannot kill its monitor. Checks that it refuses the monitor with `words`,
/// before and after the monitor's message.
fn is_refused(start: impl Fn() -> Pager, guardian: Process, words: &str) {
    for sent in [false, true] {
        let mut pager = start();
        let guardian = guardian(&pager);
        kill_process(guardian, Signal::STOP).unwrap();
        let mut monitor = Monitor::connected(&pager, sent);
        kill_process(guardian, Signal::CONT).unwrap();
        let mut line = String::new();
        BufReader::new(pager.process.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains(words), "{line}");
        if !sent {
            // The pager has closed the connection.
            assert_eq!(monitor.read(3), None);
            assert_eq!(monitor.end().code(), Some(NO_RECEIVER));
        } else {
            // The monitor waits for its page, and the pager waits for the monitor's exit.
            writeln!(monitor.input.as_mut().unwrap(), "3").unwrap();
            std::thread::sleep(Duration::from_millis(300));
            assert!(pager.process.try_wait().unwrap().is_none());
            monitor.process.kill().unwrap();
            assert_eq!(monitor.answer(), None);
            monitor.was_killed();
        }
        assert_eq!(pager.end(), (Some(1), String::new()));
    }
}

#[test]
fn a_monitor_of_another_user_is_refused() {
    if !firn_required::has("root", geteuid().is_root()) {
        return;
    }
    let start = || {
        // The other user may have no access to the build directory.
        let folder = memory_file();
        set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        let firn = folder.path().join("firn");
        // Another process makes the copy. Otherwise a child of another thread could inherit the
        // writable descriptor, and the program could not be executed.
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_firn")).arg(&firn).status();
        assert!(copied.unwrap().success());
        let mut command = Command::new(firn);
        command.uid(65534).gid(65534);
        Pager::by(command, folder, &["--image", "memory"])
    };
    is_refused(
        start,
        Pager::guardian,
        "uid 65534 may not kill it if its pager ends; run the pager as uid 0",
    );
}

#[test]
fn a_monitor_in_an_outer_pid_namespace_is_refused() {
    if !firn_required::has("root", geteuid().is_root()) {
        return;
    }
    let start = || {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", env!("CARGO_BIN_EXE_firn")]);
        Pager::by(command, memory_file(), &["--image", "memory"])
    };
    // The child of `unshare` is the guardian.
    is_refused(start, Pager::server, "in another pid namespace");
}

#[test]
fn an_image_that_shrinks_ends_the_monitor_with_a_report() {
    let pager = Pager::of_image(&["--granule", "16"]);
    let mut monitor = Monitor::start(&pager, whole);
    assert_eq!(monitor.read(0), Some(word(0)));
    let image = OpenOptions::new().write(true).open(pager.folder.path().join("memory")).unwrap();
    image.set_len(SIZE / 4).unwrap();
    assert_eq!(monitor.read(511), Some(word(511)));
    assert_eq!(monitor.read(512), None);
    monitor.was_killed();
    let (code, error) = pager.end();
    assert!(code == Some(1) && error.contains("page 512 of the image is missing"), "{error}");
}

#[test]
fn a_page_that_differs_from_the_freeze_ends_the_monitor_with_a_report() {
    let folder = TempDir::new().unwrap();
    let memory = GuestMemory::anonymous(MemoryLayout::for_size(SIZE).unwrap()).unwrap();
    for page in 0..SIZE / PAGE_SIZE {
        memory.vm_memory().write_obj(word(page), GuestAddress(page * PAGE_SIZE)).unwrap();
    }
    let path = folder.path().join("snapshot");
    let machine = Machine {
        description: Description { vcpus: 1, ..Description::default() },
        state_version: 1,
        state: Vec::new(),
        reported: Vec::new(),
    };
    let destination = Destination::Directory(path.clone());
    let request = FreezeRequest { destination, dense: false, function: None };
    freeze(&mut Contents::new(&memory.pages(), machine), request).unwrap();
    let image = OpenOptions::new().write(true).open(path.join("memory.img")).unwrap();
    image.write_all_at(&[0xff], 700 * PAGE_SIZE + 4095).unwrap();
    let pager = Pager::start(folder, &["--snapshot", "snapshot", "--granule", "1"]);
    let mut monitor = Monitor::start(&pager, whole);
    assert_eq!(monitor.read(699), Some(word(699)));
    assert_eq!(monitor.read(700), None);
    monitor.was_killed();
    let (code, error) = pager.end();
    assert!(code == Some(1) && error.contains("page 700 of the image is damaged"), "{error}");
}

#[test]
fn a_message_that_cannot_be_served_ends_the_monitor_with_a_report() {
    let cases: [Case; 4] = [
        (|_| json!({"memory": 1}), "not a JSON array"),
        (|at| json!([region(at, 2 * SIZE, 0)]), "ends at byte 0x1000000 of the memory file"),
        (|at| json!([region(at, 8192, 0), region(at + 4096, 8192, 16384)]), "0 and 1"),
        (|at| json!([region(at, 4096, 12)]), "whole pages"),
    ];
    for (message, words) in cases {
        let pager = Pager::of_image(&[]);
        let monitor = Monitor::start(&pager, message);
        let (code, error) = pager.end();
        assert!(code == Some(1) && error.contains(words), "{error}");
        assert!(error.contains("the monitor is killed"), "{error}");
        monitor.was_killed();
    }
    let pager = Pager::of_image(&[]);
    let socket = pager.socket();
    let monitor = Monitor::at(&socket, &json!([]), &[("ALONE", "1")]);
    let (code, error) = pager.end();
    assert!(code == Some(1) && error.contains("has 0 descriptors"), "{error}");
    monitor.was_killed();
}

#[test]
fn an_image_that_cannot_be_served_is_an_error_before_a_connection() {
    let folder = TempDir::new().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
        command.arg("pager").args(arguments).current_dir(folder.path());
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, error) = run(&["--socket", "socket", "--image", "none"]);
    assert!(code == Some(1) && error.contains("cannot open the memory file none"), "{error}");
    std::fs::write(folder.path().join("memory"), [0; 4096]).unwrap();
    let (code, error) = run(&["--socket", "memory", "--image", "memory"]);
    assert!(code == Some(1) && error.contains("cannot listen on memory"), "{error}");
    assert!(folder.path().join("memory").exists());
    let (code, error) = run(&["--socket", "socket", "--image", "memory", "--granule", "3"]);
    assert!(code == Some(2) && error.contains("power of two"), "{error}");
    assert_eq!(run(&["--socket", "socket"]).0, Some(2));
}
