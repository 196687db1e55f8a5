use std::io::ErrorKind;
use std::net::{TcpListener, UdpSocket};
use std::process::Command;

use super::*;

/// Runs a test of this file, which jails itself, in a process of its own.
fn alone(test: &str) {
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program)
        .args(["--exact", &format!("jail::tests::{test}"), "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn modes_are_read_as_they_are_written() {
    for mode in [JailMode::Auto, JailMode::Require, JailMode::Off] {
        assert_eq!(mode.to_string().parse::<JailMode>().unwrap(), mode);
    }
    assert!("on".parse::<JailMode>().unwrap_err().to_string().contains("\"on\" is not auto"));
}

#[test]
fn a_jail_that_is_off_has_no_walls() {
    assert_eq!(enter(JailMode::Off, None).unwrap(), None);
    assert!(Jail::new(JailMode::Off).network().is_none());
}

#[test]
fn each_wall_stands() {
    alone("walls");
}

#[test]
#[ignore = "jails its process: run by each_wall_stands"]
fn walls() {
    // Test threads are not the first thread, but the kernel's walls are a thread's.
    let tried_before = Command::new("/bin/true").status().unwrap();
    assert!(tried_before.success());
    let secret = File::open("/proc/self/ns/net").unwrap();
    let report = enter(JailMode::Auto, None).unwrap().unwrap();
    for wall in &report.walls {
        match wall {
            Wall::Network => {
                let error = UdpSocket::bind("127.0.0.1:0")
                    .and_then(|socket| socket.send_to(&[1], "127.0.0.1:9"))
                    .unwrap_err();
                assert!(
                    matches!(
                        error.kind(),
                        ErrorKind::NetworkUnreachable | ErrorKind::AddrNotAvailable
                    ),
                    "{error}"
                );
            }
            Wall::Names => assert!(rustix::system::sethostname(b"other").is_err()),
            Wall::Programs => {
                let error = Command::new("/bin/true").status().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::PermissionDenied);
                let error = TcpListener::bind("127.0.0.1:0").unwrap_err();
                assert_eq!(error.kind(), ErrorKind::PermissionDenied);
                let parent = rustix::process::getppid().unwrap();
                let error = rustix::process::kill_process(parent, rustix::process::Signal::CONT);
                assert_eq!(error.unwrap_err(), rustix::io::Errno::PERM);
            }
            Wall::Privileges => {
                let kept = rustix::thread::capabilities(None).unwrap().permitted;
                assert!(rustix::thread::CapabilitySet::DAC_OVERRIDE.contains(kept), "{kept:?}");
                assert!(rustix::thread::no_new_privs().unwrap());
                // It needs a capability that is gone.
                assert!(privileges::enter_network(&secret).is_err());
            }
        }
    }
    assert!(report.ns > 0);
}
