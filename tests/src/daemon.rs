//! A running `firn serve`, and its clients.

use std::ffi::OsString;
use std::fs::Permissions;
use std::io::{self, Cursor, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use zip::write::{SimpleFileOptions, ZipWriter};

use crate::world::LIMIT;
use crate::{Monitor, Outcome, World, cache};

/// A daemon in a world.
#[derive(Debug)]
pub struct Daemon {
    monitor: Monitor,
    address: String,
    /// The key that clients sign with, and its secret.
    key: [&'static str; 2],
}

/// A reply of the API.
#[derive(Debug, Clone)]
pub struct Reply {
    /// The status code.
    pub status: u16,
    /// The head, in lower case.
    pub head: String,
    /// The body; null if it is not JSON.
    pub body: Value,
}

impl Daemon {
    /// Starts a daemon with its directory in the world.
    #[track_caller]
    pub fn start(world: &World, options: &[&str]) -> Self {
        Self::listening(world, "127.0.0.1:0", options, ["any", "any"])
    }

    /// Starts a daemon on all addresses, which accepts only signed requests.
    #[track_caller]
    pub fn start_guarded(world: &World, options: &[&str]) -> Self {
        let key = ["AKIDTEST", "the+secret/of=AKIDTEST"];
        let file = world.credentials();
        let [id, secret] = key;
        let text =
            format!("[default]\naws_access_key_id = {id}\naws_secret_access_key = {secret}\n");
        std::fs::write(&file, text).unwrap();
        let file = file.display().to_string();
        let options = [&["--insecure", "--credentials", &file], options].concat();
        Self::listening(world, "0.0.0.0:0", &options, key)
    }

    #[track_caller]
    fn listening(world: &World, at: &str, options: &[&str], key: [&'static str; 2]) -> Self {
        // The limits are long: a function may read hundreds of megabytes of libraries under
        // emulation on a busy computer.
        let serve = world.firn(["serve", "--listen", at, "--start-limit", "900", "--data"]);
        let monitor = serve.arg(world.file("daemon")).args(options).start().ready();
        let (_, address) = monitor.first_line.trim().rsplit_once("http://").unwrap();
        Self { address: address.replace("0.0.0.0", "127.0.0.1"), monitor, key }
    }

    /// Its URL.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        self.monitor.pid()
    }

    /// Stops it with SIGTERM and returns its log. Fails unless it exits with code 0.
    #[track_caller]
    pub fn end(mut self) -> String {
        self.monitor.signal(Signal::TERM);
        let ran = self.monitor.end();
        ran.ok();
        ran.stderr
    }

    /// Its status.
    #[track_caller]
    pub fn status(&self) -> Value {
        let status = self.ask("GET", "/status", &Value::Null);
        assert_eq!(status.status, 200, "{status:?}");
        status.body
    }

    /// Kills it.
    pub fn kill(mut self) -> Outcome {
        self.monitor.signal(Signal::KILL);
        self.monitor.end()
    }

    /// Sends a request without waiting for the reply.
    #[track_caller]
    pub fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        self.send_part(method, path, body, body.len())
    }

    /// Sends a request that announces a body of `length` bytes and contains only `body`.
    #[track_caller]
    pub fn send_part(&self, method: &str, path: &str, body: &str, length: usize) -> TcpStream {
        try_send(&self.address, method, path, (&[], body), length).unwrap()
    }

    /// Where it listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sends a request and waits for the reply.
    #[track_caller]
    pub fn ask(&self, method: &str, path: &str, body: &Value) -> Reply {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        reply(self.send(method, path, &body))
    }

    /// Invokes a version of a function.
    #[track_caller]
    pub fn invoke(&self, function: &str, event: &Value) -> Reply {
        self.ask("POST", &format!("/2015-03-31/functions/{function}/invocations"), event)
    }

    /// Creates a function of one file, by default with SnapStart and a version 1.
    pub fn create(&self, name: &str, file: &str, source: &str, more: &Value) -> Reply {
        let mut function = json!({
            "FunctionName": name, "Runtime": "python3.11", "Handler": "handler.handler",
            "Role": "arn:aws:iam::000000000000:role/any",
            "Code": { "ZipFile": STANDARD.encode(zip_of(file, source)) }, "Publish": true, "Timeout": 120,
            "SnapStart": { "ApplyOn": "PublishedVersions" },
        });
        for (name, value) in more.as_object().into_iter().flatten() {
            function[name] = value.clone();
        }
        self.ask("POST", "/2015-03-31/functions", &function)
    }

    /// Creates a function of one file for SnapStart, publishes it and waits until version 1 is
    /// frozen.
    #[track_caller]
    pub fn publish(&self, name: &str, source: &str) {
        let created = self.create(name, "handler.py", source, &Value::Null);
        assert_eq!(created.status, 201, "{created:?}");
        let settled = self.settled(name);
        assert_eq!(settled.body["State"], "Active", "{settled:?}");
    }

    /// Waits until version 1 of a function is frozen or has failed.
    #[track_caller]
    pub fn settled(&self, name: &str) -> Reply {
        let path = format!("/2015-03-31/functions/{name}/configuration?Qualifier=1");
        loop {
            let found = self.ask("GET", &path, &Value::Null);
            match found.body["State"].as_str() {
                Some("Pending") => std::thread::sleep(Duration::from_millis(100)),
                Some(_) => return found,
                None => panic!("{found:?}"),
            }
        }
    }

    /// Starts a Python program of the tests with the clients from PyPI, configured for this daemon.
    #[track_caller]
    pub fn python(&self, arguments: &[&str]) -> Child {
        let mut command = python();
        command
            .args(arguments)
            .env("AWS_ACCESS_KEY_ID", self.key[0])
            .env("AWS_SECRET_ACCESS_KEY", self.key[1])
            .env("AWS_DEFAULT_REGION", "us-east-1")
            .env("AWS_ENDPOINT_URL", self.endpoint())
            .env("AWS_PAGER", "")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap_or_else(|error| panic!("Python: {error}"))
    }
}

/// Python on this host, with the clients from PyPI.
#[track_caller]
pub fn python() -> Command {
    let [program, options @ ..] = python_command() else { panic!("no Python") };
    let mut command = Command::new(program);
    command.args(options).envs(clients_environment());
    command
}

/// Sends a request to a daemon that may be killed meanwhile: with more lines of its head, and
/// announcing a body of `length` bytes.
pub fn try_send(
    address: &str,
    method: &str,
    path: &str,
    (head, body): (&[&str], &str),
    length: usize,
) -> io::Result<TcpStream> {
    let head: String = head.iter().map(|line| format!("{line}\r\n")).collect();
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(LIMIT))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {length}\r\n{head}\r\n{body}",
    )?;
    Ok(stream)
}

impl Reply {
    /// The daemon's report on the request.
    #[track_caller]
    pub fn report(&self) -> Value {
        let line = self.head.lines().find_map(|line| line.strip_prefix("x-firn-report: "));
        serde_json::from_str(line.unwrap_or_else(|| panic!("no report: {self:?}"))).unwrap()
    }
}

/// Reads a reply to its end.
#[track_caller]
pub fn reply(stream: TcpStream) -> Reply {
    try_reply(stream).unwrap()
}

/// Reads a reply to its end. The daemon may be killed meanwhile: a reply without a head has the
/// status 0.
pub fn try_reply(mut stream: TcpStream) -> io::Result<Reply> {
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    let text = String::from_utf8(text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let body = serde_json::from_str(body).unwrap_or_default();
    Ok(Reply { status, head: head.to_lowercase(), body })
}

/// A zip file with one executable file.
pub fn zip_of(file: &str, source: &str) -> Vec<u8> {
    zip_of_files([(file, source.as_bytes())])
}

/// A zip file with these executable files.
pub fn zip_of_files<'a>(files: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (path, contents) in files {
        zip.start_file(path, SimpleFileOptions::default().unix_permissions(0o755)).unwrap();
        zip.write_all(contents).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

/// The folder with the clients from PyPI, as Python's modules.
#[track_caller]
pub fn clients() -> PathBuf {
    let clients = std::env::var_os("FIRN_CLIENTS").map(PathBuf::from);
    let clients = clients.unwrap_or_else(|| cache().with_file_name("clients"));
    assert!(
        clients.is_dir(),
        "{} is missing: make it with tests/clients/build.sh",
        clients.display()
    );
    clients
}

/// The environment of a Python that has the clients from PyPI.
#[track_caller]
fn clients_environment() -> Vec<(&'static str, PathBuf)> {
    let mut variables = vec![("PYTHONPATH", clients()), ("PYTHONDONTWRITEBYTECODE", "1".into())];
    variables.extend(python_home().map(|home| ("PYTHONHOME", home)));
    variables
}

/// A shell in the world with the commands `firn`, `python3` and `aws`, without AWS's variables.
#[track_caller]
pub fn shell(world: &World, script: &str) -> Command {
    let folder = world.file("bin");
    std::fs::create_dir(&folder).unwrap();
    let words: Vec<_> = python_command().iter().map(|word| word.to_string_lossy()).collect();
    let firn = std::env::var("FIRN").unwrap_or_else(|_| "firn".to_owned());
    let python = words.join(" ");
    let aws = format!("{python} -m awscli");
    for (name, command) in [("firn", &firn), ("python3", &python), ("aws", &aws)] {
        let path = folder.join(name);
        std::fs::write(&path, format!("#!/bin/sh\nexec {command} \"$@\"\n")).unwrap();
        std::fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let mut shell = Command::new("sh");
    let aws = std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("AWS_"));
    for (name, _) in aws {
        shell.env_remove(name);
    }
    shell
        .args(["-ec", script])
        .envs(clients_environment())
        .env("PATH", format!("{}:{path}", folder.display()))
        .env("FIRN_RUN_DIR", world.run_directory())
        .env("AWS_PAGER", "")
        .current_dir(world.work());
    shell
}

/// The guests' root file system. The lab mounts it, because the lab has no Python.
fn python_home() -> Option<PathBuf> {
    static HOME: OnceLock<Option<PathBuf>> = OnceLock::new();
    HOME.get_or_init(|| {
        if Path::new("/usr/bin/python3").exists() {
            return None;
        }
        let place = Path::new("/run/python");
        std::fs::create_dir_all(place).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "erofs", "-o", "loop,ro"]).arg(cache().join("root.erofs")).arg(place);
        assert!(
            mount.status().unwrap().success(),
            "the guests' root file system cannot be mounted"
        );
        Some(place.join("usr"))
    })
    .clone()
}

/// The command for Python.
fn python_command() -> &'static [OsString] {
    static COMMAND: OnceLock<Vec<OsString>> = OnceLock::new();
    COMMAND.get_or_init(|| match python_home() {
        None => vec!["/usr/bin/python3".into()],
        Some(usr) => {
            let libraries = usr.join("lib/x86_64-linux-gnu");
            vec![
                libraries.join("ld-linux-x86-64.so.2").into(),
                "--library-path".into(),
                libraries.into(),
                usr.join("bin/python3.11").into(),
            ]
        }
    })
}
