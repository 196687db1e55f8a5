//! Throughput, and processor time for each GiB.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::stats::Runs;
use crate::subject::{HOST, Kind, Link, Subject};
use crate::{Settings, print};

const BUFFER: usize = 128 << 10;

/// Where the bytes go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    ToGuest,
    FromGuest,
}

/// The figures of an engine.
#[derive(Default)]
struct Figures {
    gbit_per_second: Runs,
    cpu_per_gib: Runs,
}

/// Every link, direction and number of flows; the engines in turn.
pub(crate) fn measure(settings: &Settings) -> Vec<Value> {
    let plain = [1500, 65_520].map(|mtu| Link { mtu, offloads: false });
    let offloads = [1500, 65_520].map(|mtu| Link { mtu, offloads: true });
    let mut rows = Vec::new();
    print("MTU, offloads | direction | flows | Gbit/s: firn, passt, ratio | CPU s/GiB: the same");
    for link in plain.into_iter().chain(offloads) {
        let kinds = if link.offloads { &[Kind::Firn][..] } else { &[Kind::Firn, Kind::Passt] };
        for direction in [Direction::ToGuest, Direction::FromGuest] {
            for flows in [1, 64] {
                rows.push(row(settings, link, kinds, direction, flows));
            }
        }
    }
    rows
}

fn row(
    settings: &Settings,
    link: Link,
    kinds: &[Kind],
    direction: Direction,
    flows: usize,
) -> Value {
    let start = |kind: &Kind| Subject::start(&settings.engines, *kind, link);
    let subjects: Vec<Subject> = kinds.iter().map(start).collect();
    let mut figures: Vec<Figures> = kinds.iter().map(|_| Figures::default()).collect();
    // The first run is not counted.
    for run in 0..=settings.runs {
        for (subject, figures) in subjects.iter().zip(&mut figures) {
            let (elapsed, cpu) = transfer(subject, direction, flows, settings.bytes);
            if run > 0 {
                let gib = bytes(settings.bytes) / f64::from(1 << 30);
                figures.gbit_per_second.add(gib * 8.589_934_592 / elapsed.as_secs_f64());
                figures.cpu_per_gib.add(cpu.as_secs_f64() / gib);
            }
        }
    }
    let name = if direction == Direction::ToGuest { "to guest" } else { "from guest" };
    let mut row = json!({
        "mtu": link.mtu, "offloads": link.offloads, "direction": name, "flows": flows,
    });
    let mut texts = [String::new(), String::new()];
    let parts: [fn(&Figures) -> &Runs; 2] =
        [|figures| &figures.gbit_per_second, |figures| &figures.cpu_per_gib];
    for ((part, of), text) in ["gbit_per_s", "cpu_s_per_gib"].iter().zip(parts).zip(&mut texts) {
        row[part] = json!({ "firn": of(&figures[0]).json() });
        *text = of(&figures[0]).text();
        if let Some(passt) = figures.get(1) {
            let ratio = of(&figures[0]).over(of(passt));
            row[part]["passt"] = of(passt).json();
            row[part]["ratio"] = ratio.json();
            *text += &format!(", {}, {}", of(passt).text(), ratio.text());
        }
    }
    let offloads = if link.offloads { "on" } else { "off" };
    let [rate, cpu] = texts;
    print(&format!("{}, {offloads} | {name} | {flows} | {rate} | {cpu}", link.mtu));
    row
}

#[expect(clippy::cast_precision_loss, reason = "a rate needs no more than 52 bits")]
fn bytes(count: usize) -> f64 {
    count as f64
}

/// Sends `bytes` over `flows` connections: the time, and the engine's processor time.
fn transfer(
    subject: &Subject,
    direction: Direction,
    flows: usize,
    bytes: usize,
) -> (Duration, Duration) {
    let (port, accepted) = subject.listen();
    let clients = subject.guest.run(move || {
        let connect = |_| {
            let mut stream = TcpStream::connect((HOST, port)).unwrap();
            stream.read_exact(&mut [0]).unwrap();
            stream
        };
        (0..flows).map(connect).collect::<Vec<TcpStream>>()
    });
    let servers: Vec<TcpStream> = accepted.into_iter().take(flows).collect();
    let (senders, receivers) = match direction {
        Direction::ToGuest => (servers, clients),
        Direction::FromGuest => (clients, servers),
    };
    let process = subject.process();
    let (started, cpu) = (Instant::now(), process.cpu_time());
    let each = bytes / flows;
    let receivers = receivers.into_iter().map(|stream| thread::spawn(move || receive(stream, each)));
    let receivers: Vec<_> = receivers.collect();
    let senders = senders.into_iter().map(|stream| thread::spawn(move || send(stream, each)));
    let senders: Vec<_> = senders.collect();
    for receiver in receivers {
        let received = receiver.join().unwrap();
        received.unwrap_or_else(|error| panic!("{}: {error}", subject.name()));
    }
    let figures = (started.elapsed(), process.cpu_time() - cpu);
    senders.into_iter().for_each(|thread| drop(thread.join().unwrap()));
    figures
}

fn send(mut stream: TcpStream, bytes: usize) -> TcpStream {
    let buffer = vec![1; BUFFER];
    let mut left = bytes;
    while left > 0 {
        left -= stream.write(&buffer[..left.min(BUFFER)]).unwrap();
    }
    stream
}

fn receive(mut stream: TcpStream, bytes: usize) -> std::io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    let mut left = bytes;
    while left > 0 {
        match stream.read(&mut buffer)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            count => left -= count,
        }
    }
    Ok(())
}
