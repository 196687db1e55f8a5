//! The guest's network.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;

use firn_required::{TapDevice, in_own_network};
use firn_tests::{World, workshop, workshop_folder};
use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde_json::json;

/// Runs a test in a network namespace of its own, where a server echoes on each address
/// `10.9.N.1` of a tap device `tapN`.
pub(crate) fn with_taps(count: u8, test: impl FnOnce(u16) + Send) {
    in_own_network(|| {
        let address = |number| Ipv4Addr::new(10, 9, number, 1);
        let device = |number| TapDevice::create(&format!("tap{number}"), address(number)).unwrap();
        let _devices: Vec<TapDevice> = (0..count).map(device).collect();
        let server = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = server.local_addr().unwrap().port();
        // It ends with the test program.
        thread::spawn(move || {
            for connection in server.incoming() {
                thread::spawn(|| echo(connection.unwrap()));
            }
        });
        test(port);
    });
}

/// Makes a name server the only resolver of this thread and its children, in a mount namespace of
/// their own.
pub(crate) fn use_resolver(world: &World, address: Ipv4Addr) {
    const RESOLVERS: &str = "/etc/resolv.conf";
    // SAFETY: the namespace is of this thread alone, and no descriptor changes.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
    let own = world.file("resolv.conf");
    std::fs::write(&own, format!("nameserver {address}\n")).unwrap();
    // The lab has none. Elsewhere it stays as it is.
    OpenOptions::new().append(true).create(true).open(RESOLVERS).unwrap();
    mount_bind(own, RESOLVERS).unwrap();
}

fn echo(mut connection: TcpStream) {
    let mut buffer = vec![0; 1 << 16];
    // A client that is killed ends the connection.
    while let Ok(len @ 1..) = connection.read(&mut buffer) {
        if connection.write_all(&buffer[..len]).is_err() {
            return;
        }
    }
}

#[test]
fn a_guest_reaches_the_host_by_a_tap_device_before_and_after_a_freeze() {
    with_taps(2, |port| {
        let world = World::default();
        let echoes = |name: &str, network: u8, mebibytes: u32| {
            let address = format!("10.9.{network}.1");
            let event =
                json!({"do": "echo", "address": address, "port": port, "mebibytes": mebibytes});
            assert_eq!(world.ask(name, "machine", &event), json!(true), "{name}");
        };
        let boot = world.firn(["boot", "--name", "booted", "--net"]);
        let boot = boot.arg("tap:tap0,address=10.9.0.2/24,gateway=10.9.0.1,dns=10.9.0.1,mtu=9000");
        let mut booted = boot.arg(workshop_folder(&world.work())).start().ready();
        echoes("booted", 0, 8);
        let servers = json!({"do": "read", "path": "/etc/resolv.conf"});
        assert_eq!(world.ask("booted", "machine", &servers), json!("nameserver 10.9.0.1\n"));
        let mtu = json!({"do": "read", "path": "/sys/class/net/eth0/mtu"});
        assert_eq!(world.ask("booted", "machine", &mtu), json!("9000\n"));
        let busy = world.firn(["thaw", "--net", "tap:tap0"]).arg(workshop()).run();
        busy.refused(&["tap0 is in use"]);
        let snapshot = world.file("snapshot");
        world.firn(["freeze", "booted"]).arg(&snapshot).run().ok();
        booted.end().ok();

        // A clone keeps its address on the same device, and gets another on another.
        let thaw = |name: &str, net: &str| {
            world.firn(["thaw", "--name", name, "--net", net]).arg(&snapshot).start().ready()
        };
        let _same = thaw("same", "tap:tap0");
        let _other = thaw("other", "tap:tap1,address=10.9.1.2/24,to-guest=4M,from-guest=4M");
        echoes("same", 0, 8);
        echoes("other", 1, 2);
        // Without a network a guest with a device still answers.
        let answer = world.thaw_and_ask(&snapshot, "machine", &mtu);
        assert_eq!(answer, json!("9000\n"));
        let without = world.firn(["thaw", "--net", "tap:tap9"]).arg(&snapshot).run();
        without.refused(&["no network interface tap9", "ip tuntap add"]);
    });
}

#[test]
fn a_guest_without_a_device_gets_no_network() {
    with_taps(1, |_| {
        let world = World::default();
        let thaw = world.firn(["thaw", "--net", "tap:tap0"]).arg(workshop()).run();
        thaw.refused(&["the guest has no network device", "boot it with --net"]);
    });
}

#[test]
fn a_guest_has_a_network_that_its_clones_share() {
    with_taps(1, |port| {
        let world = World::default();
        let egress = format!("allow:10.9.0.1:{port}");
        let options = ["--net", "proxy", "--egress", &egress];
        let to = |port: u16| json!({"address": "10.9.0.1", "port": port});
        let ask = |name: &str, what: &str, mut event: serde_json::Value| {
            event["do"] = json!(what);
            world.ask(name, "machine", &event)
        };
        let echoes = |name: &str, mebibytes: u32| {
            let event = json!({"address": "10.9.0.1", "port": port, "mebibytes": mebibytes});
            assert_eq!(ask(name, "echo", event), json!(true), "{name}");
        };
        let boot = world.firn(["boot", "--name", "booted"]).args(options);
        let mut booted = boot.arg(workshop_folder(&world.work())).start().ready();
        echoes("booted", 8);
        (0..20).for_each(|_| drop(ask("booted", "dial", to(port))));
        assert_eq!(ask("booted", "use", json!({})), json!(vec!["open"; 20]));
        // What no rule allows, and no network of the internet has.
        let event = json!({"do": "dial", "address": "10.9.0.1", "port": port ^ 1});
        let denied = world.ask_unchecked("booted", "machine", &event);
        denied.function_error(&["OSError"]);
        let snapshot = world.file("snapshot");
        world.firn(["freeze", "booted"]).arg(&snapshot).run().ok();
        booted.end().ok();

        let thaw = |name: &str| {
            let thaw = world.firn(["thaw", "--name", name]).args(options);
            thaw.arg(&snapshot).start().ready()
        };
        let clones = ["first", "second"];
        let _monitors = clones.map(thaw);
        for name in clones {
            // At once, not after a time-out.
            assert_eq!(ask(name, "use", json!({})), json!(vec!["ConnectionResetError"; 20]));
            echoes(name, 2);
        }
        // A clone with another policy.
        let thaw = world.firn(["thaw", "--name", "denied", "--net", "proxy"]);
        let _denied = thaw.arg(&snapshot).start().ready();
        let event = json!({"do": "dial", "address": "10.9.0.1", "port": port});
        world.ask_unchecked("denied", "machine", &event).function_error(&["OSError"]);
    });
}

#[test]
fn a_guest_reads_its_metadata_and_a_clone_that_of_its_own() {
    with_taps(1, |_| {
        let world = World::default();
        let document = |name: &str, text: &str| {
            let file = world.file(name);
            std::fs::write(&file, text).unwrap();
            file.display().to_string()
        };
        let long = "x".repeat(50_000);
        let first = json!({"latest": {"meta-data": {"id": "one", "long": long}}}).to_string();
        let first = document("first.json", &first);
        let second = document("second.json", r#"{"latest": {"meta-data": {"id": "two"}}}"#);
        let fetch = |name: &str, path: &str, more: serde_json::Value| {
            let mut event = json!({"do": "fetch", "path": path});
            for (key, value) in more.as_object().unwrap() {
                event[key] = value.clone();
            }
            world.ask(name, "machine", &event)
        };
        let id = "/latest/meta-data/id";
        let boot = world.firn(["boot", "--name", "booted", "--net", "proxy", "--metadata", &first]);
        let mut booted = boot.arg(workshop_folder(&world.work())).start().ready();
        assert_eq!(fetch("booted", id, json!({})), json!([200, "one"]));
        assert_eq!(fetch("booted", "/latest/meta-data/long", json!({})), json!([200, long]));
        let accepts_json = json!({"headers": {"Accept": "application/json"}});
        assert_eq!(fetch("booted", id, accepts_json), json!([200, "\"one\""]));
        assert_eq!(fetch("booted", "/latest", json!({})), json!([200, "meta-data/"]));
        let token = |name: &str| {
            let headers = json!({"X-aws-ec2-metadata-token-ttl-seconds": "60"});
            let put = json!({"method": "PUT", "headers": headers});
            let answer = fetch(name, "/latest/api/token", put);
            assert_eq!(answer[0], 200, "{answer}");
            answer[1].as_str().unwrap().to_owned()
        };
        let with =
            |token: &str| json!({"headers": {"X-aws-ec2-metadata-token": token}, "pool": true});
        let early = token("booted");
        assert_eq!(fetch("booted", id, with(&early)), json!([200, "one"]));
        let snapshot = world.file("snapshot");
        world.firn(["freeze", "booted"]).arg(&snapshot).run().ok();
        booted.end().ok();

        // By sockets, by a tap device, and with nothing but metadata.
        let guarded = format!("{second},version=2");
        let nets: [&[&str]; 3] =
            [&["--net", "proxy"], &["--net", "tap:tap0,address=10.9.0.2/24"], &[]];
        for (number, net) in nets.into_iter().enumerate() {
            let name = &format!("clone{number}");
            let thaw = world.firn(["thaw", "--name", name, "--metadata", &guarded]).args(net);
            let _clone = thaw.arg(&snapshot).start().ready();
            // The connection of before the freeze; then tokens of before it are not valid.
            let reset = fetch(name, id, with(&early));
            assert_eq!(reset, json!("ConnectionResetError"), "{name}");
            for more in [json!({}), with(&early)] {
                let answer = fetch(name, id, more);
                assert_eq!(answer[0], 401, "{name}: {answer}");
            }
            assert_eq!(fetch(name, id, with(&token(name))), json!([200, "two"]), "{name}");
        }
        // Another thaw has no metadata: neither an answer nor a route is left.
        let thaw = world.firn(["thaw", "--name", "without", "--net", "proxy"]);
        let _without = thaw.arg(&snapshot).start().ready();
        assert_eq!(fetch("without", id, json!({"pool": true})), json!("ConnectionResetError"));
        assert_eq!(fetch("without", id, json!({})), json!("OSError"));
        let routes = json!({"do": "read", "path": "/proc/net/route"});
        let routes = world.ask("without", "machine", &routes).to_string();
        assert!(routes.contains("eth0") && !routes.contains("FEA9FEA9"), "{routes}");
        let thaw = world.firn(["thaw", "--metadata", &second]).arg(workshop()).run();
        thaw.refused(&["the guest has no network device"]);
    });
}
