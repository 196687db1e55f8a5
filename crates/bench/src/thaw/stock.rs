//! Another monitor in a session: a program with Firecracker's API, such as Firecracker itself.
//!
//! It boots the player as a kernel and snapshots it where the player is ready to replay, so its
//! snapshot has the same pages as firn's. Each run is a process of the program that loads the
//! snapshot and resumes it. How long the replay took is what the player itself prints, so the way
//! of its lines over the serial port is not part of it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use firn_base::ns_since;
use firn_vmm::KVM_DEVICE;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tempfile::TempDir;
use thiserror::Error;

use super::SessionError;
use super::results::milliseconds;
use crate::cache::{Cache, CacheError, SnapshotFiles};
use crate::medium::{self, MediumError};
use crate::player::{PlayerElfError, PlayerInputs, PlayerInputsError, PlayerOptions, elf};
use crate::stats::Summary;
use crate::traces::NamedTrace;

/// How long a request, or a line of the player, may take.
const LIMIT: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;
/// The files of a snapshot: the state of the machine, and guest memory.
const STATE: &str = "state";
const MEMORY: &str = "memory";

/// Why a program with Firecracker's API is not measured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StockError {
    /// The player cannot be built from this trace.
    #[error(transparent)]
    Inputs(#[from] PlayerInputsError),
    /// The player cannot be built as a kernel.
    #[error(transparent)]
    Elf(#[from] PlayerElfError),
    /// There is no directory for the snapshot.
    #[error(transparent)]
    Medium(#[from] MediumError),
    /// The page cache cannot be brought into the required state.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The operating system refuses a step.
    #[error("cannot {what}")]
    Io {
        /// The step.
        what: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The program ended.
    #[error("the program ended: start it by hand to see why")]
    Ended,
    /// A request failed.
    #[error("{request} was answered with {status}: {answer}")]
    Refused {
        /// Method and path.
        request: String,
        /// The status of HTTP.
        status: u16,
        /// The body of the answer.
        answer: String,
    },
    /// The player printed nothing, or the API did not answer.
    #[error("no {expected:?} in {limit} s", expected = .0, limit = LIMIT.as_secs())]
    Silent(&'static str),
    /// The player printed something else.
    #[error("the player printed {0:?}: its memory is wrong, or the console lost bytes")]
    Wrong(String),
}

/// The measurements of a program with Firecracker's API on one trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StockRow {
    /// What the program prints with `--version`.
    pub version: String,
    /// The trace.
    pub trace: String,
    /// The page cache before each run.
    pub cache: Cache,
    /// Number of runs.
    pub runs: u32,
    /// Process start to an API that accepts connections.
    pub start_ms: Summary,
    /// The request that loads the snapshot and resumes it, to its answer.
    pub load_ms: Summary,
    /// The player's replay, by its own clock.
    pub replay_ms: Summary,
    /// The sum of the three.
    pub total_ms: Summary,
    /// Process start to the player's line that it is done: the total, the byte that starts the
    /// replay, and the serial port.
    pub line_ms: Summary,
}

/// One run.
#[derive(Clone, Copy, Debug)]
pub struct StockRun {
    start_ns: u64,
    load_ns: u64,
    replay_ns: u64,
    line_ns: u64,
}

/// A player's snapshot that a program with Firecracker's API made. It is removed on drop.
#[derive(Debug)]
pub struct StockPlayer {
    program: PathBuf,
    version: String,
    trace: String,
    files: SnapshotFiles,
    folder: TempDir,
}

impl StockPlayer {
    /// Boots the player of a trace with a program, and snapshots it in a new folder in `directory`,
    /// or in the folder for temporary files.
    ///
    /// # Errors
    ///
    /// [`StockError`].
    pub fn make(
        program: &Path,
        trace: &NamedTrace,
        options: &PlayerOptions,
        directory: Option<&Path>,
    ) -> Result<Self, StockError> {
        let inputs = PlayerInputs::new(vec![trace.clone()])?;
        let kernel = elf(&inputs, options, KVM_DEVICE.as_ref())?;
        let folder = medium::directory(directory)?;
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("player.elf"), &kernel.bytes).map_err(io("write the player"))?;
        let process = Process::start(program, folder.path())?;
        // Whole pages of 2 MiB.
        let memory = (kernel.memory.div_ceil(MIB) + 1).next_multiple_of(2);
        let machine = json!({ "vcpu_count": 1, "mem_size_mib": memory });
        process.request("PUT", "/machine-config", &machine)?;
        let boot = json!({ "kernel_image_path": path("player.elf"), "boot_args": "" });
        process.request("PUT", "/boot-source", &boot)?;
        process.request("PUT", "/actions", &json!({ "action_type": "InstanceStart" }))?;
        process.line("READY")?;
        process.request("PATCH", "/vm", &json!({ "state": "Paused" }))?;
        let (state, memory) = (path(STATE), path(MEMORY));
        let files = json!({ "snapshot_path": state, "mem_file_path": memory });
        process.request("PUT", "/snapshot/create", &files)?;
        drop(process);
        Ok(Self {
            program: program.to_owned(),
            version: version(program)?,
            trace: trace.name.clone(),
            files: SnapshotFiles::of(&[state, memory])?,
            folder,
        })
    }

    /// The trace.
    #[must_use]
    pub fn trace(&self) -> &str {
        &self.trace
    }

    /// Loads the snapshot once, and lets the player replay and check its memory.
    ///
    /// # Errors
    ///
    /// [`StockError`], also if a page is wrong.
    pub fn run(&self, cache: Cache) -> Result<StockRun, StockError> {
        self.files.prepare(cache, false)?;
        let path = |name: &str| self.folder.path().join(name);
        let memory = json!({ "backend_type": "File", "backend_path": path(MEMORY) });
        let load =
            json!({ "snapshot_path": path(STATE), "mem_backend": memory, "resume_vm": true });
        let begin = Instant::now();
        let mut process = Process::start(&self.program, self.folder.path())?;
        let start_ns = ns_since(begin);
        process.request("PUT", "/snapshot/load", &load)?;
        let load_ns = ns_since(begin) - start_ns;
        process.input.write_all(b"\n").map_err(io("write to the guest's console"))?;
        let done = process.line("DONE ")?;
        let line_ns = ns_since(begin);
        let replay_ns = done.split(' ').nth(2).and_then(|ns| ns.parse().ok());
        let replay_ns = replay_ns.ok_or(StockError::Wrong(done))?;
        let end = process.line("END ")?;
        if end != "END 0" {
            return Err(StockError::Wrong(end));
        }
        Ok(StockRun { start_ns, load_ns, replay_ns, line_ns })
    }

    /// A run of a session.
    pub(super) fn turn(&self, cache: Cache, run: u32) -> Result<StockRun, SessionError> {
        self.run(cache).map_err(|source| SessionError::Stock {
            program: self.program.clone(),
            trace: self.trace.clone(),
            run,
            source: Box::new(source),
        })
    }

    /// The row of some runs; `None` without any.
    pub(super) fn row(&self, cache: Cache, runs: &[StockRun]) -> Option<StockRow> {
        let each = |value: fn(&StockRun) -> u64| {
            let values: Vec<f64> = runs.iter().map(|run| milliseconds(value(run))).collect();
            Summary::of(&values)
        };
        Some(StockRow {
            version: self.version.clone(),
            trace: self.trace.clone(),
            cache,
            runs: u32::try_from(runs.len()).unwrap_or(u32::MAX),
            start_ms: each(|run| run.start_ns)?,
            load_ms: each(|run| run.load_ns)?,
            replay_ms: each(|run| run.replay_ns)?,
            total_ms: each(|run| run.start_ns + run.load_ns + run.replay_ns)?,
            line_ms: each(|run| run.line_ns)?,
        })
    }
}

fn version(program: &Path) -> Result<String, StockError> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    let output = output.map_err(io(&format!("start {}", program.display())))?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned())
}

fn io(what: &str) -> impl FnOnce(io::Error) -> StockError + use<> {
    let what = what.to_owned();
    |source| StockError::Io { what, source }
}

/// A process of the program. It is killed on drop.
struct Process {
    child: Child,
    socket: PathBuf,
    /// The guest's console.
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Process {
    /// Starts it, and waits until its API accepts connections.
    fn start(program: &Path, folder: &Path) -> Result<Self, StockError> {
        let socket = folder.join("api.sock");
        let begin = Instant::now();
        let mut child = Command::new(program)
            .arg("--api-sock")
            .arg(&socket)
            .args(["--level", "Error"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(io(&format!("start {}", program.display())))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(StockError::Ended);
        };
        let (sender, lines) = channel();
        // It ends with the process.
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let mut process = Self { child, socket, input, lines };
        while UnixStream::connect(&process.socket).is_err() {
            if process.child.try_wait().is_ok_and(|status| status.is_some()) {
                return Err(StockError::Ended);
            }
            if begin.elapsed() > LIMIT {
                return Err(StockError::Silent("socket of the API"));
            }
            thread::sleep(Duration::from_micros(50));
        }
        Ok(process)
    }

    fn request(&self, method: &str, path: &str, body: &Value) -> Result<(), StockError> {
        let request = format!("{method} {path}");
        let failed = || io(&format!("send {request}"));
        let mut stream = UnixStream::connect(&self.socket).map_err(failed())?;
        stream.set_read_timeout(Some(LIMIT)).map_err(failed())?;
        let body = body.to_string();
        let length = body.len();
        let text = format!(
            "{request} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(text.as_bytes()).map_err(failed())?;
        let (status, answer) = answer(&mut stream).map_err(failed())?;
        if (200..300).contains(&status) {
            return Ok(());
        }
        Err(StockError::Refused { request, status, answer })
    }

    /// The next line of the player that begins with a word. The program's own lines may stand
    /// between.
    fn line(&self, begin: &'static str) -> Result<String, StockError> {
        let until = Instant::now() + LIMIT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).map_err(|error| match error {
                RecvTimeoutError::Disconnected => StockError::Ended,
                RecvTimeoutError::Timeout => StockError::Silent(begin),
            })?;
            if let Some(at) = line.find(begin) {
                return Ok(line[at..].to_owned());
            }
            if line.starts_with("BAD ") {
                return Err(StockError::Wrong(line));
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Reads an answer of HTTP: its status and its body.
fn answer(stream: &mut UnixStream) -> io::Result<(u16, String)> {
    let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
    loop {
        if let Some((status, head, length)) = head(&bytes)?
            && bytes.len() >= head + length
        {
            return Ok((status, String::from_utf8_lossy(&bytes[head..]).into_owned()));
        }
        match stream.read(&mut part)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => bytes.extend(&part[..read]),
        }
    }
}

/// The status of an answer, where its body begins, and how long that is; `None` before the head is
/// complete.
fn head(bytes: &[u8]) -> io::Result<Option<(u16, usize, usize)>> {
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut answer = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(head) = answer.parse(bytes).map_err(io::Error::other)? else {
        return Ok(None);
    };
    let is_length =
        |header: &&httparse::Header<'_>| header.name.eq_ignore_ascii_case("content-length");
    let length = answer.headers.iter().find(is_length);
    let length = length.and_then(|header| std::str::from_utf8(header.value).ok()?.parse().ok());
    Ok(Some((answer.code.unwrap_or_default(), head, length.unwrap_or_default())))
}
