//! Names of hosts.

/// Bytes of a name in a message, its end included (RFC 1035, 2.3.4).
const MAX_NAME: usize = 255;
const MAX_LABEL: usize = 63;

/// A name as in a DNS message, without compression and in lower case. Each label has its length
/// before it, so a dot in a label does not make it two.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::broker) struct Name(Vec<u8>);

/// The names that a rule has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::broker) enum NamePattern {
    /// This one.
    Exact(Name),
    /// All below it, at any depth, and not itself.
    Below(Name),
}

/// A text is not a host name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// It has other characters than those of ASCII.
    #[error("a host name is given in ASCII, as xn--bcher-kva.example for b\u{fc}cher.example")]
    NotAscii,
    /// A label has a character that host names do not have.
    #[error("a host name has letters, digits, \"-\" and \"_\" between its dots")]
    Character,
    /// A label is empty, longer than 63 characters, or has a hyphen at an end.
    #[error("between the dots of a host name are 1 to 63 characters, without \"-\" at an end")]
    Label,
    /// The name is longer than DNS has it.
    #[error("a host name has at most 253 characters")]
    Length,
    /// The name has no dot.
    #[error(
        "a host name has a dot, as db.example.com; for all addresses use 0.0.0.0/0 and ::/0, each \
         in a rule of its own"
    )]
    OneLabel,
    /// A star is not the whole first label.
    #[error("\"*\" stands for the beginning of a host name, as *.example.com")]
    Star,
}

impl Name {
    /// A name of labels. `None` if one is not valid, or the name is too long.
    pub(super) fn of_labels<'a, E>(
        labels: impl Iterator<Item = Result<&'a [u8], E>>,
    ) -> Option<Self> {
        let mut bytes = Vec::with_capacity(32);
        for label in labels {
            let label = label.ok().filter(|label| (1..=MAX_LABEL).contains(&label.len()))?;
            bytes.push(u8::try_from(label.len()).ok()?);
            bytes.extend(label.iter().map(u8::to_ascii_lowercase));
            if bytes.len() >= MAX_NAME {
                return None;
            }
        }
        bytes.push(0);
        Some(Self(bytes))
    }

    fn parse(text: &str) -> Result<Self, NameError> {
        if !text.is_ascii() {
            return Err(NameError::NotAscii);
        }
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.contains('*') {
            return Err(NameError::Star);
        }
        let is_allowed =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if !text.bytes().all(is_allowed) {
            return Err(NameError::Character);
        }
        let is_label = |label: &str| {
            let hyphen = label.starts_with('-') || label.ends_with('-');
            (1..=MAX_LABEL).contains(&label.len()) && !hyphen
        };
        if !text.split('.').all(is_label) {
            return Err(NameError::Label);
        }
        let labels = text.split('.').map(|label| Ok::<_, NameError>(label.as_bytes()));
        Self::of_labels(labels).ok_or(NameError::Length)
    }

    /// As in a message, with the empty label at the end.
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether this is a name below `other`, at any depth.
    fn is_below(&self, other: &Self) -> bool {
        let mut rest = self.0.as_slice();
        while let Some((len, labels)) = rest.split_first() {
            rest = labels.get(usize::from(*len)..).unwrap_or_default();
            if rest == other.0 {
                return true;
            }
        }
        false
    }
}

impl NamePattern {
    /// Reads `api.example.com` or `*.example.com`, in any case and with or without a dot at the
    /// end.
    pub(in crate::broker) fn parse(text: &str) -> Result<Self, NameError> {
        if let Some(rest) = text.strip_prefix("*.") {
            return Ok(Self::Below(Name::parse(rest)?));
        }
        let name = Name::parse(text)?;
        // A name such as "all" would be a mistake: no address has it.
        if name.0.len() == usize::from(name.0[0]) + 2 {
            return Err(NameError::OneLabel);
        }
        Ok(Self::Exact(name))
    }

    pub(super) fn matches(&self, name: &Name) -> bool {
        match self {
            Self::Exact(exact) => exact == name,
            Self::Below(parent) => name.is_below(parent),
        }
    }
}

#[cfg(test)]
#[path = "name_tests.rs"]
mod tests;
