use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Instant;

use rustix::event::Timespec;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket_with};

use super::super::wire::Message;
use super::super::{Broker, Policy};
use super::*;

fn error(text: &str) -> String {
    PublishedPorts::open([text]).unwrap_err().to_string()
}

/// A folder of one test, removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("firn-{test}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn socket(&self) -> (PathBuf, String) {
        let path = self.0.join("web.sock");
        let text = format!("unix:{}:80", path.display());
        (path, text)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

#[test]
fn forms_of_a_published_port() {
    let cases = [
        ("8080:80", "127.0.0.1:8080", 80),
        ("0:80", "127.0.0.1:0", 80),
        ("0.0.0.0:8080:65535", "0.0.0.0:8080", 65535),
        ("[::1]:8080:80", "[::1]:8080", 80),
        ("unix:/run/web.sock:80", "unix:/run/web.sock", 80),
        ("unix:/run/a:b:80", "unix:/run/a:b", 80),
    ];
    for (text, address, guest_port) in cases {
        let port: PublishedPort = text.parse().unwrap();
        assert_eq!((port.address.to_string().as_str(), port.guest_port), (address, guest_port));
    }
    let relative: PublishedPort = "unix:web.sock:80".parse().unwrap();
    assert!(matches!(relative.address, PublishedAddress::Unix(path) if path.is_absolute()));
    for text in [
        "",
        "80",
        ":80",
        "8080:",
        "8080:0",
        "8080:65536",
        "65536:80",
        "x:8080:80",
        "localhost:1:80",
        "::1:8080:80",
        "[::1]:80",
        "unix::80",
        "unix:/run/web.sock",
        "127.0.0.1::80",
        "-1:80",
    ] {
        let error = text.parse::<PublishedPort>().unwrap_err().to_string();
        assert!(error.contains("is not a published port: use"), "{text}: {error}");
    }
}

#[test]
fn an_address_is_published_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let taken = error(&format!("{address}:80"));
    assert!(taken.starts_with(&format!("cannot publish {address}: it is in use")), "{taken}");
    drop(listener);
    let twice = [format!("{address}:80"), format!("{}:81", address.port())];
    let twice = PublishedPorts::open(twice.iter().map(String::as_str)).unwrap_err().to_string();
    assert!(twice.starts_with(&format!("{address} is published twice")), "{twice}");
    let elsewhere = PublishedPorts::open(["192.0.2.77:0:80"]).unwrap_err();
    assert!(matches!(elsewhere, PublishError::Listen { .. }), "{elsewhere:?}");
    // Any free port is another one each time.
    let free = PublishedPorts::open(["0:80", "0:80"]).unwrap();
    assert_ne!(free.ports()[0].address, free.ports()[1].address);
}

#[test]
fn addresses_that_overlap_are_named() {
    for (one, other, expected) in [
        ("0.0.0.0:80", "127.0.0.1:80", true),
        ("0.0.0.0:80", "127.0.0.1:81", false),
        ("0.0.0.0:80", "[::]:80", true),
        ("0.0.0.0:80", "[::1]:80", false),
        ("0.0.0.0:80", "[::ffff:127.0.0.1]:80", true),
        ("[::]:80", "127.0.0.1:80", true),
        ("[::]:80", "[::1]:80", true),
        ("127.0.0.1:80", "[::ffff:127.0.0.1]:80", true),
        ("127.0.0.1:80", "127.0.0.2:80", false),
        ("127.0.0.1:80", "[::1]:80", false),
    ] {
        let [a, b] = [one, other].map(|text| PublishedAddress::Tcp(text.parse().unwrap()));
        assert_eq!([a.overlaps(&b), b.overlaps(&a)], [expected; 2], "{one} {other}");
    }

    let free = TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port();
    let [all, one] = [format!("0.0.0.0:{free}"), format!("127.0.0.1:{free}")];
    for [first, second] in [[&all, &one], [&one, &all]] {
        let texts = [format!("{first}:80"), format!("{second}:81")];
        let error = PublishedPorts::open(texts.iter().map(String::as_str)).unwrap_err().to_string();
        let expected = format!("cannot publish {second}: it overlaps {first}, which is published");
        assert!(error.starts_with(&expected), "{error}");
    }
    // Different addresses have a port each.
    let texts = [format!("127.0.0.1:{free}:80"), format!("127.0.0.2:{free}:81")];
    PublishedPorts::open(texts.iter().map(String::as_str)).unwrap();
}

#[test]
fn the_file_of_a_unix_socket_is_of_this_user_and_removed() {
    let folder = Folder::new("publish");
    let (path, text) = folder.socket();
    let ports = PublishedPorts::open([text.as_str()]).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    let used = error(&text);
    assert!(used.starts_with(&format!("cannot publish unix:{}: it is in use", path.display())));
    drop(ports);
    assert!(!path.exists());

    // One that a killed process has left.
    drop(UnixListener::bind(&path).unwrap());
    let ports = PublishedPorts::open([text.as_str()]).unwrap();
    UnixStream::connect(&path).unwrap();
    // Another program's in its place stays.
    fs::remove_file(&path).unwrap();
    let other = UnixListener::bind(&path).unwrap();
    drop(ports);
    UnixStream::connect(&path).unwrap();
    drop(other);
    fs::remove_file(&path).unwrap();

    fs::write(&path, "precious").unwrap();
    let file = error(&text);
    assert!(file.contains("exists and is not a socket"), "{file}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    fs::remove_file(&path).unwrap();
    let (missing, link) = (folder.0.join("none"), folder.0.join("link"));
    std::os::unix::fs::symlink(&missing, &link).unwrap();
    assert!(error(&format!("unix:{}:80", link.display())).contains("is not a socket"));
    let nowhere = format!("unix:{}/web.sock:80", missing.display());
    assert!(matches!(PublishedPorts::open([nowhere.as_str()]), Err(PublishError::Listen { .. })));
    let long = format!("unix:{}/{}:80", folder.0.display(), "x".repeat(108));
    assert!(matches!(PublishedPorts::open([long.as_str()]), Err(PublishError::Listen { .. })));
}

/// Every user can lock `/tmp`.
#[test]
fn a_folder_that_another_process_keeps_locked_is_an_error() {
    let folder = Folder::new("locked");
    let (path, text) = folder.socket();
    let lock = fs::File::open(&folder.0).unwrap();
    lock.lock().unwrap();
    let locked = unix::listen_unix(&path, Duration::from_millis(50)).unwrap_err().to_string();
    let expected =
        format!("unix:{}: another process keeps {} locked", path.display(), folder.0.display());
    assert!(locked.contains(&expected), "{locked}");
    assert!(!path.exists());

    // A lock that is given back in time delays the socket.
    let other = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        drop(lock);
    });
    PublishedPorts::open([text.as_str()]).unwrap();
    other.join().unwrap();
}

/// Waits for a connection.
fn receive(monitor: &OwnedFd) -> Connection {
    poll(&mut [PollFd::new(monitor, PollFlags::IN)], None).unwrap();
    match Message::receive(monitor).unwrap() {
        Message::Connection(connection) => connection,
        Message::Answer(answer) => panic!("{answer:?}"),
    }
}

fn publishing(ports: &mut PublishedPorts) -> OwnedFd {
    let (broker, begin) = Broker::prepare(Policy::default(), Vec::new, ports, drop).unwrap();
    begin().unwrap();
    broker
}

#[test]
fn connections_are_passed_to_the_monitor_until_it_ends() {
    let folder = Folder::new("accept");
    let (path, text) = folder.socket();
    let mut ports = PublishedPorts::open(["127.0.0.1:0:8080", &text]).unwrap();
    let PublishedAddress::Tcp(address) = ports.ports()[0].address else { panic!("{ports:?}") };
    let monitor = publishing(&mut ports);
    let mut client = TcpStream::connect(address).unwrap();
    let Connection { guest_port, socket } = receive(&monitor);
    assert_eq!(guest_port, 8080);
    TcpStream::from(socket).write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    let Connection { guest_port, socket } = receive(&monitor);
    assert_eq!(guest_port, 80);
    UnixStream::from(socket).write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    drop(monitor);
    // Its listeners are closed.
    let started = Instant::now();
    while TcpStream::connect(address).is_ok() {
        assert!(started.elapsed().as_secs() < 60);
        thread::sleep(Duration::from_millis(5));
    }
}

/// Connects until the queue is full for a while.
fn fill(path: &Path) -> Vec<OwnedFd> {
    let mut clients = Vec::new();
    let mut failures = 0;
    while failures < 20 {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        if connect(&client, &SocketAddrUnix::new(path).unwrap()).is_ok() {
            clients.push(client);
            failures = 0;
        } else {
            failures += 1;
            thread::sleep(Duration::from_millis(5));
        }
    }
    clients
}

/// A monitor that takes nothing stops its broker from accepting.
#[test]
fn connections_that_are_not_taken_are_bounded() {
    let folder = Folder::new("bound");
    let (path, text) = folder.socket();
    let mut ports = PublishedPorts::open([text.as_str()]).unwrap();
    let monitor = publishing(&mut ports);
    let clients = fill(&path);
    // The queue of the listener, and what is on its way.
    assert!((130..=170).contains(&clients.len()), "{}", clients.len());
    let taken: Vec<Connection> = clients.iter().map(|_| receive(&monitor)).collect();
    let mut fds = [PollFd::new(&monitor, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&Timespec::default())).unwrap(), 0);
    drop((clients, taken));
    let again = fill(&path);
    assert!((130..=170).contains(&again.len()), "{}", again.len());
}
