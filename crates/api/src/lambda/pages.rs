//! Lists come in pages.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::ApiError;
use super::extract::Query;

/// The largest number of entries in a page.
const MAX_PAGE: usize = 50;

/// The largest number of entries that a request may ask for.
const MAX_ITEMS: usize = 10_000;

/// A page, and the marker of the next page, if there is one.
pub(super) type Page<T> = (Vec<T>, Option<String>);

/// One page of a list, in the order of the entries' keys: those after the query's marker, which is
/// the key of an entry that may have been deleted since.
pub(super) fn page<T>(mut items: Vec<(String, T)>, query: &Query) -> Result<Page<T>, ApiError> {
    items.sort_by(|(one, _), (other, _)| rank(one).cmp(&rank(other)));
    let skip = match query.marker.as_deref().unwrap_or_default() {
        "" => 0,
        marker => {
            let invalid = || ApiError::invalid(format!("Marker: {marker:?} is not a NextMarker"));
            let last = decode(marker).ok_or_else(invalid)?;
            items.partition_point(|(key, _)| rank(key) <= rank(&last))
        }
    };
    let count = query.max_items.unwrap_or(MAX_PAGE);
    if !(1..=MAX_ITEMS).contains(&count) {
        let rule = "be between 1 and 10000";
        return Err(ApiError::constraint("maxItems", &count.to_string(), rule));
    }
    let count = count.min(MAX_PAGE);
    let more = items.len() > skip.saturating_add(count);
    let page: Vec<(String, T)> = items.into_iter().skip(skip).take(count).collect();
    let next = page.last().map(|(key, _)| URL_SAFE_NO_PAD.encode(key)).filter(|_| more);
    Ok((page.into_iter().map(|(_, item)| item).collect(), next))
}

/// The key in a marker.
fn decode(marker: &str) -> Option<String> {
    let key = String::from_utf8(URL_SAFE_NO_PAD.decode(marker).ok()?).ok()?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_$:".contains(c);
    key.chars().all(plain).then_some(key)
}

/// The order of `FUNCTION:VERSION`, of versions, where `$LATEST` is the first, and of aliases,
/// which come before the numbers.
fn rank(key: &str) -> (&str, u64, &str) {
    let (function, name) = key.rsplit_once(':').unwrap_or(("", key));
    (function, name.parse().unwrap_or_default(), name)
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
