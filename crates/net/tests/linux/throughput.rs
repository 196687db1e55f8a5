//! How fast the proxy is.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use crate::servers::serve;
use crate::world::{HOST_V4, Settings, World, is_possible};

const LEN: usize = 2 << 30;
const RUNS: usize = 7;

fn send(mut stream: TcpStream) {
    let buffer = vec![1; 256 << 10];
    for _ in 0..LEN / buffer.len() {
        stream.write_all(&buffer).unwrap();
    }
}

fn receive(mut stream: TcpStream) {
    let mut buffer = vec![0; 256 << 10];
    while stream.read(&mut buffer).unwrap() > 0 {}
}

/// Gigabits per second.
#[expect(clippy::cast_precision_loss, reason = "a rate needs no more than 52 bits")]
fn rate(run: impl FnOnce()) -> f64 {
    let started = Instant::now();
    run();
    LEN as f64 * 8.0 / 1e9 / started.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The same two threads over the loopback device of the host.
fn loopback() -> f64 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let sender = thread::spawn(move || send(listener.accept().unwrap().0));
    let rate = rate(|| receive(TcpStream::connect(address).unwrap()));
    sender.join().unwrap();
    rate
}

/// `cargo test --release -p firn-net --test linux -- --ignored --nocapture throughput`
#[test]
#[ignore = "a measurement"]
fn throughput_beside_loopback() {
    if !is_possible() {
        return;
    }
    for mtu in [1500, 65_520] {
        let world = World::new(Settings { mtu, ..Settings::default() });
        let download = serve(&world, HOST_V4, send);
        let upload = serve(&world, HOST_V4, receive);
        let (mut down, mut up, mut local) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..RUNS {
            let connect = move |port| TcpStream::connect((HOST_V4, port)).unwrap();
            down.push(world.guest.run(move || rate(|| receive(connect(download)))));
            up.push(world.guest.run(move || {
                rate(|| {
                    let stream = connect(upload);
                    let mut end = stream.try_clone().unwrap();
                    send(stream);
                    end.shutdown(std::net::Shutdown::Write).unwrap();
                    assert_eq!(end.read(&mut [0]).unwrap(), 0);
                })
            }));
            local.push(loopback());
        }
        let (down, up, local) = (median(down), median(up), median(local));
        println!(
            "MTU {mtu}: to the guest {down:.2} Gbit/s, from it {up:.2} Gbit/s, loopback \
             {local:.2} Gbit/s: {:.2} and {:.2} of it; {:?}",
            down / local,
            up / local,
            world.counters()
        );
    }
}
