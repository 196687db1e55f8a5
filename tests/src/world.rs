//! A separate directory for each test, with the real firn.

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::{Monitor, Outcome};

/// The limit for a command, even in the lab on a busy computer.
pub(crate) const LIMIT: Duration = Duration::from_secs(600);
/// The commands that start one microVM, `profile record` among them.
const JAILED: [&str; 3] = ["boot", "record", "thaw"];
pub(crate) const PAUSE: Duration = Duration::from_millis(10);

/// A directory for firn. firn must leave it unchanged.
#[derive(Debug)]
pub struct World {
    directory: TempDir,
}

impl Default for World {
    fn default() -> Self {
        let directory = tempfile::Builder::new().prefix("e2e-").tempdir().unwrap();
        for folder in ["run", "tmp", "work"] {
            fs::create_dir(directory.path().join(folder)).unwrap();
        }
        Self { directory }
    }
}

impl World {
    /// The folder of the test's own files.
    pub fn work(&self) -> PathBuf {
        self.directory.path().join("work")
    }

    /// A path for a file of the test's own.
    pub fn file(&self, name: &str) -> PathBuf {
        self.work().join(name)
    }

    /// A file for credentials, in the format of `~/.aws/credentials`.
    pub fn credentials(&self) -> PathBuf {
        self.file("credentials")
    }

    /// The folder of the running microVMs' sockets.
    pub fn run_directory(&self) -> PathBuf {
        self.directory.path().join("run")
    }

    /// A firn command. A microVM that it starts fails if its jail lacks a wall, but where the
    /// arguments have `--jail`.
    pub fn firn<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(&self, arguments: I) -> Firn {
        let program = std::env::var_os("FIRN").unwrap_or_else(|| "firn".into());
        let mut command = Command::new(program);
        let words: Vec<S> = arguments.into_iter().collect();
        let names_it = words.iter().any(|word| word.as_ref() == "--jail");
        for (position, word) in words.iter().enumerate() {
            command.arg(word);
            let is_jailed = position < 2 && JAILED.iter().any(|it| word.as_ref() == *it);
            if is_jailed && !names_it {
                command.args(["--jail", "require"]);
            }
        }
        command
            .env("FIRN_RUN_DIR", self.run_directory())
            .env("TMPDIR", self.directory.path().join("tmp"))
            .env_remove("FIRN_REQUEST_NS")
            .current_dir(self.work())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Firn(command)
    }

    /// The answer of a module of the workshop to an event, from a running microVM.
    #[track_caller]
    pub fn ask(&self, name: &str, module: &str, event: &serde_json::Value) -> serde_json::Value {
        self.ask_unchecked(name, module, event).json()
    }

    /// Invokes a module of the workshop with an event, in a running microVM.
    pub fn ask_unchecked(&self, name: &str, module: &str, event: &serde_json::Value) -> Outcome {
        let event = workshop_event(module, event);
        self.firn(["invoke", "--time-limit", "60", name, &event]).run()
    }

    /// The answer of a module of the workshop to an event, from a new clone.
    #[track_caller]
    pub fn thaw_and_ask(
        &self,
        snapshot: &Path,
        module: &str,
        event: &serde_json::Value,
    ) -> serde_json::Value {
        let event = workshop_event(module, event);
        self.firn(["thaw", "--invoke", &event]).arg(snapshot).run().json()
    }

    /// Processes of firn in this world.
    pub fn processes(&self) -> Vec<i32> {
        let run = self.run_directory();
        let variable = format!("FIRN_RUN_DIR={}", run.display());
        // A monitor has no environment.
        let has_mark = |pid: &i32| {
            let has = |file: &str, mark: &[u8]| {
                let list = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
                list.split(|byte| *byte == 0).any(|text| text == mark)
            };
            has("environ", variable.as_bytes()) || has("cmdline", run.as_os_str().as_bytes())
        };
        let entries = fs::read_dir("/proc").unwrap();
        let pids = entries.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
        pids.filter(has_mark).collect()
    }

    /// Those that run a command of firn, such as `pool`, or its program of that name, such as
    /// `monitor`.
    pub fn processes_of(&self, name: &str) -> Vec<i32> {
        let program = format!("firn-{name}");
        let runs = |process: &i32| {
            let words = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
            let mut words = words.split(|byte| *byte == 0).map(String::from_utf8_lossy);
            let path = words.next().unwrap_or_default();
            Path::new(&*path).file_name().is_some_and(|file| *file == *program)
                || words.next().is_some_and(|command| command == name)
        };
        self.processes().into_iter().filter(runs).collect()
    }

    /// Files, sockets and processes of firn outside the folder of the test's own files.
    pub fn leftovers(&self) -> Vec<String> {
        let mut found = Vec::new();
        for folder in ["run", "tmp"] {
            list(&self.directory.path().join(folder), &mut found);
        }
        found.extend(self.processes().iter().map(|pid| format!("process {pid}")));
        found
    }

    /// Fails if files or processes of firn remain. Processes that are exiting get time to exit.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        let begin = Instant::now();
        loop {
            let found = self.leftovers();
            if found.is_empty() {
                return;
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "left behind: {found:#?}");
            std::thread::sleep(PAUSE);
        }
    }

    /// The same after a supervisor was killed, which leaves the sockets of its microVMs to the next
    /// command.
    #[track_caller]
    pub fn assert_swept(&self) {
        self.firn(["invoke", "none", "{}"]).run().refused(&["no microVM named none is running"]);
        self.assert_nothing_left();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_nothing_left();
        }
        for pid in self.processes() {
            let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
        }
    }
}

fn workshop_event(module: &str, event: &serde_json::Value) -> String {
    serde_json::json!({"module": module, "event": event}).to_string()
}

fn list(folder: &Path, found: &mut Vec<String>) {
    // A file may be removed during the walk.
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        found.push(entry.path().display().to_string());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            list(&entry.path(), found);
        }
    }
}

/// A firn command that is not started yet.
#[derive(Debug)]
pub struct Firn(Command);

impl Firn {
    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.0.arg(argument);
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(mut self, arguments: I) -> Self {
        self.0.args(arguments);
        self
    }

    /// Changes properties that only `Command` offers.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Command) -> &mut Command) -> Self {
        change(&mut self.0);
        self
    }

    /// Runs it until it exits. A command that hangs is killed and fails the test.
    #[track_caller]
    pub fn run(self) -> Outcome {
        let (name, child) = self.spawn();
        finish(name, child)
    }

    /// Starts it, and waits for its first line.
    #[track_caller]
    pub fn start(self) -> Monitor {
        let (name, child) = self.spawn();
        Monitor::new(name, child)
    }

    /// Starts it without waiting.
    #[track_caller]
    pub fn spawn(mut self) -> (String, Child) {
        let words: Vec<_> = self.0.get_args().map(OsStr::to_string_lossy).collect();
        let name = format!("firn {}", words.join(" "));
        let child = self.0.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, child)
    }
}

/// Reads the output of a started command, and waits until it exits.
#[track_caller]
fn finish(command: String, mut child: Child) -> Outcome {
    let (stdout, stderr) = (reader(child.stdout.take()), reader(child.stderr.take()));
    let status = wait(&command, &mut child);
    let (stdout, stderr) = (stdout.join().unwrap(), stderr.join().unwrap());
    Outcome { command, code: code(status), stdout, stderr }
}

/// Waits until a process exits. Kills one that hangs, and fails.
#[track_caller]
pub(crate) fn wait(command: &str, child: &mut Child) -> ExitStatus {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if begin.elapsed() > LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{command}: hangs");
        }
        std::thread::sleep(PAUSE);
    }
}

pub(crate) fn code(status: ExitStatus) -> i32 {
    status.code().or(status.signal().map(|signal| 128 + signal)).unwrap()
}

/// Reads a pipe to its end in a separate thread, so that a full pipe blocks no writer.
pub(crate) fn reader(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        pipe.unwrap().read_to_end(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    })
}

/// The folder of the guest's files.
pub fn cache() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache");
    let cache = std::env::var_os("FIRN_CACHE").map(PathBuf::from).unwrap_or_else(|| {
        std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from).join("firn")
    });
    cache.join("guest")
}
