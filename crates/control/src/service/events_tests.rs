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

#[tokio::test]
async fn an_event_older_than_the_settings_of_its_function_is_dropped() {
    use crate::functions::EventSettings;
    use crate::service::Control;
    use crate::service::testing::{new_function, options};

    let folder = tempfile::tempdir().unwrap();
    let control = Control::open(&options(folder.path()), None).unwrap();
    for name in ["f", "g"] {
        control.create_function(new_function(name)).await.unwrap();
    }
    let function = Target::new("f", None).unwrap();
    let settings = EventSettings { max_age: Some(60), ..EventSettings::default() };
    control.set_event_settings(&function, move |_| Some(settings)).await.unwrap();
    let stored = folder.path().join("data/events");
    let mut names = Vec::new();
    for name in ["f", "g"] {
        let invocation = invocation(10);
        names.push(format!("{PREFIX}{}", invocation.request_id()));
        let since = UNIX_EPOCH.elapsed().unwrap() - Duration::from_secs(61);
        let accepted_ms = u64::try_from(since.as_millis()).unwrap();
        let target = Target::new(name, None).unwrap();
        write(&Stored { target, accepted_ms, invocation, hops: 0 }, &stored).unwrap();
    }
    control.recover_events().unwrap();
    let tried = |name: &str| control.metrics().contains(&format!("function=\"{name}\""));
    // No microVM starts here, so the other one is tried and stays.
    while stored.join(&names[0]).exists() && !tried("f") || !tried("g") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!tried("f") && stored.join(&names[1]).exists());
}
