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

fn drawn(values: Vec<Option<Point>>, log: bool) -> String {
    let lines = vec![Line { name: "one & two".to_owned(), values }];
    let places = ["1", "2", "3"].map(str::to_owned).to_vec();
    let marks = Marks::Lines(Lines { places, lines, log, joined: true });
    let panel = Panel { title: "a".to_owned(), unit: "<b>".to_owned(), marks };
    let (title, remarks, foot) = (String::new(), vec!["& more".to_owned(); 2], String::new());
    let panels = vec![panel; 3];
    Chart { title, legend: Vec::new(), remarks, panels, columns: 2, foot }.svg()
}

fn lines(values: Vec<Option<f64>>) -> String {
    drawn(values.into_iter().map(|value| value.map(Point::from)).collect(), false)
}

#[test]
fn a_line_has_a_point_for_each_value() {
    let svg = lines(vec![Some(1.0), None, Some(3.0)]);
    assert!(well_formed(&svg));
    assert_eq!(svg.matches("width=\"6\"").count(), 3 * 2);
    assert!(svg.contains(">one &amp; two<") && svg.contains(">&lt;b&gt;<"), "{svg}");
    assert!(well_formed(&lines(vec![None, None, None])));
}

#[test]
fn a_logarithmic_scale_has_round_ticks_around_its_values() {
    let axis = Axis::of([0.57, 0.0, 340.0].into_iter(), true);
    assert_eq!((axis.log, number(axis.from), axis.to), (true, "0.50".to_owned(), 340.0));
    let ticks: Vec<String> = axis.ticks().into_iter().map(number).collect();
    assert_eq!(ticks.join(" "), "0.50 1.00 2.00 5.00 10.0 20.0 50.0 100 200");
    assert!(axis.part(0.57) > 0.0 && axis.part(340.0) == 1.0 && axis.part(0.0) == 0.0);
    assert!(!Axis::of([0.0, 0.0].into_iter(), true).log);
    let wide = Axis::of([0.01, 9e6].into_iter(), true).ticks();
    assert!(wide.len() < 12 && wide.windows(2).all(|pair| pair[1] > 9.9 * pair[0]), "{wide:?}");
}

#[test]
fn a_point_has_its_whisker_on_every_scale() {
    let point = Point { value: 2.0, whisker: Some((1.0, 40.0)) };
    for log in [false, true] {
        let with = drawn(vec![Some(point), None, Some(4.0.into())], log);
        let without = drawn(vec![Some(2.0.into()), None, Some(4.0.into())], log);
        assert!(well_formed(&with) && well_formed(&without));
        // A line and two ends in each of three panels; the scales have other ticks.
        let whiskers = |svg: &str| svg.matches("stroke-width=\"1.5\"").count();
        assert_eq!((whiskers(&with), whiskers(&without)), (9, 0));
    }
}

proptest! {
    #[test]
    fn every_scale_has_few_ticks(longest in 0.0..1e12_f64) {
        let step = tick(longest);
        prop_assert!(longest == 0.0 || (3.9..=10.1).contains(&(longest / step)));
        prop_assert!(well_formed(&lines(vec![Some(longest), Some(0.0)])));
        let values = vec![Some(longest.into()), Some(0.0.into()), Some(1.0.into())];
        prop_assert!(well_formed(&drawn(values, true)));
    }
}
