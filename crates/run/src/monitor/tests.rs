use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use firn_net::{Policy, RuleCount};
use firn_snapshot::SnapshotFiles;

use super::connection::{Connection, ReceiveError};
use super::*;
use crate::descriptors::Descriptors;
use crate::jail::{Jail, JailMode};
use crate::network::NetworkSpec;
use crate::spec::{HostSpec, InvokeSpec, Origin, ReplaySpec, SourceSpec, ThawSpec};

/// A spec of a snapshot whose container is in the first slot.
fn spec(event: String, descriptors: &mut Descriptors, container: File) -> StartSpec {
    let source = SourceSpec::Directory {
        files: Box::new(SnapshotFiles {
            container: descriptors.add(container),
            signature: None,
            image: None,
            overlay: None,
            packed: [const { None }; _],
        }),
        path: "snapshot".into(),
        verify: false,
        verifier: None,
    };
    let thaw = ThawSpec {
        source,
        planner: "firecracker:readahead=off".to_owned(),
        preloaded: true,
        root: None,
        invoke: Some(InvokeSpec { event, keep: true, compare: false }),
        replay: ReplaySpec::default(),
        record: None,
    };
    StartSpec::new(Origin::Thaw(thaw), HostSpec::default(), Duration::from_secs(7))
}

#[test]
fn a_spec_arrives_with_its_descriptors_and_an_event_of_6_mib() {
    let (ours, theirs) = Connection::pair().unwrap();
    let theirs = Connection::of(theirs);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"snapshot").unwrap();
    let mut descriptors = Descriptors::default();
    let event = format!("\"{}\"", "x".repeat(6 << 20));
    let sent = spec(event.clone(), &mut descriptors, file);
    let receiver = std::thread::spawn(move || theirs.receive::<Order>(None).unwrap());
    ours.send(&Order::Start(Box::new(sent)), &descriptors).unwrap();
    let (order, mut descriptors) = receiver.join().unwrap();
    let Order::Start(spec) = order else { panic!("{order:?}") };
    let Origin::Thaw(thaw) = spec.origin else { panic!("{spec:?}") };
    assert_eq!(thaw.invoke.unwrap().event, event);
    assert_eq!((spec.time_limit, thaw.preloaded), (Duration::from_secs(7), true));
    let SourceSpec::Directory { files, .. } = thaw.source else { panic!() };
    let mut file = File::from(descriptors.take(files.container).unwrap());
    let mut text = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "snapshot");
    // Each slot is taken once.
    let error = descriptors.take(files.container).unwrap_err();
    assert!(matches!(error, StartError::Spec(_)), "{error}");
}

#[test]
fn a_report_and_an_error_arrive_as_they_were_sent() {
    let (ours, theirs) = Connection::pair().unwrap();
    let theirs = Connection::of(theirs);
    let mut report = StartReport::empty();
    report.planner = "pass".to_owned();
    report.times.identify_ns = Some(5);
    report.counters.private_bytes = 4096;
    let no_descriptors = Descriptors::default();
    ours.send(&Event::Started(Box::new(report)), &no_descriptors).unwrap();
    let wrong = StartError::Wrong { planner: "pass".to_owned(), wrong: "0x1000".to_owned() };
    ours.send(&Event::Failed(wrong), &no_descriptors).unwrap();
    let (event, _) = theirs.receive(None).unwrap();
    let Event::Started(report) = event else { panic!("{event:?}") };
    let found = (report.planner.as_str(), report.times.identify_ns, report.counters.private_bytes);
    assert_eq!(found, ("pass", Some(5), 4096));
    let (event, _) = theirs.receive(None).unwrap();
    let Event::Failed(StartError::Wrong { planner, wrong }) = event else { panic!("{event:?}") };
    assert_eq!((planner.as_str(), wrong.as_str()), ("pass", "0x1000"));
}

#[test]
fn an_answer_arrives_byte_by_byte() {
    let (ours, theirs) = Connection::pair().unwrap();
    let text = r#"{"answer":{"z": 1.10, "a":[ ]},"logs":"\u001b[0m","function_ns":5}"#;
    let outcome: Outcome = serde_json::from_str(text).unwrap();
    ours.send(&Event::Answered(Box::new(outcome)), &Descriptors::default()).unwrap();
    let (event, _) = Connection::of(theirs).receive(None).unwrap();
    let Event::Answered(outcome) = event else { panic!("{event:?}") };
    assert_eq!(outcome.answer.unwrap().get(), r#"{"z": 1.10, "a":[ ]}"#);
    assert_eq!((outcome.logs.as_str(), outcome.function_ns), ("\u{1b}[0m", 5));
}

#[test]
fn a_message_that_is_sent_now_does_not_wait_for_a_monitor_that_receives_nothing() {
    let (ours, _theirs) = Connection::pair().unwrap();
    let error = (0..100_000).find_map(|_| ours.send_now(&Order::Pause).err()).unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn an_error_keeps_its_causes_across_processes() {
    let (ours, theirs) = Connection::pair().unwrap();
    let missing = File::open("/nowhere/kernel").unwrap_err();
    let sent = StartError::path("open", "/nowhere/kernel".as_ref(), missing);
    let text = firn_base::error_chain(&sent);
    ours.send(&Event::Failed(sent), &Descriptors::default()).unwrap();
    let (event, _) = Connection::of(theirs).receive(None).unwrap();
    let Event::Failed(error) = event else { panic!("{event:?}") };
    assert_eq!(firn_base::error_chain(&error), text);
    assert!(text.contains("cannot open /nowhere/kernel: No such file"), "{text}");
}

#[test]
fn a_closed_connection_a_timeout_and_nonsense_are_different_errors() {
    let (ours, theirs) = Connection::pair().unwrap();
    let limit = Some(Duration::from_millis(1));
    assert!(matches!(ours.receive::<Event>(limit), Err(ReceiveError::TimedOut)));
    for packet in [&b"\0{"[..], b"\x02{}", b"\0\"unknown\""] {
        rustix::net::send(&theirs, packet, rustix::net::SendFlags::empty()).unwrap();
        assert!(matches!(ours.receive::<Event>(None), Err(ReceiveError::Invalid(_))));
    }
    drop(theirs);
    assert!(matches!(ours.receive::<Event>(None), Err(ReceiveError::Closed)));
}

#[test]
fn a_spec_of_another_version_is_refused() {
    struct Nothing;
    impl crate::Listener for Nothing {
        fn started(&self, _: &StartReport) {}
        fn note(&self, _: &str) {}
    }
    let mut descriptors = Descriptors::default();
    let spec = spec("1".to_owned(), &mut descriptors, tempfile::tempfile().unwrap());
    let spec = StartSpec { version: 99, ..spec };
    let listener: std::sync::Arc<dyn crate::Listener> = std::sync::Arc::new(Nothing);
    let kvm = crate::KvmDevice::from(std::path::Path::new("/dev/kvm"));
    let error = crate::start(&spec, descriptors, kvm, crate::Clock::now(), &listener).unwrap_err();
    assert!(error.to_string().contains("version 99"), "{error}");
}

/// A monitor that sends this message again and again.
fn repeating(message: &str) -> (tempfile::TempDir, Monitor) {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("monitor");
    let text = format!(
        "#!/usr/bin/python3\nimport socket\npeer = socket.socket(fileno=0)\npeer.recv(1 << 16)\n\
         while True:\n    peer.send(b'\\0{message}')\n"
    );
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
    let jail = Jail::new(JailMode::Off);
    let monitor = Monitor::spawn(&jail, &program, "/dev/null".as_ref()).unwrap();
    (folder, monitor)
}

#[test]
fn a_program_that_is_missing_is_named() {
    let jail = Jail::new(JailMode::Off);
    let error = Monitor::spawn(&jail, "/no/firn".as_ref(), "/dev/null".as_ref()).unwrap_err();
    let text = firn_base::error_chain(&error);
    assert!(text.contains("/no/firn") && text.contains("No such file"), "{text}");
}

#[test]
fn a_monitor_reports_its_size_once() {
    let (_folder, mut monitor) = repeating(r#"{"size":{"memory":1,"disk":0}}"#);
    let error = monitor.started(Some(Duration::from_secs(60))).unwrap_err();
    assert!(error.to_string().contains("out of order"), "{error}");
}

#[test]
fn notes_do_not_extend_a_time_limit() {
    let (_folder, mut monitor) = repeating(r#"{"note":"again"}"#);
    let error = monitor.started(Some(Duration::from_secs(1))).unwrap_err();
    assert!(matches!(error, StartError::TimedOut(1)), "{error}");
    assert!(monitor.take_notes().len() <= 64);
}

/// The counters of a guest's rules are its broker's, whatever its monitor reports.
#[test]
fn a_monitor_does_not_count_what_its_guest_reaches() {
    let claim = RuleCount { rule: "deny:10.0.0.0/8".to_owned(), matched: 99 };
    let report = StartReport { egress: Some(vec![claim]), ..StartReport::empty() };
    let message = serde_json::json!({ "started": report }).to_string();
    let policy = Policy::parse(["deny:10.0.0.0/8"]).unwrap();
    for has_network in [true, false] {
        let (_folder, mut monitor) = repeating(&message);
        let mut descriptors = Descriptors::default();
        let network =
            has_network.then(|| NetworkSpec::proxy(&policy, &mut descriptors, drop).unwrap());
        let container = tempfile::tempfile().unwrap();
        let spec = spec("1".to_owned(), &mut descriptors, container);
        let host = HostSpec { network, ..HostSpec::default() };
        monitor.start(StartSpec { host, ..spec }, &descriptors).unwrap();
        let report = monitor.started(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(report.egress, has_network.then(|| policy.counts()));
        assert!(policy.counts().iter().all(|count| count.matched == 0));
    }
}
