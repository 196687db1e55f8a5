//! A map of a pool as text.

use firn_base::format_bytes;
use firn_pool::{Durability, ListedExtent, Listing, MediumFacts, MediumKind, Role};

use crate::output;

/// Cells per row, and maximum number of cells.
const COLUMNS: usize = 64;
const MAX_CELLS: u64 = 64 * 32;
/// Letters of snapshots; they repeat after the last one.
const LETTERS: &[u8; 26] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ";

/// The content of a piece of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Metadata,
    Free,
    /// An extent, by its index in the listing.
    Extent(usize),
}

/// All pieces of a pool in ascending order: offset, length in bytes, content.
pub(super) fn pieces(listing: &Listing) -> Vec<(u64, u64, Piece)> {
    let pool = &listing.pool;
    let mut pieces = vec![
        (0, pool.data_begin, Piece::Metadata),
        (pool.data_end, pool.size.saturating_sub(pool.data_end), Piece::Metadata),
    ];
    pieces.extend(listing.free.iter().map(|piece| (piece.offset, piece.len, Piece::Free)));
    let extents = listing.extents.iter().enumerate();
    pieces.extend(
        extents.map(|(n, listed)| (listed.extent.offset, listed.extent.len, Piece::Extent(n))),
    );
    pieces.sort_by_key(|(offset, _, _)| *offset);
    pieces
}

/// Draws rows of cells, followed by a legend.
pub(super) fn draw(listing: &Listing) -> String {
    let pool = &listing.pool;
    let cell = pool.granule * (pool.size / pool.granule).div_ceil(MAX_CELLS).max(1);
    let cells = usize::try_from(pool.size.div_ceil(cell)).unwrap_or(0);
    let pieces = pieces(listing);
    let mut text = String::new();
    for number in 0..cells {
        let begin = number as u64 * cell;
        if number % COLUMNS == 0 {
            text.push_str(&format!("{begin:>#14x}  "));
        }
        // A cell shows the piece that occupies most of it.
        let within = |(offset, len, _): &&(u64, u64, Piece)| {
            (offset + len).min(begin + cell).saturating_sub(begin.max(*offset))
        };
        let most = pieces.iter().max_by_key(within);
        text.push(most.map_or(' ', |(_, _, piece)| symbol(listing, *piece)));
        if number % COLUMNS == COLUMNS - 1 || number == cells - 1 {
            text.push('\n');
        }
    }
    text.push_str(&format!("\n# metadata   . free   a cell is {}\n", format_bytes(cell)));
    for (number, listed) in listing.extents.iter().enumerate() {
        let extent = &listed.extent;
        text.push_str(&format!(
            "{} {}, generation {}, {} at {:#x}: {}\n",
            symbol(listing, Piece::Extent(number)),
            role(listed.role),
            extent.generation,
            format_bytes(extent.len),
            extent.offset,
            name(listed),
        ));
        for learnt in &listed.learnt {
            text.push_str(&format!(
                "  expects writes to {} ({} starts by {})\n",
                format_bytes(learnt.bytes),
                learnt.starts,
                output::plain(&learnt.key),
            ));
        }
    }
    text
}

fn symbol(listing: &Listing, piece: Piece) -> char {
    match piece {
        Piece::Metadata => '#',
        Piece::Free => '.',
        Piece::Extent(number) => match listing.extents[number].role {
            Role::Staging => '+',
            Role::Superseded => '-',
            Role::Replica => '~',
            Role::Snapshot => {
                let before = listing.extents[..number].iter();
                let count = before.filter(|listed| listed.role == Role::Snapshot).count();
                char::from(LETTERS[count % LETTERS.len()])
            }
        },
    }
}

/// Describes the state of an extent in the terms of the paper.
pub(super) fn role(role: Role) -> &'static str {
    match role {
        Role::Snapshot => "snapshotted, available",
        Role::Staging => "unavailable: being written",
        Role::Superseded => "unavailable: superseded",
        Role::Replica => "unavailable: replica",
    }
}

/// An extent's name, without control characters.
pub(super) fn name(listed: &ListedExtent) -> String {
    listed.name.as_deref().map_or_else(|| "(no name)".to_owned(), output::plain)
}

/// Describes a medium.
pub(super) fn kind(medium: &MediumFacts) -> String {
    let kind = match medium.kind {
        MediumKind::Devdax => "devdax",
        MediumKind::DaxFile => "file on DAX",
        MediumKind::File => "file",
        MediumKind::Tmpfs => "file on tmpfs",
        MediumKind::Hugetlbfs => "hugetlbfs",
        MediumKind::Memfd => "memory",
        _ => "simulated",
    };
    let durable = match medium.durability {
        Durability::CacheLines(instruction) => {
            format!("durable by {}", format!("{instruction:?}").to_uppercase())
        }
        Durability::FileSync => "durable by fdatasync; uses the page cache".to_owned(),
        Durability::Volatile => "volatile".to_owned(),
    };
    format!("{kind}, {durable}")
}

/// Formats a number of extents.
pub(super) fn extents(count: u64) -> String {
    if count == 1 { "1 extent".to_owned() } else { format!("{count} extents") }
}
