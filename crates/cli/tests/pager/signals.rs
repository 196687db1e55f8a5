//! Signals as users and service managers send them: to the process group, to each process, or to
//! one of the two processes.

use rustix::process::kill_process_group;

use super::*;

const SIGNALS: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT];

/// A pager that leads a process group, as a shell or a service manager starts one.
fn in_a_group() -> Pager {
    let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
    command.process_group(0);
    Pager::by(command, memory_file(), &["--image", "memory", "--granule", "1"])
}

/// Sends signals while a monitor is served. Checks that the monitor is killed and that the pager's
/// error contains these words.
#[track_caller]
fn ends_the_monitor(send: impl Fn(&Pager), words: &str) {
    let pager = in_a_group();
    let mut monitor = Monitor::start(&pager, whole);
    assert_eq!(monitor.read(3), Some(word(3)));
    send(&pager);
    // The pager may serve the page before the kill, but never with zeros.
    let read = monitor.read(900);
    assert!([None, Some(word(900))].contains(&read), "{read:?}");
    monitor.was_killed();
    let (code, error) = pager.end();
    assert!(code == Some(1) && error.contains(words), "{error}");
}

#[test]
fn a_signal_to_the_process_group_ends_the_monitor() {
    for signal in SIGNALS {
        let words = format!("terminated by signal {}; the monitor", signal.as_raw());
        ends_the_monitor(|pager| kill_process_group(pager.guardian(), signal).unwrap(), &words);
    }
}

#[test]
fn a_signal_to_each_process_ends_the_monitor() {
    for signal in SIGNALS {
        let orders: [[Process; 2]; 2] =
            [[Pager::guardian, Pager::server], [Pager::server, Pager::guardian]];
        for order in orders {
            let each = |pager: &Pager| {
                let both = order.map(|process| process(pager));
                both.into_iter().for_each(|process| kill_process(process, signal).unwrap());
            };
            // The guardian may handle its own signal first, or the exit of the server.
            ends_the_monitor(each, "was killed");
        }
    }
}

#[test]
fn a_signal_to_one_process_ends_the_monitor() {
    for signal in SIGNALS {
        let number = signal.as_raw();
        let words = format!("terminated by signal {number}; the monitor");
        ends_the_monitor(|pager| kill_process(pager.guardian(), signal).unwrap(), &words);
        let words = format!("the server process ended unexpectedly (signal: {number} ");
        ends_the_monitor(|pager| kill_process(pager.server(), signal).unwrap(), &words);
    }
}

/// The server is in another process group, so it survives and kills the monitor.
#[test]
fn killing_the_process_group_kills_the_monitor() {
    let mut pager = in_a_group();
    let mut monitor = Monitor::start(&pager, whole);
    assert_eq!(monitor.read(3), Some(word(3)));
    kill_process_group(pager.guardian(), Signal::KILL).unwrap();
    let read = monitor.read(900);
    assert!([None, Some(word(900))].contains(&read), "{read:?}");
    monitor.was_killed();
    let error = pager.errors();
    assert!(error.contains("the guardian process ended unexpectedly"), "{error}");
    pager.process.wait().unwrap();
}

/// The server is stopped, because the guardian must not wait for it.
#[test]
fn a_signal_during_the_handover_ends_the_monitor() {
    for sent in [true, false] {
        let pager = in_a_group();
        let server = pager.server();
        kill_process(server, Signal::STOP).unwrap();
        let monitor = Monitor::connected(&pager, sent);
        kill_process_group(pager.guardian(), Signal::TERM).unwrap();
        monitor.was_killed();
        let (code, error) = pager.end();
        assert!(
            code == Some(1) && error.contains("terminated by signal 15; the monitor"),
            "{error}"
        );
    }
}

#[test]
fn a_signal_before_a_connection_ends_the_pager() {
    for signal in SIGNALS {
        let pager = in_a_group();
        kill_process_group(pager.guardian(), signal).unwrap();
        let (code, error) = pager.end();
        assert!(code == Some(1) && error.contains("terminated by signal"), "{error}");
    }
}
