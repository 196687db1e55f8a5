//! The commands of `firn`, one file each.

pub(crate) mod aws;
pub(crate) mod bench;
pub(crate) mod boot;
pub(crate) mod doctor;
pub(crate) mod freeze;
pub(crate) mod image;
pub(crate) mod import;
pub(crate) mod invoke;
pub(crate) mod lab;
pub(crate) mod pager;
pub(crate) mod plan;
pub(crate) mod player;
pub(crate) mod pool;
pub(crate) mod profile;
pub(crate) mod record;
pub(crate) mod serve;
pub(crate) mod thaw;
pub(crate) mod tier;
pub(crate) mod top;
pub(crate) mod verify;
