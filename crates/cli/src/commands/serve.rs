//! `firn serve`: runs the daemon, which serves functions through AWS Lambda's API.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use firn_base::{monitor_program, parse_size};
use tracing_subscriber::EnvFilter;

use firn_api::{Credentials, Limits, Listen, ServeOptions};
use firn_control::{BootFiles, ControlOptions, ImageFiles, Quotas, Tenants};
use firn_memory::planners::parse;
use firn_net::Policy;
use firn_run::jail::JailMode;
use firn_run::{FunctionSettings, ImageName, require_linux};

use crate::assets::{GuestFiles, image_file};
use crate::host_args::HostArgs;
use crate::log::LogLines;
use crate::output;
use crate::serve_network_arg::ServeNetworkArg;

/// The image of functions that name none.
const IMAGE: &str = "aws";

/// Planners for snapshots in a pool, best first. `firn` is `pass_shared` that copies pages before
/// the guest writes them. Both need a medium that supports private mappings or mappings in chunks.
const BEST_IN_POOL: [&str; 3] = ["firn", "pass_shared", "pass"];

/// Planners for snapshots in a directory that need no profile, best first.
const BEST_IN_DIRECTORY: [&str; 2] = ["vanilla_dax", "firecracker"];

/// Arguments of `firn serve`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn serve
  firn serve --data /srv/firn --pool /dev/dax0.0 --keep-alive 60
  aws --endpoint-url http://127.0.0.1:9700 --region us-east-1 lambda list-functions

A function chooses its planner and image with the environment variables FIRN_PLANNER and FIRN_IMAGE of its
configuration. The daemon writes its log to standard error; RUST_LOG sets the level.")]
pub(crate) struct ServeArgs {
    /// Address to listen on, or path of a unix socket, which only this user can connect to
    #[arg(long, value_name = "ADDRESS:PORT|PATH", default_value = "127.0.0.1:9700")]
    listen: Listen,
    /// A name of this host, besides the loopback addresses, for which unsigned requests are
    /// accepted
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Listen on an address that other machines reach, although requests and answers are not
    /// encrypted
    #[arg(long)]
    insecure: bool,
    /// Limit of connections; at most half of the open files that the system allows
    #[arg(long, value_name = "N", default_value_t = Limits::default().connections)]
    connections: usize,
    /// Limit of all requests and answers together that the daemon holds in memory
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "256M")]
    buffer: u64,
    /// Directory for functions, code and snapshots [default: serve, in the cache directory]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Directory for what guests write to their disks; in DRAM, that counts as the guests' memory
    /// [default: scratch, in the data directory]
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Limit of what each guest writes to its disk; more is an I/O error in the guest [default: the
    /// whole disk, which a function's EphemeralStorage sets]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    disk: Option<u64>,
    /// Limit of the guests' disks together, each of which counts with all that its guest may write
    /// [default: seven eighths of the free space in the scratch directory]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    scratch_size: Option<u64>,
    /// Rebuild the database from the export beside it if it is lost or damaged, then serve
    #[arg(long)]
    recover: bool,
    /// Store snapshots in this pool: its medium, whose manager is started if it does not run, or
    /// its manager's socket
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
    /// Sign the snapshots of each tenant with a key of its own in this directory, which is made by
    /// the tenant's first snapshot, and refuse a snapshot without such a signature before anything
    /// of it is parsed [default: snapshots are not signed]
    #[arg(long, value_name = "DIR")]
    snapshot_keys: Option<PathBuf>,
    /// Planner of functions that do not choose one [default: the best that works on this host,
    /// chosen for each version when it is frozen]
    #[arg(long, value_name = "PLANNER")]
    planner: Option<String>,
    /// Memory limit of all microVMs together [default: seven eighths of the available memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,
    /// Limit of running microVMs
    #[arg(long, value_name = "N", default_value_t = 256)]
    monitors: usize,
    /// Limit the CPU time of each microVM that serves requests by its function's memory: one CPU
    /// for MIB, others in proportion; 1769 is AWS Lambda's value. Requires a writable cgroup
    /// [default: no limit]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    cpu_limit: Option<u32>,
    /// The network of functions without FIRN_NETWORK=none: none, proxy for sockets of this host, or
    /// tap:PREFIX,network=ADDRESS/BITS, and ,dns=ADDRESS if wanted, for the existing tap devices
    /// PREFIX0, PREFIX1 and so on, one for each running microVM; see docs/concepts/network.md
    #[arg(long, value_name = "NETWORK", default_value = "proxy")]
    network: ServeNetworkArg,
    /// What functions reach: allow:NETWORK, allow:NETWORK:PORT, a host name as
    /// allow:api.example.com:443 or allow:*.example.com, or the same with deny; the first rule that
    /// matches decides, and without one a function reaches what is globally reachable
    #[arg(long, value_name = "RULE")]
    egress: Vec<String>,
    /// Whether monitors are jailed: as far as this host can, by all walls or not at all, or never:
    /// auto, require or off [default: require for root, auto for other users]
    #[arg(long, value_name = "MODE")]
    jail: Option<JailMode>,
    /// Memory to reserve for a microVM
    #[arg(long, value_enum, default_value_t = Reservation::Measured)]
    booking: Reservation,
    /// Number of standby monitors, started in advance for the next thaws
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(0..=64))]
    standby: u8,
    /// DRAM for ready clones: microVMs that are restored before they are requested, as many of each
    /// version as were requested at once lately; 0 makes none
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    ready: u64,
    /// Limit of requests that wait for a microVM, and limit of accepted events; more are refused
    #[arg(long, value_name = "N", default_value_t = 1000)]
    queue: usize,
    /// Seconds that a request waits for a microVM
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    queue_wait: u64,
    /// Limit of all accepted events together; long events are stored in the data directory
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "1G")]
    event_bytes: u64,
    /// Seconds until an event is retried after its function failed; twice as many before the second
    /// retry
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    event_pause: u64,
    /// Seconds that an idle microVM is kept
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    keep_alive: u64,
    /// What an idle microVM does
    #[arg(long, value_enum, default_value_t = Idle::Pause)]
    idle: Idle,
    /// Time limit in seconds for the start of a microVM and for the initialisation of a function
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=900))]
    start_limit: u64,
    /// Region in the functions' ARNs
    #[arg(long, default_value = "us-east-1")]
    region: String,
    /// The AWS keys that functions get by their roles: a file in the format of ~/.aws/credentials
    /// whose sections are roles' ARNs, or default. It is read for each request
    #[arg(long, value_name = "FILE")]
    role_credentials: Option<PathBuf>,
    /// Account in the functions' ARNs: 12 digits
    #[arg(long, default_value = "000000000000", value_parser = account)]
    account: String,
    /// A planner that functions can choose, by default all; sections of --credentials can have
    /// quotas of their own
    #[arg(long, value_name = "PLANNER", value_delimiter = ',')]
    allow_planner: Vec<String>,
    /// Limit of the functions of each tenant
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    quota_functions: u64,
    /// Limit of the published versions of each tenant
    #[arg(long, value_name = "N")]
    quota_versions: Option<u64>,
    /// Limit of the zip files of each tenant
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    quota_code: Option<u64>,
    /// Limit of the snapshots of each tenant
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    quota_snapshots: Option<u64>,
    /// Limit of the provisioned microVMs of each tenant
    #[arg(long, value_name = "N")]
    quota_provisioned: Option<u64>,
    /// Require requests that are signed with one of the keys in this file, in the format of
    /// ~/.aws/credentials
    #[arg(long, value_name = "FILE")]
    credentials: Option<PathBuf>,
    /// Export a span for each invocation to the OpenTelemetry collector at this endpoint, as OTLP
    /// over HTTP
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    otlp: Option<String>,
    /// Format of the log
    #[arg(long, value_enum, default_value_t = Log::Text)]
    log: Log,
    #[command(flatten)]
    files: GuestFiles,
    #[command(flatten)]
    host: HostArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Reservation {
    /// The measured use of its version plus a margin, once one of its microVMs has answered a
    /// request
    Measured,
    /// All of guest memory
    Worst,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Idle {
    /// Nothing: its vCPUs are paused between two requests, as on AWS Lambda
    Pause,
    /// It runs on
    Run,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Log {
    /// Text for people
    Text,
    /// One JSON object per line
    Json,
}

pub(crate) fn run(arguments: ServeArgs) -> anyhow::Result<ExitCode> {
    require_linux(arguments.host.software_kvm, &arguments.host.kvm)?;
    let image = ImageName::try_from(IMAGE.to_owned())?;
    let settings = FunctionSettings { image: Some(image), ..FunctionSettings::default() };
    let root = arguments.files.check(&settings)?;
    let planners: &[&str] = match (&arguments.planner, &arguments.pool) {
        (Some(planner), _) => &[planner],
        (None, Some(_)) => &BEST_IN_POOL,
        (None, None) => &BEST_IN_DIRECTORY,
    };
    for planner in planners {
        parse(planner)?;
    }
    for planner in &arguments.allow_planner {
        parse(planner)?;
    }
    let memory = match arguments.memory {
        Some(memory) => memory,
        None => {
            available_memory()
                .context("cannot read how much memory is available; pass a limit with --memory")?
                / 8
                * 7
        }
    };
    let policy = Policy::parse(arguments.egress.iter().map(String::as_str))?;
    let network = arguments.network.open(policy, !arguments.egress.is_empty())?;
    let credentials = arguments.credentials.as_deref().map(Credentials::read).transpose()?;
    let tenants = Tenants {
        default: Quotas {
            planners: (!arguments.allow_planner.is_empty()).then_some(arguments.allow_planner),
            functions: Some(arguments.quota_functions),
            versions: arguments.quota_versions,
            code: arguments.quota_code,
            snapshots: arguments.quota_snapshots,
            provisioned: arguments.quota_provisioned,
        },
        named: credentials.as_ref().map(|found| found.tenants().clone()).unwrap_or_default(),
    };
    let names_root = arguments.files.name_root();
    let options = ServeOptions {
        listen: arguments.listen,
        hosts: arguments.allow_host,
        insecure: arguments.insecure,
        limits: Limits {
            connections: arguments.connections,
            buffer: usize::try_from(arguments.buffer).unwrap_or(usize::MAX),
            ..Limits::default()
        },
        account: arguments.account,
        otlp: arguments.otlp,
        credentials,
        control: ControlOptions {
            data: match arguments.data {
                Some(data) => data,
                None => firn_lab::cache_dir().context(
                    "no directory for functions: HOME and FIRN_CACHE are not set; pass one with --data",
                )?.join("serve"),
            },
            scratch: arguments.scratch,
            scratch_size: arguments.scratch_size,
            disk: arguments.disk,
            recover: arguments.recover,
            program: std::env::current_exe().context("cannot find the path of this program")?,
            monitor_program: monitor_program().context("cannot find the path of this program")?,
            kvm: arguments.host.kvm,
            software_kvm: arguments.host.software_kvm,
            boot_files: BootFiles {
                kernel: arguments.files.kernel,
                initramfs: arguments.files.initramfs,
                root,
                overlay: arguments.files.overlay,
            },
            images: (!names_root).then(|| ImageFiles {
                base: image_file(&ImageName::base()),
                folder: firn_lab::guest_file("images"),
            }),
            standby: arguments.standby.into(),
            ready: arguments.ready,
            pool: arguments.pool,
            snapshot_keys: arguments.snapshot_keys,
            planners: planners.iter().map(|planner| (*planner).to_owned()).collect(),
            memory,
            monitors: arguments.monitors,
            jail: arguments.jail.unwrap_or_else(JailMode::of_daemon),
            network,
            one_cpu: arguments.cpu_limit,
            measured: arguments.booking == Reservation::Measured,
            queue: arguments.queue,
            event_bytes: arguments.event_bytes,
            event_pause: Duration::from_secs(arguments.event_pause),
            queue_wait: Duration::from_secs(arguments.queue_wait),
            keep_alive: Duration::from_secs(arguments.keep_alive),
            pause_idle: arguments.idle == Idle::Pause,
            start_limit: Duration::from_secs(arguments.start_limit),
            region: arguments.region,
            roles: arguments.role_credentials,
            tenants,
        },
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(LogLines(std::io::stderr));
    match arguments.log {
        Log::Text => log.with_ansi(false).init(),
        Log::Json => log.json().init(),
    }
    firn_api::serve(&options, |address| {
        output::line(&format!("firn serves AWS Lambda's API on {address}"));
    })?;
    Ok(ExitCode::SUCCESS)
}

/// `MemAvailable` of proc_meminfo(5), bytes.
fn available_memory() -> std::io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

fn account(text: &str) -> Result<String, String> {
    if text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_digit()) {
        Ok(text.to_owned())
    } else {
        Err("an account has 12 digits".to_owned())
    }
}
