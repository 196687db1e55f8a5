//! The lab's machine: its files and its QEMU process.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

use firn_base::monitor_program;
use rustix::io::FdFlags;
use rustix::process::Signal;

use crate::devdax::{self, Mode};
use crate::{LabError, RunConfig};

/// The built lab.
pub(crate) struct Lab {
    cache: PathBuf,
}

impl Lab {
    /// The lab in `cache`, if it is built.
    pub(crate) fn open(cache: PathBuf) -> Result<Self, LabError> {
        let lab = Self { cache };
        for part in ["lab/qemu", "lab/l1", "lab/scratch.ext4", "lab/guest.ext4"] {
            let missing = lab.cache.join(part);
            if !missing.exists() {
                return Err(LabError::NotBuilt { missing });
            }
        }
        Ok(lab)
    }

    fn path(&self, part: &str) -> PathBuf {
        self.cache.join("lab").join(part)
    }

    /// A file without a name. The kernel removes it with the last process that has it open.
    pub(crate) fn temporary(&self) -> io::Result<File> {
        tempfile::tempfile_in(self.path(""))
    }
}

/// The running machine. Dropping it kills QEMU.
pub(crate) struct Machine {
    qemu: Child,
    console: File,
}

impl Machine {
    /// Starts QEMU with `payload` as the disk with the request, and returns the stream of the lab's
    /// init.
    pub(crate) fn start(
        lab: &Lab,
        payload: &File,
        config: &RunConfig,
    ) -> Result<(Self, ChildStdout), LabError> {
        let prepare = |what| move |source| LabError::Prepare { what, source };
        let program = File::open("/proc/self/exe").map_err(prepare("firn's own program"))?;
        let monitor = monitor_program().and_then(File::open);
        let monitor = monitor.map_err(prepare("firn-monitor, which belongs beside firn"))?;
        let scratch = scratch_disk(lab).map_err(prepare("the scratch disk"))?;
        let guest = File::open(lab.path("guest.ext4")).map_err(prepare("the guest's files"))?;
        let images = match File::open(lab.path("images.ext4")) {
            Ok(images) => Some(images),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(prepare("the images' disk")(error)),
        };
        let (pmem, pmem_size) = pmem(lab, config)?;
        let fsdax = config.fsdax.then(|| fsdax(lab)).transpose()?;
        let log = lab.temporary().map_err(prepare("the console's log"))?;
        rustix::fs::fcntl_setfl(&log, rustix::fs::OFlags::APPEND)
            .map_err(|error| prepare("the console's log")(error.into()))?;

        let mut command = qemu(lab, config);
        command.args(accelerator(config.icount));
        let memory = config.memory_mib;
        // The kernel numbers NVDIMMs from the last one, so the devdax is always device 0.
        let mut nvdimms: Vec<_> = fsdax.iter().map(|(file, size)| (file, *size)).collect();
        nvdimms.push((&pmem, pmem_size));
        let sizes: u64 = nvdimms.iter().map(|(_, size)| size.div_ceil(1 << 20)).sum();
        let far = RunConfig::FAR_MIB;
        let most = memory + far + sizes + 1024;
        command.args(["-m", &format!("{}M,slots=3,maxmem={most}M", memory + far)]);
        let cpus = if config.icount { 1 } else { config.cpus };
        command.args(["-smp", &cpus.to_string()]);
        // The second node has memory only, as CXL memory that is onlined as system RAM.
        for (node, size) in [memory, far].into_iter().enumerate() {
            let backend = format!("memory-backend-ram,id=node{node},size={size}M");
            let processors =
                if node == 0 { format!(",cpus=0-{}", cpus - 1) } else { String::new() };
            let place = format!("node,nodeid={node},memdev=node{node}{processors}");
            command.args(["-object", &backend, "-numa", &place]);
        }
        // In this order they are /dev/vda, /dev/vdb and so on. `lab/init` relies on it.
        let programs = [(&program, "on"), (&monitor, "on")];
        let disks = [(payload, "on"), (&scratch, "off"), (&guest, "on")].into_iter();
        let disks = disks.chain(images.as_ref().map(|disk| (disk, "on")));
        for (disk, readonly) in programs.into_iter().chain(disks) {
            let path = inherited(disk).map_err(prepare("a disk"))?;
            // By default QEMU stops the machine without a message when the host's disk is full.
            // What is deleted in the lab is freed there.
            let drive = format!(
                "if=virtio,format=raw,cache=unsafe,werror=report,discard=unmap,\
                 readonly={readonly},file={path}"
            );
            command.args(["-drive", &drive]);
        }
        for (number, (file, size)) in nvdimms.into_iter().enumerate() {
            let path = inherited(file).map_err(prepare("the persistent memory"))?;
            let backend = format!(
                "memory-backend-file,id=pmem{number},share=on,align=2M,size={size},mem-path={path}"
            );
            let device = format!("nvdimm,memdev=pmem{number},unarmed=off");
            command.args(["-object", &backend, "-device", &device]);
        }

        let stderr = log.try_clone().map_err(prepare("the console's log"))?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr).process_group(0);
        // SAFETY: between fork and exec the closure only makes one system call, which neither
        // allocates nor locks.
        unsafe {
            // QEMU exits with firn, even if firn is killed.
            command.pre_exec(|| {
                Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
            });
        }
        let mut qemu = command.spawn().map_err(LabError::Start)?;
        let Some(channel) = qemu.stdout.take() else {
            return Err(LabError::Start(io::Error::other("its standard output is no pipe")));
        };
        Ok((Self { qemu, console: log }, channel))
    }

    fn stop(&mut self) -> io::Result<ExitStatus> {
        self.qemu.kill()?;
        self.qemu.wait()
    }

    /// QEMU's exit status after its channel has closed. QEMU is killed if it does not exit within a
    /// second.
    pub(crate) fn exit_status(&mut self) -> io::Result<ExitStatus> {
        for _ in 0..20 {
            if let Some(status) = self.qemu.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        self.stop()
    }

    /// The last lines of the console and of QEMU's messages.
    pub(crate) fn console_tail(&mut self) -> String {
        // A kernel panic prints its cause about 40 lines before its end.
        const LINES: usize = 80;
        let mut log = Vec::new();
        if let Err(error) = self.console.rewind().and_then(|()| self.console.read_to_end(&mut log))
        {
            return format!("  (the console's log cannot be read: {error})");
        }
        let text = String::from_utf8_lossy(&log);
        let lines: Vec<_> =
            text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
        lines[lines.len().saturating_sub(LINES)..]
            .iter()
            .map(|line| format!("  {line}"))
            .collect::<Vec<_>>()
            .join("\n")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // An error means that QEMU has already exited.
        let _ = self.stop();
    }
}

/// QEMU's options for the emulation of processors. With `icount` an instruction takes 1 ns of the
/// machine's time, and time jumps to the next timer while the processor is idle.
///
/// Otherwise the processor has none of the features that cost an emulator most, which takes a
/// third off the guests' tests: a fifth level of page tables, a protection that changes with every
/// access to a user's memory, and copies that Linux makes byte by byte because a real processor is
/// fast at it. One that counts instructions keeps them, so that its counts can be compared with
/// older ones.
fn accelerator(icount: bool) -> &'static [&'static str] {
    if icount {
        &["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off", "-cpu", "max"]
    } else {
        &["-accel", "tcg,thread=multi", "-cpu", "max,la57=off,smap=off,erms=off,fsrm=off"]
    }
}

/// QEMU with the options that are the same in every run, and the kernel's command line.
fn qemu(lab: &Lab, config: &RunConfig) -> Command {
    const KERNEL: &str = "console=ttyS0 quiet panic=-1 nokaslr mitigations=off tsc=reliable random.trust_cpu=on \
         cryptomgr.notests initcall_blacklist=jent_mod_init apparmor=0 numa_balancing=disable preempt=none";
    // Under emulation a timer of the kernel can be lost. If each sets the next one, a processor
    // stands still for ever. A clock that counts instructions loses none.
    const TICKS: &str = "nohz=off highres=off";
    const MACHINE: &str = "-nodefaults -no-user-config -display none -no-reboot \
         -machine q35,nvdimm=on";
    // The console and QEMU's messages go to the log; the channel is QEMU's standard output.
    const PORTS: &str = "-chardev file,id=console,path=/proc/self/fd/2,append=on -serial chardev:console \
         -chardev stdio,id=channel,signal=off -device virtio-serial-pci -device virtserialport,chardev=channel,nr=1";

    let ticks = if config.icount { "" } else { TICKS };
    let cmdline = [KERNEL, ticks, config.cmdline.as_deref().unwrap_or_default()].join(" ");
    let root = lab.path("qemu");
    let libraries =
        ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"].map(|folder| root.join(folder));
    let mut command = Command::new(libraries[0].join("ld-linux-x86-64.so.2"));
    command
        .env_clear()
        .env("QEMU_MODULE_DIR", libraries[1].join("qemu"))
        .arg("--library-path")
        .arg(libraries.each_ref().map(|folder| folder.display().to_string()).join(":"))
        .arg(root.join("usr/bin/qemu-system-x86_64"))
        .arg("-L")
        .arg(root.join("usr/share/qemu"))
        .arg("-L")
        .arg(root.join("usr/share/seabios"))
        .args(MACHINE.split(' '))
        .args(PORTS.split(' '))
        .arg("-kernel")
        .arg(lab.path("l1/vmlinuz"))
        .arg("-initrd")
        .arg(lab.path("l1/initramfs.cpio"))
        .args(["-append", &cmdline]);
    command
}

/// Lets a child process inherit `file`, and returns the path by which the child opens it.
fn inherited(file: &File) -> io::Result<String> {
    rustix::io::fcntl_setfd(file.as_fd(), FdFlags::empty())?;
    Ok(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A sparse copy of the formatted scratch disk.
fn scratch_disk(lab: &Lab) -> io::Result<File> {
    let mut template = File::open(lab.path("scratch.ext4"))?;
    let mut disk = lab.temporary()?;
    copy_sparse(&mut template, &mut disk, 0)?;
    Ok(disk)
}

/// The file behind `/dev/pmem1`, with an empty ext4 on it, and its size in bytes.
fn fsdax(lab: &Lab) -> Result<(File, u64), LabError> {
    let template = lab.path("fsdax.ext4");
    if !template.exists() {
        return Err(LabError::NotBuilt { missing: template });
    }
    let make = || {
        let mut template = File::open(template)?;
        let size = template.metadata()?.len() + devdax::ALIGNMENT;
        let mut file = lab.temporary()?;
        let uuid = uuid::Uuid::new_v4().into_bytes();
        devdax::format(&file, size, uuid, Mode::Fsdax)?;
        copy_sparse(&mut template, &mut file, devdax::ALIGNMENT)?;
        Ok((file, size))
    };
    make().map_err(|source| LabError::Prepare { what: "the DAX file system", source })
}

/// Copies `from` into the empty file `to` at `offset`, and keeps holes.
fn copy_sparse(from: &mut File, to: &mut File, offset: u64) -> io::Result<()> {
    let size = from.metadata()?.len();
    to.set_len(offset + size)?;
    let mut end = 0;
    loop {
        let start = match rustix::fs::seek(&*from, rustix::fs::SeekFrom::Data(end)) {
            Ok(start) => start,
            // No data after `end`.
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        end = rustix::fs::seek(&*from, rustix::fs::SeekFrom::Hole(start))?;
        from.seek(SeekFrom::Start(start))?;
        to.seek(SeekFrom::Start(offset + start))?;
        io::copy(&mut from.take(end - start), to)?;
        to.flush()?;
    }
}

/// The file behind `/dev/dax0.0` and its size in bytes.
fn pmem(lab: &Lab, config: &RunConfig) -> Result<(File, u64), LabError> {
    // The device starts after the information block.
    let size = (config.pmem_size_mib << 20).next_multiple_of(devdax::ALIGNMENT) + devdax::ALIGNMENT;
    let uuid = || uuid::Uuid::new_v4().into_bytes();
    let Some(path) = &config.pmem else {
        let prepare = |source| LabError::Prepare { what: "the persistent memory", source };
        let file = lab.temporary().map_err(prepare)?;
        devdax::format(&file, size, uuid(), Mode::Devdax).map_err(prepare)?;
        return Ok((file, size));
    };
    let failed = |source| LabError::Pmem { path: path.clone(), source };
    match create_pmem(path, size, uuid()) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Ok(()) => {}
        Err(error) => return Err(failed(error)),
    }
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    if !devdax::is_formatted(&file).map_err(failed)? {
        return Err(LabError::PmemForeign { path: path.clone() });
    }
    if !size.is_multiple_of(devdax::ALIGNMENT) || size < 64 << 20 {
        return Err(LabError::PmemSize { path: path.clone(), size });
    }
    Ok((file, size))
}

/// Creates a formatted file at `path` unless it exists. The file gets its name when it is complete.
fn create_pmem(path: &Path, size: u64, uuid: [u8; 16]) -> io::Result<()> {
    if fs::exists(path)? {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::NamedTempFile::new_in(folder)?;
    devdax::format(file.as_file(), size, uuid, Mode::Devdax)?;
    file.persist_noclobber(path)?;
    Ok(())
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
