//! The files that a guest boots from: kernel, writable disk, initramfs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use super::disk::{EmptyDisk, sha256};
use super::store::create_folder;
use super::{BuildError, Builder};

/// The modules that the agent inserts in every guest.
const MODULES: [&str; 8] = [
    "virtio_mmio",
    "virtio_blk",
    "erofs",
    "overlay",
    "vsock",
    "vmw_vsock_virtio_transport",
    "virtio_rng",
    "virtio_balloon",
];

/// The module that it inserts in a guest with a network device.
const NETWORK_MODULE: &str = "virtio_net";

const OVERLAY: EmptyDisk = EmptyDisk {
    part: "guest/overlay.ext4",
    size: (576 << 20, "576M"),
    what: "the guest's writable disk",
    dax: false,
};

impl Builder<'_> {
    /// Builds everything that a guest boots from.
    pub(super) fn guest(&mut self, agent: &Path) -> Result<(), BuildError> {
        if !agent.is_file() {
            return Err(BuildError::NoAgent { path: agent.to_owned() });
        }
        self.shared()?;
        let packages = self.kernel_packages()?;
        let key = format!("1 {}", sha256(&packages));
        if !self.store.is_built("guest/vmlinux", &key) {
            (self.progress)("extracting the guest's kernel");
            let bzimage = self.bzimage()?;
            self.extract_vmlinux(&bzimage, "guest/vmlinux")?;
            self.store.publish("guest/vmlinux", &key)?;
        }
        self.empty_disk(&OVERLAY)?;
        // Builds its layer below, base, first.
        self.own_image("aws")?;
        self.initramfs(agent, &packages)?;
        let list = self.store.path("guest/packages");
        let root = self.store.path("guest/root.packages");
        let root = fs::read_to_string(&root).map_err(BuildError::file("read", &root))?;
        let text = packages + &root;
        // An unchanged list keeps its time of modification, on which the lab's disk depends.
        if !fs::read_to_string(&list).is_ok_and(|listed| listed == text) {
            fs::write(&list, text).map_err(BuildError::file("write", &list))?;
        }
        self.pack_guest()?;
        let folder = self.store.path("guest");
        (self.progress)(&format!("the guest is built in {}", folder.display()));
        Ok(())
    }

    /// The agent as `/init`, and the modules, which `/modules/order` and `/modules/network` list.
    fn initramfs(&mut self, agent: &Path, packages: &str) -> Result<(), BuildError> {
        let program = fs::read(agent).map_err(BuildError::file("read", agent))?;
        let description = [packages.as_bytes(), MODULES.join(" ").as_bytes(), &program].concat();
        let key = format!("3 {}", sha256(description));
        if self.store.is_built("guest/initramfs.cpio", &key) {
            return Ok(());
        }
        (self.progress)("making the guest's initramfs");
        let root = self.store.fresh_folder("guest/initramfs")?;
        for folder in ["dev", "proc", "sys", "root"] {
            create_folder(&root.join(folder))?;
        }
        install(&root.join("init"), &program)?;
        self.collect_modules(&root.join("modules"), "order", &MODULES)?;
        self.collect_modules(&root.join("modules"), "network", &[NETWORK_MODULE])?;
        self.pack_initramfs(&root, "guest/initramfs.cpio")?;
        self.store.publish("guest/initramfs.cpio", &key)
    }

    /// Packs `root` as the unfinished part `part`, and removes `root`. The archive is not
    /// compressed: under emulation unpacking takes longer than reading.
    pub(super) fn pack_initramfs(&mut self, root: &Path, part: &str) -> Result<(), BuildError> {
        let (file, _) = self.store.fresh_file(part)?;
        let mut command = Command::new("sh");
        // cpio reports the number of blocks.
        let script = "find . | LC_ALL=C sort | \"$0\" cpio -o -H newc 2>/dev/null";
        command.current_dir(root).args(["-c", script]).arg(self.busybox());
        self.runner.run_into(&mut command, file)?;
        super::store::remove_tree(root).map_err(BuildError::file("remove", root))
    }
}

/// Writes a program.
pub(super) fn install(path: &Path, content: &[u8]) -> Result<(), BuildError> {
    fs::write(path, content)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
        .map_err(BuildError::file("write", path))
}
