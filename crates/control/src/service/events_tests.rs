use std::time::Duration;

use super::*;

fn invocation(length: usize) -> Invocation {
    let event = format!("\"{}\"", "x".repeat(length));
    Invocation::new(&event, Duration::from_secs(1)).unwrap()
}

#[tokio::test]
async fn a_long_event_is_stored_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let events = Events::open(folder.path(), 9, 1 << 20).unwrap();
    let stored = || fs::read_dir(folder.path().join("events")).unwrap().count();
    for (length, files) in [(10, 0), (MAX_KEPT, 1)] {
        let sent = invocation(length);
        let event = events.accept(sent.clone()).await.unwrap();
        assert_eq!(stored(), files);
        for _attempt in 0..2 {
            let loaded = event.load().await.unwrap().invocation();
            assert_eq!((loaded.event(), loaded.request_id()), (sent.event(), sent.request_id()));
        }
        drop(event);
        assert_eq!(stored(), 0);
    }
}

#[tokio::test]
async fn the_bytes_of_events_are_limited() {
    let folder = tempfile::tempdir().unwrap();
    let events = Events::open(folder.path(), 9, 1 << 20).unwrap();
    let first = events.accept(invocation(600 << 10)).await.unwrap();
    let refused = events.accept(invocation(600 << 10)).await.unwrap_err();
    assert!(matches!(refused, EventRefused::TooMany), "{refused}");
    drop(first);
    events.accept(invocation(600 << 10)).await.unwrap();
}

#[tokio::test]
async fn the_events_of_an_earlier_daemon_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let events = folder.path().join("events");
    fs::create_dir(&events).unwrap();
    for name in ["event-left", "mine"] {
        fs::write(events.join(name), "1").unwrap();
    }
    Events::open(folder.path(), 9, 1 << 20).unwrap();
    let left: Vec<_> = fs::read_dir(&events).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["mine"]);
}
