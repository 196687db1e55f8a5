//! The files that microVMs boot from, in firn's cache.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;

use clap::Args;
use thiserror::Error;

use firn_lab::guest_file;
use firn_run::{FunctionSettings, ImageName, ImageNameError};

/// Which files to boot from; by default those that `make guest` built.
#[derive(Debug, Clone, Args)]
pub(crate) struct GuestFiles {
    /// Kernel to boot: an uncompressed ELF (vmlinux) or a bzImage
    #[arg(long, value_name = "FILE", default_value_os_t = guest_file("vmlinux"), hide_default_value = true)]
    pub(crate) kernel: PathBuf,
    /// Initramfs that sets the guest up
    #[arg(long, value_name = "FILE", default_value_os_t = guest_file("initramfs.cpio"), hide_default_value = true)]
    pub(crate) initramfs: PathBuf,
    /// The image to run on: a name that `firn image list` shows [default: what the function's
    /// function.toml sets, or base]
    #[arg(long, value_name = "NAME", conflicts_with = "root", value_parser = image_name)]
    image: Option<ImageName>,
    /// Root file system, in place of an image; the guest sees it read-only
    #[arg(long, value_name = "FILE")]
    root: Option<PathBuf>,
    /// What the guest's writable disk holds at first; the file itself is never written
    #[arg(long, value_name = "FILE", default_value_os_t = guest_file("overlay.ext4"), hide_default_value = true)]
    pub(crate) overlay: PathBuf,
}

/// A file to boot from cannot be read.
#[derive(Debug, Error)]
pub(crate) enum GuestFileError {
    /// One of those that are the same for every function.
    #[error(
        "cannot read {path} to boot from: `make guest` builds the guest's files; --{option} names another one"
    )]
    File { path: PathBuf, option: &'static str, source: io::Error },
    /// The image that the function asks for.
    #[error("cannot read the image {}, which the function runs on, at {path}: `firn image build {}` builds firn's own", .name.as_str(), .name.as_str())]
    Image { name: ImageName, path: PathBuf, source: io::Error },
}

impl GuestFiles {
    /// The root file system for a function; finds early what is missing, while it is known what
    /// each file is for.
    pub(crate) fn check(&self, settings: &FunctionSettings) -> Result<PathBuf, GuestFileError> {
        let image = self.image.as_ref().or(settings.image.as_ref());
        let named = match (&self.root, image) {
            (None, Some(name)) if *name != ImageName::base() => Some(name),
            _ => None,
        };
        let root = match named {
            Some(name) => image_file(name),
            None => self.root.clone().unwrap_or_else(|| image_file(&ImageName::base())),
        };
        let files = [
            (&self.kernel, "kernel"),
            (&self.initramfs, "initramfs"),
            (&root, "root"),
            (&self.overlay, "overlay"),
        ];
        for (path, option) in files {
            let path = path.clone();
            File::open(&path).map_err(|source| match named {
                Some(name) if option == "root" => {
                    GuestFileError::Image { name: name.clone(), path, source }
                }
                _ => GuestFileError::File { path, option, source },
            })?;
        }
        Ok(root)
    }
}

impl GuestFiles {
    /// Whether they name the root file system.
    pub(crate) fn name_root(&self) -> bool {
        self.root.is_some() || self.image.is_some()
    }
}

/// Where the image of this name lies in firn's cache.
pub(crate) fn image_file(name: &ImageName) -> PathBuf {
    if *name == ImageName::base() {
        guest_file("root.erofs")
    } else {
        guest_file("images").join(format!("{}.erofs", name.as_str()))
    }
}

/// The images in firn's cache, by name.
pub(crate) fn images() -> io::Result<Vec<(ImageName, PathBuf)>> {
    let mut found = vec![ImageName::base()];
    match fs::read_dir(guest_file("images")) {
        Ok(entries) => {
            for entry in entries {
                let name = entry?.file_name().into_string().unwrap_or_default();
                // What is being built has another ending.
                let name = name.strip_suffix(".erofs").and_then(|name| image_name(name).ok());
                found.extend(name);
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    found.sort();
    Ok(found
        .into_iter()
        .map(|name| (image_file(&name), name))
        .filter(|(path, _)| path.is_file())
        .map(|(path, name)| (name, path))
        .collect())
}

fn image_name(text: &str) -> Result<ImageName, ImageNameError> {
    text.to_owned().try_into()
}
