//! The virtio devices of a microVM: which there are, where, and over which files.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event_manager::{EventManager, SubscriberOps};
use kvm_ioctls::IoEventAddress;
use thiserror::Error;

use firn_base::error_chain;
use firn_memory::GuestMemory;
use firn_snapshot::{DiskInfo, DiskSource, Overlay, ReadAt, Snapshot};

use super::Subscriber;
use super::parts::event;
use crate::arch::layout;
use crate::bus::{Bus, MmioDevice, OverlapError};
use crate::open_file::{OpenFile, OpenFileError};
use crate::virtio::{
    Balloon, Block, Disk, NewDeviceError, OpenDiskError, OverlayDisk, PageDiscard, ReadOnlyDisk,
    RestoreDeviceError, Rng, TransportState, VirtioDevice, VirtioMmio, Vsock, VsockListener,
};
use crate::vm::{Vm, VmError};

/// Name of the root disk in a snapshot's manifest, and to the guest.
const ROOT: &str = "root";
/// Name of the writable disk to the guest.
const OVERLAY: &str = "overlay";

/// The devices in the order of their windows, for people to read.
const NAMES: [&str; 5] = ["root disk", "writable disk", "vsock", "entropy", "balloon"];

/// The guest's vsock address. Every guest has the same: only its own monitor sees it.
const GUEST_CID: u64 = 3;

/// Why a disk cannot be used.
#[derive(Debug, Error)]
pub enum DiskError {
    /// It is not a disk image.
    #[error(transparent)]
    Open(#[from] OpenDiskError),
    /// The snapshot's root disk cannot be opened.
    #[error(
        "cannot open the snapshot's root disk; if the file has moved, pass its new path with --root"
    )]
    Root(#[source] OpenFileError),
    /// The snapshot has a root disk, and the caller opened none: a defect of firn.
    #[error("the snapshot has a root disk, but no open file was passed for it")]
    NoRoot,
    /// The open file is not the disk that the snapshot was made with.
    #[error(
        "cannot use the snapshot's root disk; if the file has moved, pass its new path with --root"
    )]
    OfSnapshot(#[source] firn_snapshot::DiskError),
    /// A disk's descriptor cannot be duplicated.
    #[error("cannot duplicate the descriptor of a disk")]
    Duplicate(#[source] io::Error),
    /// The snapshot does not hold what its manifest says.
    #[error("the snapshot has a root disk, but no writable one")]
    NoOverlay,
}

/// Why a virtio device was not made or connected.
#[derive(Debug, Error)]
pub enum WireError {
    /// A disk cannot be used.
    #[error(transparent)]
    Disk(#[from] OpenDiskError),
    /// A device cannot be made.
    #[error(transparent)]
    Device(#[from] NewDeviceError),
    /// The microVM has disks, and the caller passed no listener for its vsock: a defect of firn.
    #[error("the microVM has a vsock device, but no listener was passed for it")]
    NoVsock,
    /// The vsock's sockets cannot be watched.
    #[error("watching the vsock's sockets")]
    Vsock(#[source] io::Error),
    /// An interrupt or a notification cannot be connected.
    #[error("connecting a virtio device")]
    Connect(#[from] VmError),
    /// Its window overlaps another's.
    #[error(transparent)]
    Overlap(#[from] OverlapError),
    /// An event descriptor cannot be made.
    #[error("making an event descriptor")]
    EventFd(#[source] io::Error),
}

/// The files behind a microVM's disks.
pub(super) struct Disks {
    root: ReadOnlyDisk,
    root_info: RootInfo,
    overlay: OverlayBase,
}

/// What a manifest says of the root disk.
enum RootInfo {
    /// Known from the snapshot that the microVM was restored from.
    Known(DiskInfo),
    /// Not digested yet: the disk of a boot, open once more, and its path.
    Booted(OpenFile),
}

/// What the writable disk held at first.
enum OverlayBase {
    File(ReadOnlyDisk),
    Extent(Arc<dyn ReadAt>),
}

impl Disks {
    /// The disks of a microVM that boots.
    pub(super) fn of_boot(root: OpenFile, overlay: OpenFile) -> Result<Self, DiskError> {
        let file = root.file.try_clone().map_err(DiskError::Duplicate)?;
        Ok(Self {
            root_info: RootInfo::Booted(OpenFile { file, path: root.path.clone() }),
            root: ReadOnlyDisk::new(root)?,
            overlay: OverlayBase::File(ReadOnlyDisk::new(overlay)?),
        })
    }

    /// The disks of a snapshot's microVM, if it has any; `root` is the open root disk.
    pub(super) fn of_snapshot(
        snapshot: &Snapshot,
        root: Option<OpenFile>,
    ) -> Result<Option<Self>, DiskError> {
        let Some(info) = root_info(snapshot) else { return Ok(None) };
        let root = root.ok_or(DiskError::NoRoot)?;
        let info = DiskInfo { path: root.path.clone(), ..info.clone() };
        info.check_file(&root.file).map_err(DiskError::OfSnapshot)?;
        let overlay = match snapshot.overlay().ok_or(DiskError::NoOverlay)? {
            Overlay::File(file) => {
                let file = file.try_clone().map_err(DiskError::Duplicate)?;
                let path = snapshot.path().to_owned();
                OverlayBase::File(ReadOnlyDisk::new(OpenFile { file, path })?)
            }
            Overlay::Tail(content) => OverlayBase::Extent(content.clone()),
        };
        Ok(Some(Self { root: ReadOnlyDisk::new(root)?, root_info: RootInfo::Known(info), overlay }))
    }
}

/// Opens the root disk that a snapshot's manifest names, if it names one; at `moved` where the file has moved since the freeze.
/// [`Microvm::restore`](super::Microvm::restore) checks that it is the disk of the freeze.
///
/// # Errors
/// The file cannot be opened.
pub fn open_root_disk(
    snapshot: &Snapshot,
    moved: Option<&Path>,
) -> Result<Option<OpenFile>, DiskError> {
    let Some(info) = root_info(snapshot) else { return Ok(None) };
    OpenFile::open(moved.unwrap_or(&info.path)).map(Some).map_err(DiskError::Root)
}

fn root_info(snapshot: &Snapshot) -> Option<&DiskInfo> {
    snapshot.manifest().description.disks.iter().find(|disk| disk.id == ROOT)
}

/// The devices of one microVM, none or all of them, in the order of their windows.
#[derive(Default)]
pub(super) struct VirtioSet {
    transports: Vec<Arc<Mutex<VirtioMmio>>>,
    disks: Option<AttachedDisks>,
}

struct AttachedDisks {
    root_info: RootInfo,
    overlay: Arc<Mutex<VirtioMmio<Block>>>,
}

impl VirtioSet {
    /// Makes every device and connects it: registers to the bus, notifications and interrupt to KVM,
    /// queues to the event loop.
    pub(super) fn wire(
        vsock: Option<VsockListener>,
        scratch: Option<BorrowedFd<'_>>,
        disks: Disks,
        vm: &Vm,
        bus: &mut Bus,
        events: &mut EventManager<Subscriber>,
    ) -> Result<Self, WireError> {
        let mut wiring = Wiring { vm, bus, events, set: Self::default() };
        wiring.add(Block::new(Disk::ReadOnly(disks.root), ROOT))?;
        let overlay = match disks.overlay {
            OverlayBase::File(file) => OverlayDisk::new(file, scratch)?,
            OverlayBase::Extent(content) => OverlayDisk::of_extent(content, scratch)?,
        };
        let overlay = wiring.add(Block::new(Disk::Overlay(overlay), OVERLAY))?;
        let vsock = vsock.ok_or(WireError::NoVsock)?;
        wiring.add(Vsock::new(GUEST_CID, vsock).map_err(WireError::Vsock)?)?;
        wiring.add(Rng::new())?;
        wiring.add(Balloon::new(FreePages(vm.memory.clone())))?;
        let mut set = wiring.set;
        set.disks = Some(AttachedDisks { root_info: disks.root_info, overlay });
        Ok(set)
    }

    /// How many devices there are.
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.transports.len()).unwrap_or(u32::MAX)
    }

    /// Why devices stopped, of those that did: their guest broke the rules.
    pub(super) fn errors(&self) -> Vec<String> {
        let errors = self.transports.iter().zip(NAMES).filter_map(|(transport, name)| {
            let transport = lock(transport);
            let error = transport.error()?;
            Some(format!("the guest's {name} device stopped: {}", error_chain(error)))
        });
        errors.collect()
    }

    pub(super) fn save(&self) -> Vec<TransportState> {
        self.transports.iter().map(|transport| lock(transport).save()).collect()
    }

    /// Takes over the state of an equal set, and serves what was in flight.
    pub(super) fn restore(&self, states: &[TransportState]) -> Result<(), RestoreDeviceError> {
        if states.len() != self.transports.len() {
            return Err(RestoreDeviceError::DeviceCount {
                offered: self.transports.len(),
                saved: states.len(),
            });
        }
        for (transport, state) in self.transports.iter().zip(states) {
            lock(transport).restore(state)?;
        }
        for transport in &self.transports {
            lock(transport).kick_all();
        }
        Ok(())
    }

    /// The disks that lie outside a snapshot.
    pub(super) fn read_only_disks(&self) -> Result<Vec<DiskInfo>, firn_snapshot::DiskError> {
        match &self.disks {
            None => Ok(Vec::new()),
            Some(AttachedDisks { root_info: RootInfo::Known(info), .. }) => Ok(vec![info.clone()]),
            Some(AttachedDisks { root_info: RootInfo::Booted(root), .. }) => {
                Ok(vec![DiskInfo::of_file(ROOT, &root.path, &root.file)?])
            }
        }
    }

    /// Shows the writable disk's content as the guest sees it, if there is such a disk.
    pub(super) fn with_overlay<T>(&self, look: impl FnOnce(Option<&mut dyn DiskSource>) -> T) -> T {
        let Some(disks) = &self.disks else { return look(None) };
        match lock(&disks.overlay).device().disk() {
            Disk::Overlay(disk) => look(Some(&mut disk.content())),
            Disk::ReadOnly(_) => look(None),
        }
    }
}

fn lock<D: VirtioDevice + ?Sized>(
    transport: &Mutex<VirtioMmio<D>>,
) -> MutexGuard<'_, VirtioMmio<D>> {
    transport.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.events.add_subscriber(transport.clone());
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

/// The balloon's way to give guest memory back to the host.
struct FreePages(Arc<GuestMemory>);

impl PageDiscard for FreePages {
    fn discard(&self, addr: u64, len: u64) -> io::Result<()> {
        self.0.discard(addr, len).map_err(io::Error::other)
    }
}
