use std::io;
use std::sync::{Arc, Mutex};

use firn_base::ErrorChain;
use tracing_subscriber::fmt::MakeWriter;

use super::LogLines;

#[derive(Clone, Default)]
struct Buffer(Arc<Mutex<Vec<u8>>>);

impl io::Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Buffer {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

const FORGED: &str = "bad\n2026-01-01T00:00:00Z  INFO firn: deleted\r\u{1b}[2J\u{9b}1m\u{2028}ü";

/// Logs texts of a guest in every way that the daemon does.
fn log() {
    let error = ErrorChain::new(FORGED);
    let error: &(dyn std::error::Error + 'static) = &error;
    tracing::warn!(error, "not frozen");
    tracing::warn!(function = FORGED, %error, "not frozen");
    tracing::error!("{error}");
}

#[test]
fn texts_of_guests_begin_no_line() {
    let buffer = Buffer::default();
    let log_lines = tracing_subscriber::fmt().with_writer(LogLines(buffer.clone()));
    tracing::subscriber::with_default(log_lines.with_ansi(false).finish(), log);
    let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
    assert_eq!(text.lines().count(), 3, "{text}");
    let breaks = |c: char| (c.is_control() && c != '\n') || c == '\u{2028}';
    assert!(!text.contains(breaks), "{text:?}");
    assert!(text.contains("bad\\n2026") && text.contains('ü'), "{text}");
}

#[test]
fn json_lines_keep_the_texts() {
    let buffer = Buffer::default();
    let log_lines = tracing_subscriber::fmt().json().with_writer(LogLines(buffer.clone()));
    tracing::subscriber::with_default(log_lines.finish(), log);
    let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
    let breaks = |c: char| (c.is_control() && c != '\n') || c == '\u{2028}';
    assert!(!text.contains(breaks), "{text:?}");
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(lines[1]["fields"]["function"], FORGED);
}
