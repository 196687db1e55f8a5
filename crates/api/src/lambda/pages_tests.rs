use super::*;

fn list(keys: &[&str], marker: Option<String>, max_items: usize) -> Result<Page<usize>, ApiError> {
    let items = keys.iter().enumerate().map(|(at, key)| ((*key).to_owned(), at)).collect();
    page(items, &Query { marker, max_items: Some(max_items), ..Query::default() })
}

#[test]
fn pages_have_every_entry_once_although_entries_are_deleted() {
    for keys in [
        ["$LATEST", "1", "2", "9", "10"],
        ["a:$LATEST", "a:2", "a:10", "a-b:$LATEST", "b:$LATEST"],
        ["a", "a-1", "b", "b2", "live"],
    ] {
        let mut keys = keys.to_vec();
        keys.sort_by(|one, other| rank(one).cmp(&rank(other)));
        let (mut seen, mut marker) = (Vec::new(), None);
        loop {
            let (page, next) = list(&keys, marker, 2).unwrap();
            seen.extend(page);
            marker = next;
            if marker.is_none() {
                break;
            }
        }
        assert_eq!(seen, [0, 1, 2, 3, 4], "{keys:?}");
        let (_, next) = list(&keys, None, 2).unwrap();
        // The entries of the first page are gone.
        assert_eq!(list(&keys[2..], next, 50).unwrap(), (vec![0, 1, 2], None), "{keys:?}");
    }
}

#[test]
fn invalid_markers_and_sizes_are_refused() {
    for marker in ["nothing", "%", "1", "a:$LATEST"] {
        assert!(list(&["1"], Some(marker.to_owned()), 1).is_err(), "{marker}");
    }
    for size in [0, 10_001] {
        assert!(list(&["1"], None, size).is_err(), "{size}");
    }
}
