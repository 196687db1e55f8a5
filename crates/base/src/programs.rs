use std::io;
use std::path::PathBuf;

/// The path of `firn-monitor`, which is installed beside the program of this process.
///
/// # Errors
/// The path of this program cannot be found.
pub fn monitor_program() -> io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name("firn-monitor"))
}
