//! Servers of the host, and bytes that show where they belong.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::thread;

use crate::world::World;

/// Starts a server that runs `serve` for each connection, in a thread of its own. Returns its port.
pub(crate) fn serve(
    world: &World,
    address: &'static str,
    serve: impl Fn(TcpStream) + Clone + Send + 'static,
) -> u16 {
    let (send, receive) = channel();
    world.host.spawn(move || {
        let listener = TcpListener::bind((address, 0)).unwrap();
        send.send(listener.local_addr().unwrap().port()).unwrap();
        for stream in listener.incoming() {
            let serve = serve.clone();
            thread::spawn(move || serve(stream.unwrap()));
        }
    });
    receive.recv().unwrap()
}

/// Returns what the client sends, and then its end.
pub(crate) fn echo(mut stream: TcpStream) {
    let mut copy = stream.try_clone().unwrap();
    let _ = std::io::copy(&mut stream, &mut copy);
    let _ = stream.shutdown(Shutdown::Write);
}

/// A byte stream in which each 8 bytes are their offset, mixed with a seed.
#[derive(Clone, Copy)]
pub(crate) struct Pattern {
    seed: u64,
    offset: u64,
}

impl Pattern {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, offset: 0 }
    }

    fn next(&mut self) -> [u8; 8] {
        let mixed = (self.offset ^ self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.offset += 8;
        mixed.rotate_left(17).to_le_bytes()
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(8) {
            part.copy_from_slice(&self.next()[..part.len()]);
        }
    }

    /// Sends `len` bytes, a multiple of 8.
    pub(crate) fn send(mut self, mut stream: &TcpStream, len: usize) {
        let mut buffer = vec![0; 128 << 10];
        let mut left = len;
        while left > 0 {
            let part = left.min(buffer.len());
            self.fill(&mut buffer[..part]);
            stream.write_all(&buffer[..part]).unwrap();
            left -= part;
        }
    }

    /// Reads to the end, and checks that it is these `len` bytes.
    pub(crate) fn expect(mut self, mut stream: &TcpStream, len: usize) {
        let (mut buffer, mut expected) = (vec![0; 64 << 10], vec![0; 64 << 10]);
        let mut left = len;
        while left > 0 {
            let part = left.min(buffer.len());
            stream.read_exact(&mut buffer[..part]).unwrap();
            self.fill(&mut expected[..part]);
            assert!(buffer[..part] == expected[..part], "other bytes at {}", len - left);
            left -= part;
        }
        assert_eq!(stream.read(&mut buffer).unwrap(), 0, "more than {len} bytes");
    }
}
