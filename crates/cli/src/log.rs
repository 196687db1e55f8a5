//! The daemon's log: one line for each event, whatever texts it has.

use std::borrow::Cow;
use std::io::{self, Write};

use tracing_subscriber::fmt::MakeWriter;

/// Makes writers of events to `out`. Texts in events come from guests and from other processes:
/// their control characters are escaped, so that they neither begin a line nor reach a terminal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogLines<M>(pub(crate) M);

/// Writes one event with each call of [`Write::write`], as the formatters do.
#[derive(Debug)]
pub(crate) struct LogLine<W>(W);

impl<'a, M: MakeWriter<'a>> MakeWriter<'a> for LogLines<M> {
    type Writer = LogLine<M::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        LogLine(self.0.make_writer())
    }
}

impl<W: Write> Write for LogLine<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let text = text.strip_suffix('\n').unwrap_or(&text);
        self.0.write_all(format!("{}\n", one_line(text)).as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// A text in one line: control characters and Unicode's separators of lines as `\n`, or as
/// `\u` and four digits, which in JSON have the same meaning as the characters.
fn one_line(text: &str) -> Cow<'_, str> {
    let breaks = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    if !text.contains(breaks) {
        return Cow::Borrowed(text);
    }
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => line.push_str("\\n"),
            c if breaks(c) => line.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => line.push(c),
        }
    }
    Cow::Owned(line)
}

#[cfg(test)]
#[path = "log_tests.rs"]
mod tests;
