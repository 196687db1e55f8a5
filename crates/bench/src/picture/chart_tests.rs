use proptest::prelude::{prop_assert, proptest};

use super::*;
use crate::testing::well_formed;

#[test]
fn malformed_svg_is_detected() {
    assert!(well_formed("<a x=\"1\"><b/>t &amp; u</a>"));
    for wrong in ["<a>", "<a></b>", "<a>&</a>", "<a x=\"1></a>", "<a>></a>", "<a", "<a></a>x"] {
        assert!(!well_formed(wrong), "{wrong}");
    }
}

#[test]
fn ticks_are_few_and_round() {
    for (longest, step) in [(10.0, 2.0), (1.0, 0.2), (43.0, 10.0), (99.0, 20.0), (0.0, 1.0)] {
        assert!((tick(longest) - step).abs() < 1e-12, "{longest}: {}", tick(longest));
    }
    assert_eq!([0.0, 1.234, 12.34, 123.4].map(number), ["0", "1.23", "12.3", "123"]);
}

fn lines(values: Vec<Option<f64>>) -> String {
    let line = Line { name: "one & two".to_owned(), values };
    let places = ["1", "2", "3"].map(str::to_owned).to_vec();
    let marks = Marks::Lines(places, vec![line]);
    let panel = Panel { title: "a".to_owned(), unit: "<b>".to_owned(), marks };
    let (title, remark, foot) = (String::new(), String::new(), String::new());
    Chart { title, legend: Vec::new(), remark, panels: vec![panel], foot }.svg()
}

#[test]
fn a_line_has_a_point_for_each_value() {
    let svg = lines(vec![Some(1.0), None, Some(3.0)]);
    assert!(well_formed(&svg));
    assert_eq!(svg.matches("width=\"6\"").count(), 2);
    assert!(svg.contains(">one &amp; two<") && svg.contains(">&lt;b&gt;<"), "{svg}");
    assert!(well_formed(&lines(vec![None, None, None])));
}

proptest! {
    #[test]
    fn every_scale_has_few_ticks(longest in 0.0..1e12_f64) {
        let step = tick(longest);
        prop_assert!(longest == 0.0 || (3.9..=10.1).contains(&(longest / step)));
        prop_assert!(well_formed(&lines(vec![Some(longest), Some(0.0)])));
    }
}
