//! Debian's cloud kernel, and the programs that only the build needs.
//!
//! The same kernel, unmodified, serves the lab's machine and the guests. The programs come from
//! Debian packages too, so that a build depends on few programs of the system.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt::{BACKPORTS, Suite};
use super::{BuildError, Builder};

const TOOLS: [&str; 5] = ["busybox-static", "e2fsprogs", "erofs-utils", "xz-utils", "zstd"];
const LIBRARIES: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];

impl Builder<'_> {
    /// Unpacks the tools and the kernel.
    pub(super) fn shared(&mut self) -> Result<(), BuildError> {
        let key = format!("1 {}", TOOLS.join(" "));
        if !self.store.is_built("tools", &key) {
            let folder = self.store.fresh_folder("tools")?;
            let (apt, list) = (self.apt(Suite::Bookworm)?, self.store.path("tools.packages"));
            self.unpack(&apt, &folder, &list, |_| true, &TOOLS)?;
            self.store.publish("tools", &key)?;
        }
        let package = format!("linux-image-cloud-amd64/{BACKPORTS}");
        let key = format!("1 {package}");
        if !self.store.is_built("kernel", &key) {
            let folder = self.store.fresh_folder("kernel")?;
            let (apt, list) = (self.apt(Suite::Bookworm)?, self.store.path("kernel.packages"));
            self.unpack(&apt, &folder, &list, is_kernel, &[&package])?;
            self.store.publish("kernel", &key)?;
        }
        Ok(())
    }

    /// A program of the unpacked tools, with their own loader and libraries.
    pub(super) fn tool(&self, name: &str) -> Result<Command, BuildError> {
        let tools = self.store.path("tools");
        let program = ["bin", "sbin", "usr/bin", "usr/sbin"]
            .map(|folder| tools.join(folder).join(name))
            .into_iter()
            .find(|program| program.is_file())
            .ok_or_else(|| BuildError::NoTool { name: name.to_owned() })?;
        let libraries = LIBRARIES.map(|folder| tools.join(folder).display().to_string());
        let mut command = Command::new(format!("{}/ld-linux-x86-64.so.2", libraries[0]));
        command.args(["--library-path", &libraries.join(":")]).arg(program);
        Ok(command)
    }

    /// The static busybox of the tools.
    pub(super) fn busybox(&self) -> PathBuf {
        self.store.path("tools/bin/busybox")
    }

    /// The kernel's names and versions of packages.
    pub(super) fn kernel_packages(&self) -> Result<String, BuildError> {
        let path = self.store.path("kernel.packages");
        fs::read_to_string(&path).map_err(BuildError::file("read", path))
    }

    /// The kernel's compressed image.
    pub(super) fn bzimage(&self) -> Result<PathBuf, BuildError> {
        let folder = self.store.path("kernel/boot");
        let find = || -> io::Result<PathBuf> {
            for entry in fs::read_dir(&folder)? {
                let path = entry?.path();
                if path
                    .file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
                {
                    return Ok(path);
                }
            }
            Err(io::ErrorKind::NotFound.into())
        };
        find().map_err(BuildError::file("find the kernel in", &folder))
    }

    /// Writes the ELF kernel of the compressed image `bzimage` to the unfinished part `part`.
    pub(super) fn extract_vmlinux(&mut self, bzimage: &Path, part: &str) -> Result<(), BuildError> {
        let image = fs::read(bzimage).map_err(BuildError::file("read", bzimage))?;
        let unknown = || BuildError::Compression { path: bzimage.to_owned() };
        let Payload { compression, bytes } = payload(&image).ok_or_else(unknown)?;
        let mut command = match compression {
            Compression::Zstd => self.tool("zstd")?,
            Compression::Xz => self.tool("xz")?,
            Compression::Gzip => Command::new("gzip"),
        };
        let mut input = tempfile::tempfile().map_err(BuildError::file("unpack", bzimage))?;
        io::Write::write_all(&mut input, bytes)
            .and_then(|()| io::Seek::rewind(&mut input))
            .map_err(BuildError::file("unpack", bzimage))?;
        let (file, path) = self.store.fresh_file(part)?;
        self.runner.run_into(command.arg("-qdc").stdin(input), file)?;
        let mut start = [0; 4];
        let read =
            fs::File::open(&path).and_then(|mut file| io::Read::read_exact(&mut file, &mut start));
        read.map_err(BuildError::file("read", &path))?;
        if start == *b"\x7fELF" {
            Ok(())
        } else {
            Err(BuildError::NotElf { path: bzimage.to_owned() })
        }
    }
}

fn is_kernel(package: &str) -> bool {
    let version = package.strip_prefix("linux-image-");
    version.is_some_and(|version| version.starts_with(|first: char| first.is_ascii_digit()))
}

#[derive(Debug, PartialEq, Eq)]
enum Compression {
    Zstd,
    Xz,
    Gzip,
}

/// The compressed kernel in a bzImage.
struct Payload<'a> {
    compression: Compression,
    bytes: &'a [u8],
}

/// Finds the payload by the header of the boot protocol (Linux Documentation/arch/x86/boot.rst).
fn payload(image: &[u8]) -> Option<Payload<'_>> {
    let word = |at: usize| {
        let bytes = image.get(at..at + 4)?;
        usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
    };
    let sectors = usize::from(*image.get(0x1f1)?);
    let start = (sectors + 1) * 512 + word(0x248)?;
    let bytes = image.get(start..)?.get(..word(0x24c)?)?;
    // The last four bytes are the unpacked size. Only gzip's own format contains them.
    let without_size = &bytes[..bytes.len().checked_sub(4)?];
    let (compression, bytes) = match bytes.get(..4)? {
        [0x28, 0xb5, 0x2f, 0xfd] => (Compression::Zstd, without_size),
        [0xfd, 0x37, 0x7a, 0x58] => (Compression::Xz, without_size),
        [0x1f, 0x8b, ..] => (Compression::Gzip, bytes),
        _ => return None,
    };
    Some(Payload { compression, bytes })
}

#[cfg(test)]
#[path = "kernel_tests.rs"]
mod tests;
