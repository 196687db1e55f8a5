//! The log: lines for people, as Firecracker writes them.
//!
//! `2026-11-26T01:20:00.123456789 [ID:THREAD:LEVEL:FILE:LINE] text`, on standard output or to the
//! file or named pipe of the configuration. Level and origin are there if the configuration asks
//! for them. A line that cannot be written, such as to a full pipe, is dropped and counted.

use std::fmt::Arguments;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use parking_lot::Mutex;
use rustix::fs::OFlags;
use serde::{Deserialize, Deserializer, Serialize};
use time::OffsetDateTime;
use time::macros::format_description;

/// How important a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) enum Level {
    /// No line is.
    Off,
    /// Something failed.
    Error,
    /// Something may fail.
    #[serde(rename = "Warning")]
    Warn,
    /// What happens.
    Info,
    /// What may help to find an error.
    Debug,
    /// More of it.
    Trace,
}

impl Level {
    /// The level of a name in letters of any case.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Some(match name.to_ascii_lowercase().as_str() {
            "off" => Self::Off,
            "error" => Self::Error,
            "warn" | "warning" => Self::Warn,
            "info" => Self::Info,
            "debug" => Self::Debug,
            "trace" => Self::Trace,
            _ => return None,
        })
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Off => "OFF",
            Self::Error => "ERROR",
            Self::Warn => "WARN",
            Self::Info => "INFO",
            Self::Debug => "DEBUG",
            Self::Trace => "TRACE",
        }
    }
}

impl<'de> Deserialize<'de> for Level {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Self::parse(&name).ok_or_else(|| {
            let expected = ["Error", "Warning", "Info", "Debug", "Trace", "Off"].as_slice();
            serde::de::Error::custom(format!(
                "unknown level {name:?}, expected one of {expected:?}"
            ))
        })
    }
}

/// A change of the log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoggerConfig {
    /// The file or named pipe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) log_path: Option<String>,
    /// The least important level that is written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) level: Option<Level>,
    /// Whether lines have their level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) show_level: Option<bool>,
    /// Whether lines have their place in the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) show_log_origin: Option<bool>,
    /// The modules whose lines are written, by the beginning of their path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) module: Option<String>,
}

struct Logger {
    id: String,
    file: Option<File>,
    level: Level,
    show_level: bool,
    show_origin: bool,
    module: Option<String>,
    missed: u64,
}

static LOGGER: Mutex<Logger> = Mutex::new(Logger {
    id: String::new(),
    file: None,
    level: Level::Info,
    show_level: false,
    show_origin: false,
    module: None,
    missed: 0,
});

/// Opens a file or named pipe that this process appends to. It waits neither for a reader of a pipe
/// nor for room in it.
pub(crate) fn open_output(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    // A pipe that is open for reading, too, needs no reader to be opened.
    File::options().read(true).append(true).create(true).custom_flags(flags).open(path)
}

/// Sets the id that lines have.
pub(crate) fn set_id(id: &str) {
    id.clone_into(&mut LOGGER.lock().id);
}

/// Changes the log.
///
/// # Errors
/// The file cannot be opened. The log is as before.
pub(crate) fn configure(config: &LoggerConfig) -> io::Result<()> {
    let file = config.log_path.as_deref().map(|path| open_output(path.as_ref())).transpose()?;
    let mut logger = LOGGER.lock();
    if file.is_some() {
        logger.file = file;
    }
    logger.level = config.level.unwrap_or(logger.level);
    logger.show_level = config.show_level.unwrap_or(logger.show_level);
    logger.show_origin = config.show_log_origin.unwrap_or(logger.show_origin);
    if config.module.is_some() {
        logger.module.clone_from(&config.module);
    }
    Ok(())
}

/// The lines that were not written.
pub(crate) fn missed() -> u64 {
    LOGGER.lock().missed
}

/// Writes a line; see [`log!`](crate::log).
pub(crate) fn write(level: Level, module: &str, file: &str, line: u32, text: Arguments<'_>) {
    let mut logger = LOGGER.lock();
    let wanted = logger.module.as_deref().is_none_or(|prefix| module.starts_with(prefix));
    if level > logger.level || !wanted {
        return;
    }
    let format =
        format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:9]");
    let now = OffsetDateTime::now_utc().format(format).unwrap_or_default();
    let thread = std::thread::current();
    let mut entry = format!("{now} [{}:{}", logger.id, thread.name().unwrap_or("-"));
    if logger.show_level {
        entry.extend([":", level.name()]);
    }
    if logger.show_origin {
        entry.push_str(&format!(":{file}:{line}"));
    }
    entry.push_str(&format!("] {text}\n"));
    let written = match &mut logger.file {
        Some(file) => file.write_all(entry.as_bytes()),
        None => io::stdout().write_all(entry.as_bytes()),
    };
    if written.is_err() {
        logger.missed = logger.missed.saturating_add(1);
    }
}

/// Writes a line to the log: a [`Level`], and what `format!` takes.
#[macro_export]
macro_rules! log {
    ($level:expr, $($text:tt)+) => {
        $crate::logger::write($level, module_path!(), file!(), line!(), format_args!($($text)+))
    };
}
