//! The phrases.

/// A phrase in lower case, and what to write instead.
type Phrase = (&'static str, &'static str);

const NAME_THE_THING: &str = "name the thing that acts";
const NO_SPEECH: &str = "programs and documents report, return, require, record";
const REPAIR: &str = "write repair, correct or fix";
const EVICT: &str = "write evict, yield or is removed";
const PLAIN: &str = "write it without the inversion";

/// Phrases that plain technical English avoids. Each matches whole words only.
const PHRASES: [Phrase; 31] = [
    ("who", NAME_THE_THING),
    ("whom", NAME_THE_THING),
    ("whoever", NAME_THE_THING),
    ("nobody", NAME_THE_THING),
    ("somebody", NAME_THE_THING),
    ("said", NO_SPEECH),
    ("says", NO_SPEECH),
    ("say so", NO_SPEECH),
    ("is told", NO_SPEECH),
    ("are told", NO_SPEECH),
    ("by mincore's word", "write: verified with mincore"),
    ("in the middle", "write median, or: during, within, between"),
    ("give way", EVICT),
    ("gives way", EVICT),
    ("gave way", EVICT),
    ("put right", REPAIR),
    ("puts right", REPAIR),
    ("putting right", REPAIR),
    ("asked for lately", "write: least recently used"),
    ("is none that", PLAIN),
    ("are none that", PLAIN),
    ("or is none", PLAIN),
    ("what there is not", PLAIN),
    ("what is asked for", PLAIN),
    ("what was asked for", PLAIN),
    ("has to be found", PLAIN),
    ("is no matter", PLAIN),
    ("stands by", "write waits, or: is started in advance"),
    ("takes the road", "write uses"),
    ("to the end of its days", PLAIN),
    ("the whole way", "write: end to end"),
];

/// The phrases in a text, with what to write instead.
pub(super) fn of(text: &str) -> Vec<Phrase> {
    let text = text.to_lowercase();
    PHRASES.into_iter().filter(|(phrase, _)| contains(&text, phrase)).collect()
}

fn contains(text: &str, phrase: &str) -> bool {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || "_-".contains(c));
    text.match_indices(phrase).any(|(start, _)| {
        let (before, after) = (&text[..start], &text[start + phrase.len()..]);
        // `name:x` is data, such as a line of /etc/passwd.
        let field = after.strip_prefix(':').and_then(|rest| rest.chars().next());
        let field = field.is_some_and(|next| !next.is_whitespace());
        !part(before.chars().next_back()) && !part(after.chars().next()) && !field
    })
}
