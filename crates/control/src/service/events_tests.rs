use std::time::Duration;

use super::*;

fn invocation(length: usize) -> Invocation {
    let event = format!("\"{}\"", "x".repeat(length));
    Invocation::new(&event, Duration::from_secs(1)).unwrap()
}

fn target() -> Target {
    Target::new("f", Some("live")).unwrap()
}

#[tokio::test]
async fn an_event_is_stored_until_it_is_done() {
    let folder = tempfile::tempdir().unwrap();
    let events = Events::open(folder.path(), 9, 1 << 20).unwrap();
    let stored = || fs::read_dir(folder.path().join("events")).unwrap().count();
    for length in [10, MAX_KEPT] {
        let sent = invocation(length);
        let event = events.accept(target(), sent.clone()).await.unwrap();
        for _attempt in 0..2 {
            let loaded = event.load().await.unwrap().invocation();
            assert_eq!((loaded.event(), loaded.request_id()), (sent.event(), sent.request_id()));
        }
        assert_eq!(stored(), 1);
        event.done().await;
        assert_eq!(stored(), 0);
    }
}

#[tokio::test]
async fn the_bytes_of_events_are_limited() {
    let folder = tempfile::tempdir().unwrap();
    let events = Events::open(folder.path(), 9, 1 << 20).unwrap();
    let first = events.accept(target(), invocation(600 << 10)).await.unwrap();
    let refused = events.accept(target(), invocation(600 << 10)).await.unwrap_err();
    assert!(matches!(refused, EventRefused::TooMany), "{refused}");
    first.done().await;
    events.accept(target(), invocation(600 << 10)).await.unwrap();
}

#[tokio::test]
async fn the_next_daemon_has_the_events_that_were_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let stored = folder.path().join("events");
    let sent = [invocation(10), invocation(MAX_KEPT)];
    let events = Events::open(folder.path(), 9, 1 << 20).unwrap();
    for invocation in &sent {
        drop(events.accept(target(), invocation.clone()).await.unwrap());
    }
    // One was not accepted, one is damaged, and one file is not the daemon's.
    for name in ["new-event-cut", "event-damaged", "mine"] {
        fs::write(stored.join(name), "{").unwrap();
    }
    // Even beyond the limits of this daemon.
    let events = Events::open(folder.path(), 1, 1 << 20).unwrap();
    let found = events.recover().unwrap();
    let mut texts = Vec::new();
    for event in &found {
        assert_eq!(event.target(), &target());
        texts.push(event.load().await.unwrap().invocation().event().to_owned());
    }
    let mut expected: Vec<_> = sent.iter().map(|sent| sent.event().to_owned()).collect();
    texts.sort();
    expected.sort();
    assert_eq!(texts, expected);
    let refused = events.accept(target(), invocation(1)).await.unwrap_err();
    assert!(matches!(refused, EventRefused::TooMany), "{refused}");
    for event in found {
        event.done().await;
    }
    let left = fs::read_dir(&stored).unwrap().map(|entry| entry.unwrap().file_name());
    let mut left: Vec<_> = left.collect();
    left.sort();
    assert_eq!(left, ["event-damaged", "mine"]);
}
