//! A snapshot of parts that are at hand, without a microVM.

use std::os::fd::OwnedFd;

use crate::disk::DiskSource;
use crate::freeze::{Begin, Begun, Freeze, FreezeReport, Seal};
use crate::freeze_error::FreezeError;
use crate::image::PageSource;
use crate::writer::{Machine, Writer};

/// All that a snapshot contains: a machine that [`freeze`](crate::freeze()) accepts, and that never
/// runs. Tests and tools write snapshots with it.
pub struct Contents<'a> {
    memory: &'a dyn PageSource,
    disk: Option<&'a mut dyn DiskSource>,
    machine: Machine,
    writer: Option<Writer>,
}

impl<'a> Contents<'a> {
    /// A machine with guest memory and without a writable disk.
    #[must_use]
    pub fn new(memory: &'a dyn PageSource, machine: Machine) -> Self {
        Self { memory, disk: None, machine, writer: None }
    }

    /// The same with a writable disk.
    #[must_use]
    pub fn with_disk(self, disk: &'a mut dyn DiskSource) -> Self {
        Self { disk: Some(disk), ..self }
    }
}

impl Freeze for Contents<'_> {
    type Error = FreezeError;

    fn write(&mut self, begin: Begin, files: Vec<OwnedFd>) -> Result<Begun, FreezeError> {
        let mut machine = self.machine.clone();
        machine.description.function = begin.function.or(machine.description.function);
        let disk = self.disk.as_mut().map(|disk| &mut **disk as &mut dyn DiskSource);
        let (writer, begun) = Writer::begin(machine, self.memory, disk, begin.target, files)?;
        self.writer = Some(writer);
        Ok(begun)
    }

    fn seal(&mut self, seal: Seal, files: Vec<OwnedFd>) -> Result<FreezeReport, FreezeError> {
        let writer = self.writer.take().ok_or(FreezeError::NotBegun)?;
        let disk = self.disk.as_mut().map(|disk| &mut **disk as &mut dyn DiskSource);
        writer.seal(self.memory, disk, seal, files)
    }
}
