//! Snapshots.

use serde::Deserialize;

use super::ValueError;

/// A snapshot to be made.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateSnapshot {
    /// What its memory file has.
    #[serde(default)]
    pub(crate) snapshot_type: SnapshotType,
    /// Path of the state file.
    pub(crate) snapshot_path: String,
    /// Path of the memory file.
    pub(crate) mem_file_path: String,
}

/// What the memory file of a snapshot has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) enum SnapshotType {
    /// All of guest memory.
    #[default]
    Full,
    /// The pages that were written since the last snapshot.
    Diff,
}

/// A snapshot to be loaded.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoadSnapshot {
    /// Path of the state file.
    pub(crate) snapshot_path: String,
    /// Path of the memory file, as older clients send it.
    #[serde(default)]
    pub(crate) mem_file_path: Option<String>,
    /// Where guest memory comes from.
    #[serde(default)]
    pub(crate) mem_backend: Option<MemoryBackend>,
    /// The older name of `track_dirty_pages`.
    #[serde(default)]
    pub(crate) enable_diff_snapshots: bool,
    /// Whether diff snapshots can be made.
    #[serde(default)]
    pub(crate) track_dirty_pages: bool,
    /// Whether the guest runs at once.
    #[serde(default)]
    pub(crate) resume_vm: bool,
    /// Other tap devices than those of the snapshot.
    #[serde(default)]
    pub(crate) network_overrides: Vec<NetworkOverride>,
    /// Another socket than that of the snapshot.
    #[serde(default)]
    pub(crate) vsock_override: Option<VsockOverride>,
    /// Whether the guest's clock advances by the time since the snapshot.
    #[serde(default)]
    pub(crate) clock_realtime: bool,
}

/// Where guest memory comes from.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemoryBackend {
    /// The kind.
    pub(crate) backend_type: BackendType,
    /// Path of the memory file, or of the socket of a page fault handler.
    pub(crate) backend_path: String,
}

/// A kind of [`MemoryBackend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) enum BackendType {
    /// The memory file.
    File,
    /// A page fault handler.
    Uffd,
}

/// Another tap device.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NetworkOverride {
    /// The network device's id.
    pub(crate) iface_id: String,
    /// The tap device.
    pub(crate) host_dev_name: String,
}

/// Another socket of the vsock device.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VsockOverride {
    /// Its path.
    pub(crate) uds_path: String,
}

impl LoadSnapshot {
    /// Where guest memory comes from, by either of the two fields.
    pub(crate) fn backend(&self) -> Result<MemoryBackend, ValueError> {
        match (&self.mem_file_path, &self.mem_backend) {
            (Some(path), None) => {
                Ok(MemoryBackend { backend_type: BackendType::File, backend_path: path.clone() })
            }
            (None, Some(backend)) => Ok(backend.clone()),
            (Some(_), Some(_)) => {
                Err(ValueError::invalid("mem_backend", "send it or mem_file_path, not both"))
            }
            (None, None) => Err(ValueError::invalid("mem_backend", "send it or mem_file_path")),
        }
    }

    /// Whether diff snapshots can be made, by either of the two fields.
    pub(crate) fn tracks(&self) -> Result<bool, ValueError> {
        if self.enable_diff_snapshots && self.track_dirty_pages {
            let reason = "send it or track_dirty_pages, not both";
            return Err(ValueError::invalid("enable_diff_snapshots", reason));
        }
        Ok(self.enable_diff_snapshots || self.track_dirty_pages)
    }
}
