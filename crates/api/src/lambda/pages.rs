//! Lists come in pages.

use super::extract::Query;

/// The largest number of entries in a page.
const MAX_PAGE: usize = 50;

/// One page of a list: the entries after the query's marker, and the marker of the next page, if
/// there is one. The key of an entry is its marker.
pub(super) fn page<T>(items: Vec<(String, T)>, query: &Query) -> (Vec<T>, Option<String>) {
    let after = query.marker.as_deref().unwrap_or_default();
    let at = items.iter().position(|(key, _)| after.is_empty() || key.as_str() == after);
    let skip = if after.is_empty() { 0 } else { at.map_or(items.len(), |at| at + 1) };
    let count = query.max_items.unwrap_or(MAX_PAGE).clamp(1, MAX_PAGE);
    let more = items.len() > skip.saturating_add(count);
    let page: Vec<(String, T)> = items.into_iter().skip(skip).take(count).collect();
    let next = page.last().map(|(key, _)| key.clone()).filter(|_| more);
    (page.into_iter().map(|(_, item)| item).collect(), next)
}
