//! The program, and a client of its socket.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// How long anything may take before a test fails.
const LIMIT: Duration = Duration::from_secs(60);

/// A running process of the program.
pub(crate) struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    socket: PathBuf,
    begin: Instant,
    _dir: TempDir,
}

/// An answer: its status and its body, null where it has none.
pub(crate) type Answer = (u16, Value);

/// A command of the program.
pub(crate) fn command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_firn-firecracker"))
}

/// Runs the program to its end.
pub(crate) fn run(words: &[&str]) -> Output {
    command().args(words).stdin(Stdio::null()).output().unwrap()
}

impl Process {
    /// Starts it, with a socket for the API and without a log.
    pub(crate) fn start() -> Self {
        Self::with(&["--level", "Off"])
    }

    /// The same with these arguments.
    pub(crate) fn with(words: &[&str]) -> Self {
        Self::with_input(words, Stdio::piped())
    }

    /// The same with this standard input.
    pub(crate) fn with_input(words: &[&str], input: Stdio) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api.sock");
        let mut command = command();
        command.arg("--api-sock").arg(&socket).args(words).stdin(input).stdout(Stdio::piped());
        let begin = Instant::now();
        let mut child = command.spawn().unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let stdin = child.stdin.take();
        let process = Self { child, stdin, lines, socket, begin, _dir: dir };
        while UnixStream::connect(&process.socket).is_err() {
            assert!(begin.elapsed() < LIMIT, "there is no socket");
            std::thread::sleep(Duration::from_micros(50));
        }
        process
    }

    /// Since it was started.
    pub(crate) fn age(&self) -> Duration {
        self.begin.elapsed()
    }

    /// The API's socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The next line of standard output.
    pub(crate) fn line(&self) -> String {
        self.lines.recv_timeout(LIMIT).unwrap()
    }

    /// Writes to standard input, which is the guest's serial port.
    pub(crate) fn type_byte(&mut self) {
        self.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Waits for the end of the process.
    pub(crate) fn wait(mut self) -> ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begin.elapsed() < LIMIT, "the process has not ended");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether it runs.
    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a request with any bytes as its body.
    pub(crate) fn send(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
             Connection: close\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        // The server may answer before it has read all.
        let _ = stream.write_all(&[head.as_bytes(), body].concat());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        if status == 204 {
            assert_eq!(body, "");
            assert!(!head.to_ascii_lowercase().contains("content-length"), "{head}");
            return (status, Value::Null);
        }
        (status, serde_json::from_str(body).unwrap())
    }

    pub(crate) fn get(&self, path: &str) -> Value {
        let (status, body) = self.send("GET", path, b"");
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// A `PUT` that succeeds.
    #[track_caller]
    pub(crate) fn put(&self, path: &str, body: &Value) {
        let answer = self.send("PUT", path, body.to_string().as_bytes());
        assert_eq!(answer, (204, Value::Null), "PUT {path} {body}");
    }

    /// A `PATCH` that succeeds.
    #[track_caller]
    pub(crate) fn patch(&self, path: &str, body: &Value) {
        let answer = self.send("PATCH", path, body.to_string().as_bytes());
        assert_eq!(answer, (204, Value::Null), "PATCH {path} {body}");
    }

    /// The error of a request that is not valid.
    #[track_caller]
    pub(crate) fn refused(&self, method: &str, path: &str, body: &Value) -> String {
        let text = if body.is_null() { String::new() } else { body.to_string() };
        let (status, answer) = self.send(method, path, text.as_bytes());
        assert_eq!(status, 400, "{method} {path} {body}: {answer}");
        fault(&answer)
    }

    pub(crate) fn pause(&self) {
        self.patch("/vm", &json!({ "state": "Paused" }));
    }

    pub(crate) fn resume(&self) {
        self.patch("/vm", &json!({ "state": "Resumed" }));
    }

    /// Pauses the microVM and saves it to the files `state` and `memory` of `dir`. Returns the
    /// fields that name them, as creations and loads have them.
    pub(crate) fn save(&self, dir: &Path) -> Value {
        self.pause();
        let (state, memory) = (dir.join("state"), dir.join("memory"));
        let files = json!({ "snapshot_path": state, "mem_file_path": memory });
        self.put("/snapshot/create", &files);
        files
    }

    pub(crate) fn start_instance(&self) {
        self.put("/actions", &json!({ "action_type": "InstanceStart" }));
    }
}

/// The message of an error.
#[track_caller]
pub(crate) fn fault(answer: &Value) -> String {
    let object = answer.as_object().unwrap();
    assert_eq!(object.keys().collect::<Vec<_>>(), ["fault_message"]);
    object["fault_message"].as_str().unwrap().to_owned()
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.socket);
    }
}
