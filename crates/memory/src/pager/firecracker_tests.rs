use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;

use proptest::prelude::{any, proptest};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::json;

use super::*;
use crate::uffd::{Features, Uffd};

const MIB: u64 = 1 << 20;

fn region(address: u64, size: u64, offset: u64) -> serde_json::Value {
    json!({"base_host_virt_addr": address, "size": size, "offset": offset, "page_size": 4096,
        "page_size_kib": 4096})
}

fn parsed(regions: &serde_json::Value) -> Result<Vec<Area>, HandoffError> {
    parse(regions.to_string().as_bytes(), 4 * MIB)
}

#[test]
fn the_regions_of_a_message_are_areas() {
    let areas = parsed(&json!([region(MIB, 3 * MIB, 0), region(8 * MIB, MIB, 3 * MIB)])).unwrap();
    let second = Area { address: 8 * MIB, len: MIB, image_offset: 3 * MIB };
    assert_eq!(areas, [Area { address: MIB, len: 3 * MIB, image_offset: 0 }, second]);
    let old =
        json!([{"base_host_virt_addr": MIB, "size": 4096, "offset": 0, "page_size_kib": 4096}]);
    assert_eq!(parsed(&old).unwrap().len(), 1);
}

#[test]
fn the_defect_of_a_message_is_named() {
    for (message, words) in [
        (json!([]), "has 0 memory regions"),
        (json!(vec![region(0, 4096, 0); 65]), "has 65 memory regions"),
        (json!({}), "not a JSON array"),
        (json!([{"size": 4096}]), "not a JSON array"),
        (json!([region(MIB, 0, 0)]), "whole pages"),
        (json!([region(MIB + 8, 4096, 0)]), "whole pages"),
        (json!([region(MIB, 4097, 0)]), "whole pages"),
        (json!([region(MIB, 4096, 1)]), "whole pages"),
        (json!([region(u64::MAX - 4095, 8192, 0)]), "whole pages"),
        (
            json!([{"base_host_virt_addr": 0, "size": 2 * MIB, "offset": 0, "page_size": 2 * MIB}]),
            "huge pages",
        ),
        (json!([region(MIB, 5 * MIB, 0)]), "ends at byte 0x500000"),
        (json!([region(MIB, 4096, u64::MAX - 4095)]), "ends at byte 0xffffffffffffffff"),
        (json!([region(MIB, 8192, 0), region(MIB + 4096, 4096, 8192)]), "0 and 1"),
        (json!([region(MIB, 8192, 0), region(8 * MIB, 4096, 4096)]), "0 and 1"),
    ] {
        let error = parsed(&message).unwrap_err().to_string();
        assert!(error.contains(words), "{message}: {error}");
    }
}

fn send(to: &UnixStream, bytes: &[u8], descriptors: &[&Uffd]) {
    let descriptors: Vec<_> = descriptors.iter().map(|uffd| uffd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
    }
    sendmsg(to, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::empty()).unwrap();
}

#[test]
fn a_message_is_received_whole_or_in_parts_with_its_userfaultfd() {
    let message = json!([region(MIB, MIB, 0)]).to_string();
    let uffd = Uffd::open(Features::empty()).unwrap();
    let (mut monitor, handler) = UnixStream::pair().unwrap();
    send(&monitor, message.as_bytes(), &[&uffd]);
    let (received, taken) = receive(&handler).unwrap();
    assert_eq!(received, message.as_bytes());
    Uffd::of(taken).unwrap().events().unwrap();

    send(&monitor, message.as_bytes(), &[&uffd]);
    let [kept] = <[OwnedFd; 1]>::try_from(peek(&handler).unwrap()).unwrap();
    assert_eq!(receive(&handler).unwrap().0, message.as_bytes());
    Uffd::of(kept).unwrap().events().unwrap();

    send(&monitor, &message.as_bytes()[..9], &[&uffd]);
    monitor.write_all(&message.as_bytes()[9..]).unwrap();
    assert_eq!(receive(&handler).unwrap().0, message.as_bytes());
}

#[test]
fn a_message_without_one_userfaultfd_is_refused() {
    let uffd = Uffd::open(Features::empty()).unwrap();
    let (mut monitor, handler) = UnixStream::pair().unwrap();
    monitor.write_all(b"[]").unwrap();
    let error = receive(&handler).unwrap_err();
    assert!(matches!(error, HandoffError::Descriptors(0)), "{error}");
    send(&monitor, b"[]", &[&uffd, &uffd]);
    let error = receive(&handler).unwrap_err();
    assert!(matches!(error, HandoffError::Descriptors(2)), "{error}");
    // The other side closes the connection, or never ends the message.
    send(&monitor, b"[", &[&uffd]);
    drop(monitor);
    let (message, _) = receive(&handler).unwrap();
    assert!(matches!(parse(&message, MIB), Err(HandoffError::Json(_))));
    let (mut monitor, handler) = UnixStream::pair().unwrap();
    let sender = std::thread::spawn(move || {
        let _ = monitor.write_all(b"[");
        while monitor.write_all(&[b' '; 4096]).is_ok() {}
    });
    let error = receive(&handler).unwrap_err();
    assert!(matches!(error, HandoffError::TooLong), "{error}");
    drop(handler);
    sender.join().unwrap();
}

proptest! {
    #[test]
    fn any_message_is_parsed_or_refused(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        numbers in proptest::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 0..4),
    ) {
        let _ = parse(&bytes, MIB);
        let regions: Vec<_> = numbers.iter().map(|&(a, s, o)| region(a, s, o)).collect();
        if let Ok(areas) = parsed(&json!(regions)) {
            assert!(areas.iter().all(|area| area.image_offset + area.len <= 4 * MIB));
        }
    }
}
