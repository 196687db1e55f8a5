//! Unmodified clients in guests, against servers of this host: curl, urllib, ssl and boto3.

mod echo;
mod long;
mod plain;
mod site;
mod store;

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use site::{Site, with_site};

/// curl's exit codes.
const TIMED_OUT: i64 = 28;
const RECEIVE_FAILED: i64 = 56;
const NOT_TRUSTED: i64 = 60;
/// For what must happen at some time.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs a shell in the guest.
#[track_caller]
fn run(site: &Site, name: &str, script: &str) -> Value {
    site.ask(name, &json!({"do": "run", "script": script}))
}

/// Fails unless the guest downloads the right bytes.
#[track_caller]
fn downloads(site: &Site, name: &str, from: &str, bytes: u64) {
    let url = format!("{from}/bytes/{bytes}");
    let got = run(site, name, &format!("curl -sS --cacert $CA {url} | sha256sum"));
    assert_eq!(got["out"], format!("{}  -\n", plain::digest(bytes)), "{url}: {got}");
}

/// Fails unless a client ended because its connection was reset.
#[track_caller]
fn assert_reset(ended: &Value) {
    assert_eq!(ended["code"], RECEIVE_FAILED, "{ended}");
    assert!(ended["error"].as_str().unwrap().contains("reset by peer"), "{ended}");
}

/// Waits until something is true.
#[track_caller]
fn until(what: &str, is_true: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_true() {
        assert!(begin.elapsed() < LIMIT, "{what}: not after {LIMIT:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn clients_reach_servers_by_name_and_retry_after_a_freeze() {
    with_site(|site| {
        let mut guest = site.guest("first");
        downloads(site, "first", "https://server.test", 1 << 20);
        let distrusts = run(site, "first", "curl -sS https://server.test/bytes/1");
        assert_eq!(distrusts["code"], NOT_TRUSTED, "{distrusts}");
        let put = json!({"do": "fetch", "url": "https://six.test/sha256", "put": 1 << 20});
        assert_eq!(site.ask("first", &put), json!({"length": 1 << 20, "same": true}));
        assert_reset(&run(
            site,
            "first",
            "curl -sS --cacert $CA -o /dev/null https://server.test/reset",
        ));

        let resolve = |name: &str| site.ask("first", &json!({"do": "resolve", "name": name}));
        assert_eq!(resolve("six.test"), json!([site::SIX.to_string()]));
        assert_eq!(resolve("none.test"), "EAI_NONAME");
        // Their answer is too long for a datagram.
        assert_eq!(resolve("many.test").as_array().unwrap().len(), usize::from(site::MANY));
        assert!(site.dns.over_tcp() > 0);

        // A freeze with frames on their way.
        let endless = "curl -sS -o /dev/null http://server.test/endless";
        site.ask("first", &json!({"do": "begin", "script": endless}));
        until("a download runs", || site.plain.endless() > 4 << 20);
        let snapshot = site.world.file("downloading");
        site.world.firn(["freeze", "first"]).arg(&snapshot).run().ok();
        guest.end().ok();
        assert!(site.plain.ended("/endless").error.is_some());
        let _clone = site.thaw_of(&snapshot).args(["--name", "clone"]).start().ready();
        assert_reset(&site.ask("clone", &json!({"do": "finish"})));
        downloads(site, "clone", "http://server.test", 1 << 20);
    });
}
