//! What a monitor gets before an order, as the first message to it: its jail, its devices, and what
//! its supervisor knows of the host. The supervisor prepares it while the program begins.

use std::path::Path;
use std::sync::OnceLock;

use firn_base::{ErrorChain, get_or_try_init};
use firn_memory::{HostFacts, OwnDevices, OwnFiles};
use firn_vmm::{OpenKvm, OpenKvmError, SupportedCpuid, open_kvm_device};
use serde::{Deserialize, Serialize};

use super::connection::{Connection, ReceiveError};
use crate::descriptors::{Descriptors, Slot};
use crate::error::StartError;
use crate::jail::{Jail, JailMode, Shared};
use crate::life::KvmDevice;
use crate::spec::OpenedFile;

/// The message.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Setup {
    jail: JailMode,
    /// The network and the mount namespace that the monitors of the supervisor share.
    shared: Option<[Slot; 2]>,
    /// KVM; or why there is none, which a start reports once it needs it.
    kvm: Result<Kvm, ErrorChain>,
    nowhere: Slot,
    userfaultfd: Option<Slot>,
    /// None where they cannot be read: then what needs them has the error.
    host: Option<HostFacts>,
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

impl Setup {
    /// Sends the message: a jail's, and open devices with KVM's at `kvm`, which this opens.
    pub(super) fn send(
        connection: &Connection,
        jail: &Jail,
        devices: OwnDevices,
        kvm: &Path,
    ) -> std::io::Result<()> {
        let mut descriptors = Descriptors::default();
        let kvm = Kvm::add(kvm, &mut descriptors).map_err(|error| ErrorChain::of(&error));
        let shared = match jail.shared() {
            Some(Shared { network, root }) => {
                Some([descriptors.add(network.try_clone()?), descriptors.add(root.try_clone()?)])
            }
            None => None,
        };
        let setup = Self {
            jail: jail.mode(),
            shared,
            kvm,
            nowhere: descriptors.add(devices.nowhere),
            userfaultfd: devices.userfaultfd.map(|device| descriptors.add(device)),
            host: HostFacts::read().ok(),
        };
        connection.send(&setup, &descriptors)
    }

    /// Receives the message, and makes the devices and the facts those of this process. Returns
    /// KVM and the jail; `None` where the supervisor has ended.
    pub(super) fn receive(
        connection: &Connection,
    ) -> Result<Option<(KvmDevice, JailMode, Option<Shared>)>, StartError> {
        let (setup, mut descriptors) = match connection.receive::<Self>(None) {
            Ok(received) => received,
            Err(ReceiveError::Closed) => return Ok(None),
            Err(error) => return Err(StartError::Monitor(ErrorChain::of(&error))),
        };
        let mut take = |slot| descriptors.take(slot);
        let userfaultfd = setup.userfaultfd.map(&mut take).transpose()?;
        OwnFiles::open_with(OwnDevices { nowhere: take(setup.nowhere)?, userfaultfd });
        if let Some(host) = setup.host {
            host.know();
        }
        let shared = match setup.shared {
            Some([network, root]) => Some(Shared { network: take(network)?, root: take(root)? }),
            None => None,
        };
        let kvm = match setup.kvm {
            Ok(Kvm { device: OpenedFile { slot, path }, cpuid }) => {
                OpenKvm::with(take(slot)?, &path, &cpuid).into()
            }
            Err(reason) => KvmDevice(Err(reason)),
        };
        Ok(Some((kvm, setup.jail, shared)))
    }
}
