//! Events are sent meanwhile: each that was accepted is served, by a later daemon if need be.

use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

use firn_tests::World;
use serde_json::json;

use crate::{FUNCTIONS, Life};

/// The request ids of accepted events.
#[derive(Default)]
pub(crate) struct Events {
    accepted: Mutex<Vec<String>>,
}

impl Events {
    /// Sends an event after the other until the requests have ended.
    pub(crate) fn send(&self, life: &Life<'_>) {
        let mut number = 0;
        while !life.stop.load(Ordering::SeqCst) {
            number += 1;
            let path = format!("/2015-03-31/functions/{}:1/invocations", FUNCTIONS[0]);
            let event = json!({ "event": number });
            if let Some(reply) = life.send_event(&path, &event) {
                assert_eq!(reply.status, 202, "{reply:?}");
                let id =
                    reply.head.lines().find_map(|line| line.strip_prefix("x-amzn-requestid: "));
                self.accepted.lock().unwrap().push(id.unwrap().trim().to_owned());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits until no event is left.
    pub(crate) fn until_served(&self, world: &World) {
        let folder = world.file("daemon").join("events");
        for _ in 0..1200 {
            if std::fs::read_dir(&folder).unwrap().count() == 0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("events remain in {}", folder.display());
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
