//! Clones draw different random values, whatever draws them, and whenever after the restore.

use std::collections::BTreeMap;

use firn_tests::{World, at_once, folder};
use serde_json::Value;

const DRAWS: &str = include_str!("../../functions/draws/handler.py");

/// The values that eight clones thawed at once return, each with what drew it. `values` is a list
/// of objects for each drawer.
#[track_caller]
fn assert_all_differ(clones: &[Value], drawers: &[&str]) {
    let mut seen = BTreeMap::new();
    for (number, clone) in clones.iter().enumerate() {
        for drawer in drawers {
            let draws = clone[drawer].as_array().unwrap();
            assert!(!draws.is_empty(), "the {drawer} of clone {number} drew nothing: {clone}");
            for (position, draw) in draws.iter().enumerate() {
                for (kind, value) in draw.as_object().unwrap() {
                    let here = format!("{kind}, draw {position} of the {drawer} of clone {number}");
                    let value = value.as_str().unwrap().to_owned();
                    let there = seen.insert((kind.clone(), value.clone()), here.clone());
                    assert!(there.is_none(), "{value} is {here} and {}", there.unwrap());
                }
            }
        }
    }
}

#[test]
fn eight_clones_draw_different_values() {
    let image = std::env::var("FIRN_CLONES_IMAGE").expect("make guest-tests sets it");
    let world = World::default();
    let boot = world.firn(["boot", "--name", "first", "--root", &image]);
    let mut first = boot.arg(folder(&world.work(), "draws", DRAWS)).start().ready();
    world.firn(["freeze", "first", "snapshot"]).run().ok();
    first.end().ok();
    let clones: [Value; 8] =
        at_once(|| world.firn(["thaw", "--invoke", "{}", "snapshot"]).run().json());
    assert_all_differ(&clones, &["thread", "child", "request"]);
    for kind in ["random", "ssl", "urandom", "numpy", "ec", "x25519"] {
        assert!(clones[0]["request"][0][kind].is_string(), "{kind}: {}", clones[0]);
    }
}
