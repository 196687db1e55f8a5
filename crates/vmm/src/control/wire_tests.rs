use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;

use rustix::fs::fstat;
use serde_json::json;

use super::*;

fn pair() -> (UnixStream, UnixStream) {
    UnixStream::pair().unwrap()
}

fn null() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

fn pipes(number: usize) -> (Vec<io::PipeReader>, Vec<OwnedFd>) {
    (0..number).map(|_| io::pipe().unwrap()).map(|(read, write)| (read, write.into())).unzip()
}

/// Whether all writing ends of pipes are closed.
#[track_caller]
fn all_closed(pipes: Vec<io::PipeReader>) {
    for mut pipe in pipes {
        assert_eq!(pipe.read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn a_line_arrives_with_its_descriptors_and_the_next_without() {
    let (ours, theirs) = pair();
    send(&ours, &json!({"a": 1}), &[null(), ours.try_clone().unwrap().into()]).unwrap();
    send(&ours, &json!("b"), &[]).unwrap();
    drop(ours);
    let mut lines = Lines::of(&theirs);
    let (line, descriptors) = lines.next().unwrap().unwrap();
    assert_eq!(line, br#"{"a":1}"#);
    assert_eq!(descriptors.len(), 2);
    assert_eq!(fstat(&descriptors[0]).unwrap().st_rdev, fstat(null()).unwrap().st_rdev);
    drop(descriptors);
    let (line, descriptors) = lines.next().unwrap().unwrap();
    assert_eq!((&line[..], descriptors.len()), (&br#""b""#[..], 0));
    assert!(lines.next().unwrap().is_none());
}

#[test]
fn a_long_line_arrives_in_parts() {
    let (ours, theirs) = pair();
    let long = "x".repeat(900_000);
    std::thread::scope(|scope| {
        scope.spawn(|| send(&ours, &json!(long), &[null()]).unwrap());
        let (line, descriptors) = Lines::of(&theirs).next().unwrap().unwrap();
        assert_eq!((line.len(), descriptors.len()), (long.len() + 2, 1));
    });
}

#[test]
fn the_descriptors_of_a_peer_that_sends_too_many_are_closed() {
    // All at once, and one with each byte.
    for step in [MAX_DESCRIPTORS + 1, 1] {
        let (ours, theirs) = pair();
        let (readers, writers) = pipes(MAX_DESCRIPTORS + 1);
        for few in writers.chunks(step) {
            let descriptors: Vec<_> = few.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            sendmsg(&ours, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
        }
        drop((writers, ours));
        let error = Lines::of(&theirs).next().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        assert!(error.to_string().contains("descriptors"), "{error}");
        all_closed(readers);
    }
}

#[test]
fn the_descriptors_of_a_line_that_does_not_end_are_closed() {
    let (ours, theirs) = pair();
    let (readers, writers) = pipes(1);
    send(&ours, &json!("first"), &[]).unwrap();
    send(&ours, &json!("second"), &writers).unwrap();
    drop(writers);
    ours.shutdown(Shutdown::Write).unwrap();
    drop(Lines::of(&theirs));
    drop(theirs);
    all_closed(readers);
}

#[test]
fn a_line_that_is_too_long_is_refused() {
    let (mut ours, theirs) = pair();
    std::thread::scope(|scope| {
        scope.spawn(move || while ours.write_all(&[b'x'; 4096]).is_ok() {});
        let error = Lines::of(&theirs).next().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        theirs.shutdown(Shutdown::Both).unwrap();
    });
}

#[test]
fn too_many_descriptors_are_not_sent() {
    let (ours, _theirs) = pair();
    let (_readers, writers) = pipes(MAX_DESCRIPTORS + 1);
    assert!(send(&ours, &json!(1), &writers).is_err());
}
