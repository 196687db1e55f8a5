//! Kernel modules and their dependencies, for an initramfs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::store::create_folder;
use super::{BuildError, Builder};

/// The modules of an unpacked kernel package, by name with `_` for `-`.
struct Available {
    files: BTreeMap<String, PathBuf>,
    built_in: BTreeSet<String>,
}

impl Available {
    fn read(kernel: &Path) -> io::Result<Self> {
        let mut available = Self { files: BTreeMap::new(), built_in: BTreeSet::new() };
        available.read_folder(&kernel.join("lib/modules"))?;
        Ok(available)
    }

    fn read_folder(&mut self, folder: &Path) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type()?.is_dir() {
                self.read_folder(&path)?;
            } else if name == "modules.builtin" {
                let text = fs::read_to_string(path)?;
                self.built_in.extend(text.lines().filter_map(module_name));
            } else if let Some(module) = module_name(&name) {
                self.files.insert(module, path);
            }
        }
        Ok(())
    }
}

/// The name of the module in a file such as `kernel/fs/erofs/erofs.ko.xz`.
fn module_name(path: &str) -> Option<String> {
    let file = path.rsplit('/').next()?;
    let (name, end) = file.split_once(".ko")?;
    ["", ".xz", ".zst"].contains(&end).then(|| name.replace('-', "_"))
}

/// The modules that a module depends on. `depends=a,b` is one of its NUL-terminated strings.
fn dependencies(module: &[u8]) -> Vec<String> {
    let strings = module.split(|byte| [0, b'\n'].contains(byte));
    let lists = strings.filter_map(|string| string.strip_prefix(b"depends="));
    let names = lists.flat_map(|list| list.split(|byte| *byte == b','));
    names
        .filter(|name| !name.is_empty())
        .map(|name| String::from_utf8_lossy(name).replace('-', "_"))
        .collect()
}

impl Builder<'_> {
    /// Unpacks kernel modules and their dependencies into `folder`, and lists the files in
    /// `folder/order`, each after its dependencies. Modules that are built into the kernel are left
    /// out.
    ///
    /// The package has no `modules.dep`, which depmod writes on installation, so the modules' own
    /// information is read.
    pub(super) fn collect_modules(
        &mut self,
        folder: &Path,
        list: &str,
        names: &[&str],
    ) -> Result<(), BuildError> {
        create_folder(folder)?;
        let kernel = self.store.path("kernel");
        let available = Available::read(&kernel).map_err(BuildError::file("read", kernel))?;
        let mut collection = Collection {
            folder,
            available: &available,
            seen: BTreeSet::new(),
            order: String::new(),
        };
        for name in names {
            self.collect_module(&mut collection, name)?;
        }
        let order = folder.join(list);
        fs::write(&order, collection.order).map_err(BuildError::file("write", order))
    }

    fn collect_module(
        &mut self,
        collection: &mut Collection<'_>,
        name: &str,
    ) -> Result<(), BuildError> {
        if collection.available.built_in.contains(name) || !collection.seen.insert(name.to_owned())
        {
            return Ok(());
        }
        let Some(file) = collection.available.files.get(name) else {
            return Err(BuildError::NoModule { name: name.to_owned() });
        };
        let path = collection.folder.join(format!("{name}.ko"));
        let failed = |source| BuildError::File { action: "write", path: path.clone(), source };
        let tool = match file.extension().and_then(|end| end.to_str()) {
            Some("xz") => Some("xz"),
            Some("zst") => Some("zstd"),
            _ => None,
        };
        match tool {
            Some(tool) => {
                let output = File::create(&path).map_err(failed)?;
                let mut command = self.tool(tool)?;
                self.runner.run_into(command.arg("-qdc").arg(file), output)?;
            }
            None => {
                fs::copy(file, &path).map_err(failed)?;
            }
        }
        for needed in dependencies(&fs::read(&path).map_err(failed)?) {
            self.collect_module(collection, &needed)?;
        }
        collection.order += &format!("{name}.ko\n");
        Ok(())
    }
}

/// The modules of one initramfs.
struct Collection<'a> {
    folder: &'a Path,
    available: &'a Available,
    seen: BTreeSet<String>,
    order: String,
}

#[cfg(test)]
#[path = "modules_tests.rs"]
mod tests;
