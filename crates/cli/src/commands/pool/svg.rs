//! A map of a pool as a picture.

use std::fmt::Write;

use firn_base::format_bytes;
use firn_pool::{Listing, Role};

use super::map::{self, Piece, pieces};

const WIDTH: u64 = 960;
const ROW: u64 = 28;
const MARGIN: u64 = 12;
const LINE: u64 = 20;
/// Bytes of the pool are spread over at most so many rows.
const MAX_ROWS: u64 = 16;
/// A row has this many bytes at least.
const LEAST_ROW: u64 = 256 << 20;

/// The whole pool in rows, and a line for each extent.
pub(super) fn draw(listing: &Listing) -> String {
    let size = listing.pool.size.max(1);
    let rows = size.div_ceil(LEAST_ROW).clamp(1, MAX_ROWS);
    let per_row = size.div_ceil(rows);
    let map_end = MARGIN + LINE + rows * (ROW + 4);
    let legend = listing.extents.len() as u64 + 2;
    let height = map_end + legend * LINE + MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        WIDTH + 2 * MARGIN
    );
    let title = format!(
        "pool {} on {}: {}, {} free",
        listing.pool.uuid,
        listing.medium.name,
        format_bytes(listing.pool.size),
        format_bytes(listing.free_bytes())
    );
    text(&mut svg, MARGIN, MARGIN + 8, &title);
    for (offset, len, piece) in pieces(listing) {
        rectangles(&mut svg, listing, piece, offset..offset + len, per_row);
    }
    for number in 0..listing.extents.len() {
        let y = map_end + LINE * (number as u64 + 1);
        let color = color(listing, Piece::Extent(number));
        let _ = writeln!(
            svg,
            "<rect x=\"{MARGIN}\" y=\"{}\" width=\"14\" height=\"14\" fill=\"{color}\"/>",
            y - 11
        );
        text(&mut svg, MARGIN + 22, y, &describe(listing, Piece::Extent(number)));
    }
    svg.push_str("</svg>\n");
    svg
}

/// A piece, cut where rows end.
fn rectangles(
    svg: &mut String,
    listing: &Listing,
    piece: Piece,
    bytes: std::ops::Range<u64>,
    per_row: u64,
) {
    let x = |within: u64| {
        let scaled = u128::from(within) * u128::from(WIDTH) * 100 / u128::from(per_row);
        MARGIN * 100 + u64::try_from(scaled).unwrap_or(0)
    };
    let mut at = bytes.start;
    while at < bytes.end {
        let row = at / per_row;
        let end = bytes.end.min((row + 1) * per_row);
        let (left, right) = (x(at - row * per_row), x(end - row * per_row));
        let _ = writeln!(
            svg,
            "<rect x=\"{}.{:02}\" y=\"{}\" width=\"{}.{:02}\" height=\"{ROW}\" fill=\"{}\" stroke=\"white\" \
             stroke-width=\"0.5\"><title>{}</title></rect>",
            left / 100,
            left % 100,
            MARGIN + LINE + row * (ROW + 4),
            (right - left) / 100,
            (right - left) % 100,
            color(listing, piece),
            escape(&describe(listing, piece)),
        );
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

fn text(svg: &mut String, x: u64, y: u64, text: &str) {
    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\">{}</text>", escape(text));
}

/// A name may be any text.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
