//! Rules of a guest's network with host names.

use std::net::Ipv4Addr;

use firn_required::TapDevice;
use firn_tests::{World, workshop_folder};
use serde_json::{Value, json};

use crate::name_server::NameServer;
use crate::network::{use_resolver, with_taps};

/// The names of the server, and their addresses. The first one is globally reachable, not the
/// host's own, and without a host.
const NAMES: [(&str, Ipv4Addr); 3] = [
    ("api.example.com", Ipv4Addr::new(9, 9, 9, 2)),
    ("inner.example.com", Ipv4Addr::new(10, 9, 0, 1)),
    ("evil.example.net", Ipv4Addr::new(10, 9, 1, 1)),
];

/// Makes a name server of the test's the only resolver of this thread's and its children's.
fn use_own_resolver(world: &World) {
    NameServer::start(NAMES[1].1, |name| {
        let known = NAMES.iter().filter(|known| known.0 == name);
        known.map(|(_, address)| (*address).into()).collect()
    });
    use_resolver(world, NAMES[1].1);
}

/// How often each rule has decided, as a report has it.
fn matched(report: &Value) -> Vec<(&str, u64)> {
    let counts = report["egress"].as_array().unwrap().iter();
    counts
        .map(|count| (count["rule"].as_str().unwrap(), count["matched"].as_u64().unwrap()))
        .collect()
}

#[test]
fn a_guest_reaches_the_names_that_its_rules_have() {
    with_taps(2, |port| {
        let world = World::default();
        let _internet = TapDevice::create("internet", Ipv4Addr::new(9, 9, 9, 1)).unwrap();
        use_own_resolver(&world);
        let rules = ["deny:evil.example.net", "allow:api.example.com:443", "allow:10.9.0.0/16"];
        let rules = rules.into_iter().chain(["deny:0.0.0.0/0"]);
        let options: Vec<&str> = ["--net", "proxy"]
            .into_iter()
            .chain(rules.flat_map(|rule| ["--egress", rule]))
            .collect();
        let dial =
            |address: &str, port: u16| json!({"do": "dial", "address": address, "port": port});
        let boot = world.firn(["boot", "--name", "booted"]).args(&options);
        let mut booted = boot.arg(workshop_folder(&world.work())).start().ready();
        // By the resolver of the guest's system.
        let inner = dial("inner.example.com", port);
        assert_eq!(world.ask("booted", "machine", &inner), json!(null));
        let missing = world.ask_unchecked("booted", "machine", &dial("none.example.com", port));
        missing.function_error(&["gaierror"]);
        let evil = world.ask_unchecked("booted", "machine", &dial("evil.example.net", port));
        evil.function_error(&["OSError", "No route to host"]);
        let snapshot = world.file("snapshot");
        world.firn(["freeze", "booted"]).arg(&snapshot).run().ok();
        booted.end().ok();

        // The clone knows the addresses, and asks for no name. Both connects fail, each for its own
        // reason: one address is allowed and has no host, the other one is denied.
        for (address, port, decided) in [("9.9.9.2", 443, 1), ("10.9.1.1", port, 0)] {
            let event = json!({"module": "machine", "event": dial(address, port)}).to_string();
            let thaw = world.firn(["thaw", "--json", "--invoke", &event]).args(&options);
            let report = thaw.arg(&snapshot).run().function_error(&["OSError"]);
            let counts = matched(&report);
            assert_eq!(counts.len(), 6, "{counts:?}");
            // The host's kernel gives up after 3 s, when the guest sends its third SYN.
            for (number, (rule, count)) in counts.iter().enumerate() {
                assert_eq!(*count > 0, number == decided, "{rule}: {counts:?}");
            }
        }
        let wrong = world.firn(["thaw", "--net", "proxy", "--egress", "deny:all"]).arg(&snapshot);
        wrong.run().refused(&["egress rule \"deny:all\"", "a host name has a dot"]);
    });
}
