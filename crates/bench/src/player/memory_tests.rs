use firn_memory::Leaf;
use firn_memory::trace::{Access, GapUnit, Touch, Toucher, Trace, TraceOrigin};
use firn_snapshot::{MemoryLayout, PageSet};

use super::{HIGH_MEMORY_START, OwnRegion, PAGE, PLAYER, PlayerMemoryError, Surroundings};
use crate::player::{PlayerInputs, PlayerOptions};
use crate::traces::NamedTrace;

fn trace(bytes: u64, gaps: GapUnit, list: &[u64]) -> Trace {
    let origin = TraceOrigin {
        function: String::new(),
        input: String::new(),
        command: String::new(),
        host: String::new(),
        gaps,
    };
    let layout = MemoryLayout::for_size(bytes).unwrap();
    let touch = |(page, gap): (u64, &u64)| {
        let (access, by, leaf) = (Access::Read, Toucher::Instruction, Leaf::Size4K);
        Touch { page, access, by, leaf, gap: *gap }
    };
    let touches = (0..).zip(list).map(touch).collect();
    let zero_map = PageSet::new(layout.pages());
    Trace::new(origin, layout, zero_map, touches).unwrap()
}

fn region(bytes: u64) -> Result<OwnRegion, PlayerMemoryError> {
    let trace = trace(bytes, GapUnit::Instructions, &[0]);
    let surroundings = Surroundings { unchecked: (0, 0), boot: false, reports: 0, tsc_khz: 0 };
    let named = NamedTrace { name: "some".into(), trace };
    OwnRegion::new(
        &PlayerInputs::new(vec![named]).unwrap(),
        &PlayerOptions::default(),
        surroundings,
    )
}

#[test]
fn the_players_region_is_above_the_trace_and_outside_the_device_window() {
    let mega = 1 << 20;
    assert_eq!(region(64 * mega).unwrap().start, 64 * mega);
    assert_eq!(region(65 * mega).unwrap().start, 66 * mega);
    for low in [3072 * mega, 3072 * mega - PAGE] {
        assert_eq!(region(low).unwrap().start, HIGH_MEMORY_START);
    }
    assert_eq!(region(4096 * mega).unwrap().start, 5120 * mega);
}

#[test]
fn memory_with_too_high_page_numbers_is_rejected() {
    assert!(matches!(region(4 << 40), Err(PlayerMemoryError::TooHigh(_))));
}

/// `dec` of a register and a jump back to it.
fn gap_loops() -> Vec<usize> {
    let is_loop = |code: &[u8]| {
        matches!(code, [0xff, 0xc8..=0xcf, 0x75, 0xfc, ..])
            || matches!(code, [0x41, 0xff, 0xc8..=0xcf, 0x75, 0xfb])
    };
    let places = PLAYER.windows(5).enumerate();
    places.filter(|(_, code)| is_loop(code)).map(|(at, _)| at).collect()
}

#[test]
fn all_work_runs_at_the_speed_of_one_aligned_loop() {
    // With a REX prefix the loop is found at its second byte, too.
    let mut loops = gap_loops();
    loops.dedup_by(|next, before| *next == *before + 1);
    assert_eq!(loops.len(), 1, "{loops:x?}");
    assert_eq!(loops[0] % 32, 0, "{loops:x?}");
}
