//! The configuration of one run.

use std::path::PathBuf;
use std::time::Duration;

/// One command to run in the lab, and the machine to run it in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunConfig {
    /// The command and its arguments. Not empty.
    pub command: Vec<String>,
    /// Files and folders to copy into the lab, as `/in/NAME`.
    pub inputs: Vec<PathBuf>,
    /// The folder that receives the contents of the lab's `/out`.
    pub out: Option<PathBuf>,
    /// Memory of the NUMA node with the processors, in MiB.
    pub memory_mib: u64,
    /// Processors of the machine. With `icount` the machine has one.
    pub cpus: u8,
    /// Whether the machine's clock counts instructions, 1 ns each.
    pub icount: bool,
    /// Words added to the command line of the machine's kernel.
    pub cmdline: Option<String>,
    /// Limit for the command, counted from the start of the lab.
    pub timeout: Option<Duration>,
    /// Variables added to the command's environment.
    pub environment: Vec<(String, String)>,
    /// The file that keeps `/dev/dax0.0` across runs. It is created if absent.
    pub pmem: Option<PathBuf>,
    /// Size of `/dev/dax0.0` in MiB, when it is created.
    pub pmem_size_mib: u64,
    /// Whether the machine has a second NVDIMM with an empty ext4 for DAX.
    pub fsdax: bool,
    /// Whether the command's output is returned instead of being written to this process's own
    /// streams.
    pub capture: bool,
}

impl RunConfig {
    /// Default memory of the machine, in MiB.
    pub const MEMORY_MIB: u64 = 4096;
    /// Memory of the NUMA node without processors (node 1), in MiB.
    pub const FAR_MIB: u64 = 512;
    /// Default number of processors of the machine.
    pub const CPUS: u8 = 2;
    /// Default size of `/dev/dax0.0`, in MiB.
    pub const PMEM_MIB: u64 = 1024;

    /// The default machine for a command.
    #[must_use]
    pub fn new(command: Vec<String>) -> Self {
        Self {
            command,
            inputs: Vec::new(),
            out: None,
            memory_mib: Self::MEMORY_MIB,
            cpus: Self::CPUS,
            icount: false,
            cmdline: None,
            timeout: None,
            environment: Vec::new(),
            pmem: None,
            pmem_size_mib: Self::PMEM_MIB,
            fsdax: false,
            capture: false,
        }
    }
}
