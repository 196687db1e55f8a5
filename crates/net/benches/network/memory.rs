//! Memory of idle flows and idle engines.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::process::Process;
use crate::subject::{HOST, Kind, Link, Subject, new_host};
use crate::{Settings, engine, print};

/// The first argument of a process with idle engines.
pub(crate) const ENGINES_ROLE: &str = "idle-engines";
/// The first argument of a guest's process with idle connections.
pub(crate) const FLOWS_ROLE: &str = "idle-flows";
const ENGINES: u64 = 1000;
const READY: &str = "ready";
const LINK: Link = Link { mtu: 1500, offloads: false };

pub(crate) fn measure(settings: &Settings) -> Value {
    print("memory, PSS in bytes | firn | passt");
    let mut flows = Vec::new();
    // passt has two descriptors for each, of as many as a process may have.
    for count in [1000, 5000] {
        let [firn, passt] = [Kind::Firn, Kind::Passt].map(|kind| flow(settings, kind, count));
        print(&format!("each of {count} idle flows | {firn} | {passt}"));
        flows.push(json!({ "flows": count, "firn_bytes": firn, "passt_bytes": passt }));
    }
    let (firn, passt) = (own_engines(), passt_processes(settings));
    print(&format!("each of {ENGINES} idle engines | {firn} | {passt}"));
    let engines = json!({ "engines": ENGINES, "firn_bytes": firn, "passt_bytes": passt });
    json!({ "idle_flow": flows, "idle_engine": engines })
}

/// What an engine has for each of `count` connections that have carried a byte and are silent.
fn flow(settings: &Settings, kind: Kind, count: u64) -> u64 {
    let subject = Subject::start(&settings.engines, kind, LINK);
    let (port, accepted) = subject.listen();
    let connect = |count: u64| {
        let child = subject.guest.run(move || start(&[FLOWS_ROLE, &port.to_string()], count));
        let accept = |_| {
            let mut stream = accepted.recv().unwrap();
            stream.read_exact(&mut [0]).unwrap();
            stream
        };
        let streams: Vec<TcpStream> = (0..count).map(accept).collect();
        settle();
        (child, streams)
    };
    let first = connect(1);
    let before = subject.process().pss();
    let others = connect(count);
    let each = (subject.process().pss() - before) / count;
    [first, others].into_iter().for_each(|(child, _)| end(child));
    each
}

/// In a guest's process: opens connections, reports that on standard output, and waits.
pub(crate) fn idle_flows(mut arguments: impl Iterator<Item = String>) {
    let mut next = || arguments.next().unwrap().parse::<u16>().unwrap();
    let (port, count) = (next(), next());
    let connect = |number: u16| {
        if number % 1000 == 999 {
            // The broker opens 2,048 sockets in a second.
            thread::sleep(Duration::from_millis(500));
        }
        let mut stream = TcpStream::connect((HOST, port)).unwrap();
        stream.read_exact(&mut [0]).unwrap();
        stream.write_all(&[1]).unwrap();
        stream
    };
    wait((0..count).map(connect).collect::<Vec<TcpStream>>());
}

/// Starts this program in another role, and waits until it is ready.
fn start(role: &[&str], count: u64) -> Child {
    let mut child = Command::new("/proc/self/exe")
        .args(role)
        .arg(count.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; READY.len() + 1]).unwrap();
    child
}

/// Reports that it is ready, and keeps `what` until this process is ended.
fn wait<T>(what: T) {
    print(READY);
    let _ = std::io::stdin().read(&mut [0]);
    drop(what);
}

/// Waits for delayed acknowledgements.
fn settle() {
    thread::sleep(Duration::from_secs(1));
}

/// In a process of its own: makes engines, reports that on standard output, and waits.
pub(crate) fn idle_engines(mut arguments: impl Iterator<Item = String>) {
    let count: usize = arguments.next().unwrap().parse().unwrap();
    wait((0..count).map(|_| engine::proxy(LINK.mtu)).collect::<Vec<_>>());
}

/// What 1,000 engines with their brokers take in one process.
fn own_engines() -> u64 {
    let pss = |count: u64| {
        let child = start(&[ENGINES_ROLE], count);
        let pss = Process(child.id()).pss();
        end(child);
        pss
    };
    (pss(ENGINES) - pss(0)) / ENGINES
}

/// What each of 1,000 processes takes: passt has one for each guest.
fn passt_processes(settings: &Settings) -> u64 {
    let host = new_host();
    let start = |_| settings.engines.start(Kind::Passt, LINK, &host);
    let processes: Vec<(Child, _)> = (0..ENGINES).map(start).collect();
    settle();
    let pss: u64 = processes.iter().map(|(child, _)| Process(child.id()).pss()).sum();
    processes.into_iter().for_each(|(child, _)| end(child));
    pss / ENGINES
}

fn end(mut child: Child) {
    let _ = child.kill();
    let _ = child.wait();
}
