//! The lab's machine: kernel, initramfs and disks of L1.

use std::fs;

use super::disk::{EmptyDisk, sha256};
use super::guest::install;
use super::store::create_folder;
use super::{BuildError, Builder};

/// `/init` of L1.
const INIT: &str = include_str!("../../../../lab/init");
const MODULES: [&str; 9] =
    ["virtio_blk", "kvm_amd", "nfit", "nd_pmem", "dax_pmem", "device_dax", "erofs", "loop", "tun"];
const FOLDERS: [&str; 11] =
    ["bin", "dev", "proc", "sys", "tmp", "run", "in", "out", "cache", "scratch", "etc"];
const FILES: [(&str, &str); 3] = [
    ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
    ("etc/group", "root:x:0:\n"),
    ("etc/hosts", "127.0.0.1 localhost\n"),
];

const SCRATCH: EmptyDisk = EmptyDisk {
    part: "lab/scratch.ext4",
    size: (8 << 30, "8G"),
    what: "the scratch disk",
    dax: false,
};
const FSDAX: EmptyDisk = EmptyDisk {
    part: "lab/fsdax.ext4",
    size: (1536 << 20, "1536M"),
    what: "the file system for DAX",
    dax: true,
};

impl Builder<'_> {
    /// Builds the lab.
    pub(super) fn lab(&mut self) -> Result<(), BuildError> {
        self.shared()?;
        self.qemu()?;
        self.l1()?;
        self.empty_disk(&SCRATCH)?;
        self.empty_disk(&FSDAX)?;
        self.pack_guest()?;
        (self.progress)(&format!("the lab is built in {}", self.store.path("lab").display()));
        Ok(())
    }

    /// The kernel and the initramfs.
    fn l1(&mut self) -> Result<(), BuildError> {
        let description = [INIT, &self.kernel_packages()?, &MODULES.join(" ")].concat();
        let key = format!("2 {}", sha256(description));
        if self.store.is_built("lab/l1", &key) {
            return Ok(());
        }
        (self.progress)("making the initramfs of L1");
        let folder = self.store.fresh_folder("lab/l1")?;
        let root = folder.join("root");
        for name in FOLDERS {
            create_folder(&root.join(name))?;
        }
        for (name, text) in FILES {
            let path = root.join(name);
            fs::write(&path, text).map_err(BuildError::file("write", path))?;
        }
        let busybox = root.join("bin/busybox");
        fs::copy(self.busybox(), &busybox).map_err(BuildError::file("write", busybox))?;
        install(&root.join("init"), INIT.as_bytes())?;
        self.collect_modules(&root.join("modules"), "order", &MODULES)?;
        self.pack_initramfs(&root, "lab/initramfs.cpio")?;
        let bzimage = self.bzimage()?;
        let kernel = folder.join("vmlinuz");
        fs::copy(bzimage, &kernel).map_err(BuildError::file("write", kernel))?;
        let (packed, place) =
            (self.store.unfinished("lab/initramfs.cpio"), folder.join("initramfs.cpio"));
        fs::rename(packed, &place).map_err(BuildError::file("write", place))?;
        self.store.publish("lab/l1", &key)
    }
}
