//! Throughput, and processor time for each GiB.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::stats::Runs;
use crate::subject::{HOST, Kind, Link, Subject};
use crate::{Settings, print};

const BUFFER: usize = 128 << 10;
/// Before a run is counted, its connections reach their windows.
const START: Duration = Duration::from_millis(300);

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
                if name(link, direction, flows).contains(&settings.only) {
                    rows.push(row(settings, link, kinds, direction, flows));
                }
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
            let (bytes, elapsed, cpu) = transfer(subject, direction, flows, settings.time);
            if run > 0 {
                let gib = bytes / f64::from(1 << 30);
                figures.gbit_per_second.add(gib * 8.589_934_592 / elapsed.as_secs_f64());
                figures.cpu_per_gib.add(cpu.as_secs_f64() / gib);
            }
        }
    }
    let mut row = json!({
        "mtu": link.mtu, "offloads": link.offloads, "flows": flows,
        "direction": if direction == Direction::ToGuest { "to guest" } else { "from guest" },
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
    let [rate, cpu] = texts;
    print(&format!("{} | {rate} | {cpu}", name(link, direction, flows)));
    row
}

fn name(link: Link, direction: Direction, flows: usize) -> String {
    let offloads = if link.offloads { "on" } else { "off" };
    let direction = if direction == Direction::ToGuest { "to" } else { "from" };
    format!("{}, {offloads} | {direction} guest | {flows}", link.mtu)
}

/// Sends over `flows` connections for `time`: the bytes that arrived, the time between the readings
/// of the counters, and the engine's processor time.
fn transfer(
    subject: &Subject,
    direction: Direction,
    flows: usize,
    time: Duration,
) -> (f64, Duration, Duration) {
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
    let ends: Vec<TcpStream> =
        receivers.iter().chain(&senders).map(|stream| stream.try_clone().unwrap()).collect();
    let received = Arc::new(AtomicU64::new(0));
    let receivers = receivers.into_iter().map(|stream| {
        let received = Arc::clone(&received);
        thread::spawn(move || receive(stream, &received))
    });
    let threads = receivers.collect::<Vec<_>>();
    let senders = senders.into_iter().map(|stream| thread::spawn(move || send(stream)));
    let threads: Vec<_> = threads.into_iter().chain(senders.collect::<Vec<_>>()).collect();
    let process = subject.process();
    let read = || (Instant::now(), received.load(Ordering::Relaxed), process.cpu_time());
    thread::sleep(START);
    let before = read();
    thread::sleep(time);
    let after = read();
    for end in ends {
        // An engine may have reset it.
        let _ = end.shutdown(Shutdown::Both);
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    (bytes(after.1 - before.1), after.0 - before.0, after.2 - before.2)
}

#[expect(clippy::cast_precision_loss, reason = "a rate needs no more than 52 bits")]
fn bytes(count: u64) -> f64 {
    count as f64
}

/// Sends until the connection ends.
fn send(mut stream: TcpStream) {
    let buffer = vec![1; BUFFER];
    while stream.write(&buffer).is_ok() {}
}

/// Counts what arrives until the connection ends.
fn receive(mut stream: TcpStream, received: &AtomicU64) {
    let mut buffer = vec![0; BUFFER];
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        received.fetch_add(u64::try_from(count).unwrap(), Ordering::Relaxed);
    }
}
