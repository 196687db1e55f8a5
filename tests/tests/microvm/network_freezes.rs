//! Freezes of guests whose network is in use, and published ports.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use firn_required::{TapDevice, in_own_network};
use firn_tests::{Monitor, World, clients, folder};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde_json::{Value, json};

const HOST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);

/// Runs a test in a network namespace of its own, which has the address of the servers.
fn with_host(test: impl FnOnce() + Send) {
    in_own_network(|| {
        let _device = TapDevice::create("tap0", HOST).unwrap();
        test();
    });
}

fn ask(world: &World, name: &str, event: &Value) -> Value {
    world.firn(["invoke", "--time-limit", "300", name, &event.to_string()]).run().json()
}

/// What the HTTP server was sent.
#[derive(Default)]
struct Served {
    bodies: Vec<String>,
    connections: usize,
}

/// Starts an HTTP server. The channel gets the body of each request, `None` for each connection.
fn http_server() -> (u16, Receiver<Option<String>>) {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let (send, receive) = channel();
    // It ends with the test program.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, send) = (stream.unwrap(), send.clone());
            let _ = send.send(None);
            thread::spawn(move || {
                let mut reader = BufReader::new(&stream);
                while let Some(body) = request(&mut reader) {
                    let _ = send.send(Some(body));
                    let answer = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\
                                  Content-Length: 2\r\n\r\n{}";
                    // A client that is frozen may be gone.
                    let _ = { &stream }.write_all(answer.as_bytes());
                }
            });
        }
    });
    (port, receive)
}

/// The body of the next request of a connection, if there is one.
fn request(reader: &mut impl BufRead) -> Option<String> {
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if line == "\r\n" {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(String::from_utf8(body).unwrap())
}

impl Served {
    fn add(&mut self, received: &Receiver<Option<String>>) {
        for event in received.try_iter() {
            match event {
                Some(body) => self.bodies.push(body),
                None => self.connections += 1,
            }
        }
    }
}

/// Copies a folder of Python, without the models of services that the test does not use.
fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (entry, is_data) = (entry.unwrap(), from.ends_with("botocore/data"));
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        let is_used = !is_data || path.is_file() || path.ends_with("lambda");
        if path.is_dir() && is_used {
            copy(&path, &target);
        } else if path.is_file() {
            fs::copy(&path, &target).unwrap();
        }
    }
}

/// The function, with the clients of PyPI.
fn pooled(world: &World) -> PathBuf {
    let folder = folder(&world.work(), "pooled", include_str!("../../functions/pooled/handler.py"));
    let clients = clients();
    for package in ["boto3", "botocore", "urllib3", "s3transfer", "jmespath", "dateutil"] {
        copy(&clients.join(package), &folder.join(package));
    }
    fs::copy(clients.join("six.py"), folder.join("six.py")).unwrap();
    folder
}

/// A pooled connection of before the freeze is known to be gone before it is used: a client that
/// does not try again has no error, and no request is sent twice.
#[test]
fn a_pooled_post_after_a_thaw_is_sent_once() {
    with_host(|| {
        let hard = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard }).unwrap();
        let world = World::default();
        let (port, received) = http_server();
        let egress = format!("allow:{HOST}:{port}");
        let options = ["--net", "proxy", "--egress", &egress, "--time-limit", "300"];
        let post = |bodies: &[&str]| json!({"do": "post", "address": HOST, "port": port, "bodies": bodies});
        let hold =
            |count: usize| json!({"do": "hold", "address": HOST, "port": port, "count": count});
        let boot = world.firn(["boot", "--name", "booted"]).args(options);
        let mut booted = boot.arg(pooled(&world)).start().ready();
        assert_eq!(ask(&world, "booted", &post(&["a", "b", "c"])), json!(vec![200; 6]));
        let mut served = Served::default();
        served.add(&received);
        assert_eq!((served.bodies.len(), served.connections), (6, 2), "the clients have pools");
        let freeze = |count: usize, keep: &[&str]| {
            let held = ask(&world, "booted", &hold(count));
            world.firn(["freeze"]).args(keep).args(["booted", &format!("with-{held}")]).run().ok();
        };
        freeze(1, &["--keep"]);
        freeze(999, &[]);
        booted.end().ok();
        served.add(&received);

        for (held, connections) in [(1, 1), (1000, 1000)] {
            let (snapshot, body) = (format!("with-{held}"), format!("after {held}"));
            let thaw = |event: &Value| {
                let event = event.to_string();
                world.firn(["thaw", "--invoke", &event]).args(options).arg(&snapshot).run()
            };
            // The clone's first request.
            let before = served.connections;
            let outcome = thaw(&post(&[&body]));
            assert_eq!(outcome.json(), json!([200, 200]));
            assert!(!outcome.stderr.contains("old connections"), "{outcome:#?}");
            served.add(&received);
            assert_eq!(served.connections, before + 2, "each client has opened another");
            // Nothing was sent over these, and each is known to be reset.
            let ends = thaw(&json!({"do": "ends"})).json();
            assert_eq!(ends, json!({"ConnectionResetError": connections}));
        }
        let mut times = BTreeMap::new();
        served.bodies.iter().for_each(|body| *times.entry(body.as_str()).or_insert(0) += 1);
        let bodies = ["a", "b", "c", "after 1", "after 1000"];
        let names = ["urllib3", "boto3"]
            .into_iter()
            .flat_map(|client| bodies.iter().map(move |body| format!("{client} {body}")));
        let names: Vec<String> = names.collect();
        assert_eq!(times, names.iter().map(|name| (name.as_str(), 1)).collect());
    });
}

/// Servers that send back what they receive, on a TCP and a UDP port.
fn echo_servers() -> (u16, u16) {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let datagrams = UdpSocket::bind((HOST, 0)).unwrap();
    let ports = (listener.local_addr().unwrap().port(), datagrams.local_addr().unwrap().port());
    // Both end with the test program.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let mut copy = stream.try_clone().unwrap();
                // A client that is frozen may be gone.
                let _ = std::io::copy(&mut stream, &mut copy);
            });
        }
    });
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        loop {
            let Ok((len, from)) = datagrams.recv_from(&mut buffer) else { continue };
            let _ = datagrams.send_to(&buffer[..len], from);
        }
    });
    ports
}

/// Clients of a published port, which exchange bytes with it until they are dropped.
struct Callers {
    is_over: Arc<AtomicBool>,
    exchanges: Arc<AtomicUsize>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Callers {
    fn start(address: SocketAddr) -> Self {
        let (is_over, exchanges) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let thread = thread::spawn({
            let (is_over, exchanges) = (is_over.clone(), exchanges.clone());
            move || {
                while !is_over.load(Ordering::SeqCst) {
                    // Between two microVMs nothing listens.
                    if let Ok(stream) = TcpStream::connect(address) {
                        let limit = Some(Duration::from_secs(1));
                        stream.set_read_timeout(limit).unwrap();
                        while !is_over.load(Ordering::SeqCst) && echoes(&stream).is_ok() {
                            exchanges.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        Self { is_over, exchanges, thread: Some(thread) }
    }

    /// Waits for an exchange that begins from now on.
    fn wait(&self) {
        let now = self.exchanges.load(Ordering::SeqCst);
        for _ in 0..60_000 {
            if self.exchanges.load(Ordering::SeqCst) > now + 1 {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("the published port does not answer");
    }
}

impl Drop for Callers {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.thread.take().map(thread::JoinHandle::join);
    }
}

fn echoes(mut stream: impl Read + Write) -> std::io::Result<()> {
    let question = [7; 3000];
    stream.write_all(&question)?;
    let mut answer = [0; 3000];
    stream.read_exact(&mut answer)?;
    assert_eq!(answer, question);
    Ok(())
}

/// Freezes and thaws a guest `count` times, each clone being frozen in its turn, while TCP and UDP
/// traffic passes in both directions. After each thaw all of it goes on, and what is new works at
/// the first attempt.
fn freeze_under_traffic(count: usize) {
    with_host(|| {
        let world = World::default();
        let (tcp, udp) = echo_servers();
        let rules = [format!("allow:{HOST}:{tcp}"), format!("allow:{HOST}:{udp}")];
        let options = ["--net", "proxy", "--egress", &rules[0], "--egress", &rules[1]];
        let handler = include_str!("../../functions/traffic/handler.py");
        // Not a port that the system could give to a client, which would then reach itself.
        let address = SocketAddr::from((HOST, 7000));
        let publish = format!("{address}:7000");
        let boot = world.firn(["boot", "--name", "traffic", "--publish", &publish]).args(options);
        let boot = boot.arg(folder(&world.work(), "traffic", handler));
        let mut monitor: Monitor = boot.start().ready();
        let started =
            json!({"do": "start", "address": HOST, "tcp": tcp, "udp": udp, "server": 7000});
        ask(&world, "traffic", &started);
        let callers = Callers::start(address);
        let check = json!({"do": "check", "address": HOST, "tcp": tcp, "udp": udp});
        let checked = json!({
            "connected": true, "answered": true, "moved": ["client", "server", "datagrams"]
        });
        callers.wait();
        assert_eq!(ask(&world, "traffic", &check), checked);
        for number in 0..count {
            let snapshot = world.file("snapshot");
            world.firn(["freeze", "traffic"]).arg(&snapshot).run().ok();
            monitor.end().ok();
            let thaw = world.firn(["thaw", "--name", "traffic", "--publish", &publish]);
            monitor = thaw.args(options).arg(&snapshot).start().ready();
            assert_eq!(ask(&world, "traffic", &check), checked, "after {number} others");
            callers.wait();
        }
        drop(callers);
    });
}

/// The first address of the first line of a boot or thaw.
fn published(line: &str) -> SocketAddr {
    let (before, _) = line.split_once(" is port 7000 of the guest").unwrap();
    before.rsplit_once("; ").unwrap().1.parse().unwrap()
}

#[test]
fn traffic_goes_on_after_2_freezes() {
    freeze_under_traffic(2);
}

#[test]
#[ignore = "long: make test-full"]
fn traffic_goes_on_after_100_freezes() {
    freeze_under_traffic(100);
}

#[test]
fn a_published_port_reaches_the_guest_and_its_clones() {
    with_host(|| {
        let world = World::default();
        let handler = include_str!("../../functions/traffic/handler.py");
        let socket = world.file("web.sock");
        let unix = format!("unix:{}:7000", socket.display());
        let publish = ["--net", "proxy", "--publish", "10.9.0.1:0:7000", "--publish", &unix];
        let boot = world.firn(["boot", "--name", "booted"]).args(publish);
        let boot = boot.arg(folder(&world.work(), "traffic", handler));
        let mut booted = boot.start().ready();
        let address = published(&booted.first_line);
        let shown = format!("; unix:{} is port 7000 of the guest\n", socket.display());
        assert!(booted.first_line.ends_with(&shown), "{}", booted.first_line);
        // No server listens yet.
        let refused = TcpStream::connect(address).unwrap().read(&mut [0]).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionReset);
        let start = json!({"do": "start", "address": HOST, "tcp": 1, "udp": 1, "server": 7000});
        ask(&world, "booted", &start);
        echoes(TcpStream::connect(address).unwrap()).unwrap();
        echoes(UnixStream::connect(&socket).unwrap()).unwrap();

        // What is in use is named.
        let again = world.firn(["boot", "--net", "proxy", "--publish"]);
        again.arg(format!("{address}:80")).run().refused(&["cannot publish 10.9.0.1:", "in use"]);
        let snapshot = world.file("snapshot");
        let open = TcpStream::connect(address).unwrap();
        echoes(&open).unwrap();
        world.firn(["freeze", "--keep", "booted"]).arg(&snapshot).run().ok();
        let thaw = world.firn(["thaw", "--net", "proxy", "--publish", &unix]).arg(&snapshot).run();
        thaw.refused(&["cannot publish unix:", "in use"]);
        // A connection goes on after a freeze that keeps the microVM.
        echoes(&open).unwrap();
        booted.signal(Signal::TERM);
        booted.end();
        assert!(!socket.exists(), "the socket's file is removed");

        let thaw = world.firn(["thaw", "--name", "clone"]).args(publish).arg(&snapshot);
        let mut clone = thaw.start().ready();
        let address = published(&clone.first_line);
        echoes(TcpStream::connect(address).unwrap()).unwrap();
        echoes(UnixStream::connect(&socket).unwrap()).unwrap();
        clone.signal(Signal::TERM);
        clone.end();

        let tap = world.firn(["thaw", "--net", "tap:tap0", "--publish", "8080:80"]).arg(&snapshot);
        tap.run().refused(&["--publish needs --net proxy"]);
        fs::write(&socket, "text").unwrap();
        let file = world.firn(["thaw", "--net", "proxy", "--publish", &unix]).arg(&snapshot).run();
        file.refused(&["is not a socket"]);
    });
}
