//! Large bodies, servers and guests that are slow or rude, and many connections.

use std::thread;
use std::time::Duration;

use firn_tests::at_once;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

use super::echo::{self, Echo};
use super::plain::{self, DRIP, EARLY};
use super::site::{ADDRESS, Site, with_site};
use super::{TIMED_OUT, assert_reset, downloads, run, until};

/// The most that a client or a server sends to one that takes nothing: what both kernels and the
/// proxy hold. Linux holds at most 4 MiB for a sender and 6 MiB for a receiver (tcp(7)).
const MOST_ON_THE_WAY: u64 = 24 << 20;

/// Fails unless the server gets what the guest uploads.
#[track_caller]
fn uploads(site: &Site, name: &str, to: &str, mebibytes: u64) {
    let make =
        format!("head -c {mebibytes}M /dev/urandom > /tmp/up && sha256sum /tmp/up | cut -c1-64");
    let put = format!("curl -sS --cacert $CA -T /tmp/up {to}/sha256");
    let ran = run(site, name, &format!("{make} && {put} && rm /tmp/up"));
    let out = ran["out"].as_str().unwrap();
    let (made, got) = out.split_once('\n').unwrap_or_else(|| panic!("{to}: {ran}"));
    assert_eq!((made.len(), made), (64, got), "{to}: {ran}");
}

#[test]
#[ignore = "long: make test-full"]
fn large_bodies_arrive_whole() {
    with_site(|site| {
        let _guest = site.guest("first");
        downloads(site, "first", "http://server.test", 256 << 20);
        uploads(site, "first", "http://server.test", 64);
        for name in ["server.test", "six.test"] {
            downloads(site, "first", &format!("https://{name}"), 32 << 20);
            uploads(site, "first", &format!("https://{name}"), 16);
        }
    });
}

#[test]
#[ignore = "long: make test-full"]
fn servers_that_fail_and_stall_are_seen_as_such() {
    with_site(|site| {
        let _guest = site.guest("first");
        let curl = |what: &str| run(site, "first", &format!("curl -sS -o /tmp/got {what}"));
        assert_reset(&curl("http://server.test/reset"));
        let reset = json!({"do": "fetch", "url": "http://server.test/reset"});
        assert_eq!(site.ask("first", &reset), json!({"error": "ConnectionResetError"}));

        // A client that gives up ends the server's side, too.
        let stalled = curl("-m 5 http://server.test/stall");
        assert_eq!(stalled["code"], TIMED_OUT, "{stalled}");
        site.plain.ended("/stall");
        site.plain.forget();
        let stalled = json!({"do": "fetch", "url": "http://server.test/stall", "limit": 3});
        assert_eq!(site.ask("first", &stalled), json!({"error": "TimeoutError"}));
        site.plain.ended("/stall");

        let slow = run(site, "first", "curl -sS http://server.test/drip");
        assert_eq!(slow, json!({"code": 0, "out": DRIP, "error": ""}));

        // A server that does not read, and a client that does not.
        let upload = "head -c 1G /dev/zero \
                      | curl -sS -m 10 -T - -w '%{size_upload}' http://server.test/deaf";
        let deaf = run(site, "first", upload);
        assert_eq!(deaf["code"], TIMED_OUT, "{deaf}");
        let sent: u64 = deaf["out"].as_str().unwrap().parse().unwrap();
        assert!((1 << 16..MOST_ON_THE_WAY).contains(&sent), "{deaf}");
        // What is on the way arrives, and then the end: a kernel gives up on its own much later.
        assert_eq!(site.plain.ended("/deaf").error, None);
        let request = "GET /endless HTTP/1.1\r\n\r\n";
        let hold = json!({"do": "hold", "address": ADDRESS, "port": plain::PORT, "send": request});
        site.ask("first", &hold);
        let stays = || {
            let sent = site.plain.endless();
            thread::sleep(Duration::from_secs(3));
            sent > 0 && sent == site.plain.endless()
        };
        until("the server waits for the client", stays);
        let sent = site.plain.endless();
        assert!(sent < MOST_ON_THE_WAY, "{sent}");
        site.ask("first", &json!({"do": "drop"}));
        assert!(site.plain.ended("/endless").error.is_some());
    });
}

#[test]
#[ignore = "long: make test-full"]
fn each_side_may_end_its_half_first() {
    with_site(|site| {
        let _guest = site.guest("first");
        let exchange = |path: &str, then: &str| {
            let send = format!("PUT {path} HTTP/1.1\r\n\r\n");
            let to = json!({"address": ADDRESS, "port": plain::PORT, "send": send});
            let mut event = to;
            event["do"] = json!("exchange");
            event["then"] = json!(then);
            event["megabytes"] = json!(4);
            let seen = site.ask("first", &event);
            let back = seen["back"].as_str().unwrap();
            (seen["digest"].clone(), back.rsplit("\r\n").next().unwrap().to_owned())
        };
        let (sent, back) = exchange("/late", "before");
        assert_eq!(sent, back);
        let (sent, back) = exchange("/early", "after");
        assert_eq!(back, EARLY);
        assert_eq!(sent, site.plain.ended("/early").digest);
    });
}

#[test]
#[ignore = "long: make test-full"]
fn sixteen_clones_upload_at_once() {
    const CLONES: usize = 16;
    with_site(|site| {
        let url = format!("https://server.test/together/{CLONES}");
        let event = json!({"do": "fetch", "url": url, "put": 4 << 20, "limit": 600}).to_string();
        let answers: [Value; CLONES] =
            at_once(|| site.thaw().args(["--invoke", &event]).run().json());
        for answer in answers {
            assert_eq!(answer, json!({"length": 4 << 20, "same": true}));
        }
    });
}

#[test]
#[ignore = "long: make test-full"]
fn a_guest_opens_ten_thousand_flows() {
    const FLOWS: usize = 10_000;
    with_site(|site| {
        let mut guest = site.guest("first");
        // The server is in this process.
        let before = getrlimit(Resource::Nofile);
        let more = Some(u64::try_from(FLOWS).unwrap() + 1000);
        setrlimit(Resource::Nofile, Rlimit { current: more, maximum: before.maximum.max(more) })
            .unwrap();
        let server = Echo::start();
        let open = json!({"do": "flows", "address": ADDRESS, "port": echo::PORT, "count": FLOWS});
        assert_eq!(site.ask("first", &open), json!({"open": FLOWS}));
        until("the server has all connections", || server.open() == FLOWS);
        assert_eq!(site.ask("first", &json!({"do": "use"})), json!({"open": FLOWS}));
        // Beside them there is room for others.
        downloads(site, "first", "https://server.test", 1 << 20);

        let snapshot = site.world.file("with-flows");
        site.world.firn(["freeze", "first"]).arg(&snapshot).run().ok();
        guest.end().ok();
        until("the freeze ends the connections", || server.open() == 0);
        let _clone = site.thaw_of(&snapshot).args(["--name", "clone"]).start().ready();
        let used = site.ask("clone", &json!({"do": "use"}));
        assert_eq!(used, json!({"ConnectionResetError": FLOWS}));
        downloads(site, "clone", "https://server.test", 1 << 20);
        setrlimit(Resource::Nofile, before).unwrap();
    });
}
