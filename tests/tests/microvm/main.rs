//! Real functions in real microVMs, run with the `firn` command. The program is the one that
//! `FIRN` names, or `firn` of the PATH; it needs a KVM that runs Linux guests and the guest's files
//! in firn's cache. `make test` runs this here or in the lab.
//!
//! With `--test-threads=1`: tests share this computer's memory.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod answers;
mod clones;
mod damage;
mod dax;
mod endings;
mod errors;
mod freezing;
mod hugetlbfs;
mod jail;
mod marking;
mod name_server;
mod network;
mod network_captive;
mod network_clients;
mod network_freezes;
mod network_names;
mod nodes;
mod planners;
mod pool;
mod pool_thaws;
mod recording;
mod refusals;
mod secrets;
mod serve;
mod shapes;
mod tiers;
mod vsock;
