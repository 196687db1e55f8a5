//! Kernel modules.

use std::fs::{self, File};
use std::io;

use rustix::io::Errno;
use rustix::system::finit_module;

use super::SetUpError;

/// The folder of the initramfs that holds the modules, and the list of them in the file `order`.
const FOLDER: &str = "/modules";

/// Inserts the modules that `/modules/order` names, one file name a line, in that order. Without
/// that file there are none to insert.
pub(super) fn insert_all() -> Result<(), SetUpError> {
    let path = format!("{FOLDER}/order");
    let order = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        order => order.map_err(|source| SetUpError::Module { name: path, source })?,
    };
    for name in order.lines().map(str::trim).filter(|name| !name.is_empty()) {
        insert(name).map_err(|source| SetUpError::Module { name: name.to_owned(), source })?;
    }
    Ok(())
}

fn insert(name: &str) -> io::Result<()> {
    let file = File::open(format!("{FOLDER}/{name}"))?;
    match finit_module(&file, c"", 0) {
        // Present already: built in, or named twice; or left out by the kernel's command line (`module_blacklist=`). What needs a
        // module that was left out says so itself.
        Ok(()) | Err(Errno::EXIST | Errno::PERM) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
