//! `firn player`: build the measuring guest from a trace.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use serde::Serialize;

use firn_bench::player::{
    GapFactor, Leaves, PlayerInputs, PlayerOptions, Repeats, elf, freeze_signed,
};
use firn_bench::traces::{NamedTrace, load};
use firn_snapshot::FreezeReport;
use firn_vmm::KVM_DEVICE;

use crate::output;
use crate::pool_at;
use crate::signature_args::{SignerArgs, TenantArgs};
use crate::snapshot_args::destination;

/// Arguments of `firn player`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn player --trace sequential-read:64M --out snapshots/read
  firn player --trace pyaes-a --leaves 4k --gaps 1 --out snapshots/pyaes-a
  firn thaw --planner dram_cached --json snapshots/read
  firn player --trace json-a,json-b --out snapshots/json
  firn thaw --input json-b snapshots/json
  firn player --elf --trace pyaes-a --out player.elf

The player repeats the page accesses of a recorded function and checks what it reads. It runs natively on any KVM.

With --elf any monitor starts it as a kernel. It fills its memory, prints READY on the first serial port, waits for a byte
there, replays, and prints DONE with the touched pages and the nanoseconds, BAD with each wrong guest page, and END with
their number. Its clock is the time-stamp counter, at the frequency that KVM reports on the host that built the file.")]
pub(crate) struct PlayerArgs {
    /// A trace that firn contains, sequential-read:SIZE, sequential-write:SIZE, or the path of a
    /// .trace file; up to four traces that were recorded from one snapshot: repeat the option, or
    /// separate them by commas. `firn thaw --input` selects one
    #[arg(long, value_name = "NAME", required = true, value_delimiter = ',')]
    trace: Vec<String>,
    /// Directory for the snapshot, or its name with --pool; the file with --elf
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// Build an ELF kernel instead, for any monitor that boots Linux
    #[arg(long, conflicts_with_all = ["dense", "pool", "signing_key"])]
    elf: bool,
    /// Freeze into this pool: its medium, whose manager is started if none runs, or its manager's
    /// socket
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
    #[command(flatten)]
    signing: SignerArgs,
    #[command(flatten)]
    tenant: TenantArgs,
    /// Leaves of the guest's own page tables: recorded, 4k or 2m
    #[arg(long, value_name = "LEAVES", default_value_t = Leaves::Recorded)]
    leaves: Leaves,
    /// Factor for the recorded work between touches; 0 measures page faults alone
    #[arg(long, value_name = "FACTOR", default_value_t = GapFactor::NONE)]
    gaps: GapFactor,
    /// Seed of the content of memory
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// Store zero pages too
    #[arg(long)]
    dense: bool,
    /// Fill the pages that the guest held free with content; most of them were zero in the recorded
    /// guest
    #[arg(long)]
    unsanitised: bool,
    /// Also replay repeated accesses: those that the trace has (recorded), or one after each N
    /// instructions (or ns) of replayed work, of a random cache line of a random page among those
    /// touched so far, which needs --gaps
    #[arg(long, value_name = "recorded|N", conflicts_with = "elf")]
    again: Option<Repeats>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// The KVM device
    #[arg(long, value_name = "DEVICE", default_value = KVM_DEVICE, hide = true)]
    kvm: PathBuf,
}

/// The size of a trace.
#[derive(Serialize)]
struct InputAnswer {
    trace: String,
    touches: usize,
    pages: u64,
}

impl InputAnswer {
    fn of(inputs: &PlayerInputs) -> Vec<Self> {
        let of = |NamedTrace { name, trace }: &NamedTrace| Self {
            trace: name.clone(),
            touches: trace.touches().len(),
            pages: trace.touched_pages(),
        };
        inputs.iter().map(of).collect()
    }

    fn describe(inputs: &[Self]) -> String {
        let describe = |input: &Self| {
            format!("{} ({} touches of {} pages)", input.trace, input.touches, input.pages)
        };
        inputs.iter().map(describe).collect::<Vec<_>>().join(", ")
    }
}

#[derive(Serialize)]
struct Answer {
    inputs: Vec<InputAnswer>,
    snapshot: PathBuf,
    freeze: FreezeReport,
}

#[derive(Serialize)]
struct ElfAnswer {
    inputs: Vec<InputAnswer>,
    elf: PathBuf,
    /// Bytes of guest memory that it needs.
    memory: u64,
}

pub(crate) fn run(arguments: &PlayerArgs) -> anyhow::Result<ExitCode> {
    let traces = arguments.trace.iter().map(|name| load(name)).collect::<Result<_, _>>()?;
    let inputs = PlayerInputs::new(traces)?;
    let options = PlayerOptions {
        leaves: arguments.leaves,
        gaps: arguments.gaps,
        seed: arguments.seed,
        sanitised: !arguments.unsanitised,
        again: arguments.again,
        ..PlayerOptions::default()
    };
    if arguments.elf {
        return make_elf(arguments, &inputs, &options);
    }
    let pool = arguments.pool.as_deref().map(pool_at::open).transpose()?;
    let destination = destination(pool.as_ref(), &arguments.out)?;
    let signer = arguments.signing.signer(&arguments.tenant.tenant)?;
    let (kvm, dense) = (&arguments.kvm, arguments.dense);
    let freeze = freeze_signed(&inputs, &options, kvm, destination, dense, signer.as_ref())?;
    let answer =
        Answer { inputs: InputAnswer::of(&inputs), snapshot: arguments.out.clone(), freeze };
    if arguments.json {
        output::json(&answer);
    } else {
        output::line(&format!(
            "a player of {}; {} pages stored, {} zero; thaw it with `firn thaw {}`",
            InputAnswer::describe(&answer.inputs),
            answer.freeze.stored_pages,
            answer.freeze.zero_pages,
            answer.snapshot.display(),
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn make_elf(
    arguments: &PlayerArgs,
    inputs: &PlayerInputs,
    options: &PlayerOptions,
) -> anyhow::Result<ExitCode> {
    let elf = elf(inputs, options, &arguments.kvm)?;
    let path = arguments.out.clone();
    std::fs::write(&path, &elf.bytes)
        .with_context(|| format!("cannot write {}", path.display()))?;
    let answer = ElfAnswer { inputs: InputAnswer::of(inputs), elf: path, memory: elf.memory };
    if arguments.json {
        output::json(&answer);
    } else {
        output::line(&format!(
            "a player of {} in {}; it needs {} MiB of guest memory, plus the memory that its monitor uses",
            InputAnswer::describe(&answer.inputs),
            answer.elf.display(),
            answer.memory.div_ceil(1 << 20),
        ));
    }
    Ok(ExitCode::SUCCESS)
}
