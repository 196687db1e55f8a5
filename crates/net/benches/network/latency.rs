//! How long a byte takes to the host and back.

use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::thread;
use std::time::Instant;

use serde_json::{Value, json};

use crate::stats::{Runs, quantile};
use crate::subject::{HOST, Kind, Link, Subject};
use crate::{Settings, print};

const ROUNDS: usize = 5000;

/// A way to the host and back.
type Round = Box<dyn FnMut() + Send>;
type Open = fn(&Subject) -> Round;

/// The median and the 99th percentile over an established flow of each protocol, in microseconds.
pub(crate) fn measure(settings: &Settings) -> Vec<Value> {
    let link = Link { mtu: 1500, offloads: false };
    let subjects =
        [Kind::Firn, Kind::Passt].map(|kind| Subject::start(&settings.engines, kind, link));
    let parts: [(&str, Open); 2] = [("TCP", tcp), ("UDP", udp)];
    print("round trip | quantile | µs: firn, passt, ratio");
    let mut rows = Vec::new();
    for (protocol, open) in parts {
        let mut rounds: Vec<Option<Round>> = subjects.iter().map(|one| Some(open(one))).collect();
        // For each engine, the runs of the two quantiles.
        let mut figures = [[Runs::default(), Runs::default()], [Runs::default(), Runs::default()]];
        for run in 0..=settings.runs {
            for (at, subject) in subjects.iter().enumerate() {
                let mut round = rounds[at].take().unwrap();
                let (round, mut times) = subject.guest.run(move || {
                    let times: Vec<f64> = (0..ROUNDS).map(|_| time(&mut round)).collect();
                    (round, times)
                });
                rounds[at] = Some(round);
                times.sort_by(f64::total_cmp);
                if run > 0 {
                    figures[at][0].add(quantile(&times, 500));
                    figures[at][1].add(quantile(&times, 990));
                }
            }
        }
        let [firn, passt] = figures;
        for (name, (firn, passt)) in ["p50", "p99"].iter().zip(firn.iter().zip(&passt)) {
            let ratio = firn.over(passt);
            let text = [firn, passt, &ratio].map(Runs::text).join(", ");
            print(&format!("{protocol} | {name} | {text}"));
            rows.push(json!({
                "protocol": protocol, "quantile": name, "rounds": ROUNDS,
                "firn_us": firn.json(), "passt_us": passt.json(), "ratio": ratio.json(),
            }));
        }
    }
    rows
}

fn time(round: &mut Round) -> f64 {
    let started = Instant::now();
    round();
    started.elapsed().as_secs_f64() * 1e6
}

fn tcp(subject: &Subject) -> Round {
    let (port, accepted) = subject.listen();
    thread::spawn(move || {
        let mut stream = accepted.recv().unwrap();
        stream.set_nodelay(true).unwrap();
        let mut byte = [0];
        while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
    });
    let mut stream = subject.guest.run(move || TcpStream::connect((HOST, port)).unwrap());
    stream.set_nodelay(true).unwrap();
    stream.read_exact(&mut [0]).unwrap();
    Box::new(move || {
        stream.write_all(&[1]).unwrap();
        stream.read_exact(&mut [0]).unwrap();
    })
}

fn udp(subject: &Subject) -> Round {
    let server = subject.host.run(|| UdpSocket::bind((HOST, 0)).unwrap());
    let address = server.local_addr().unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 8];
        while let Ok((len, from)) = server.recv_from(&mut buffer) {
            server.send_to(&buffer[..len], from).unwrap();
        }
    });
    let socket = subject.guest.run(move || {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect(address).unwrap();
        socket
    });
    Box::new(move || {
        socket.send(&[1]).unwrap();
        socket.recv(&mut [0; 8]).unwrap();
    })
}
