//! Walks of the guest's page tables, as the processor does them (AMD64 Architecture Programmer's
//! Manual, volume 2, chapter 5): four or five levels, pages of 4 KiB, 2 MiB and 1 GiB.
//!
//! The tables may hold any value. A walk reads one entry of each level, of at most five levels, and
//! reads every address through the caller, which checks it against guest memory.

use std::collections::BTreeSet;

use firn_memory::Leaf;
use kvm_bindings::kvm_sregs;

const CR0_PAGING: u64 = 1 << 31;
const CR4_FIVE_LEVELS: u64 = 1 << 12;
const EFER_LONG_MODE_ACTIVE: u64 = 1 << 10;
const PRESENT: u64 = 1;
/// In an entry of level 2 or 3: the entry maps a large page.
const LARGE: u64 = 1 << 7;
/// Bits 12 to 51: a guest-physical address.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const MAX_LEVELS: u8 = 5;

/// The page tables that a vCPU uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageTables {
    root: u64,
    levels: u8,
}

/// The translation of a linear address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    tables: [u64; MAX_LEVELS as usize],
    visited: usize,
    /// Where the walk ends.
    pub(crate) end: WalkEnd,
}

/// Where a walk ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WalkEnd {
    /// At a page.
    Mapped {
        /// The guest-physical address.
        address: u64,
        /// The size of the page.
        leaf: Leaf,
    },
    /// At an entry that is not present, or at an address that is not canonical.
    NotPresent,
    /// At a table that the caller cannot read: the last one visited.
    Unread,
}

impl Walk {
    /// Guest-physical addresses of the tables that the walk visits, the root first.
    pub(crate) fn tables(&self) -> &[u64] {
        &self.tables[..self.visited]
    }
}

impl PageTables {
    /// The page tables of a vCPU in long mode; `None` in any other mode.
    pub(crate) fn of(sregs: &kvm_sregs) -> Option<Self> {
        let long_mode = sregs.cr0 & CR0_PAGING != 0 && sregs.efer & EFER_LONG_MODE_ACTIVE != 0;
        let levels = if sregs.cr4 & CR4_FIVE_LEVELS == 0 { 4 } else { MAX_LEVELS };
        long_mode.then_some(Self { root: sregs.cr3 & ADDRESS, levels })
    }

    /// Page tables whose root is at a guest-physical address.
    pub(crate) fn at(root: u64, five_levels: bool) -> Self {
        Self { root: root & ADDRESS, levels: if five_levels { MAX_LEVELS } else { 4 } }
    }

    /// Translates a linear address. `entry` reads 8 bytes at a guest-physical address; `None` if it
    /// cannot.
    pub(crate) fn walk(&self, linear: u64, entry: impl Fn(u64) -> Option<u64>) -> Walk {
        let mut walk = Walk { tables: [0; 5], visited: 0, end: WalkEnd::NotPresent };
        if !self.is_canonical(linear) {
            return walk;
        }
        let mut table = self.root;
        for level in (1..=self.levels).rev() {
            walk.tables[walk.visited] = table;
            walk.visited += 1;
            // 9 bits of the address select one of 512 entries.
            let shift = 12 + 9 * (level - 1);
            let Some(value) = entry(table + ((linear >> shift & 0x1ff) << 3)) else {
                walk.end = WalkEnd::Unread;
                return walk;
            };
            if value & PRESENT == 0 {
                return walk;
            }
            let leaf = match level {
                1 => Some(Leaf::Size4K),
                2 if value & LARGE != 0 => Some(Leaf::Size2M),
                3 if value & LARGE != 0 => Some(Leaf::Size1G),
                _ => None,
            };
            if let Some(leaf) = leaf {
                let inside = leaf.bytes() - 1;
                let address = value & ADDRESS & !inside | linear & inside;
                walk.end = WalkEnd::Mapped { address, leaf };
                return walk;
            }
            table = value & ADDRESS;
        }
        walk
    }

    /// The guest-physical addresses of all tables that are reachable from the root, the root
    /// included, up to a number of `max`. `read` returns a table's bytes; `None` if it cannot.
    pub(crate) fn reachable(
        &self,
        max: usize,
        read: impl Fn(u64) -> Option<[u8; 4096]>,
    ) -> BTreeSet<u64> {
        let mut found = BTreeSet::from([self.root]);
        let mut level_tables = found.clone();
        for level in (2..=self.levels).rev() {
            let mut below = BTreeSet::new();
            for bytes in level_tables.iter().filter_map(|table| read(*table)) {
                let (entries, _) = bytes.as_chunks();
                let entries = entries.iter().map(|entry| u64::from_le_bytes(*entry));
                let is_table =
                    |entry: &u64| entry & PRESENT != 0 && !(level <= 3 && entry & LARGE != 0);
                below.extend(entries.filter(is_table).map(|entry| entry & ADDRESS));
                if below.len() >= max {
                    break;
                }
            }
            let room = max.saturating_sub(found.len());
            level_tables = below.into_iter().take(room).collect();
            found.extend(&level_tables);
        }
        found
    }

    /// Whether the bits above the translated ones repeat the highest translated bit.
    fn is_canonical(&self, linear: u64) -> bool {
        let unused = 64 - (12 + 9 * u32::from(self.levels));
        (linear.cast_signed() << unused >> unused).cast_unsigned() == linear
    }
}

#[cfg(test)]
#[path = "page_tables_tests.rs"]
mod tests;
