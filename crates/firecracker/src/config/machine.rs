//! vCPUs, memory and the kernel.

use firn_vmm::{CpuChoice, CpuModel, MAX_VCPUS};
use serde::{Deserialize, Serialize};

use super::ValueError;

const MIB: u64 = 1 << 20;

/// vCPUs and memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MachineConfig {
    /// Number of vCPUs.
    pub(crate) vcpu_count: u8,
    /// Guest memory, MiB.
    pub(crate) mem_size_mib: u64,
    /// Whether two vCPUs are threads of one core.
    #[serde(default)]
    pub(crate) smt: bool,
    /// A processor that Firecracker describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_template: Option<CpuTemplate>,
    /// Whether diff snapshots can be made.
    #[serde(default)]
    pub(crate) track_dirty_pages: bool,
    /// Pages of the host behind guest memory.
    #[serde(default)]
    pub(crate) huge_pages: HugePages,
}

/// A change of some fields of a [`MachineConfig`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MachineConfigUpdate {
    vcpu_count: Option<u8>,
    mem_size_mib: Option<u64>,
    smt: Option<bool>,
    pub(crate) cpu_template: Option<CpuTemplate>,
    track_dirty_pages: Option<bool>,
    huge_pages: Option<HugePages>,
}

/// A processor that Firecracker describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names of Firecracker's templates")]
pub(crate) enum CpuTemplate {
    C3,
    T2,
    T2S,
    T2CL,
    T2A,
    V1N1,
    None,
}

/// Pages of the host behind guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum HugePages {
    /// Those of the host's default.
    #[default]
    None,
    /// Transparent huge pages.
    Transparent,
    /// Pages of hugetlbfs.
    #[serde(rename = "2M")]
    Hugetlbfs2M,
}

impl Default for MachineConfig {
    fn default() -> Self {
        Self {
            vcpu_count: 1,
            mem_size_mib: 128,
            smt: false,
            cpu_template: None,
            track_dirty_pages: false,
            huge_pages: HugePages::None,
        }
    }
}

impl MachineConfig {
    /// Checks all values.
    pub(crate) fn check(&self) -> Result<(), ValueError> {
        if !(1..=MAX_VCPUS).contains(&self.vcpu_count) {
            let reason = format!("use 1 to {MAX_VCPUS}");
            return Err(ValueError::invalid("vcpu_count", reason));
        }
        if self.mem_size_mib == 0 || self.mem_size_mib > u64::MAX / MIB {
            return Err(ValueError::invalid("mem_size_mib", "use at least 1 MiB"));
        }
        if self.smt && self.vcpu_count > 1 && !self.vcpu_count.is_multiple_of(2) {
            let reason = "with smt, use 1 or an even number";
            return Err(ValueError::invalid("vcpu_count", reason));
        }
        if self.cpu_template == Some(CpuTemplate::V1N1) {
            return Err(ValueError::unsupported("cpu_template", "V1N1 is for Arm processors"));
        }
        if self.huge_pages != HugePages::None {
            let reason = "guest memory has pages of the host's default size; use \"None\"";
            return Err(ValueError::unsupported("huge_pages", reason));
        }
        Ok(())
    }

    /// The processor model of the template. A template hides instructions that not all of its
    /// processors have, and so does the model.
    pub(crate) fn cpu(&self) -> CpuChoice {
        match self.cpu_template {
            Some(CpuTemplate::C3) => CpuChoice::AtMost(CpuModel::V2),
            Some(CpuTemplate::T2 | CpuTemplate::T2S | CpuTemplate::T2CL | CpuTemplate::T2A) => {
                CpuChoice::AtMost(CpuModel::V3)
            }
            Some(CpuTemplate::V1N1 | CpuTemplate::None) | None => CpuChoice::Best,
        }
    }

    /// Guest memory, bytes.
    pub(crate) fn memory(&self) -> u64 {
        self.mem_size_mib.saturating_mul(MIB)
    }

    /// The configuration of a snapshot's machine, whose state file has this one.
    pub(crate) fn of_snapshot(&self, vcpus: u32, memory: u64, track_dirty_pages: bool) -> Self {
        Self {
            vcpu_count: u8::try_from(vcpus).unwrap_or(u8::MAX),
            mem_size_mib: memory / MIB,
            track_dirty_pages,
            ..self.clone()
        }
    }
}

impl MachineConfigUpdate {
    /// The configuration after the change.
    pub(crate) fn of(self, old: &MachineConfig) -> Result<MachineConfig, ValueError> {
        if self == Self::default() {
            return Err(ValueError::invalid("the body", "it changes nothing"));
        }
        let config = MachineConfig {
            vcpu_count: self.vcpu_count.unwrap_or(old.vcpu_count),
            mem_size_mib: self.mem_size_mib.unwrap_or(old.mem_size_mib),
            smt: self.smt.unwrap_or(old.smt),
            cpu_template: self.cpu_template.or(old.cpu_template),
            track_dirty_pages: self.track_dirty_pages.unwrap_or(old.track_dirty_pages),
            huge_pages: self.huge_pages.unwrap_or(old.huge_pages),
        };
        config.check().map(|()| config)
    }
}

/// The kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BootSource {
    /// Path of the kernel.
    pub(crate) kernel_image_path: String,
    /// Path of the initial RAM disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) initrd_path: Option<String>,
    /// The kernel's command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) boot_args: Option<String>,
}
