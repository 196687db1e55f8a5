//! The devices of a monitor, which its supervisor opens: they are the first message to it.

use std::path::Path;
use std::sync::OnceLock;

use firn_base::{ErrorChain, get_or_try_init};
use firn_memory::{OwnDevices, OwnFiles};
use firn_vmm::{OpenKvm, OpenKvmError, SupportedCpuid, open_kvm_device};
use serde::{Deserialize, Serialize};

use super::connection::{Connection, ReceiveError};
use crate::descriptors::{Descriptors, Slot};
use crate::error::StartError;
use crate::life::KvmDevice;
use crate::spec::OpenedFile;

/// The message.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Devices {
    /// KVM; or why there is none, which a start reports once it needs it.
    kvm: Result<Kvm, ErrorChain>,
    nowhere: Slot,
    userfaultfd: Option<Slot>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Kvm {
    device: OpenedFile,
    /// What the supervisor has read once: a monitor would need longer for it than for its VM.
    cpuid: SupportedCpuid,
}

/// What KVM supports on this host.
static CPUID: OnceLock<SupportedCpuid> = OnceLock::new();

impl Kvm {
    fn add(path: &Path, descriptors: &mut Descriptors) -> Result<Self, OpenKvmError> {
        let device = open_kvm_device(path)?;
        let cpuid = get_or_try_init(&CPUID, || SupportedCpuid::read(&device, path))?.clone();
        Ok(Self {
            device: OpenedFile { slot: descriptors.add(device), path: path.to_owned() },
            cpuid,
        })
    }
}

impl Devices {
    /// Adds open devices to the descriptors, and KVM's device at `kvm`, which it opens.
    pub(super) fn add(devices: OwnDevices, kvm: &Path, descriptors: &mut Descriptors) -> Self {
        let kvm = Kvm::add(kvm, descriptors).map_err(|error| ErrorChain::of(&error));
        Self {
            kvm,
            nowhere: descriptors.add(devices.nowhere),
            userfaultfd: devices.userfaultfd.map(|device| descriptors.add(device)),
        }
    }

    /// Receives the message, and makes the devices those of this process. `None` where the
    /// supervisor has ended.
    pub(super) fn receive(connection: &Connection) -> Result<Option<KvmDevice>, StartError> {
        let (devices, mut descriptors) = match connection.receive::<Self>(None) {
            Ok(received) => received,
            Err(ReceiveError::Closed) => return Ok(None),
            Err(error) => return Err(StartError::Monitor(ErrorChain::of(&error))),
        };
        let userfaultfd = devices.userfaultfd.map(|slot| descriptors.take(slot)).transpose()?;
        let nowhere = descriptors.take(devices.nowhere)?;
        OwnFiles::open_with(OwnDevices { nowhere, userfaultfd });
        Ok(Some(match devices.kvm {
            Ok(Kvm { device: OpenedFile { slot, path }, cpuid }) => {
                OpenKvm::with(descriptors.take(slot)?, &path, &cpuid).into()
            }
            Err(reason) => KvmDevice(Err(reason)),
        }))
    }
}
