//! KVM's own counters, read through its binary statistics interface
//! (`Documentation/virt/kvm/api.rst`, 4.133 KVM_GET_STATS_FD).

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

use kvm_bindings::{KVMIO, kvm_stats_desc, kvm_stats_header};
use serde::{Deserialize, Serialize};
use vmm_sys_util::ioctl::ioctl;
use vmm_sys_util::ioctl_io_nr;

ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);

/// Bytes of a descriptor before its name.
const DESCRIPTOR_LEN: usize = size_of::<kvm_stats_desc>();

/// KVM's counters of one microVM since its creation.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct KvmStats {
    /// Guest page faults that KVM resolved by filling an entry of its own tables.
    pub page_faults: u64,
    /// Exits from guest mode, over all vCPUs.
    pub exits: u64,
    /// Leaves of 4 KiB in KVM's tables now.
    pub pages_4k: u64,
    /// Leaves of 2 MiB in KVM's tables now.
    pub pages_2m: u64,
    /// Leaves of 1 GiB in KVM's tables now.
    pub pages_1g: u64,
}

impl KvmStats {
    /// Guest pages (4 KiB) that KVM maps now: those that the guest accessed, and the others in the
    /// same larger leaves.
    #[must_use]
    pub fn mapped_pages(&self) -> u64 {
        self.pages_4k + (self.pages_2m << 9) + (self.pages_1g << 18)
    }
}

/// Faults of one vCPU, on guest memory and on addresses without memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FaultCounts {
    /// Faults that KVM took; 0 before Linux 6.0.
    pub(crate) taken: u64,
    /// Faults that had a result: an entry of KVM's tables, an emulated access, a fault of the
    /// guest.
    pub(crate) resolved: u64,
}

/// The counters of a microVM. Any thread may read them while it runs, a device too during an exit.
pub struct KvmCounters(Vec<StatsFile>);

impl KvmCounters {
    /// Opens the statistics of a VM and its vCPUs.
    ///
    /// # Errors
    /// KVM_GET_STATS_FD fails.
    pub fn open(descriptors: &[&dyn AsRawFd]) -> io::Result<Self> {
        descriptors
            .iter()
            .map(|fd| StatsFile::open(&fd.as_raw_fd()))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// From the statistics file of a VM, followed by those of its vCPUs.
    pub(crate) fn new(files: Vec<StatsFile>) -> Self {
        Self(files)
    }

    /// The faults of each vCPU since the start, in the order of the vCPUs.
    pub(crate) fn faults(&self) -> io::Result<Vec<FaultCounts>> {
        let vcpus = self.0.iter().skip(1);
        let counts = vcpus.map(|file| {
            let names =
                ["pf_taken", "pf_fixed", "pf_emulate", "pf_spurious", "pf_fast", "pf_guest"];
            let [taken, results @ ..] = file.read(names)?;
            Ok(FaultCounts { taken, resolved: results.iter().sum() })
        });
        counts.collect()
    }

    /// KVM's counters since the start.
    ///
    /// # Errors
    /// A statistics file cannot be read.
    pub fn read(&self) -> io::Result<KvmStats> {
        let mut sum = KvmStats::default();
        for file in &self.0 {
            let [page_faults, exits, pages_4k, pages_2m, pages_1g] =
                file.read(["pf_fixed", "exits", "pages_4k", "pages_2m", "pages_1g"])?;
            sum.page_faults += page_faults;
            sum.exits += exits;
            sum.pages_4k += pages_4k;
            sum.pages_2m += pages_2m;
            sum.pages_1g += pages_1g;
        }
        Ok(sum)
    }
}

/// An open statistics file of a VM or a vCPU. Any thread may read it.
///
/// Its descriptors are read together with the values, so that opening it costs a start nothing.
pub(crate) struct StatsFile(File);

impl StatsFile {
    /// Opens the statistics of `fd`, a VM or vCPU descriptor.
    pub(crate) fn open(fd: &impl AsRawFd) -> io::Result<Self> {
        // SAFETY: the ioctl takes no argument and accesses no memory of this process.
        let stats_fd = unsafe { ioctl(fd, KVM_GET_STATS_FD()) };
        if stats_fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just returned this descriptor; nothing else owns it.
        Ok(Self(unsafe { File::from_raw_fd(stats_fd) }))
    }

    /// The values of counters; 0 for those that this kernel does not have.
    pub(crate) fn read<const N: usize>(&self, names: [&str; N]) -> io::Result<[u64; N]> {
        let mut header = [0u8; size_of::<kvm_stats_header>()];
        self.0.read_exact_at(&mut header, 0)?;
        let word = |at: usize| u32_at(&header, at);
        let name_len = word(offset_of!(kvm_stats_header, name_size));
        let count = word(offset_of!(kvm_stats_header, num_desc));
        let descriptors_at = u64::from(word(offset_of!(kvm_stats_header, desc_offset)));
        let data_at = u64::from(word(offset_of!(kvm_stats_header, data_offset)));

        let stride = DESCRIPTOR_LEN + name_len as usize;
        let mut descriptors = vec![0u8; stride * count as usize];
        self.0.read_exact_at(&mut descriptors, descriptors_at)?;
        let mut values = [0; N];
        for descriptor in descriptors.chunks_exact(stride) {
            let name = descriptor[DESCRIPTOR_LEN..].split(|byte| *byte == 0).next();
            let Some(wanted) = names.iter().position(|wanted| name == Some(wanted.as_bytes()))
            else {
                continue;
            };
            let mut value = [0u8; 8];
            let offset = u32_at(descriptor, offset_of!(kvm_stats_desc, offset));
            self.0.read_exact_at(&mut value, data_at + u64::from(offset))?;
            values[wanted] = u64::from_le_bytes(value);
        }
        Ok(values)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
