//! The program in a session of `firn bench thaw`, where Firecracker itself would be.

use std::path::Path;

use firn_bench::player::PlayerOptions;
use firn_bench::traces::load;
use firn_bench::{Cache, StockError, StockPlayer};

use crate::player::has_kvm;

#[test]
fn a_player_is_snapshotted_once_and_loaded_in_each_run() {
    if !has_kvm() {
        return;
    }
    let program = Path::new(env!("CARGO_BIN_EXE_firn-firecracker"));
    let trace = load("sequential-write:4M").unwrap();
    let player = StockPlayer::make(program, &trace, &PlayerOptions::default(), None).unwrap();
    assert_eq!(player.trace(), trace.name);
    for _ in 0..2 {
        player.run(Cache::Cached).unwrap();
    }
}

#[test]
fn a_program_without_the_api_is_an_error() {
    if !has_kvm() {
        return;
    }
    let trace = load("sequential-read:4M").unwrap();
    let make = |program: &str| {
        StockPlayer::make(program.as_ref(), &trace, &PlayerOptions::default(), None).unwrap_err()
    };
    assert!(matches!(make("/bin/false"), StockError::Ended));
    assert!(matches!(make("/nowhere"), StockError::Io { .. }));
}
