//! The steps of Firecracker's jailer around a program, for tests with Firecracker's clients, which
//! start it by their own arguments (Firecracker's docs/jailer.md, "Jailer Operation").
//!
//! It is the tests' own: users of firn take Firecracker's.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::sys::time::TimeValLike;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{chdir, pivot_root, setsid};

/// What the client asks for.
#[derive(Debug, Parser)]
#[command(name = "jailer", disable_version_flag = true)]
struct Args {
    /// Print the version.
    #[arg(long)]
    version: bool,
    /// Name of the microVM.
    #[arg(long, required_unless_present = "version", default_value = "")]
    id: String,
    /// The program.
    #[arg(long, required_unless_present = "version", default_value = "/")]
    exec_file: PathBuf,
    /// The user that it runs as.
    #[arg(long, required_unless_present = "version", default_value_t = 0)]
    uid: u32,
    /// The group that it runs as.
    #[arg(long, required_unless_present = "version", default_value_t = 0)]
    gid: u32,
    /// Where its folder is made.
    #[arg(long, default_value = "/srv/jailer")]
    chroot_base_dir: PathBuf,
    /// A file of its control group, and the value to write.
    #[arg(long, value_name = "FILE=VALUE")]
    cgroup: Vec<String>,
    /// The version of control groups.
    #[arg(long, default_value = "1", value_parser = ["1", "2"])]
    cgroup_version: String,
    /// The control group in which its own is made.
    #[arg(long)]
    parent_cgroup: Option<PathBuf>,
    /// The network namespace that it joins.
    #[arg(long)]
    netns: Option<PathBuf>,
    /// A limit.
    #[arg(long, value_name = "fsize|no-file=VALUE")]
    resource_limit: Vec<String>,
    /// Leave the session and the terminal.
    #[arg(long)]
    daemonize: bool,
    /// Make it the first process of a new namespace.
    #[arg(long)]
    new_pid_ns: bool,
    /// The program's own arguments.
    #[arg(last = true)]
    arguments: Vec<OsString>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error may be closed.
            let _ = writeln!(io::stderr(), "jailer: error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    if args.version {
        return Ok(writeln!(io::stdout(), "Jailer v1.16.0")?);
    }
    let now = [ClockId::CLOCK_MONOTONIC, ClockId::CLOCK_PROCESS_CPUTIME_ID].map(clock_gettime);
    let valid = |character: char| character.is_ascii_alphanumeric() || character == '-';
    ensure!((1..=64).contains(&args.id.len()) && args.id.chars().all(valid), "--id is not valid");
    let program = args.exec_file.file_name().context("--exec-file names no file")?;
    let root = args.chroot_base_dir.join(program).join(&args.id).join("root");
    fs::create_dir_all(&root).with_context(|| format!("cannot create {}", root.display()))?;
    let copy = root.join(program);
    fs::copy(&args.exec_file, &copy)
        .with_context(|| format!("cannot copy {}", args.exec_file.display()))?;
    chown(&copy, Some(args.uid), Some(args.gid))?;
    limit(&args.resource_limit)?;
    enter_cgroups(args, Path::new(program))?;
    if let Some(path) = &args.netns {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        setns(file, CloneFlags::CLONE_NEWNET).context("cannot join the network namespace")?;
    }
    let (fault_device, null) = (fault_device()?, open_null()?);
    enter_root(&root).with_context(|| format!("cannot enter {}", root.display()))?;
    make_devices(args, fault_device).context("cannot make the devices")?;

    let [wall, cpu] = now;
    let inside = Path::new("/").join(program);
    let mut command = Command::new(&inside);
    command.env_clear().uid(args.uid).gid(args.gid);
    command.arg(format!("--id={}", args.id));
    command.arg(format!("--start-time-us={}", wall?.num_microseconds()));
    command.arg(format!("--start-time-cpu-us={}", cpu?.num_microseconds()));
    command.args(&args.arguments);
    if args.daemonize {
        // A leader of a process group keeps its session.
        let _ = setsid();
        command.stdin(null.try_clone()?).stdout(null.try_clone()?).stderr(null);
    }
    let pid_file = inside.with_extension("pid");
    if args.new_pid_ns {
        unshare(CloneFlags::CLONE_NEWPID).context("cannot make a process namespace")?;
        let child = command.spawn().context("cannot start the program")?;
        fs::write(pid_file, child.id().to_string())?;
        return Ok(());
    }
    fs::write(pid_file, std::process::id().to_string())?;
    Err(command.exec()).context("cannot execute the program")
}

fn limit(limits: &[String]) -> Result<()> {
    let defaults = ["no-file=2048".to_owned()];
    for limit in defaults.iter().chain(limits) {
        let (name, value) = limit.split_once('=').context("--resource-limit is not NAME=VALUE")?;
        let resource = match name {
            "fsize" => Resource::RLIMIT_FSIZE,
            "no-file" => Resource::RLIMIT_NOFILE,
            _ => bail!("--resource-limit {name} is unknown: use fsize or no-file"),
        };
        let value = value.parse().with_context(|| format!("--resource-limit {limit}"))?;
        setrlimit(resource, value, value).with_context(|| format!("cannot limit {name}"))?;
    }
    Ok(())
}

/// Makes a control group for each controller (version 1) or one for all (version 2), and enters it.
fn enter_cgroups(args: &Args, program: &Path) -> Result<()> {
    let parent = args.parent_cgroup.as_deref().unwrap_or(program);
    let base = Path::new("/sys/fs/cgroup");
    if args.cgroup_version == "2" && args.cgroup.is_empty() {
        // With a parent alone the process moves to it.
        let Some(parent) = &args.parent_cgroup else { return Ok(()) };
        return enter(&base.join(parent), "cgroup.procs");
    }
    for setting in &args.cgroup {
        let (file, value) = setting.split_once('=').context("--cgroup is not FILE=VALUE")?;
        let controller = file.split('.').next().unwrap_or(file);
        let (group, tasks) = match args.cgroup_version.as_str() {
            "1" => (base.join(controller).join(parent).join(&args.id), "tasks"),
            _ => (base.join(parent).join(&args.id), "cgroup.procs"),
        };
        fs::create_dir_all(&group)
            .with_context(|| format!("cannot create the control group {}", group.display()))?;
        if args.cgroup_version == "1" && controller == "cpuset" {
            inherit_cpuset(&base.join(controller), &group)?;
        } else if args.cgroup_version == "2" {
            let above = group.ancestors().skip(1).take_while(|path| path.starts_with(base));
            for folder in above.collect::<Vec<_>>().into_iter().rev() {
                write(&folder.join("cgroup.subtree_control"), &format!("+{controller}"))?;
            }
        }
        write(&group.join(file), value)?;
        enter(&group, tasks)?;
    }
    Ok(())
}

/// A new control group has no processors and no nodes, and can have those of the one above.
fn inherit_cpuset(base: &Path, group: &Path) -> Result<()> {
    let folders = group.ancestors().take_while(|path| *path != base);
    for folder in folders.collect::<Vec<_>>().into_iter().rev() {
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let above = folder.parent().unwrap_or(base).join(file);
            let value = fs::read_to_string(&above)
                .with_context(|| format!("cannot read {}", above.display()))?;
            write(&folder.join(file), &value)?;
        }
    }
    Ok(())
}

fn enter(group: &Path, tasks: &str) -> Result<()> {
    write(&group.join(tasks), &std::process::id().to_string())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {text:?} to {}", path.display()))
}

/// Makes the folder the root of all paths, and detaches every other file system.
fn enter_root(root: &Path) -> Result<()> {
    let none = None::<&Path>;
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount(none, "/", none, MsFlags::MS_SLAVE | MsFlags::MS_REC, none)?;
    // pivot_root(2) needs a mount point.
    mount(Some(root), root, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)?;
    chdir(root)?;
    fs::create_dir("old_root")?;
    pivot_root(".", "old_root")?;
    chdir("/")?;
    umount2("old_root", MntFlags::MNT_DETACH)?;
    Ok(fs::remove_dir("old_root")?)
}

/// Not to be found in its root.
fn open_null() -> Result<File> {
    File::options().read(true).write(true).open("/dev/null").context("cannot open /dev/null")
}

/// The minor number of the device for page fault handlers, if the host has one.
fn fault_device() -> Result<Option<u64>> {
    let misc = fs::read_to_string("/proc/misc").context("cannot read /proc/misc")?;
    let mut devices = misc.lines().filter_map(|line| line.trim().split_once(' '));
    let found = devices.find(|(_, name)| *name == "userfaultfd");
    Ok(found.map(|(minor, _)| minor.parse()).transpose()?)
}

fn make_devices(args: &Args, fault_device: Option<u64>) -> Result<()> {
    let mut folder = DirBuilder::new();
    let folder = folder.mode(0o700).recursive(true);
    for path in ["/dev/net", "/run"] {
        folder.create(path)?;
    }
    for path in ["/", "/dev", "/dev/net", "/run"] {
        fs::set_permissions(path, Permissions::from_mode(0o700))?;
        chown(path, Some(args.uid), Some(args.gid))?;
    }
    let devices = [
        ("/dev/net/tun", Some((10, 200))),
        ("/dev/kvm", Some((10, 232))),
        ("/dev/urandom", Some((1, 9))),
        ("/dev/userfaultfd", fault_device.map(|minor| (10, minor))),
    ];
    for (path, device) in devices {
        let Some((major, minor)) = device else { continue };
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        mknod(path, SFlag::S_IFCHR, mode, makedev(major, minor))
            .with_context(|| format!("cannot make {path}"))?;
        chown(path, Some(args.uid), Some(args.gid))?;
    }
    Ok(())
}
