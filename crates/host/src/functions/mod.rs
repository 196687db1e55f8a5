//! What a function is to the daemon: its name, its configuration, its code and its versions.

mod code;
mod name;
mod version;

pub(crate) use code::{CodeError, CodeStore, MAX_ZIP};
pub(crate) use name::{Arn, NameError, Place, Target, is_alias};
pub(crate) use version::{
    Alias, Code, Function, LATEST, Runtime, Snapshot, SnapshotPlace, State, Version, now, revision,
};
