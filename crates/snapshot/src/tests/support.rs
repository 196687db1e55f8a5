//! What the tests of whole snapshots share.

use std::io;
use std::path::PathBuf;

use crate::{
    Chunk, CpuFeatures, CpuRequirement, CpuidRegister, Description, FunctionInfo, MemoryLayout,
    PageSource,
};
use uuid::Uuid;

/// Guest memory in a vector.
pub(crate) struct Memory {
    pub(crate) layout: MemoryLayout,
    pub(crate) bytes: Vec<u8>,
    /// Give the bytes through the buffer, as a source without addressable memory does.
    pub(crate) through_buffer: bool,
}

impl Memory {
    /// Memory of `pages` pages, all zero, in firn's usual layout.
    pub(crate) fn zeroed(pages: u64) -> Self {
        let layout = MemoryLayout::for_size(pages * 4096).unwrap();
        let bytes = vec![0; usize::try_from(layout.total_bytes()).unwrap()];
        Self { layout, bytes, through_buffer: false }
    }

    /// Fills one page with a byte.
    pub(crate) fn fill(&mut self, page: usize, byte: u8) {
        self.bytes[page * 4096..][..4096].fill(byte);
    }
}

impl PageSource for Memory {
    fn layout(&self) -> &MemoryLayout {
        &self.layout
    }

    fn chunk<'a>(&'a mut self, image_offset: u64, buf: &'a mut [u8]) -> io::Result<Chunk<'a>> {
        let bytes = &self.bytes[usize::try_from(image_offset).unwrap()..][..buf.len()];
        if self.through_buffer {
            buf.copy_from_slice(bytes);
            return Ok(Chunk::Bytes(buf));
        }
        Ok(if bytes.iter().all(|&byte| byte == 0) { Chunk::Zero } else { Chunk::Bytes(bytes) })
    }
}

/// A description with every field used and nothing of chance in it.
pub(crate) fn description() -> Description {
    Description {
        id: Uuid::from_u128(0x1234_5678_9abc_def0),
        parent: Some(Uuid::from_u128(7)),
        created_ns: 1_760_000_000_000_000_000,
        firn_version: "0.1.0".into(),
        vcpus: 2,
        cpu: CpuRequirement {
            vendor: "AuthenticAMD".into(),
            brand: "A processor".into(),
            features: vec![CpuFeatures {
                leaf: 7,
                subleaf: 0,
                register: CpuidRegister::Ebx,
                bits: 0x20,
            }],
        },
        disks: vec![],
        function: Some(FunctionInfo { name: "hello".into(), handler: "hello.handler".into() }),
    }
}

/// A place for a snapshot in a directory of its own, which goes with the guard.
pub(crate) fn destination() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    (dir, path)
}
