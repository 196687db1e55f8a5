//! Versions are published and deleted meanwhile: what the daemon has acknowledged stays so.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_tests::zip_of;
use serde_json::{Value, json};

use crate::{ECHO, FUNCTIONS, House, Life};

const API: &str = "/2015-03-31/functions";

/// How often a version's state is read before the test fails, ten times a second: a publication is
/// tried for six hours.
const PATIENCE: usize = 6000;

/// How many versions are kept: the pool has space for a few more.
const KEPT: usize = 5;

/// The versions of the function `changing`, and version 1 of each of [`FUNCTIONS`].
pub(crate) struct Versions {
    /// Those whose publication was acknowledged, and whose deletion was not asked for.
    published: Mutex<BTreeSet<u64>>,
    /// Those whose deletion was acknowledged.
    deleted: Mutex<BTreeSet<u64>>,
    /// Whether a publication or deletion ended with the daemon: such a version may be there.
    unknown: AtomicBool,
}

impl Versions {
    /// Creates the functions, and waits until they are frozen.
    pub(crate) fn publish(life: &Life<'_>) -> Self {
        for name in FUNCTIONS.into_iter().chain(["changing"]) {
            let function = json!({
                "FunctionName": name, "Runtime": "python3.11", "Handler": "handler.handler",
                "Role": "arn:aws:iam::000000000000:role/any", "Publish": true, "Timeout": 120,
                "Code": { "ZipFile": STANDARD.encode(zip_of("handler.py", ECHO)) },
                "SnapStart": { "ApplyOn": "PublishedVersions" },
            });
            let created = life.ask_again("POST", API, &function);
            assert_eq!(created.status, 201, "{created:?}");
            settled(life, name, 1);
        }
        Self {
            published: Mutex::new(BTreeSet::from([1])),
            deleted: Mutex::default(),
            unknown: AtomicBool::new(false),
        }
    }

    /// Publishes a version after the other, and keeps [`KEPT`], until the requests have ended.
    pub(crate) fn change(&self, life: &Life<'_>) {
        let mut turn = 0;
        while !life.stop.load(Ordering::SeqCst) {
            turn += 1;
            if self.publish_next(life, turn).is_none() {
                continue;
            }
            let oldest = {
                let kept = self.published.lock().unwrap();
                kept.first().copied().filter(|_| kept.len() > KEPT)
            };
            if let Some(oldest) = oldest {
                self.delete(life, oldest);
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Publishes a version, and waits until it is frozen.
    pub(crate) fn publish_and_wait(&self, life: &Life<'_>) {
        settled(life, "changing", self.publish_next(life, 1).unwrap());
    }

    /// Publishes a version of another configuration; `None` if that ended with the daemon.
    fn publish_next(&self, life: &Life<'_>, turn: usize) -> Option<u64> {
        let change = json!({ "Environment": { "Variables": { "TURN": turn.to_string() } } });
        let path = format!("{API}/changing/configuration");
        let updated = life.ask_again("PUT", &path, &change);
        assert_eq!(updated.status, 200, "{updated:?}");
        let path = format!("{API}/changing/versions");
        let Some(published) = life.ask("POST", &path, &json!({})) else {
            self.unknown.store(true, Ordering::SeqCst);
            return None;
        };
        assert_eq!(published.status, 201, "{published:?}");
        let version = published.body["Version"].as_str().unwrap().parse().unwrap();
        self.published.lock().unwrap().insert(version);
        Some(version)
    }

    fn delete(&self, life: &Life<'_>, version: u64) {
        self.published.lock().unwrap().remove(&version);
        let path = format!("{API}/changing?Qualifier={version}");
        match life.ask("DELETE", &path, &Value::Null) {
            None => self.unknown.store(true, Ordering::SeqCst),
            Some(reply) => {
                assert_eq!(reply.status, 204, "{reply:?}");
                self.deleted.lock().unwrap().insert(version);
            }
        }
    }

    /// Every acknowledged version becomes active and answers; no deleted version is there.
    pub(crate) fn all_are_there(&self, life: &Life<'_>) {
        for version in self.published.lock().unwrap().iter() {
            settled(life, "changing", *version);
            let path = format!("{API}/changing:{version}/invocations");
            let answer = life.ask_again("POST", &path, &json!({ "version": version }));
            assert_eq!(answer.body["version"], *version, "{answer:?}");
        }
        for version in self.deleted.lock().unwrap().iter() {
            let path = format!("{API}/changing/configuration?Qualifier={version}");
            let found = life.ask_again("GET", &path, &Value::Null);
            assert_eq!(found.status, 404, "{found:?}");
        }
        eprintln!(
            "versions: {} published, {} deleted",
            self.published.lock().unwrap().len(),
            self.deleted.lock().unwrap().len()
        );
    }

    /// The pool has the snapshots of the versions and no other, once the daemon has purged those of
    /// the deleted ones: it tries again while microVMs of a killed manager use the pool.
    pub(crate) fn only_they_have_snapshots(&self, life: &Life<'_>, house: &House) {
        let mut versions = FUNCTIONS.len() + self.published.lock().unwrap().len();
        if self.unknown.load(Ordering::SeqCst) {
            let path = format!("{API}/changing/versions?MaxItems=1000");
            let listed = life.ask_again("GET", &path, &Value::Null);
            // The list has the unpublished version, too.
            versions = FUNCTIONS.len() + listed.body["Versions"].as_array().unwrap().len() - 1;
        }
        let mut listed = Value::Null;
        for _ in 0..PATIENCE {
            let list = house.world.firn(["pool", "ls", "--json", "--pool"]).arg(&house.pool);
            listed = list.run().json();
            if listed["extents"].as_array().unwrap().len() == versions {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("{versions} versions and {listed:#}");
    }
}

/// Waits until a version is active.
fn settled(life: &Life<'_>, function: &str, version: u64) {
    let path = format!("{API}/{function}/configuration?Qualifier={version}");
    let mut last = Value::Null;
    for _ in 0..PATIENCE {
        last = life.ask_again("GET", &path, &Value::Null).body;
        match last["State"].as_str() {
            Some("Active") => return,
            Some("Pending") => std::thread::sleep(Duration::from_millis(100)),
            _ => break,
        }
    }
    let (world, pool) = (&life.house.world, &life.house.pool);
    let listed = world.firn(["pool", "ls", "--pool"]).arg(pool).run();
    panic!("{function}:{version} is not active: {last}\n{}", listed.stdout);
}
