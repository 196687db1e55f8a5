//! The guest's own page tables, walked as the processor walks them (AMD64 Architecture Programmer's Manual, volume 2,
//! chapter 5): four or five levels, pages of 4 KiB, 2 MiB and 1 GiB.
//!
//! The tables are the guest's and hold anything. A walk reads one entry a level, follows no more than five, and takes
//! no address on trust: what an entry points to is read through the caller, who knows where memory is.

use std::collections::BTreeSet;

use firn_memory::Leaf;
use kvm_bindings::kvm_sregs;

const CR0_PAGING: u64 = 1 << 31;
const CR4_FIVE_LEVELS: u64 = 1 << 12;
const EFER_LONG_MODE_ACTIVE: u64 = 1 << 10;
const PRESENT: u64 = 1;
/// In an entry of level 2 or 3: it maps a large page.
const LARGE: u64 = 1 << 7;
/// Bits 12 to 51: a guest-physical address.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const MOST_LEVELS: u8 = 5;

/// The page tables that a vCPU uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTables {
    root: u64,
    levels: u8,
}

/// How a linear address is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walk {
    tables: [u64; MOST_LEVELS as usize],
    visited: usize,
    /// Where it ends.
    pub end: WalkEnd,
}

/// Where a walk ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkEnd {
    /// At a page.
    Mapped {
        /// The guest-physical address.
        address: u64,
        /// The size of the page.
        leaf: Leaf,
    },
    /// The guest has mapped nothing there, or the address is not canonical.
    NotPresent,
    /// At a table that the caller does not give: the last one visited.
    Unread,
}

impl Walk {
    /// Guest-physical addresses of the tables that the walk goes through, the root first.
    #[must_use]
    pub fn tables(&self) -> &[u64] {
        &self.tables[..self.visited]
    }
}

impl PageTables {
    /// The page tables of a vCPU in long mode; `None` in any other mode.
    #[must_use]
    pub fn of(sregs: &kvm_sregs) -> Option<Self> {
        let long_mode = sregs.cr0 & CR0_PAGING != 0 && sregs.efer & EFER_LONG_MODE_ACTIVE != 0;
        let levels = if sregs.cr4 & CR4_FIVE_LEVELS == 0 { 4 } else { MOST_LEVELS };
        long_mode.then_some(Self { root: sregs.cr3 & ADDRESS, levels })
    }

    /// Page tables whose root is at a guest-physical address.
    #[must_use]
    pub fn at(root: u64, five_levels: bool) -> Self {
        Self { root: root & ADDRESS, levels: if five_levels { MOST_LEVELS } else { 4 } }
    }

    /// Translates a linear address. `entry` reads 8 bytes at a guest-physical address, or says that it cannot.
    #[must_use]
    pub fn walk(&self, linear: u64, entry: impl Fn(u64) -> Option<u64>) -> Walk {
        let mut walk = Walk { tables: [0; 5], visited: 0, end: WalkEnd::NotPresent };
        if !self.is_canonical(linear) {
            return walk;
        }
        let mut table = self.root;
        for level in (1..=self.levels).rev() {
            walk.tables[walk.visited] = table;
            walk.visited += 1;
            // 9 bits of the address choose one of 512 entries.
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

    /// The guest-physical addresses of all tables that the root leads to, the root included, but no more than `most`.
    /// `read` gives a table's bytes, or says that it cannot.
    #[must_use]
    pub fn reachable(
        &self,
        most: usize,
        read: impl Fn(u64) -> Option<[u8; 4096]>,
    ) -> BTreeSet<u64> {
        let mut found = BTreeSet::from([self.root]);
        let mut level_tables = found.clone();
        for level in (2..=self.levels).rev() {
            let mut below = BTreeSet::new();
            for bytes in level_tables.iter().filter_map(|table| read(*table)) {
                let (entries, _) = bytes.as_chunks();
                let entries = entries.iter().map(|entry| u64::from_le_bytes(*entry));
                let leads_on =
                    |entry: &u64| entry & PRESENT != 0 && !(level <= 3 && entry & LARGE != 0);
                below.extend(entries.filter(leads_on).map(|entry| entry & ADDRESS));
                if below.len() >= most {
                    break;
                }
            }
            let room = most.saturating_sub(found.len());
            level_tables = below.into_iter().take(room).collect();
            found.extend(&level_tables);
        }
        found
    }

    /// Whether the bits above those that are translated repeat the highest of them.
    fn is_canonical(&self, linear: u64) -> bool {
        let unused = 64 - (12 + 9 * u32::from(self.levels));
        (linear.cast_signed() << unused >> unused).cast_unsigned() == linear
    }
}

#[cfg(test)]
#[path = "paging_tests.rs"]
mod tests;
