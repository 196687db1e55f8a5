//! A map of a pool as a picture.

use firn_base::format_bytes;
use firn_bench::picture::{Anchor, Picture, Style};
use firn_pool::{Listing, Role};

use super::map::{self, Piece, pieces};

const WIDTH: f64 = 960.0;
const ROW: f64 = 28.0;
const MARGIN: f64 = 12.0;
const LINE: f64 = 20.0;
/// Space between pieces in a row.
const GAP: f64 = 0.5;
const TEXT: Style = Style { size: 13.0, colour: "#000000" };
/// The highest number of rows.
const MAX_ROWS: u64 = 16;
/// The lowest number of bytes in a row.
const LEAST_ROW: u64 = 256 << 20;

/// The whole pool in rows, and a line for each extent.
pub(super) fn draw(listing: &Listing) -> String {
    let size = listing.pool.size.max(1);
    let rows = size.div_ceil(LEAST_ROW).clamp(1, MAX_ROWS);
    let per_row = size.div_ceil(rows);
    let map_end = MARGIN + LINE + rows as f64 * (ROW + 4.0);
    let height = map_end + (listing.extents.len() as f64 + 2.0) * LINE + MARGIN;
    let mut picture = Picture::new(WIDTH + 2.0 * MARGIN, height);
    let title = format!(
        "pool {} on {}: {}, {} free",
        listing.pool.uuid,
        listing.medium.name,
        format_bytes(listing.pool.size),
        format_bytes(listing.free_bytes())
    );
    picture.text((MARGIN, MARGIN + 8.0), TEXT, Anchor::Start, &title);
    for (offset, len, piece) in pieces(listing) {
        draw_piece(&mut picture, listing, piece, offset..offset + len, per_row);
    }
    for number in 0..listing.extents.len() {
        let y = map_end + LINE * (number as f64 + 1.0);
        let extent = Piece::Extent(number);
        picture.rectangle((MARGIN, y - 11.0), (14.0, 14.0), color(listing, extent), None);
        let place = (MARGIN + 22.0, y);
        picture.text(place, TEXT, Anchor::Start, &describe(listing, extent));
    }
    picture.into_svg()
}

/// A piece, cut where rows end.
fn draw_piece(
    picture: &mut Picture,
    listing: &Listing,
    piece: Piece,
    bytes: std::ops::Range<u64>,
    per_row: u64,
) {
    let x = |within: u64| WIDTH * (within as f64 / per_row as f64);
    let mut at = bytes.start;
    while at < bytes.end {
        let row = at / per_row;
        let end = bytes.end.min((row + 1) * per_row);
        let (left, right) = (x(at - row * per_row), x(end - row * per_row));
        let place = (MARGIN + left, MARGIN + LINE + row as f64 * (ROW + 4.0));
        let size = ((right - left - GAP).max(GAP), ROW);
        let title = describe(listing, piece);
        picture.rectangle(place, size, color(listing, piece), Some(&title));
        at = end;
    }
}

fn describe(listing: &Listing, piece: Piece) -> String {
    match piece {
        Piece::Metadata => "metadata".to_owned(),
        Piece::Free => "free".to_owned(),
        Piece::Extent(number) => {
            let listed = &listing.extents[number];
            format!(
                "{}: {}, generation {}, {} of guest memory at {:#x}",
                map::name(listed),
                map::role(listed.role),
                listed.extent.generation,
                format_bytes(listed.extent.guest_bytes),
                listed.extent.offset
            )
        }
    }
}

fn color(listing: &Listing, piece: Piece) -> &'static str {
    const SNAPSHOTS: [&str; 6] = ["#2b6cb0", "#2c7a7b", "#6b46c1", "#b7791f", "#2f855a", "#97266d"];
    match piece {
        Piece::Metadata => "#4a5568",
        Piece::Free => "#e2e8f0",
        Piece::Extent(number) => match listing.extents[number].role {
            Role::Snapshot => SNAPSHOTS[number % SNAPSHOTS.len()],
            Role::Staging => "#f6ad55",
            Role::Superseded => "#a0aec0",
            Role::Replica => "#fc8181",
        },
    }
}
