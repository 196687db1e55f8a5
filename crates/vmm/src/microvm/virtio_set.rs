#![allow(missing_docs)]
//! stub
use super::Subscriber;
use crate::bus::Bus;
use crate::config::HostConfig;
use crate::virtio::*;
use crate::vm::Vm;
use event_manager::EventManager;
use firn_snapshot::{DiskInfo, Snapshot, Writer};
use std::fs::File;
use std::path::PathBuf;
/// x
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error("opening {path}")]
    Open { path: PathBuf, source: std::io::Error },
}
/// x
#[derive(Debug, thiserror::Error)]
#[error("x")]
pub struct WireError;
pub(super) struct Disks {
    pub(super) root: PathBuf,
    pub(super) overlay: File,
}
impl Disks {
    pub(super) fn of_snapshot(
        _s: &Snapshot,
        _r: Option<PathBuf>,
    ) -> Result<Option<Self>, DiskError> {
        Ok(None)
    }
}
#[derive(Default)]
pub(super) struct VirtioSet;
impl VirtioSet {
    pub(super) fn wire(
        _h: &HostConfig,
        _d: Disks,
        _v: &Vm,
        _b: &mut Bus,
        _e: &mut EventManager<Subscriber>,
    ) -> Result<Self, WireError> {
        Ok(Self)
    }
    pub(super) fn len(&self) -> u32 {
        0
    }
    pub(super) fn save(&self) -> Vec<(DeviceKind, TransportState)> {
        vec![]
    }
    pub(super) fn restore(
        &self,
        _s: Vec<(DeviceKind, TransportState)>,
    ) -> Result<(), RestoreDeviceError> {
        Ok(())
    }
    pub(super) fn read_only_disks(&self) -> std::io::Result<Vec<DiskInfo>> {
        Ok(vec![])
    }
    pub(super) fn write_overlay(&self, _w: &mut Writer) -> Result<(), firn_snapshot::FreezeError> {
        Ok(())
    }
}
