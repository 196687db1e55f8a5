//! Limits of descriptors.

use std::time::Instant;

use super::*;

#[test]
fn a_server_short_of_descriptors_answers() {
    for (limit, peers, hoards) in [(256, 260, false), (1024, 1100, false), (256, 60, true)] {
        answers_under_a_limit(limit, peers, hoards);
    }
}

/// Keeps `peers` partial requests open at a server with a limit of descriptors, which it has used
/// up if it `hoards`. None of them times out.
fn answers_under_a_limit(limit: usize, peers: usize, hoards: bool) {
    let mut server = Limited::start(&format!("ulimit -n {limit}"));
    let slow: Vec<TcpStream> = (0..peers).map(|_| server.begin_request()).collect();
    let answers = |server: &Limited| {
        let begin = Instant::now();
        let mut stream = server.connect();
        let list = head("GET", FUNCTIONS, "connection: close\r\n");
        stream.write_all(list.as_bytes()).unwrap();
        assert_eq!(status(stream), 200, "{peers} under {limit}");
        begin.elapsed()
    };
    // Connections are accepted in order: after this answer the server has all of `slow`.
    answers(&server);
    if hoards {
        server.hoard();
    }
    let took: Vec<Duration> = (0..8).map(|_| answers(&server)).collect();
    println!("{peers} slow clients under {limit} descriptors: answers in {took:?}");
    // The machine may be busy with other tests. A server that waits for a time limit, of which the
    // shortest is an hour here, is never this fast.
    assert!(took.iter().min() < Some(&Duration::from_secs(1)), "{took:?}");
    drop(slow);
    server.end();
}

#[test]
fn a_soft_limit_of_descriptors_is_raised() {
    let server = Limited::start("ulimit -n 512; ulimit -S -n 64");
    // Far more connections than 64 files allow, none of which is closed for another.
    let slow: Vec<TcpStream> = (0..100).map(|_| server.begin_request()).collect();
    for mut stream in slow {
        stream.write_all(b"host: localhost\r\nconnection: close\r\n\r\n").unwrap();
        assert_eq!(status(stream), 200);
    }
    server.end();
}

/// A server in a process with limits of its own.
struct Limited {
    process: std::process::Child,
    lines: std::io::Lines<std::io::BufReader<std::process::ChildStdout>>,
    address: SocketAddr,
}

impl Limited {
    /// Starts it after a command of the shell.
    fn start(limits: &str) -> Self {
        let name = "attack_tests::descriptors::serves_under_a_limit_of_descriptors";
        let mut process = std::process::Command::new("sh")
            .args(["-c", &format!("{limits}; exec \"$0\" \"$@\"")])
            .arg(std::env::current_exe().unwrap())
            .args([name, "--exact", "--ignored", "--nocapture"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let lines = std::io::BufReader::new(process.stdout.take().unwrap()).lines();
        let address = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut server = Self { process, lines, address };
        server.address = server.line("at http://").trim().parse().unwrap();
        server
    }

    /// What follows `mark` in the next line that has it.
    fn line(&mut self, mark: &str) -> String {
        let mut found = self
            .lines
            .by_ref()
            .filter_map(|line| Some(line.unwrap().split_once(mark)?.1.to_owned()));
        found.next().unwrap()
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Sends the first line of a request.
    fn begin_request(&self) -> TcpStream {
        let mut stream = self.connect();
        // Fails on a connection that the server has closed for another.
        let _ = stream.write_all(format!("GET {FUNCTIONS} HTTP/1.1\r\n").as_bytes());
        stream
    }

    /// Has it use up all descriptors.
    fn hoard(&mut self) {
        self.process.stdin.as_mut().unwrap().write_all(b"hoard\n").unwrap();
        self.line("hoarded");
    }

    fn end(mut self) {
        drop(self.process.stdin.take());
        assert!(self.process.wait().unwrap().success());
    }
}

/// The server of the tests above: serves until standard input closes.
#[test]
#[ignore = "the tests above run it with a limit"]
fn serves_under_a_limit_of_descriptors() {
    // Only the limit of descriptors closes connections.
    let server = Server::start(|options| options.limits.head = Duration::from_secs(3600));
    println!("at {}", server.address);
    let mut hoard = Vec::new();
    for line in std::io::stdin().lines() {
        assert_eq!(line.unwrap(), "hoard");
        while let Ok(file) = std::fs::File::open("/dev/null") {
            hoard.push(file);
        }
        println!("hoarded");
    }
}
