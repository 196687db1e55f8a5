//! A DNS server (RFC 1035) for the names of the tests.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

const PORT: u16 = 53;
/// The most bytes of an answer over UDP without extensions.
const UDP_LIMIT: usize = 512;
const HEADER: usize = 12;
const TYPE_A: u16 = 1;
const TYPE_AAAA: u16 = 28;
const TRUNCATED: u8 = 0x02;
const NAME_ERROR: u8 = 3;

/// The addresses of a name; without one there is no such name.
type Addresses = fn(&str) -> Vec<IpAddr>;

/// The server, in threads that end with the test program.
#[derive(Debug)]
pub(crate) struct NameServer {
    over_tcp: Arc<AtomicUsize>,
}

impl NameServer {
    /// Listens on port 53 of an address.
    pub(crate) fn start(address: Ipv4Addr, addresses: Addresses) -> Self {
        let socket = UdpSocket::bind((address, PORT)).unwrap();
        let listener = TcpListener::bind((address, PORT)).unwrap();
        let over_tcp = Arc::new(AtomicUsize::new(0));
        thread::spawn(move || {
            let mut query = [0; 1 << 16];
            loop {
                let (len, from) = socket.recv_from(&mut query).unwrap();
                if let Some(answer) = answer(&query[..len], UDP_LIMIT, addresses) {
                    socket.send_to(&answer, from).unwrap();
                }
            }
        });
        let count = Arc::clone(&over_tcp);
        thread::spawn(move || {
            for connection in listener.incoming() {
                count.fetch_add(1, Ordering::Relaxed);
                // A client that ends early has what it wants.
                thread::spawn(move || answer_stream(connection.unwrap(), addresses));
            }
        });
        Self { over_tcp }
    }

    /// How many connections there were.
    pub(crate) fn over_tcp(&self) -> usize {
        self.over_tcp.load(Ordering::Relaxed)
    }
}

/// Each message has its length before it.
fn answer_stream(mut connection: TcpStream, addresses: Addresses) -> io::Result<()> {
    loop {
        let mut length = [0; 2];
        connection.read_exact(&mut length)?;
        let mut query = vec![0; u16::from_be_bytes(length).into()];
        connection.read_exact(&mut query)?;
        let answer = answer(&query, usize::from(u16::MAX), addresses);
        let Some(answer) = answer else { return Ok(()) };
        let length = u16::try_from(answer.len()).unwrap().to_be_bytes();
        connection.write_all(&[&length, &answer[..]].concat())?;
    }
}

/// The answer to a query with one question, of at most `limit` bytes.
fn answer(query: &[u8], limit: usize, addresses: Addresses) -> Option<Vec<u8>> {
    let (name, end) = question(query)?;
    let kind = u16::from_be_bytes(query.get(end - 4..end - 2)?.try_into().ok()?);
    let record = |address| match address {
        IpAddr::V4(address) => (TYPE_A, address.octets().to_vec()),
        IpAddr::V6(address) => (TYPE_AAAA, address.octets().to_vec()),
    };
    let all: Vec<(u16, Vec<u8>)> = addresses(&name).into_iter().map(record).collect();
    let failed = if all.is_empty() { NAME_ERROR } else { 0 };
    let records = all.iter().filter(|(of, _)| *of == kind).flat_map(|(of, data)| {
        let length = u16::try_from(data.len()).unwrap();
        // The name is that of the question; class IN; 256 seconds to live.
        let head = [&[0xc0, 0x0c][..], &of.to_be_bytes(), &[0, 1, 0, 0, 1, 0]].concat();
        [head, length.to_be_bytes().to_vec(), data.clone()].concat()
    });
    let mut answer = query.get(..end)?.to_vec();
    let records: Vec<u8> = records.collect();
    let fits = answer.len() + records.len() <= limit;
    let count = if fits { all.iter().filter(|(of, _)| *of == kind).count() } else { 0 };
    // A response, to a query that may desire recursion, with recursion.
    answer[2] = 0x80 | (query[2] & 1) | if fits { 0 } else { TRUNCATED };
    answer[3] = 0x80 | failed;
    answer[4..HEADER].fill(0);
    answer[5] = 1;
    answer[6..8].copy_from_slice(&u16::try_from(count).unwrap().to_be_bytes());
    if fits {
        answer.extend(records);
    }
    Some(answer)
}

/// The name of the question, and where it ends.
fn question(query: &[u8]) -> Option<(String, usize)> {
    let mut labels = Vec::new();
    let mut at = HEADER;
    loop {
        let length = usize::from(*query.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        labels.push(String::from_utf8_lossy(query.get(at..at + length)?).to_lowercase());
        at += length;
    }
    let end = at + 4;
    (end <= query.len()).then(|| (labels.join("."), end))
}
