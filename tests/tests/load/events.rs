//! Events are sent meanwhile: each that was accepted is served, by a later daemon if need be.

use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use firn_tests::World;
use serde_json::json;

use crate::{FUNCTIONS, Life};

/// The request ids of accepted events.
#[derive(Default)]
pub(crate) struct Events {
    accepted: Mutex<Vec<String>>,
}

impl Events {
    /// Sends an event after the other until the requests have ended. Where guests are slow, as many
    /// wait as the daemon lets, and more are refused.
    pub(crate) fn send(&self, life: &Life<'_>) {
        let mut number = 0;
        while !life.stop.load(Ordering::SeqCst) {
            number += 1;
            let path = format!("/2015-03-31/functions/{}:1/invocations", FUNCTIONS[0]);
            let event = json!({ "event": number });
            if let Some(reply) = life.send_event(&path, &event) {
                let id =
                    reply.head.lines().find_map(|line| line.strip_prefix("x-amzn-requestid: "));
                match reply.status {
                    202 => self.accepted.lock().unwrap().push(id.unwrap().trim().to_owned()),
                    status => assert_eq!(status, 429, "{reply:?}"),
                }
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits until no event is left, as long as any are served.
    pub(crate) fn until_served(&self, world: &World) {
        let folder = world.file("daemon").join("events");
        let (mut left, mut since) = (usize::MAX, Instant::now());
        while since.elapsed() < Duration::from_secs(120) {
            let waiting = std::fs::read_dir(&folder).unwrap().count();
            if waiting == 0 {
                return;
            }
            if waiting < left {
                (left, since) = (waiting, Instant::now());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("{left} events remain in {}", folder.display());
    }

    /// The daemons have logged an answer to each event.
    pub(crate) fn were_served(&self, log: &str) {
        let accepted = self.accepted.lock().unwrap();
        let invoked: Vec<&str> =
            log.lines().filter(|line| line.contains(" invoked function=")).collect();
        for id in accepted.iter() {
            assert!(invoked.iter().any(|line| line.contains(id)), "the event {id} was lost");
        }
        eprintln!("{} events", accepted.len());
    }
}
