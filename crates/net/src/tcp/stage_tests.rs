use std::io::Write;
use std::net::TcpStream;

use super::*;
use crate::tcp::tests::tcp_pair;

const START: usize = 54;

/// A host's program and the socket of a flow, which is read from its first byte on.
fn pair() -> (TcpStream, TcpStream) {
    let (host, socket) = tcp_pair();
    set_peek_offset(&socket, 0).unwrap();
    (host, socket)
}

/// A stage, the frame that it fills, and a flow's turn.
#[derive(Default)]
struct Reader {
    stage: Stage,
    frame: Frame,
    turn: u64,
}

impl Reader {
    /// Reads a segment of `len` bytes at `offset`, before `more` of the same size: how many it has,
    /// and how many segments are staged.
    fn read(
        &mut self,
        socket: &TcpStream,
        offset: usize,
        len: usize,
        more: usize,
    ) -> (usize, usize) {
        let mut payload = Payload { start: START, filled: 0, len, more, most: len };
        let place = (&mut self.frame, &mut payload);
        assert!(!self.stage.read(socket, &mut self.turn, offset, place).unwrap());
        (payload.filled, self.stage.next.len())
    }

    fn bytes(&mut self, len: usize) -> &[u8] {
        self.frame.payload_mut(START, len)
    }
}

#[test]
fn segments_are_read_together() {
    let (mut host, socket) = pair();
    let mut reader = Reader::default();
    host.write_all(&[[1; 1000], [2; 1000], [3; 1000]].concat()).unwrap();
    for (number, staged) in [(1, 2), (2, 1), (3, 0)] {
        let offset = 1000 * (usize::from(number) - 1);
        assert_eq!(reader.read(&socket, offset, 1000, 3000), (1000, staged));
        assert_eq!(reader.bytes(1000), [number; 1000]);
    }
    host.write_all(&[4; 3000]).unwrap();
    assert_eq!(reader.read(&socket, 3000, 1000, 500), (1000, 1), "what the guest takes");
    assert_eq!(reader.read(&socket, 4000, 1000, 3000), (1000, 1), "the end of a segment is read");
    assert_eq!(reader.read(&socket, 5000, 1000, 3000), (1000, 0), "all that there is");
}

#[test]
fn a_segment_of_another_size_is_read_again() {
    let (mut host, socket) = pair();
    let mut reader = Reader::default();
    host.write_all(&[[1; 1000], [2; 1000], [3; 1000]].concat()).unwrap();
    assert_eq!(reader.read(&socket, 0, 1000, 2000), (1000, 2));
    assert_eq!(reader.read(&socket, 1000, 1500, 0), (1500, 2));
    assert_eq!(reader.bytes(1500)[..], [[2; 1000].as_slice(), &[3; 500]].concat());
    assert_eq!(reader.read(&socket, 2500, 500, 0), (500, 2));
    assert_eq!(reader.bytes(500), [3; 500]);
}

#[test]
fn what_was_read_ahead_is_not_lost_by_an_error() {
    let (mut host, socket) = pair();
    let mut reader = Reader::default();
    host.write_all(&[1; 1500]).unwrap();
    assert_eq!(reader.read(&socket, 0, 1000, 2000), (1000, 1));
    (&socket).write_all(b"not read").unwrap();
    drop(host);
    let mut payload = Payload { start: START, filled: 0, len: 1000, more: 0, most: 1000 };
    let place = (&mut reader.frame, &mut payload);
    let read = reader.stage.read(&socket, &mut reader.turn, 1000, place);
    assert_eq!((read, payload.filled), (Err(Errno::CONNRESET), 500));
}

#[test]
fn flows_take_turns() {
    let ((mut host, socket), (mut other_host, other)) = (pair(), pair());
    let mut reader = Reader::default();
    host.write_all(&[[1; 1000], [2; 1000]].concat()).unwrap();
    other_host.write_all(&[9; 2000]).unwrap();
    assert_eq!(reader.read(&socket, 0, 1000, 1000), (1000, 1));
    let turn = std::mem::take(&mut reader.turn);
    assert_eq!(reader.read(&other, 0, 1000, 1000), (1000, 1));
    reader.turn = turn;
    assert_eq!(reader.read(&socket, 1000, 1000, 0), (1000, 1));
    assert_eq!(reader.bytes(1000), [2; 1000]);
}
