//! Kernel modules.

use std::fs::{self, File};
use std::io;

use rustix::io::Errno;
use rustix::system::finit_module;

use super::SetUpError;

/// The directory of the initramfs with the modules and their lists.
const DIRECTORY: &str = "/modules";

/// Inserts the modules of a list, a file with one file name per line, in its order. Without the
/// file there are none.
pub(super) fn insert(list: &str) -> Result<(), SetUpError> {
    let path = format!("{DIRECTORY}/{list}");
    let order = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        order => order.map_err(|source| SetUpError::Module { name: path, source })?,
    };
    for name in order.lines().map(str::trim).filter(|name| !name.is_empty()) {
        insert_one(name).map_err(|source| SetUpError::Module { name: name.to_owned(), source })?;
    }
    Ok(())
}

fn insert_one(name: &str) -> io::Result<()> {
    let file = File::open(format!("{DIRECTORY}/{name}"))?;
    match finit_module(&file, c"", 0) {
        // EEXIST: the module is built in or listed twice. EPERM: the kernel's command line excludes
        // it (`module_blacklist=`). A later step reports an error if it needs an excluded module.
        Ok(()) | Err(Errno::EXIST | Errno::PERM) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
