//! The guest's page tables, built before the guest exists.

use firn_player::format::PAGE;

/// Present, writable, user and accessed, at every level.
const TABLE: u64 = 0b10_0111;
/// The same, and dirty. With accessed and dirty set, a page walk never writes to the tables.
const LEAF: u64 = TABLE | 1 << 6;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const ENTRIES: usize = 512;

/// Bytes of a large leaf.
pub(super) const LARGE_LEAF: u64 = 2 << 20;

/// Contiguous page tables in guest memory, the top one first.
pub(super) struct PageTables {
    start: u64,
    tables: Vec<[u64; ENTRIES]>,
}

impl PageTables {
    /// An empty top table at guest-physical address `start`.
    pub(super) fn new(start: u64) -> Self {
        Self { start, tables: vec![[0; ENTRIES]] }
    }

    /// Maps a page of 4 KiB.
    pub(super) fn map_small(&mut self, at: u64, to: u64) {
        let table = self.descend(at, &[39, 30, 21]);
        self.tables[table][index(at, 12)] = to | LEAF;
    }

    /// Maps 2 MiB.
    pub(super) fn map_large(&mut self, at: u64, to: u64) {
        let table = self.descend(at, &[39, 30]);
        self.tables[table][index(at, 21)] = to | LEAF | LARGE;
    }

    /// The table below the levels whose index starts at these bits of an address. Missing tables
    /// are added.
    fn descend(&mut self, at: u64, levels: &[u32]) -> usize {
        let mut table = 0;
        for shift in levels {
            let entry = self.tables[table][index(at, *shift)];
            table = if entry == 0 {
                let new = self.tables.len();
                self.tables.push([0; ENTRIES]);
                self.tables[table][index(at, *shift)] = self.address(new) | TABLE;
                new
            } else {
                usize::try_from(((entry & ADDRESS) - self.start) / PAGE).unwrap_or(usize::MAX)
            };
        }
        table
    }

    fn address(&self, table: usize) -> u64 {
        self.start + table as u64 * PAGE
    }

    /// The content of the tables in memory.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.tables.iter().flatten().flat_map(|entry| entry.to_le_bytes()).collect()
    }
}

/// An address's index in a table; the index starts at bit `shift`.
fn index(at: u64, shift: u32) -> usize {
    usize::try_from(at >> shift & 511).unwrap_or_default()
}
