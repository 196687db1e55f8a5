//! Sizes as people write them: `256M`, `2G`, `1048576`.

/// Parses a number of bytes with an optional suffix K, M or G (powers of 1024; `MiB` works too).
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("{text:?} is no size: write a number, with K, M or G behind it"))?;
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        unit => return Err(format!("{unit:?} is no unit of size: use K, M or G")),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is more than can be counted"))
}

#[cfg(test)]
#[path = "size_tests.rs"]
mod tests;
