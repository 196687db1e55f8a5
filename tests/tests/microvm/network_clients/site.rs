//! The internet of a test: names and servers, in a network of the test's own.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use firn_required::add_loopback_address;
use firn_tests::{Firn, Monitor, World, client, python};
use serde_json::Value;

use super::plain::Plain;
use crate::name_server::NameServer;
use crate::network::{use_resolver, with_taps};
use crate::secrets::made;

/// The address of `server.test` and `s3.test`.
pub(super) const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
/// The address of `six.test`.
pub(super) const SIX: Ipv6Addr = Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 1);
/// How many addresses `many.test` has: their answer needs TCP.
pub(super) const MANY: u8 = 120;

const HTTPS: &str = include_str!("../../../clients/https.py");

fn addresses(name: &str) -> Vec<IpAddr> {
    match name {
        "server.test" | "s3.test" => vec![ADDRESS.into()],
        "six.test" => vec![SIX.into()],
        "many.test" => (1..=MANY).map(|last| Ipv4Addr::new(10, 9, 1, last).into()).collect(),
        _ => Vec::new(),
    }
}

/// Servers, and a world to run firn in.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) world: World,
    pub(super) dns: NameServer,
    pub(super) plain: Plain,
    // Dropped before the world.
    _https: Server,
}

/// A server's process, which is killed at the end.
#[derive(Debug)]
pub(super) struct Server(Child);

/// Runs a test in a network and a mount namespace of its own, where this host's resolver is the
/// test's.
pub(super) fn with_site(test: impl FnOnce(&Site) + Send) {
    // What Python needs of this host is mounted for all tests.
    let mut https = python();
    with_taps(1, |_| {
        add_loopback_address(SIX).unwrap();
        let world = World::default();
        use_resolver(&world, ADDRESS);
        let (dns, plain) = (NameServer::start(ADDRESS, addresses), Plain::start());
        let script = world.file("https.py");
        std::fs::write(&script, HTTPS).unwrap();
        let https = https.arg(script).arg(made("FIRN_CERTIFICATES"));
        let _https = Server::start(https).ready();
        test(&Site { world, dns, plain, _https });
    });
}

impl Site {
    /// The certificate authority of the servers.
    fn authority() -> PathBuf {
        made("FIRN_CERTIFICATES").join("ca.pem")
    }

    /// A thaw of this snapshot with a network that reaches the servers.
    pub(super) fn thaw_of(&self, snapshot: &Path) -> Firn {
        let egress = [IpAddr::from(ADDRESS), SIX.into()];
        let egress =
            egress.iter().flat_map(|address| ["--egress".into(), format!("allow:{address}")]);
        let thaw = self.world.firn(["thaw", "--net", "proxy", "--time-limit", "600"]).args(egress);
        thaw.arg(snapshot)
    }

    /// A thaw of the guest with the clients.
    pub(super) fn thaw(&self) -> Firn {
        self.thaw_of(client(&Self::authority()))
    }

    /// A guest with the clients.
    pub(super) fn guest(&self, name: &str) -> Monitor {
        self.thaw().args(["--name", name]).start().ready()
    }

    /// What the clients' function returns for an event.
    #[track_caller]
    pub(super) fn ask(&self, name: &str, event: &Value) -> Value {
        self.world.firn(["invoke", "--time-limit", "600", name, &event.to_string()]).run().json()
    }
}

impl Server {
    /// Starts a server in the test's network.
    #[track_caller]
    pub(super) fn start(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
        Self(command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }

    /// Waits for its first line.
    #[track_caller]
    fn ready(mut self) -> Self {
        let mut line = String::new();
        BufReader::new(self.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        self
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It fails for one that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
