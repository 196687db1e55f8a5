//! Requests: method, path and body.

use hyper::Method;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::{
    Balloon, BalloonStatisticsUpdate, BalloonUpdate, BootSource, CreateSnapshot, Drive,
    DriveUpdate, Entropy, LoadSnapshot, MachineConfig, MachineConfigUpdate, MmdsConfig,
    MmdsVersion, NetworkInterface, NetworkInterfaceUpdate, PlannerChoice, Serial, Vsock,
};
use crate::fault::Fault;
use crate::logger::LoggerConfig;
use crate::metrics::{Counter, MetricsConfig};

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Request {
    /// `GET /`.
    GetInstance,
    /// `GET /version`.
    GetVersion,
    /// `GET /vm/config`.
    GetVmConfig,
    /// `GET /machine-config`.
    GetMachineConfig,
    /// `PUT /machine-config`.
    PutMachineConfig(MachineConfig),
    /// `PATCH /machine-config`.
    PatchMachineConfig(MachineConfigUpdate),
    /// `PUT /boot-source`.
    PutBootSource(BootSource),
    /// `PUT /actions`.
    Act(Action),
    /// `PATCH /vm`.
    PatchVm(VmState),
    /// `PUT /snapshot/create`.
    CreateSnapshot(CreateSnapshot),
    /// `PUT /snapshot/load`.
    LoadSnapshot(Box<LoadSnapshot>),
    /// `PUT /firn/planner`.
    PutPlanner(PlannerChoice),
    /// `PUT /logger`.
    PutLogger(LoggerConfig),
    /// `PUT /metrics`.
    PutMetrics(MetricsConfig),
    /// `PUT /drives/{id}`.
    PutDrive(Box<Drive>),
    /// `PATCH /drives/{id}`.
    PatchDrive(DriveUpdate),
    /// `PUT /network-interfaces/{id}`.
    PutNetwork(Box<NetworkInterface>),
    /// `PATCH /network-interfaces/{id}`.
    PatchNetwork(NetworkInterfaceUpdate),
    /// `PUT /vsock`.
    PutVsock(Vsock),
    /// `GET /mmds`.
    GetMmds,
    /// `PUT /mmds`.
    PutMmds(Value),
    /// `PATCH /mmds`.
    PatchMmds(Value),
    /// `PUT /mmds/config`.
    PutMmdsConfig(MmdsConfig),
    /// `GET /balloon`.
    GetBalloon,
    /// `PUT /balloon`.
    PutBalloon(Balloon),
    /// `PATCH /balloon`.
    PatchBalloon(BalloonUpdate),
    /// `GET /balloon/statistics`.
    GetBalloonStatistics,
    /// `PATCH /balloon/statistics`.
    PatchBalloonStatistics(BalloonStatisticsUpdate),
    /// `PUT /entropy`.
    PutEntropy(Entropy),
    /// `PUT /serial`.
    PutSerial(Serial),
    /// A resource that Firecracker has and firn has not.
    Unsupported(&'static str),
}

/// An action of `PUT /actions`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) enum Action {
    /// Writes the metrics.
    FlushMetrics,
    /// Boots the guest.
    InstanceStart,
    /// Presses Ctrl, Alt and Del.
    SendCtrlAltDel,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ActionBody {
    action_type: Action,
}

/// A state of `PATCH /vm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) enum VmState {
    /// The vCPUs do not run.
    Paused,
    /// They run.
    Resumed,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VmBody {
    state: VmState,
}

/// Parses a request.
pub(crate) fn parse(method: &Method, path: &str, body: &[u8]) -> Result<Request, Fault> {
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    let request = match *method {
        Method::GET if body.is_empty() => get(&parts),
        Method::GET => return Err(Fault::new("a GET request cannot have a body")),
        Method::PUT => put(&parts, body)?,
        Method::PATCH => patch(&parts, body)?,
        _ => None,
    };
    request
        .ok_or_else(|| Fault::new(format!("Invalid request method and/or path: {method} {path}.")))
}

fn get(parts: &[&str]) -> Option<Request> {
    Some(match parts {
        [""] => Request::GetInstance,
        ["version"] => Request::GetVersion,
        ["vm", "config"] => Request::GetVmConfig,
        ["machine-config"] => Request::GetMachineConfig,
        ["mmds"] => Request::GetMmds,
        ["balloon"] => Request::GetBalloon,
        ["balloon", "statistics"] => Request::GetBalloonStatistics,
        ["balloon", "hinting", "status"] => Request::Unsupported("/balloon/hinting"),
        ["hotplug", "memory"] => Request::Unsupported("/hotplug/memory"),
        _ => return None,
    })
}

fn put(parts: &[&str], body: &[u8]) -> Result<Option<Request>, Fault> {
    Ok(Some(match parts {
        ["actions"] => Request::Act(read::<ActionBody>(body)?.action_type),
        ["machine-config"] => Request::PutMachineConfig(read(body)?),
        ["boot-source"] => Request::PutBootSource(read(body)?),
        ["snapshot", "create"] => Request::CreateSnapshot(read(body)?),
        ["snapshot", "load"] => Request::LoadSnapshot(read(body)?),
        ["firn", "planner"] => Request::PutPlanner(read(body)?),
        ["logger"] => Request::PutLogger(read(body)?),
        ["metrics"] => Request::PutMetrics(read(body)?),
        ["drives", id] => {
            let drive: Box<Drive> = read(body)?;
            named(id, &drive.drive_id, "drive_id")?;
            Request::PutDrive(drive)
        }
        ["network-interfaces", id] => {
            let network: Box<NetworkInterface> = read(body)?;
            named(id, &network.iface_id, "iface_id")?;
            Request::PutNetwork(network)
        }
        ["vsock"] => Request::PutVsock(read(body)?),
        ["mmds"] => Request::PutMmds(read_object(body)?),
        ["mmds", "config"] => Request::PutMmdsConfig(read(body)?),
        ["balloon"] => Request::PutBalloon(read(body)?),
        ["entropy"] => Request::PutEntropy(read(body)?),
        ["serial"] => Request::PutSerial(read(body)?),
        ["cpu-config"] => Request::Unsupported("/cpu-config"),
        ["pmem", _] => Request::Unsupported("/pmem"),
        ["hotplug", "memory"] => Request::Unsupported("/hotplug/memory"),
        _ => return Ok(None),
    }))
}

fn patch(parts: &[&str], body: &[u8]) -> Result<Option<Request>, Fault> {
    Ok(Some(match parts {
        ["machine-config"] => Request::PatchMachineConfig(read(body)?),
        ["vm"] => Request::PatchVm(read::<VmBody>(body)?.state),
        ["drives", id] => {
            let update: DriveUpdate = read(body)?;
            named(id, &update.drive_id, "drive_id")?;
            Request::PatchDrive(update)
        }
        ["network-interfaces", id] => {
            let update: NetworkInterfaceUpdate = read(body)?;
            named(id, &update.iface_id, "iface_id")?;
            Request::PatchNetwork(update)
        }
        ["mmds"] => Request::PatchMmds(read_object(body)?),
        ["balloon"] => Request::PatchBalloon(read(body)?),
        ["balloon", "statistics"] => Request::PatchBalloonStatistics(read(body)?),
        ["balloon", "hinting", "start" | "stop"] => Request::Unsupported("/balloon/hinting"),
        ["pmem", _] => Request::Unsupported("/pmem"),
        ["hotplug", "memory"] => Request::Unsupported("/hotplug/memory"),
        _ => return Ok(None),
    }))
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Fault> {
    if body.is_empty() {
        return Err(Fault::new("the request has no body"));
    }
    serde_json::from_slice(body)
        .map_err(|error| Fault::new(format!("the body is not valid: {error}")))
}

fn read_object(body: &[u8]) -> Result<Value, Fault> {
    let value: Value = read(body)?;
    if value.is_object() { Ok(value) } else { Err(Fault::new("the body is not a JSON object")) }
}

/// Checks the id in a path: that it is one, and that of the body.
fn named(path: &str, body: &str, field: &'static str) -> Result<(), Fault> {
    let is_id = |character: char| character.is_ascii_alphanumeric() || character == '_';
    if path.is_empty() || !path.chars().all(is_id) {
        let reason = "use letters, digits and underscores";
        return Err(Fault::new(format!("the id {path:?} in the path is not valid: {reason}")));
    }
    if path == body {
        return Ok(());
    }
    Err(Fault::new(format!("{field} is not valid: {body:?} is not the id in the path, {path:?}")))
}

/// What the metrics count a request as, if they do.
pub(crate) fn counter(method: &Method, path: &str) -> Option<Counter> {
    let first = path.split('/').nth(1)?;
    Some(match (method.as_str(), first) {
        ("GET", "") => Counter::GetInstance,
        ("GET", "version") => Counter::GetVersion,
        ("GET", "machine-config") => Counter::GetMachineConfig,
        ("GET", "mmds") => Counter::GetMmds,
        ("PUT", "actions") => Counter::PutActions,
        ("PUT", "boot-source") => Counter::PutBootSource,
        ("PUT", "cpu-config") => Counter::PutCpuConfig,
        ("PUT", "drives") => Counter::PutDrive,
        ("PUT", "logger") => Counter::PutLogger,
        ("PUT", "machine-config") => Counter::PutMachineConfig,
        ("PUT", "metrics") => Counter::PutMetrics,
        ("PUT", "network-interfaces") => Counter::PutNetwork,
        ("PUT", "mmds") => Counter::PutMmds,
        ("PUT", "vsock") => Counter::PutVsock,
        ("PUT", "serial") => Counter::PutSerial,
        ("PATCH", "drives") => Counter::PatchDrive,
        ("PATCH", "network-interfaces") => Counter::PatchNetwork,
        ("PATCH", "machine-config") => Counter::PatchMachineConfig,
        ("PATCH", "mmds") => Counter::PatchMmds,
        _ => return None,
    })
}

impl Request {
    /// Whether it has a field that has a new name, or none, in newer versions of the API.
    pub(crate) fn is_deprecated(&self) -> bool {
        match self {
            Self::LoadSnapshot(load) => load.mem_file_path.is_some() || load.enable_diff_snapshots,
            Self::PutVsock(vsock) => vsock.vsock_id.is_some(),
            Self::PutMachineConfig(machine) => machine.cpu_template.is_some(),
            Self::PatchMachineConfig(machine) => machine.cpu_template.is_some(),
            Self::PutMmdsConfig(mmds) => mmds.version == MmdsVersion::V1,
            _ => false,
        }
    }
}
