//! The module for the lab's kernel by which SnapBPF's program reads ahead (`lab/snapbpf`), with the
//! description of its types (split BTF) that the kernel needs to let BPF programs call it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt::{BACKPORTS, Suite};
use super::disk::sha256;
use super::{BuildError, Builder, command};

const SOURCES: [(&str, &str); 2] = [
    ("firn_snapbpf.c", include_str!("../../../../lab/snapbpf/firn_snapbpf.c")),
    ("Kbuild", include_str!("../../../../lab/snapbpf/Kbuild")),
];
const MODULE: &str = "firn_snapbpf.ko";
const PART: &str = "lab/firn_snapbpf.ko";
const FOLDER: &str = "lab/snapbpf";
/// What the build takes of the packages. The compiler and its libraries are the system's.
const PACKAGES: [&str; 6] =
    ["linux-headers-", "linux-kbuild-", "pahole", "libdw1", "libelf1", "libbpf1"];
/// The packages' libraries, for the kernel's and pahole's programs.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

impl Builder<'_> {
    /// Builds the module.
    pub(super) fn snapbpf(&mut self) -> Result<(), BuildError> {
        self.shared()?;
        let kernel = self.kernel_packages()?;
        let description: Vec<&str> = SOURCES.iter().map(|(_, text)| *text).collect();
        let key = format!("1 {}", sha256(description.concat() + &kernel));
        if !self.store.is_built(PART, &key) {
            command::require(&["make", "gcc-12"])?;
            let folder = self.store.fresh_folder(FOLDER)?;
            let headers = self.headers(&folder, &kernel)?;
            (self.progress)("compiling the module for SnapBPF");
            let module = self.compile_module(&folder, &headers)?;
            let (_, place) = self.store.fresh_file(PART)?;
            fs::rename(&module, &place).map_err(BuildError::file("move", &module))?;
            self.store.publish(PART, &key)?;
            super::store::remove_tree(&folder).map_err(BuildError::file("remove", &folder))?;
        }
        (self.progress)(&format!("the module is {}", self.store.path(PART).display()));
        Ok(())
    }

    /// Unpacks what a module of the kernel is built with, and returns the folder of its headers.
    fn headers(&mut self, folder: &Path, kernel: &str) -> Result<PathBuf, BuildError> {
        let release = release(kernel).unwrap_or_default();
        let headers = format!("linux-headers-{release}");
        let package = format!("{headers}/{BACKPORTS}");
        let apt = self.apt(Suite::Bookworm)?;
        let needed = |name: &str| PACKAGES.iter().any(|start| name.starts_with(start));
        let list = folder.join("packages");
        self.unpack(&apt, folder, &list, needed, &[&package, "pahole"])?;
        let headers = folder.join("usr/src").join(headers);
        // It names the common headers as they are installed.
        let makefile = headers.join("Makefile");
        let write = || {
            let text = fs::read_to_string(&makefile)?;
            let here = format!("{}/usr/src/", folder.display());
            fs::write(&makefile, text.replace("/usr/src/", &here))
        };
        write().map_err(BuildError::file("write", &makefile))?;
        Ok(headers)
    }

    fn compile_module(&mut self, folder: &Path, headers: &Path) -> Result<PathBuf, BuildError> {
        let sources = folder.join("module");
        let write = || {
            fs::create_dir(&sources)?;
            SOURCES.iter().try_for_each(|(name, text)| fs::write(sources.join(name), text))
        };
        write().map_err(BuildError::file("write", &sources))?;
        let mut make = Command::new("make");
        make.env("LD_LIBRARY_PATH", folder.join(LIBRARIES)).arg("--silent").arg("-C").arg(headers);
        make.arg(format!("M={}", sources.display()));
        make.arg(format!("PAHOLE={}", folder.join("usr/bin/pahole").display())).arg("modules");
        self.runner.run(&mut make, "Check that gcc-12 and make are installed")?;
        Ok(sources.join(MODULE))
    }
}

/// The release in the kernel's list of packages, such as `6.12.95+deb12-cloud-amd64`.
fn release(packages: &str) -> Option<&str> {
    packages.lines().find_map(|line| line.strip_prefix("linux-image-")?.split(' ').next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_that_of_the_kernels_package() {
        let packages = "linux-base 4\nlinux-image-6.12.95+deb12-cloud-amd64 6.12.95-1\n";
        assert_eq!(release(packages), Some("6.12.95+deb12-cloud-amd64"));
        assert_eq!(release("linux-base 4\n"), None);
    }
}
