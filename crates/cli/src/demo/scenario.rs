//! One function's scenario: boot, ask, freeze to files and into a pool, thaw again and again in new
//! processes.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;

use firn_base::now_ns;
use firn_lab::guest_file;
use firn_memory::page_cache;
use firn_pool::{Client, CreateOptions, MappedMedium, MemfdOptions, Pool, Server};
use firn_run::jail::Jail;
use firn_run::monitor::Monitor;
use firn_run::{
    AgentClient, BootSpec, Descriptors, FreezeInstanceReport, Function, HostSpec, ImageName,
    Invocation, InvokeSpec, OpenedFile, Origin, Outcome, OwnedInstance, ReplaySpec, SourceSpec,
    StartReport, StartSpec, ThawSpec, freeze,
};
use firn_snapshot::{Destination, Verify};
use firn_vmm::KVM_DEVICE;

use crate::assets::image_file;
use crate::output;

/// Limit for a boot, a thaw and a request.
const LIMIT: Duration = Duration::from_secs(120);
/// Limit for a monitor to end.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Guest memory, bytes.
const MEMORY: u64 = 256 << 20;
/// The pool has room for the snapshot, a replica and their metadata, bytes.
const POOL: u64 = 640 << 20;

/// Where a kind of thaw finds the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In files that are not in the page cache.
    Cold,
    /// In files that are in the page cache.
    Cached,
    /// In a pool in memory.
    Pool,
}

/// The kinds of thaw: name, planner, place.
const KINDS: [(&str, &str, Place); 6] = [
    ("firecracker, files, cold cache", "firecracker", Place::Cold),
    ("firecracker:readahead=off, files, cold cache", "firecracker:readahead=off", Place::Cold),
    ("firecracker, files, in the page cache", "firecracker", Place::Cached),
    ("pass_shared, pool", "pass_shared", Place::Pool),
    ("pass, pool", "pass", Place::Pool),
    ("firn, pool", "firn", Place::Pool),
];

/// Parts of a start with their names, ns, in the order in which they pass.
type Parts = Vec<(String, u64)>;

/// One kind of start.
#[derive(Debug, Serialize)]
pub(super) struct Start {
    /// The kind.
    pub(super) name: String,
    /// Its parts, ns; medians of several starts.
    pub(super) parts: Parts,
    /// Request to correct answer, ns.
    pub(super) total_ns: u64,
    /// What it cost, medians; not of a boot.
    pub(super) cost: Option<Cost>,
}

/// What a kind of start cost.
#[derive(Debug, Serialize)]
pub(super) struct Cost {
    /// Guest pages that KVM maps at the end.
    pub(super) guest_pages: u64,
    /// Faults that KVM resolved.
    pub(super) kvm_faults: u64,
    /// Bytes read from storage.
    pub(super) read_bytes: u64,
    /// Guest memory in DRAM of this microVM alone, copies included, bytes.
    pub(super) private_bytes: u64,
    /// Guest memory that other microVMs can share: in the page cache or in the pool, bytes.
    pub(super) shared_bytes: u64,
}

/// All of one function.
#[derive(Debug, Serialize)]
pub(super) struct Scenario {
    /// The function.
    pub(super) function: String,
    /// Its freezes to files and into the pool.
    pub(super) freezes: Vec<(String, FreezeInstanceReport)>,
    /// Number of thaws of each kind.
    pub(super) thaws: u32,
    /// The cold boot first, then each kind of thaw.
    pub(super) starts: Vec<Start>,
}

/// What a scenario is run with.
pub(super) struct Stage<'a> {
    /// The program of monitors.
    pub(super) program: &'a Path,
    /// How the monitors are jailed.
    pub(super) jail: &'a Jail,
    /// The function's directory.
    pub(super) function: PathBuf,
    /// A directory for snapshots.
    pub(super) work: &'a Path,
    pub(super) thaws: u32,
}

impl Stage<'_> {
    /// Runs the scenario of one function.
    pub(super) fn run(&self, name: &str) -> Result<Scenario> {
        output::note(&format!("{name}: boot a microVM and load the function"));
        let (monitor, instance, boot) = self.boot(name)?;

        output::note(&format!("{name}: freeze it to files and into a pool, and end the microVM"));
        let files = self.work.join(name);
        let socket = self.work.join(format!("{name}.sock"));
        let medium = MappedMedium::memfd(MemfdOptions { size: POOL, huge: None, node: None })?;
        let pool = Pool::create(Arc::new(medium), &CreateOptions::default())?;
        let _manager = Server::start(&socket, pool)?;
        let to_files = freeze(&instance, Destination::Directory(files.clone()), false, true, None)?;
        let destination = Destination::Pool { socket: socket.clone(), name: name.to_owned() };
        let into_pool = freeze(&instance, destination, false, false, None)?;
        monitor.end(END_LIMIT);
        drop(instance);

        let mut starts = vec![boot];
        for (kind, planner, place) in KINDS {
            output::note(&format!("{name}: {} x {kind}, each in a new process", self.thaws));
            starts.push(self.thaws(name, kind, planner, place, &files, &socket)?);
        }
        let freezes =
            vec![("to files".to_owned(), to_files), ("into the pool".to_owned(), into_pool)];
        Ok(Scenario { function: name.to_owned(), freezes, thaws: self.thaws, starts })
    }

    /// Boots the function in a monitor of its own, and checks its first answer.
    fn boot(&self, name: &str) -> Result<(Monitor, OwnedInstance, Start)> {
        let begin = now_ns();
        let mut monitor = Monitor::spawn(self.jail, self.program, Path::new(KVM_DEVICE))?;
        let mut descriptors = Descriptors::default();
        let mut open = |path: &Path| OpenedFile::open(path, &mut descriptors);
        let boot = BootSpec {
            network: None,
            kernel: open(&guest_file("vmlinux"))?,
            initramfs: open(&guest_file("initramfs.cpio"))?,
            root: open(&image_file(&ImageName::base()))?,
            overlay: open(&guest_file("overlay.ext4"))?,
            disk_size: 0,
            cmdline: None,
            vcpus: 1,
            cpu: None,
            memory: MEMORY,
            function: Some(Function::from_path(&self.function)?),
        };
        let microvm = format!("demo-{name}-{}", std::process::id());
        let (instance, host) = HostSpec::claim(Some(&microvm), None, true, &mut descriptors)?;
        let spec = StartSpec {
            request_ns: Some(begin),
            ..StartSpec::new(Origin::Boot(Box::new(boot)), host, LIMIT)
        };
        monitor.start(spec, &descriptors)?;
        let report = monitor.started(Some(LIMIT * 2)).context("the boot failed")?;
        let sent = now_ns();
        let mut agent = AgentClient::connect(&instance.vsock_socket(), LIMIT)?;
        let outcome =
            Outcome::of(agent.invoke(&Invocation::new(&self.event("input-a.json")?, LIMIT)?))?;
        drop(agent);
        let answered = now_ns();
        self.check("input A after the boot", Some(&outcome), "expected-a.json")?;
        let mut parts = parts(&report);
        parts.push(("first response".to_owned(), answered - sent));
        let total_ns = answered - begin;
        Ok((monitor, instance, Start { name: "cold boot".to_owned(), parts, total_ns, cost: None }))
    }

    fn thaws(
        &self,
        name: &str,
        kind: &str,
        planner: &str,
        place: Place,
        files: &Path,
        socket: &Path,
    ) -> Result<Start> {
        let mut reports = Vec::new();
        for number in 1..=self.thaws {
            match place {
                Place::Pool => Client::connect(socket)?.settle()?,
                place => set_cache(files, place == Place::Cached)?,
            }
            let step = format!("thaw {number} of {name} ({kind})");
            let request_ns = now_ns();
            let mut descriptors = Descriptors::default();
            let source = match place {
                Place::Pool => SourceSpec::pool(socket, name, Verify::Once, &mut descriptors)?,
                _ => SourceSpec::directory(files, &mut descriptors)?,
            };
            let root = OpenedFile::open(&image_file(&ImageName::base()), &mut descriptors)?;
            let event = self.event("input-b.json")?;
            let thaw = ThawSpec {
                source,
                planner: planner.to_owned(),
                preloaded: false,
                root: Some(root),
                invoke: Some(InvokeSpec { event, keep: false, compare: false }),
                replay: ReplaySpec::default(),
                record: None,
            };
            let mut monitor = Monitor::spawn(self.jail, self.program, Path::new(KVM_DEVICE))?;
            let (_claimed, host) = HostSpec::claim(None, None, true, &mut descriptors)?;
            let spec = StartSpec {
                request_ns: Some(request_ns),
                ..StartSpec::new(Origin::Thaw(thaw), host, LIMIT)
            };
            monitor.start(spec, &descriptors)?;
            let report =
                monitor.started(Some(LIMIT * 2)).with_context(|| format!("{step} failed"))?;
            self.check(&step, report.outcome.as_ref(), "expected-b.json")?;
            monitor.wait().with_context(|| format!("{step} failed"))?;
            reports.push(*report);
        }
        Ok(median_start(kind, &reports))
    }

    fn event(&self, file: &str) -> Result<String> {
        let path = self.function.join(file);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    fn check(&self, step: &str, outcome: Option<&Outcome>, expected: &str) -> Result<()> {
        let expected: Value = serde_json::from_str(&self.event(expected)?)
            .with_context(|| format!("{expected} is not valid JSON"))?;
        let outcome = outcome.with_context(|| format!("{step}: the report has no answer"))?;
        let found = match (&outcome.answer, &outcome.error) {
            (Some(answer), _) => serde_json::from_str(answer.get())?,
            (None, Some(error)) => Value::String(error.to_string()),
            (None, None) => Value::Null,
        };
        if found != expected {
            bail!("{step}: the answer is {found}, and {expected} is right");
        }
        Ok(())
    }
}

/// Puts the snapshot's image into the page cache, or makes sure that no page of it is there.
fn set_cache(snapshot: &Path, cached: bool) -> Result<()> {
    let path = snapshot.join("memory.img");
    let image = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    if cached {
        let len = image.metadata()?.len();
        page_cache::preload(&image, 0..len).context("cannot fill the page cache")?;
    } else if !page_cache::evict(&image).context("cannot evict the page cache")?.is_cold() {
        bail!(
            "the page cache keeps {}: its file system, such as tmpfs, has no other place for it",
            path.display()
        );
    }
    Ok(())
}

/// The parts of a start, the response of a thaw as "first response".
fn parts(report: &StartReport) -> Parts {
    let name = |part: &str| if part == "invoke" { "first response" } else { part }.to_owned();
    report.times.parts().into_iter().map(|(part, ns)| (name(part), ns)).collect()
}

/// The medians of several starts of one kind.
fn median_start(kind: &str, reports: &[StartReport]) -> Start {
    let all: Vec<Parts> = reports.iter().map(parts).collect();
    let names = all.first().into_iter().flatten().map(|(name, _)| name.clone());
    let of = |name: &String| {
        let values = all.iter().flatten().filter(|(part, _)| part == name);
        median(values.map(|(_, ns)| *ns))
    };
    let parts = names.map(|name| (name.clone(), of(&name))).collect();
    let cost = |value: fn(&StartReport) -> u64| median(reports.iter().map(value));
    Start {
        name: kind.to_owned(),
        parts,
        total_ns: cost(|report| report.times.total_ns),
        cost: Some(Cost {
            guest_pages: cost(|report| report.counters.guest_pages),
            kvm_faults: cost(|report| report.counters.kvm.page_faults),
            read_bytes: cost(|report| report.counters.read_bytes),
            private_bytes: cost(|report| {
                report.counters.private_bytes + report.counters.copy_bytes
            }),
            shared_bytes: cost(|report| report.counters.shared_bytes + report.counters.pool_bytes),
        }),
    }
}

/// The median of some values; of an even number of them, the upper of the two in the centre.
fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
#[path = "scenario_tests.rs"]
mod tests;
