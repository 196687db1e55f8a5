//! The virtio devices of a microVM: their order, their windows, their connection to KVM and the
//! event loop.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventManager, SubscriberOps};
use kvm_ioctls::IoEventAddress;
use parking_lot::Mutex;
use thiserror::Error;

use firn_base::error_chain;
use firn_memory::GuestMemory;
use firn_snapshot::{DiskInfo, DiskSource};

use super::disks::{self, DiskError, DriveKind};
use super::event;
use crate::arch::layout;
use crate::bus::{Bus, MmioDevice, OverlapError};
use crate::config::{Devices, Drive, NetworkDevice};
use crate::counters::{Counters, DeviceCounters};
use crate::kvm::{Vm, VmError};
use crate::open_file::OpenFile;
use crate::state::SavedDevice;
use crate::subscriber::Subscriber;
use crate::virtio::{
    Balloon, BalloonStatistics, Block, Disk, Net, Network, NetworkEnd, NewDeviceError,
    OpenDiskError, PageDiscard, RateLimit, RateLimiter, RestoreDeviceError, Rng, VirtioDevice,
    VirtioMmio, Vsock, VsockListener,
};

/// The least context id of a guest (`VMADDR_CID_HOST` and below are not a guest's).
const LEAST_CID: u32 = 3;

/// Why a virtio device was not created or connected.
#[derive(Debug, Error)]
pub enum WireError {
    /// A disk cannot be used.
    #[error("cannot use drive {id}")]
    Drive {
        /// The drive.
        id: String,
        /// Why.
        source: DiskError,
    },
    /// A device cannot be created.
    #[error(transparent)]
    Device(#[from] NewDeviceError),
    /// The guest has more devices than there are interrupts.
    #[error(
        "the guest has {0} devices, and there are interrupts for {most}: use fewer drives or \
         network devices",
        most = layout::VIRTIO_DEVICES
    )]
    TooMany(usize),
    /// Two devices of one kind have the same id.
    #[error("two of the guest's {kind} have the same id (they are {ids})")]
    Twice {
        /// The kind of device.
        kind: &'static str,
        /// All ids.
        ids: Names,
    },
    /// Files were passed for other drives than the guest has.
    #[error("the guest's drives are {guest}, and the drives that were passed are {passed}")]
    Drives {
        /// The guest's.
        guest: Names,
        /// Those that were passed.
        passed: Names,
    },
    /// More than one drive is an overlay, of which a snapshot contains one.
    #[error("the drives {0} are overlays, and a guest has one at most")]
    Overlays(Names),
    /// A vsock without a listener, or a listener without a vsock: a defect of the caller.
    #[error(
        "the guest's vsock and a listener for it come together (vsock: {guest}, listener: {passed})"
    )]
    Listener {
        /// Whether the guest has a vsock.
        guest: bool,
        /// Whether a listener was passed.
        passed: bool,
    },
    /// The guest's context id is not valid.
    #[error("{0} is not a context id of a guest: use 3 or more")]
    Cid(u32),
    /// There is no timer for the balloon's statistics.
    #[error("cannot create a timer for the balloon's statistics")]
    Timer(#[source] io::Error),
    /// The vsock's sockets cannot be polled.
    #[error("cannot poll the vsock's sockets")]
    Vsock(#[source] io::Error),
    /// The guest has no such network device to connect.
    #[error(
        "the guest has no network device {id} (it has {guest}): boot it with --net, and freeze it \
         again"
    )]
    NoNetwork {
        /// The device that was passed.
        id: String,
        /// The guest's.
        guest: Names,
    },
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

/// Why a device of a running microVM was not changed.
#[derive(Debug, Error)]
pub enum UpdateDeviceError {
    /// The guest has no such device.
    #[error("the guest has no {kind} {id} (it has {guest})")]
    Absent {
        /// The kind of device.
        kind: &'static str,
        /// The id that was passed.
        id: String,
        /// The guest's.
        guest: Names,
    },
    /// A snapshot contains or names the content of the drive.
    #[error("the content of drive {0} is part of snapshots and cannot be exchanged")]
    Content(String),
    /// The new file is not a disk image.
    #[error(transparent)]
    Disk(#[from] OpenDiskError),
    /// The guest has no balloon.
    #[error("the guest has no balloon")]
    NoBalloon,
    /// The balloon was made without statistics.
    #[error("the guest's balloon was made without statistics")]
    NoStatistics,
    /// The device was made without a limiter.
    #[error("{kind} {id} was made without a rate limiter, so its limit cannot be changed")]
    NoLimiter {
        /// The kind of device.
        kind: &'static str,
        /// The device.
        id: String,
    },
}

/// The ids of devices, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names(Vec<String>);

impl Names {
    fn of<'a>(ids: impl IntoIterator<Item = &'a String>) -> Self {
        Self(ids.into_iter().cloned().collect())
    }

    fn sorted(&self) -> Vec<&String> {
        let mut ids: Vec<_> = self.0.iter().collect();
        ids.sort();
        ids
    }

    /// Fails if an id is there twice.
    fn unique(self, kind: &'static str) -> Result<Self, WireError> {
        let twice = self.sorted().windows(2).any(|pair| pair[0] == pair[1]);
        if twice { Err(WireError::Twice { kind, ids: self }) } else { Ok(self) }
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "none" } else { "" })?;
        f.write_str(&self.0.join(", "))
    }
}

/// The host's side of a guest's devices.
pub(super) struct Connected {
    pub(super) drives: Vec<Drive>,
    pub(super) vsock: Option<VsockListener>,
    pub(super) entropy_limiter: Option<RateLimiter>,
    pub(super) balloon_period: Option<Duration>,
    pub(super) networks: Vec<(String, Network)>,
}

impl Connected {
    /// Checks that these are sides of the guest's devices.
    fn check(&self, devices: &Devices) -> Result<(), WireError> {
        let Devices { drives, vsock, entropy, balloon, networks } = devices;
        let count = drives.len()
            + networks.len()
            + [vsock.is_some(), *entropy, balloon.is_some()].into_iter().filter(|has| *has).count();
        if u32::try_from(count).is_ok_and(|count| count > layout::VIRTIO_DEVICES) {
            return Err(WireError::TooMany(count));
        }
        let guest = Names::of(drives).unique("drives")?;
        let passed = Names::of(self.drives.iter().map(|drive| &drive.id));
        if guest.sorted() != passed.sorted() {
            return Err(WireError::Drives { guest, passed });
        }
        let guest = Names::of(networks.iter().map(|device| &device.id));
        let guest = guest.unique("network devices")?;
        if let Some((id, _)) = self.networks.iter().find(|(id, _)| !guest.0.contains(id)) {
            return Err(WireError::NoNetwork { id: id.clone(), guest });
        }
        if vsock.is_some() != self.vsock.is_some() {
            let (guest, passed) = (vsock.is_some(), self.vsock.is_some());
            return Err(WireError::Listener { guest, passed });
        }
        vsock.filter(|cid| *cid < LEAST_CID).map_or(Ok(()), |cid| Err(WireError::Cid(cid)))
    }
}

/// The devices of one microVM, in the order of their windows.
#[derive(Default)]
pub(super) struct VirtioSet {
    devices: Vec<Attached>,
    drives: Vec<AttachedDrive>,
    vsock: Option<Arc<Mutex<VirtioMmio<Vsock>>>>,
    entropy: Option<Arc<Mutex<VirtioMmio<Rng>>>>,
    balloon: Option<Arc<Mutex<VirtioMmio<Balloon<FreePages>>>>>,
    networks: Vec<(String, Arc<Mutex<VirtioMmio<Net>>>)>,
    most_sockets: usize,
}

struct Attached {
    id: String,
    transport: Arc<Mutex<VirtioMmio>>,
}

struct AttachedDrive {
    id: String,
    kind: DriveKind,
    transport: Arc<Mutex<VirtioMmio<Block>>>,
}

impl VirtioSet {
    /// Creates every device and connects it: registers to the bus, notifications and interrupt to
    /// KVM, queues to the event loop. `known` are the images that the microVM's snapshot names.
    pub(super) fn wire(
        devices: Devices,
        mut connected: Connected,
        known: &[DiskInfo],
        vm: &Vm,
        bus: &mut Bus,
        events: &mut EventManager<Subscriber>,
    ) -> Result<Self, WireError> {
        connected.check(&devices)?;
        let Devices { drives, vsock: cid, entropy, balloon, networks } = devices;
        let mut wiring = Wiring { vm, bus, events, set: Self::default() };
        for id in drives {
            let passed = connected.drives.iter().position(|drive| drive.id == id);
            if let Some(passed) = passed {
                wiring.add_drive(connected.drives.swap_remove(passed), known)?;
            }
        }
        if let Some((cid, listener)) = cid.zip(connected.vsock) {
            let device = Vsock::new(cid, listener).map_err(WireError::Vsock)?;
            wiring.set.vsock = Some(wiring.add("vsock", device)?);
        }
        if entropy {
            wiring.set.entropy = Some(wiring.add("entropy", Rng::new(connected.entropy_limiter))?);
        }
        if let Some(config) = balloon {
            let pages = FreePages(vm.memory.clone());
            let device = Balloon::new(config, connected.balloon_period, pages);
            let transport = wiring.add("balloon", device.map_err(WireError::Timer)?)?;
            wiring.set.balloon = Some(transport);
        }
        for NetworkDevice { id, config } in networks {
            let passed = connected.networks.iter().position(|(passed, _)| *passed == id);
            let network = passed.map(|passed| connected.networks.swap_remove(passed).1);
            let network = network.unwrap_or_default();
            wiring.set.most_sockets += network.end.as_ref().map_or(0, NetworkEnd::most_sockets);
            let device = Net::new(config, network).map_err(WireError::Network)?;
            let transport = wiring.add(&id, device)?;
            wiring.set.networks.push((id, transport));
        }
        let set = wiring.set;
        let overlays = set.drives.iter().filter(|drive| matches!(drive.kind, DriveKind::Overlay));
        let overlays = Names::of(overlays.map(|drive| &drive.id));
        if overlays.0.len() > 1 { Err(WireError::Overlays(overlays)) } else { Ok(set) }
    }

    /// The number of devices.
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.devices.len()).unwrap_or(u32::MAX)
    }

    /// The most sockets of the host that the devices have at once.
    pub(super) const fn most_sockets(&self) -> usize {
        self.most_sockets
    }

    /// The errors of devices that stopped because the guest violated the virtio specification.
    pub(super) fn errors(&self) -> Vec<String> {
        let errors = self.devices.iter().filter_map(|Attached { id, transport }| {
            let transport = transport.lock();
            let error = transport.error()?;
            Some(format!("the guest's device {id} stopped: {}", error_chain(error)))
        });
        errors.collect()
    }

    /// What the devices have done.
    pub(super) fn counters(&self) -> Counters {
        let drives = self.drives.iter();
        let drives =
            drives.map(|drive| counted(&drive.id, &drive.transport, Block::counters)).collect();
        let networks = self.networks.iter();
        let networks =
            networks.map(|(id, transport)| counted(id, transport, Net::counters)).collect();
        let vsock = self.vsock.as_ref();
        let entropy = self.entropy.as_ref();
        let balloon = self.balloon.as_ref();
        Counters {
            drives,
            networks,
            vsock: vsock.map(|transport| counted("vsock", transport, Vsock::counters)),
            entropy: entropy.map(|transport| counted("entropy", transport, Rng::counters)),
            balloon: balloon.map(|transport| counted("balloon", transport, Balloon::counters)),
            ..Counters::default()
        }
    }

    pub(super) fn save(&self) -> Vec<SavedDevice> {
        let save = |Attached { id, transport }: &Attached| SavedDevice {
            id: id.clone(),
            transport: transport.lock().save(),
        };
        self.devices.iter().map(save).collect()
    }

    /// Restores the state of a set that was made of these devices, and serves the requests in
    /// flight.
    pub(super) fn restore(&self, states: &[SavedDevice]) -> Result<(), RestoreDeviceError> {
        if states.len() != self.devices.len() {
            return Err(RestoreDeviceError::DeviceCount {
                offered: self.devices.len(),
                saved: states.len(),
            });
        }
        for (Attached { id, transport }, state) in self.devices.iter().zip(states) {
            if *id != state.id {
                let (offered, saved) = (id.clone(), state.id.clone());
                return Err(RestoreDeviceError::OtherId { offered, saved });
            }
            transport.lock().restore(&state.transport)?;
        }
        self.kick();
        Ok(())
    }

    /// Makes each device look at its queues.
    pub(super) fn kick(&self) {
        for Attached { transport, .. } in &self.devices {
            transport.lock().kick_all();
        }
    }

    /// Exchanges the file of a drive.
    pub(super) fn replace_drive(&self, id: &str, file: OpenFile) -> Result<(), UpdateDeviceError> {
        let drive = self.drive(id)?;
        let DriveKind::File { read_only, cache } = drive.kind else {
            return Err(UpdateDeviceError::Content(id.to_owned()));
        };
        let disk = disks::open_file(file, read_only, cache)?;
        drive.transport.lock().configure(|device| device.replace(disk));
        Ok(())
    }

    /// Changes the limit of a drive.
    pub(super) fn limit_drive(&self, id: &str, limit: RateLimit) -> Result<(), UpdateDeviceError> {
        let has_one = self.drive(id)?.transport.lock().device_mut().set_limit(limit);
        if has_one { Ok(()) } else { Err(no_limiter("drive", id)) }
    }

    /// Changes limits of a network device: of frames to the guest, and of frames from it.
    pub(super) fn limit_network(
        &self,
        id: &str,
        to_guest: Option<RateLimit>,
        from_guest: Option<RateLimit>,
    ) -> Result<(), UpdateDeviceError> {
        let found = self.networks.iter().find(|(found, _)| found == id);
        let (_, transport) = found.ok_or_else(|| UpdateDeviceError::Absent {
            kind: "network device",
            id: id.to_owned(),
            guest: Names::of(self.networks.iter().map(|(id, _)| id)),
        })?;
        let has_them = transport.lock().device_mut().set_limits(to_guest, from_guest);
        if has_them { Ok(()) } else { Err(no_limiter("network device", id)) }
    }

    /// Changes the size of the balloon that the host wants, in pages of 4096 bytes.
    pub(super) fn set_balloon_target(&self, target: u32) -> Result<(), UpdateDeviceError> {
        self.balloon()?.lock().configure(|device| device.set_target(target));
        Ok(())
    }

    /// What the guest has told of its memory.
    pub(super) fn balloon_statistics(&self) -> Result<BalloonStatistics, UpdateDeviceError> {
        self.balloon()?.lock().device().statistics().ok_or(UpdateDeviceError::NoStatistics)
    }

    /// Changes the time after which the guest tells again; `None` for never.
    pub(super) fn set_balloon_period(
        &self,
        period: Option<Duration>,
    ) -> Result<(), UpdateDeviceError> {
        let has_them = self.balloon()?.lock().device().set_period(period);
        if has_them { Ok(()) } else { Err(UpdateDeviceError::NoStatistics) }
    }

    fn balloon(&self) -> Result<&Mutex<VirtioMmio<Balloon<FreePages>>>, UpdateDeviceError> {
        self.balloon.as_deref().ok_or(UpdateDeviceError::NoBalloon)
    }

    fn drive(&self, id: &str) -> Result<&AttachedDrive, UpdateDeviceError> {
        let found = self.drives.iter().find(|drive| drive.id == id);
        found.ok_or_else(|| UpdateDeviceError::Absent {
            kind: "drive",
            id: id.to_owned(),
            guest: Names::of(self.drives.iter().map(|drive| &drive.id)),
        })
    }

    /// Makes what the guest has written to the caller's files survive the host, as a snapshot does
    /// that relies on it. An error comes with the drive's id.
    pub(super) fn sync_drives(&self) -> Result<(), (String, io::Error)> {
        self.drives.iter().try_for_each(|drive| match drive.transport.lock().device().disk() {
            Disk::Writable(disk) => disk.sync().map_err(|error| (drive.id.clone(), error)),
            Disk::ReadOnly(_) | Disk::Overlay(_) => Ok(()),
        })
    }

    /// The disks that are outside a snapshot, as its manifest describes them.
    pub(super) fn described_disks(&self) -> Result<Vec<DiskInfo>, firn_snapshot::DiskError> {
        let described = self.drives.iter().map(|drive| drive.kind.describe(&drive.id));
        described.filter_map(Result::transpose).collect()
    }

    /// Size of the largest disk that the guest writes, bytes; 0 if there is none.
    pub(super) fn written_disk_size(&self) -> u64 {
        let sizes = self.drives.iter().map(|drive| match drive.transport.lock().device().disk() {
            Disk::ReadOnly(_) => 0,
            written => written.size(),
        });
        sizes.max().unwrap_or(0)
    }

    /// Passes the overlay's content, as the guest sees it, to `read`; `None` if there is no such
    /// disk.
    pub(super) fn with_overlay<T>(&self, read: impl FnOnce(Option<&mut dyn DiskSource>) -> T) -> T {
        let overlay = self.drives.iter().find(|drive| matches!(drive.kind, DriveKind::Overlay));
        let Some(overlay) = overlay else { return read(None) };
        match overlay.transport.lock().device().disk() {
            Disk::Overlay(disk) => read(Some(&mut disk.content())),
            Disk::ReadOnly(_) | Disk::Writable(_) => read(None),
        }
    }
}

fn counted<D: VirtioDevice, C>(
    id: &str,
    transport: &Mutex<VirtioMmio<D>>,
    counters: impl FnOnce(&D) -> C,
) -> DeviceCounters<C> {
    let transport = transport.lock();
    let device = counters(transport.device());
    DeviceCounters { id: id.to_owned(), transport: transport.counters().clone(), device }
}

fn no_limiter(kind: &'static str, id: &str) -> UpdateDeviceError {
    UpdateDeviceError::NoLimiter { kind, id: id.to_owned() }
}

struct Wiring<'a> {
    vm: &'a Vm,
    bus: &'a mut Bus,
    events: &'a mut EventManager<Subscriber>,
    set: VirtioSet,
}

impl Wiring<'_> {
    fn add_drive(&mut self, drive: Drive, known: &[DiskInfo]) -> Result<(), WireError> {
        let Drive { id, disk, limiter } = drive;
        let opened = disks::open(disk, &id, known);
        let (disk, kind) = opened.map_err(|source| WireError::Drive { id: id.clone(), source })?;
        let transport = self.add(&id, Block::new(disk, &id).with_limiter(limiter))?;
        self.set.drives.push(AttachedDrive { id, kind, transport });
        Ok(())
    }

    fn add<D: VirtioDevice + 'static>(
        &mut self,
        id: &str,
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
        self.set.devices.push(Attached { id: id.to_owned(), transport: transport.clone() });
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
