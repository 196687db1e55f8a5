use std::collections::VecDeque;
use std::io::Write;
use std::os::unix::net::UnixStream;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::frame::Link;
use crate::header::Offloads;
use crate::network::GuestNetwork;
use crate::tcp::tests::tcp_pair;

/// Bytes of headers before a segment.
const START: usize = 54;
/// The most bytes that wait: a window of TCP has room for them.
const MOST: usize = 30_000;

/// What happens to a connection.
#[derive(Clone, Debug)]
enum Step {
    /// The host sends.
    Send(usize),
    /// A segment of at most so many bytes is sent to the guest, which takes so many more.
    Read(usize, usize),
    /// Another flow has its turn on the stage.
    Yield,
    /// The guest acknowledges so many, of those that were ever sent.
    Consume(usize),
    /// The rest is sent again.
    Rewind,
}

fn step() -> impl Strategy<Value = Step> {
    let len = 1..10_000_usize;
    prop_oneof![
        3 => len.clone().prop_map(Step::Send),
        3 => (1..2000_usize, 0..MOST).prop_map(|(len, more)| Step::Read(len, more)),
        1 => (10_000..MOST, 0..MOST).prop_map(|(len, more)| Step::Read(len, more)),
        1 => Just(Step::Yield),
        2 => len.prop_map(Step::Consume),
        1 => Just(Step::Rewind),
    ]
}

/// A host's program and the connected socket of a flow.
fn pair(is_tcp: bool) -> (Box<dyn Write>, End) {
    if is_tcp {
        let (host, socket) = tcp_pair();
        (Box::new(host), End::Socket(socket.into()))
    } else {
        let (host, socket) = UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        (Box::new(host), End::Socket(socket.into()))
    }
}

/// What a segment of at most `len` bytes is read into, before one with `more`.
fn payload(len: usize, more: usize) -> Payload {
    Payload { start: START, filled: 0, len, more, most: len }
}

proptest! {
    /// In a queue and in a socket, of TCP and of a published path, in small and large segments.
    #[test]
    fn bytes_are_sent_in_order_and_again_until_they_are_acknowledged(
        steps in vec(step(), 1..40),
        is_queue: bool,
        is_tcp: bool,
    ) {
        let link = Link { network: GuestNetwork::default(), offloads: Offloads::default() };
        let mut shared = Shared::new(link);
        let (mut host, mut end) = pair(is_tcp);
        let End::Socket(socket) = &end else { unreachable!() };
        let mut unacked = Unacked::of_socket(socket);
        if is_queue {
            unacked = Unacked::default();
        }
        let (mut other_host, mut other_end) = pair(is_tcp);
        let End::Socket(socket) = &other_end else { unreachable!() };
        let mut other = Unacked::of_socket(socket);
        let mut frame = Frame::default();
        let mut numbers = (0_u32..).map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1]);
        // What is not acknowledged, and how much of it was sent.
        let (mut model, mut sent, mut ever_sent) = (VecDeque::new(), 0, 0);
        for step in steps {
            match step {
                Step::Send(len) if model.len() + len < MOST => {
                    let bytes: Vec<u8> = numbers.by_ref().take(len).collect();
                    host.write_all(&bytes).unwrap();
                    model.extend(bytes);
                }
                Step::Send(_) => {}
                Step::Yield => {
                    other_host.write_all(&[0; 2]).unwrap();
                    other.rewind(Some(&other_end)).unwrap();
                    let place = (&mut frame, &mut payload(1, 1));
                    other.read(&mut other_end, 0, place, &mut shared).unwrap();
                }
                Step::Read(len, more) => {
                    let mut payload = payload(len, more);
                    let place = (&mut frame, &mut payload);
                    let read = unacked.read(&mut end, sent, place, &mut shared);
                    let count = payload.filled;
                    let is_all = count == len || sent + count == model.len();
                    match read {
                        Ok(is_end) => {
                            prop_assert!(!is_end, "an end that is none");
                            prop_assert!(count > 0, "neither bytes nor a reason");
                            prop_assert!(is_all || is_queue, "a short read in the middle");
                        }
                        Err(errno) => {
                            prop_assert_eq!(errno, Errno::AGAIN);
                            prop_assert_eq!(sent + count, model.len());
                        }
                    }
                    let expected = model.iter().skip(sent).take(count);
                    prop_assert!(expected.eq(&frame.payload_mut(START, count)[..]));
                    sent += count;
                    ever_sent = ever_sent.max(sent);
                }
                Step::Consume(len) => {
                    let len = len.min(ever_sent);
                    ever_sent -= len;
                    unacked.consume(len, &mut shared);
                    if len > sent {
                        unacked.rewind(Some(&end)).unwrap();
                    }
                    sent = sent.saturating_sub(len);
                    unacked.discard(Some(&end), sent, &mut shared).unwrap();
                    model.drain(..len);
                }
                Step::Rewind => {
                    unacked.rewind(Some(&end)).unwrap();
                    sent = 0;
                }
            }
        }
        drop(host);
        let mut is_end = false;
        while !is_end {
            let mut rest = payload(MOST, 0);
            is_end = unacked.read(&mut end, sent, (&mut frame, &mut rest), &mut shared).unwrap();
            let expected = model.iter().skip(sent).take(rest.filled);
            prop_assert!(expected.eq(&frame.payload_mut(START, rest.filled)[..]));
            sent += rest.filled;
        }
        prop_assert_eq!(sent, model.len());
        unacked.clear(&mut shared);
        prop_assert_eq!(shared.pool.usage().0, 0);
    }
}

/// Where the kernel can, bytes wait in the socket.
#[test]
fn bytes_wait_in_the_socket() {
    let (_host, End::Socket(socket)) = pair(false) else { unreachable!() };
    assert!(matches!(Unacked::of_socket(&socket), Unacked::Socket { acked: 0, turn: 0 }));
}
