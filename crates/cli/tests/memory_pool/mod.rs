//! A pool in memory, for the tests of several programs.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// A pool in memory with its manager, which is killed on drop.
pub(crate) struct MemoryPool {
    manager: Child,
    directory: TempDir,
}

impl MemoryPool {
    /// Serves one of this size, with further options.
    pub(crate) fn serve(size: &str, options: &[&str]) -> Self {
        let directory = TempDir::new().unwrap();
        let mut manager = Command::new(env!("CARGO_BIN_EXE_firn"))
            .args(["pool", "serve", "--medium", &format!("memfd:{size}"), "--socket"])
            .arg(directory.path().join("pool.sock"))
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The manager prints its first line when it serves.
        let mut line = String::new();
        BufReader::new(manager.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("serving"), "{line}");
        Self { manager, directory }
    }

    /// The manager's socket, in a directory of its own.
    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("pool.sock")
    }
}

impl Drop for MemoryPool {
    fn drop(&mut self) {
        let _ = self.manager.kill();
        let _ = self.manager.wait();
    }
}
