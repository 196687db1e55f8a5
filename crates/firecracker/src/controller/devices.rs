//! Devices: their configuration before the start, and their changes after it.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use firn_net::{MetadataConfig, MetadataVersion};
use firn_vmm::{
    Console, Devices, DiskCache, Drive as HostDrive, DriveDisk, Handle, HostConfig, Metadata,
    Network, NetworkConfig, NetworkDevice, NetworkEnd, OpenFile, RateLimit, RateLimiter as Limiter,
    TokenBucket as Bucket, VsockBroker, VsockListener, open_tap,
};
use rustix::event::epoll;
use rustix::io::dup;
use serde_json::json;
use uuid::Uuid;

use super::balloon::period;
use super::{Answer, Controller, NOT_BEFORE, answer, call, cannot_open};
use crate::api::{Action, Request};
use crate::config::{
    CacheType, Drive, DriveUpdate, IoEngine, LoadSnapshot, MmdsConfig, MmdsVersion,
    NetworkInterface, NetworkInterfaceUpdate, RateLimiter, Serial, TokenBucket, ValueError,
    VmConfig, Vsock,
};
use crate::fault::Fault;
use crate::logger;

/// The largest packet of a network device whose configuration names none, bytes.
const DEFAULT_MTU: u16 = 1500;
/// The first address that a guest's vsock can have.
const FIRST_CID: u32 = 3;

/// The requests that set up the devices of a configuration file, in an order in which they refer to
/// earlier ones.
pub(super) fn requests(config: &VmConfig) -> Vec<Request> {
    let mut requests = Vec::new();
    requests.extend(config.drives.iter().cloned().map(Box::new).map(Request::PutDrive));
    let networks = config.network_interfaces.iter().cloned();
    requests.extend(networks.map(Box::new).map(Request::PutNetwork));
    requests.extend(config.vsock.clone().map(Request::PutVsock));
    requests.extend(config.mmds_config.clone().map(Request::PutMmdsConfig));
    requests.extend(config.balloon.map(Request::PutBalloon));
    requests.extend(config.entropy.map(Request::PutEntropy));
    requests.extend(config.serial.clone().map(Request::PutSerial));
    requests
}

impl Controller {
    /// Carries out a request of a device or of the metadata.
    pub(super) fn carry_out_of_device(&mut self, request: Request) -> Result<Answer, Fault> {
        match request {
            Request::PatchDrive(update) => return self.patch_drive(update),
            Request::PatchNetwork(update) => return self.patch_network(update),
            Request::GetMmds => {
                let document = self.mmds.document();
                return Ok(Answer::Json(if document.is_null() { json!({}) } else { document }));
            }
            Request::PutMmds(document) => self.mmds.put(document)?,
            Request::PatchMmds(patch) => self.mmds.patch(patch)?,
            Request::GetBalloon => return answer(self.balloon()?),
            Request::PatchBalloon(update) => self.resize_balloon(update)?,
            Request::GetBalloonStatistics => {
                return Ok(Answer::Json(self.balloon_statistics()?));
            }
            Request::PatchBalloonStatistics(update) => self.set_statistics_period(update)?,
            Request::Act(Action::SendCtrlAltDel) => {
                let running = self.running()?;
                call(&running.handle, |microvm| microvm.send_ctrl_alt_del())??;
            }
            Request::Unsupported(resource) => {
                return Err(Fault::new(format!("{resource} is not supported by firn")));
            }
            request => return self.configure_device(request),
        }
        Ok(Answer::Done)
    }

    /// Configures a device before the start.
    fn configure_device(&mut self, request: Request) -> Result<Answer, Fault> {
        self.before_start()?;
        match request {
            Request::PutDrive(drive) => self.put_drive(*drive)?,
            Request::PutNetwork(network) => self.put_network(*network)?,
            Request::PutVsock(vsock) => {
                check_vsock(&vsock)?;
                self.config.vsock = Some(vsock);
            }
            Request::PutMmdsConfig(config) => {
                self.check_mmds(&config)?;
                self.config.mmds_config = Some(config);
            }
            Request::PutBalloon(balloon) => self.put_balloon(balloon)?,
            Request::PutEntropy(entropy) => {
                self.config.entropy = Some(entropy);
            }
            Request::PutSerial(serial) => {
                if serial.rate_limiter.is_some() {
                    let reason = "the serial port has no limits; leave the field out";
                    return Err(ValueError::unsupported("rate_limiter", reason).into());
                }
                console(Some(&serial))?;
                self.config.serial = Some(serial);
            }
            // Every other request is carried out elsewhere.
            _ => return Err(Fault::new(NOT_BEFORE)),
        }
        self.configured = true;
        Ok(Answer::Done)
    }

    fn put_drive(&mut self, drive: Drive) -> Result<(), Fault> {
        if drive.socket.is_some() {
            let reason = "firn has no vhost-user drives; use path_on_host";
            return Err(ValueError::unsupported("socket", reason).into());
        }
        if drive.io_engine == Some(IoEngine::Async) {
            let reason = "use \"Sync\", or leave the field out";
            return Err(ValueError::unsupported("io_engine", reason).into());
        }
        open_drive(&drive)?;
        let others = self.config.drives.iter().filter(|other| other.drive_id != drive.drive_id);
        if drive.is_root_device && others.clone().any(|other| other.is_root_device) {
            let reason = "another drive is the root device";
            return Err(ValueError::invalid("is_root_device", reason).into());
        }
        put(&mut self.config.drives, drive, |drive| &drive.drive_id);
        // The guest's first drive is its root device.
        self.config.drives.sort_by_key(|drive| !drive.is_root_device);
        Ok(())
    }

    fn put_network(&mut self, network: NetworkInterface) -> Result<(), Fault> {
        let mac = network.guest_mac.as_deref().map(parse_mac).transpose()?;
        let id = &network.iface_id;
        for other in self.config.network_interfaces.iter().filter(|other| other.iface_id != *id) {
            if other.host_dev_name == network.host_dev_name {
                let reason = format!("the network device {} has it", other.iface_id);
                return Err(ValueError::invalid("host_dev_name", reason).into());
            }
            let other_mac = other.guest_mac.as_deref().map(parse_mac).transpose()?;
            if mac.is_some() && mac == other_mac {
                let reason = format!("the network device {} has it", other.iface_id);
                return Err(ValueError::invalid("guest_mac", reason).into());
            }
        }
        if network.mtu.is_some_and(|mtu| mtu < 68) {
            return Err(ValueError::invalid("mtu", "use 68 to 65535").into());
        }
        // It is opened for the start.
        drop(open_tap(&network.host_dev_name).map_err(|error| Fault::of("host_dev_name", &error))?);
        put(&mut self.config.network_interfaces, network, |network| &network.iface_id);
        Ok(())
    }

    fn check_mmds(&self, config: &MmdsConfig) -> Result<(), ValueError> {
        let field = "network_interfaces";
        if config.network_interfaces.is_empty() {
            return Err(ValueError::invalid(field, "name at least one"));
        }
        let networks = &self.config.network_interfaces;
        let known: HashSet<_> = networks.iter().map(|network| &network.iface_id).collect();
        if let Some(id) = config.network_interfaces.iter().find(|id| !known.contains(id)) {
            return Err(ValueError::invalid(field, format!("there is no network device {id:?}")));
        }
        match config.ipv4_address {
            Some(address) if !MetadataConfig::is_valid_address(address) => {
                let reason = "use a link-local address, 169.254.1.0 to 169.254.254.255";
                Err(ValueError::invalid("ipv4_address", reason))
            }
            _ => Ok(()),
        }
    }

    fn patch_drive(&mut self, update: DriveUpdate) -> Result<Answer, Fault> {
        let running = self.running.as_ref().ok_or_else(|| Fault::new(NOT_BEFORE))?;
        let drive = self.config.drives.iter_mut().find(|drive| drive.drive_id == update.drive_id);
        let drive = drive.ok_or_else(|| no_device("drive", &update.drive_id))?;
        let mut changed = drive.clone();
        if let Some(path) = update.path_on_host {
            changed.path_on_host = Some(path);
            let replaced = replace_drive(&running.handle, &changed);
            self.metrics.count_update(&drive.drive_id, replaced.is_err());
            replaced?;
        }
        if let Some(limiter) = update.rate_limiter {
            changed.rate_limiter = Some(limiter);
            let (id, limit) = (drive.drive_id.clone(), limit(&limiter));
            call(&running.handle, move |microvm| microvm.limit_drive(&id, limit))??;
        }
        *drive = changed;
        Ok(Answer::Done)
    }

    fn patch_network(&mut self, update: NetworkInterfaceUpdate) -> Result<Answer, Fault> {
        let running = self.running.as_ref().ok_or_else(|| Fault::new(NOT_BEFORE))?;
        let mut networks = self.config.network_interfaces.iter_mut();
        let network = networks.find(|network| network.iface_id == update.iface_id);
        let network = network.ok_or_else(|| no_device("network device", &update.iface_id))?;
        let id = update.iface_id;
        let (to, from) = (update.rx_rate_limiter, update.tx_rate_limiter);
        let limits = (to.as_ref().map(limit), from.as_ref().map(limit));
        call(&running.handle, move |microvm| microvm.limit_network(&id, limits.0, limits.1))??;
        network.rx_rate_limiter = to.or(network.rx_rate_limiter);
        network.tx_rate_limiter = from.or(network.tx_rate_limiter);
        Ok(Answer::Done)
    }

    /// The devices of the guest that boots.
    pub(super) fn guest_devices(&self) -> Result<Devices, Fault> {
        let networks = self.config.network_interfaces.iter().map(|network| {
            let mac = network.guest_mac.as_deref().map(parse_mac).transpose()?;
            let mtu = network.mtu.unwrap_or(DEFAULT_MTU);
            let config = NetworkConfig { mac: mac.unwrap_or_else(random_mac), mtu };
            Ok::<_, Fault>(NetworkDevice { id: network.iface_id.clone(), config })
        });
        Ok(Devices {
            drives: self.config.drives.iter().map(|drive| drive.drive_id.clone()).collect(),
            vsock: self.config.vsock.as_ref().map(|vsock| vsock.guest_cid),
            entropy: self.config.entropy.is_some(),
            balloon: self.guest_balloon()?,
            networks: networks.collect::<Result<_, _>>()?,
        })
    }

    /// The host's side of a configuration's devices, open.
    pub(super) fn host(&self, config: &VmConfig) -> Result<HostConfig, Fault> {
        let drives = config.drives.iter().map(|drive| {
            let disk = DriveDisk::File {
                file: open_drive(drive)?,
                read_only: drive.is_read_only.unwrap_or_default(),
                cache: match drive.cache_type {
                    None | Some(CacheType::Unsafe) => DiskCache::Unsafe,
                    Some(CacheType::Writeback) => DiskCache::Writeback,
                },
            };
            let limiter = Some(limiter(drive.rate_limiter.as_ref())?);
            Ok::<_, Fault>(HostDrive { id: drive.drive_id.clone(), disk, limiter })
        });
        let drives = drives.collect::<Result<_, _>>()?;
        let networks = config.network_interfaces.iter().map(|network| {
            let tap = open_tap(&network.host_dev_name);
            let tap = tap.map_err(|error| Fault::of("host_dev_name", &error))?;
            let host = Network {
                end: Some(NetworkEnd::Tap(tap)),
                metadata: self.metadata(config, &network.iface_id),
                to_guest: Some(limiter(network.rx_rate_limiter.as_ref())?),
                from_guest: Some(limiter(network.tx_rate_limiter.as_ref())?),
                ..Network::default()
            };
            Ok::<_, Fault>((network.iface_id.clone(), host))
        });
        let networks = networks.collect::<Result<_, _>>()?;
        let entropy = config.entropy.map(|entropy| limiter(entropy.rate_limiter.as_ref()));
        Ok(HostConfig {
            drives,
            networks,
            console: console(config.serial.as_ref())?,
            console_input: console_input()?,
            entropy_limiter: entropy.transpose()?,
            balloon_period: config.balloon.as_ref().and_then(period),
            generation: Some(Uuid::new_v4()),
            advance_clock: false,
            windows: Vec::new(),
            // The last one: a start that fails leaves no socket.
            vsock: config.vsock.as_ref().map(listen).transpose()?,
        })
    }

    fn metadata(&self, config: &VmConfig, network: &str) -> Option<Metadata> {
        let mmds = config.mmds_config.as_ref()?;
        if !mmds.network_interfaces.iter().any(|id| id == network) {
            return None;
        }
        let config = MetadataConfig {
            address: mmds.ipv4_address.unwrap_or(MetadataConfig::DEFAULT_ADDRESS),
            version: match mmds.version {
                MmdsVersion::V1 => MetadataVersion::V1,
                MmdsVersion::V2 => MetadataVersion::V2,
            },
            imds_compat: mmds.imds_compat,
        };
        Some(Metadata { config, store: self.mmds.clone() })
    }
}

/// The configuration of a saved microVM with what a load replaces.
pub(super) fn overridden(config: VmConfig, load: &LoadSnapshot) -> Result<VmConfig, Fault> {
    let mut config = config;
    for network in &load.network_overrides {
        let mut saved = config.network_interfaces.iter_mut();
        let saved = saved.find(|saved| saved.iface_id == network.iface_id);
        let saved = saved.ok_or_else(|| no_device("network device", &network.iface_id))?;
        saved.host_dev_name.clone_from(&network.host_dev_name);
    }
    if let Some(vsock) = &load.vsock_override {
        let saved = config.vsock.as_mut();
        let saved = saved.ok_or_else(|| Fault::new("the snapshot's microVM has no vsock"))?;
        saved.uds_path.clone_from(&vsock.uds_path);
    }
    Ok(config)
}

/// Adds an item, or replaces the one with the same id.
fn put<T>(items: &mut Vec<T>, item: T, id: impl Fn(&T) -> &String) {
    match items.iter_mut().find(|old| id(old) == id(&item)) {
        Some(old) => *old = item,
        None => items.push(item),
    }
}

fn no_device(kind: &str, id: &str) -> Fault {
    Fault::new(format!("the microVM has no {kind} {id:?}"))
}

/// Exchanges the file of a drive of a running microVM.
fn replace_drive(microvm: &Handle, drive: &Drive) -> Result<(), Fault> {
    let (id, file) = (drive.drive_id.clone(), open_drive(drive)?);
    Ok(call(microvm, move |microvm| microvm.replace_drive(&id, file))??)
}

fn open_drive(drive: &Drive) -> Result<OpenFile, Fault> {
    let path = drive.path_on_host.as_deref();
    let path = path.ok_or_else(|| ValueError::invalid("path_on_host", "it is missing"))?;
    let path = Path::new(path);
    let mut options = std::fs::File::options();
    let file = options.read(true).write(!drive.is_read_only.unwrap_or_default()).open(path);
    let file = file.map_err(|error| cannot_open("path_on_host", path, &error))?;
    Ok(OpenFile { file, path: path.to_owned() })
}

fn check_vsock(vsock: &Vsock) -> Result<(), ValueError> {
    if vsock.guest_cid < FIRST_CID {
        return Err(ValueError::invalid("guest_cid", format!("use at least {FIRST_CID}")));
    }
    if vsock.uds_path.is_empty() {
        return Err(ValueError::invalid("uds_path", "it is empty"));
    }
    Ok(())
}

/// Where the output of the serial port goes.
fn console(serial: Option<&Serial>) -> Result<Console, Fault> {
    let path = serial.and_then(|serial| serial.serial_out_path.as_deref());
    let Some(path) = path else {
        return Ok(Console::unlimited(dup(rustix::stdio::stdout())?.into()));
    };
    let output = logger::open_output(path.as_ref());
    let output = output.map_err(|error| cannot_open("serial_out_path", path.as_ref(), &error))?;
    Ok(Console::new(Some(output)))
}

/// The input of the serial port: standard input, where that can be waited for.
fn console_input() -> Result<Option<OwnedFd>, Fault> {
    let stdin = rustix::stdio::stdin();
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    // It refuses files, and devices that are always ready.
    let waits = epoll::add(&epoll, stdin, epoll::EventData::new_u64(0), epoll::EventFlags::IN);
    Ok(if waits.is_ok() { Some(dup(stdin)?) } else { None })
}

/// Binds the socket for connections to the guest, and connects the guest to the host's sockets. The
/// socket's file stays when the microVM ends, as in Firecracker.
fn listen(vsock: &Vsock) -> Result<VsockListener, Fault> {
    let path = &vsock.uds_path;
    let listener = UnixListener::bind(path).map_err(|error| {
        Fault::of(&format!("uds_path is not valid: cannot bind {path}"), &error)
    })?;
    let broker = VsockBroker::start(path.into())?;
    Ok(VsockListener::new(listener)?.with_broker(Some(broker)))
}

/// Removes the socket of a microVM that did not start.
pub(super) fn unbind(config: &VmConfig) {
    if let Some(vsock) = &config.vsock {
        // A client that repeats the start has the error.
        let _ = std::fs::remove_file(&vsock.uds_path);
    }
}

fn parse_mac(text: &str) -> Result<[u8; 6], ValueError> {
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|byte| (byte.len() == 2).then(|| u8::from_str_radix(byte, 16).ok()).flatten())
        .collect();
    let mac = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
    mac.ok_or_else(|| ValueError::invalid("guest_mac", "use a form such as 06:00:00:00:00:01"))
}

/// An address that is not of a manufacturer.
fn random_mac() -> [u8; 6] {
    let [_, second, third, fourth, fifth, sixth, ..] = *Uuid::new_v4().as_bytes();
    [0x06, second, third, fourth, fifth, sixth]
}

/// A limiter, also of a device without a limit, so that it can get one later.
fn limiter(config: Option<&RateLimiter>) -> Result<Limiter, Fault> {
    Ok(Limiter::new(config.map(limit).unwrap_or_default())?)
}

fn limit(limiter: &RateLimiter) -> RateLimit {
    // A bucket of nothing, or that refills in no time, is none.
    let bucket = |bucket: &TokenBucket| {
        (bucket.size != 0 && bucket.refill_time != 0).then(|| Bucket {
            size: bucket.size,
            burst: bucket.one_time_burst.unwrap_or_default(),
            refill: Duration::from_millis(bucket.refill_time),
        })
    };
    RateLimit {
        bytes: limiter.bandwidth.as_ref().and_then(bucket),
        operations: limiter.ops.as_ref().and_then(bucket),
    }
}
