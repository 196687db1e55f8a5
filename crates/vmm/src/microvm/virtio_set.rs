//! The virtio devices of a microVM: their order, their windows, their connection to KVM and the
//! event loop.

use std::io;
use std::sync::Arc;

use event_manager::{EventManager, SubscriberOps};
use kvm_ioctls::IoEventAddress;
use parking_lot::Mutex;
use thiserror::Error;

use firn_base::error_chain;
use firn_memory::GuestMemory;
use firn_snapshot::{DiskInfo, DiskSource};

use super::disks::{Disks, OverlayBase, ROOT, RootInfo};
use super::event;
use crate::arch::layout;
use crate::bus::{Bus, MmioDevice, OverlapError};
use crate::config::Scratch;
use crate::kvm::{Vm, VmError};
use crate::subscriber::Subscriber;
use crate::virtio::{
    Balloon, Block, Disk, Net, Network, NetworkConfig, NetworkEnd, NewDeviceError, OpenDiskError,
    OverlayDisk, PageDiscard, RestoreDeviceError, Rng, TransportState, VirtioDevice, VirtioMmio,
    Vsock, VsockListener,
};

/// Name of the writable disk to the guest.
const OVERLAY: &str = "overlay";

/// The devices' names in error messages, in the order of their windows.
const NAMES: [&str; 6] = ["root disk", "writable disk", "vsock", "entropy", "balloon", "network"];

/// The guest's vsock address. Every guest has the same address, which only its monitor uses.
const GUEST_CID: u64 = 3;

/// Why a virtio device was not created or connected.
#[derive(Debug, Error)]
pub enum WireError {
    /// A disk cannot be used.
    #[error(transparent)]
    Disk(#[from] OpenDiskError),
    /// A device cannot be created.
    #[error(transparent)]
    Device(#[from] NewDeviceError),
    /// The microVM has disks, and the caller passed no listener for its vsock: a defect of firn.
    #[error("the microVM has a vsock device, but no listener was passed for it")]
    NoVsock,
    /// The vsock's sockets cannot be polled.
    #[error("cannot poll the vsock's sockets")]
    Vsock(#[source] io::Error),
    /// The guest has no network device to connect.
    #[error("the guest has no network device: boot it with --net, and freeze it again")]
    NoNetwork,
    /// The backend of the network device cannot be polled.
    #[error("cannot poll the host's side of the network")]
    Network(#[source] io::Error),
    /// An interrupt or a notification cannot be connected.
    #[error("cannot connect a virtio device")]
    Connect(#[from] VmError),
    /// Its window overlaps another's.
    #[error(transparent)]
    Overlap(#[from] OverlapError),
    /// An event descriptor cannot be created.
    #[error("cannot create an event descriptor")]
    EventFd(#[source] io::Error),
}

/// What decides a guest's devices: it has all, the network only where there is one.
pub(super) struct Devices {
    pub(super) disks: Disks,
    pub(super) network: Option<NetworkConfig>,
}

/// What the devices use of the host.
pub(super) struct Connected {
    pub(super) vsock: Option<VsockListener>,
    pub(super) scratch: Option<Scratch>,
    pub(super) network: Network,
}

/// The devices of one microVM, none or all of them, in the order of their windows.
#[derive(Default)]
pub(super) struct VirtioSet {
    transports: Vec<Arc<Mutex<VirtioMmio>>>,
    disks: Option<AttachedDisks>,
    most_sockets: usize,
}

struct AttachedDisks {
    root_info: RootInfo,
    overlay: Arc<Mutex<VirtioMmio<Block>>>,
}

impl VirtioSet {
    /// Creates every device and connects it: registers to the bus, notifications and interrupt to
    /// KVM, queues to the event loop.
    pub(super) fn wire(
        devices: Devices,
        connected: Connected,
        vm: &Vm,
        bus: &mut Bus,
        events: &mut EventManager<Subscriber>,
    ) -> Result<Self, WireError> {
        let Devices { disks, network: config } = devices;
        let Connected { vsock, scratch, network } = connected;
        let mut wiring = Wiring { vm, bus, events, set: Self::default() };
        wiring.add(Block::new(Disk::ReadOnly(disks.root), ROOT))?;
        let (file, limit) = match scratch {
            Some(Scratch { file, limit }) => (Some(file), limit),
            None => (None, u64::MAX),
        };
        let overlay = match disks.overlay {
            OverlayBase::File(base) => OverlayDisk::new(base, file)?,
            OverlayBase::Extent(content) => OverlayDisk::of_extent(content, file)?,
        };
        let overlay = overlay.grown_to(disks.disk_size)?.with_limit(limit);
        let overlay = wiring.add(Block::new(Disk::Overlay(overlay), OVERLAY))?;
        let vsock = vsock.ok_or(WireError::NoVsock)?;
        wiring.add(Vsock::new(GUEST_CID, vsock).map_err(WireError::Vsock)?)?;
        wiring.add(Rng::new())?;
        wiring.add(Balloon::new(FreePages(vm.memory.clone())))?;
        let most_sockets = network.end.as_ref().map_or(0, NetworkEnd::most_sockets);
        match config {
            Some(config) => {
                wiring.add(Net::new(config, network).map_err(WireError::Network)?)?;
            }
            None if network.end.is_some() || network.metadata.is_some() => {
                return Err(WireError::NoNetwork);
            }
            None => {}
        }
        let mut set = wiring.set;
        set.disks = Some(AttachedDisks { root_info: disks.root_info, overlay });
        set.most_sockets = most_sockets;
        Ok(set)
    }

    /// The number of devices.
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.transports.len()).unwrap_or(u32::MAX)
    }

    /// The most sockets of the host that the devices have at once.
    pub(super) const fn most_sockets(&self) -> usize {
        self.most_sockets
    }

    /// The errors of devices that stopped because the guest violated the virtio specification.
    pub(super) fn errors(&self) -> Vec<String> {
        let errors = self.transports.iter().zip(NAMES).filter_map(|(transport, name)| {
            let transport = transport.lock();
            let error = transport.error()?;
            Some(format!("the guest's {name} device stopped: {}", error_chain(error)))
        });
        errors.collect()
    }

    pub(super) fn save(&self) -> Vec<TransportState> {
        self.transports.iter().map(|transport| transport.lock().save()).collect()
    }

    /// Restores the state of an equal set, and serves the requests in flight.
    pub(super) fn restore(&self, states: &[TransportState]) -> Result<(), RestoreDeviceError> {
        if states.len() != self.transports.len() {
            return Err(RestoreDeviceError::DeviceCount {
                offered: self.transports.len(),
                saved: states.len(),
            });
        }
        for (transport, state) in self.transports.iter().zip(states) {
            transport.lock().restore(state)?;
        }
        for transport in &self.transports {
            transport.lock().kick_all();
        }
        Ok(())
    }

    /// The disks that are outside a snapshot, as its manifest describes them.
    pub(super) fn read_only_disks(&self) -> Result<Vec<DiskInfo>, firn_snapshot::DiskError> {
        self.disks.iter().map(|disks| disks.root_info.describe()).collect()
    }

    /// Size of the writable disk, bytes; 0 if there is none.
    pub(super) fn written_disk_size(&self) -> u64 {
        self.disks.as_ref().map_or(0, |disks| disks.overlay.lock().device().disk().size())
    }

    /// The most memory that what the guest writes to its disk can take, bytes.
    pub(super) fn written_disk_memory(&self) -> u64 {
        let Some(disks) = &self.disks else { return 0 };
        match disks.overlay.lock().device().disk() {
            Disk::Overlay(disk) => disk.memory(),
            Disk::ReadOnly(_) => 0,
        }
    }

    /// Passes the writable disk's content, as the guest sees it, to `read`; `None` if there is no
    /// such disk.
    pub(super) fn with_overlay<T>(&self, read: impl FnOnce(Option<&mut dyn DiskSource>) -> T) -> T {
        let Some(disks) = &self.disks else { return read(None) };
        match disks.overlay.lock().device().disk() {
            Disk::Overlay(disk) => read(Some(&mut disk.content())),
            Disk::ReadOnly(_) => read(None),
        }
    }
}

struct Wiring<'a> {
    vm: &'a Vm,
    bus: &'a mut Bus,
    events: &'a mut EventManager<Subscriber>,
    set: VirtioSet,
}

impl Wiring<'_> {
    fn add<D: VirtioDevice + 'static>(
        &mut self,
        device: D,
    ) -> Result<Arc<Mutex<VirtioMmio<D>>>, WireError> {
        let index = self.set.len();
        let window = u64::from(layout::VIRTIO_MMIO + index * layout::VIRTIO_MMIO_LEN);
        let interrupt = event().map_err(WireError::EventFd)?;
        self.vm.interrupt(&interrupt, layout::VIRTIO_GSI + index)?;
        let transport = VirtioMmio::new(device, self.vm.memory.vm_memory(), interrupt)?;
        let notify = IoEventAddress::Mmio(window + VirtioMmio::<D>::NOTIFY);
        for (queue, notification) in (0u32..).zip(transport.notifications()) {
            self.vm.notify(notification, &notify, queue)?;
        }
        let transport = Arc::new(Mutex::new(transport));
        self.bus.add(window, u64::from(layout::VIRTIO_MMIO_LEN), transport.clone())?;
        self.events.add_subscriber(Subscriber::new(transport.clone()));
        self.set.transports.push(transport.clone());
        Ok(transport)
    }
}

impl<D: VirtioDevice> MmioDevice for VirtioMmio<D> {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        VirtioMmio::read(self, offset, data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        VirtioMmio::write(self, offset, data);
    }
}

/// Returns free guest memory to the host on behalf of the balloon.
struct FreePages(Arc<GuestMemory>);

impl PageDiscard for FreePages {
    fn discard(&self, addr: u64, len: u64) -> io::Result<()> {
        self.0.discard(addr, len).map_err(io::Error::other)
    }
}
