//! The guest: the player as a kernel, which runs on every KVM.

use std::path::{Path, PathBuf};

use firn_bench::player::{PlayerInputs, PlayerOptions, elf};
use firn_bench::traces::load;
use firn_vmm::{KVM_DEVICE, open_kvm};
use serde_json::json;

use crate::process::Process;

/// Whether guests can run here.
pub(crate) fn has_kvm() -> bool {
    firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok())
}

/// A player as a kernel.
pub(crate) struct Player {
    pub(crate) kernel: PathBuf,
    /// Guest memory that it needs, MiB.
    pub(crate) memory: u64,
}

impl Player {
    /// A player that reads 4 MiB and checks them.
    pub(crate) fn new(dir: &Path) -> Self {
        Self::of(dir, "sequential-read:4M")
    }

    /// A player of a trace.
    pub(crate) fn of(dir: &Path, trace: &str) -> Self {
        let inputs = PlayerInputs::new(vec![load(trace).unwrap()]).unwrap();
        let elf = elf(&inputs, &PlayerOptions::default(), KVM_DEVICE.as_ref()).unwrap();
        let kernel = dir.join("player.elf");
        std::fs::write(&kernel, elf.bytes).unwrap();
        // Whole pages of 2 MiB.
        let memory = (elf.memory.div_ceil(1 << 20) + 1).next_multiple_of(2);
        Self { kernel, memory }
    }

    /// Boots it.
    pub(crate) fn boot(&self, process: &Process) {
        self.configure(process, false);
        process.start_instance();
        assert_eq!(process.line(), "READY");
    }

    /// Configures its kernel and its memory.
    pub(crate) fn configure(&self, process: &Process, track_dirty_pages: bool) {
        let memory = self.memory;
        let machine = json!({ "vcpu_count": 1, "mem_size_mib": memory, "track_dirty_pages": track_dirty_pages, "cpu_template": "T2" });
        process.put("/machine-config", &machine);
        process.put("/boot-source", &json!({ "kernel_image_path": self.kernel }));
    }
}

/// Lets a player that is ready replay, and checks that all its memory is right.
pub(crate) fn replay(process: &mut Process) {
    process.type_byte();
    let done = process.line();
    let pages = done.strip_prefix("DONE ").and_then(|rest| rest.split(' ').next());
    assert_eq!(pages, Some("1024"), "{done}");
    assert_eq!(process.line(), "END 0");
}
